"""Training's forward and backward pass: loss and gradients of whole batches, in float32 kernels. spec.py says what they are.

The forward pass is the model's own: the kernels, and so the bits, that an inference of the quantised model gives. Master weights are
quantised as loading a Hugging Face folder does (ternarize.py), so that the loss is the exported model's. The backward pass is the straight-
through estimator of the published recipe (spec.py, "THE CONVENTION").

Rows are the tokens that predict one, all but each sequence's last, end to end. Every sum over rows is over a sequence first, then over
sequences in order: so gradients do not depend on how many threads there are, and a batch's are, to the bit, the sum of its sequences'.
Of a tied embedding that is true for what it gets as the head and for what it gets as the input; the two are added at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ContextLimitError, NonFiniteError, OptionError, ShapeError, UnsupportedError
from ..base.tensor_types import TERNARY_TYPES
from ..base.validate import instance, positive
from ..engine.network import rotations
from ..engine.tokens import check_tokens
from ..kernels import backward, cpu
from ..kernels.float_state import steady
from ..model import ternarize, widen
from ..model.checks import check_model, ternary_flaws
from ..model.families import FAMILIES, NORMS, Family, layer_shapes
from ..model.records import Blocks, Config, Linear, Model, Ternary
from ..model.rope import rope_frequencies, scaling_factors

Floats = NDArray[np.float32]
Gradients = dict[str, Floats]
Quantizer = Literal["ternary", "none"]
"""How float32 matrices are quantised."""
FACTORS = "rope_freqs.weight"
_LOGITS = 1 << 24  # numbers of logits that exist at a time, if a sequence does not need more


@steady
def loss_and_gradients(
    config: Config,
    parameters: Mapping[str, Floats | Ternary],
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    weights: Quantizer = "ternary",
    recompute: bool = False,
    divisor: float | None = None,
) -> tuple[float, Gradients]:
    """Next-token cross-entropy in nats, and its gradient for every parameter by the same names.

    parameters: float32 arrays by GGUF's names, as the family of config.architecture has them: token_embd.weight [V, D],
    blk.<n>.attn_q.weight [H*K, D], ..., output_norm.weight [D]; output.weight [V, D] where the head is not the embedding, and biases
    blk.<n>.attn_q.bias [H*K] where the family can have them. rope_freqs.weight [J] divides RoPE's frequencies and gets no gradient.
    tokens: integers [B, T]; lengths: [B], how many of the T are tokens of each sequence, at least 2. Each token but the last of its
    sequence predicts the next; the loss is the sum over all of them / divisor.

    weights: how the layers' float32 matrices are quantised. "ternary": to -1, 0, +1 times their absmean, and their inputs to int8
    codes; "none": neither is quantised. A matrix may also be a `Ternary` already: its gradient is that of the dequantised matrix.
    recompute: store the inputs of layers only, and run each layer's forward pass again for its backward pass: the same bits, with less
    memory. divisor: by default the number of predicted tokens. With that of a larger batch, losses and gradients of its parts add up.

    Raises UnsupportedError for a family that is not BitNet's or Llama's, ShapeError for a parameter or tokens of a wrong shape,
    ContextLimitError, TokenRangeError, EmptyInputError, OptionError, and NonFiniteError if the loss or a gradient leaves float32's range.
    """
    instance("config", config, Config)
    tables = _checked(config, parameters, weights)
    ids, counts = check_tokens(config, tokens, lengths)
    if counts.min() < 2:
        raise ShapeError(f"sequence {int(counts.argmin())} has {counts.min()} token, expected at least 2: one to predict and one before it")
    if counts.max() > config.context:
        raise ContextLimitError(f"sequence {int(counts.argmax())} has {counts.max()} tokens, the model's context is {config.context}")
    if divisor is not None:
        positive("divisor", divisor)
    batch = _Batch.of(config, ids, counts, tables.pop(FACTORS, None))
    quantised = {name: _matrix(table, weights) for name, table in tables.items() if _is_matrix(name, table.shape)}
    return _run(config, tables, quantised, batch, recompute, 1 / (len(batch.tokens) if divisor is None else divisor))


# --- checked arguments ----------------------------------------------------------------------------------------------------------------


def parameter_shapes(config: Config, tied: bool = True) -> dict[str, tuple[int, ...]]:
    """The parameters of a model without biases, by GGUF's names, and their shapes. tied: the head is the embedding."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab, config.width)}
    for n in range(config.n_layers):
        shapes |= {f"blk.{n}.{name}.weight": shape for name, shape in layer_shapes(config).items()}
    shapes["output_norm.weight"] = (config.width,)
    return shapes if tied else shapes | {"output.weight": (config.vocab, config.width)}


def parameters_of(model: Model) -> dict[str, Floats | Ternary]:
    """A model's parameters for `loss_and_gradients` with weights="none": ternary matrices as they are, the others widened to float32.

    Raises UnsupportedError for tensors that have no gradient here: factors, inner norms and biases that only some models have.
    """
    check_model(model)
    if model.config.experts:
        raise UnsupportedError("the model has experts, which have no gradient here")
    parameters: dict[str, Floats | Ternary] = {
        "token_embd.weight": widen.float32(model.token_embd),
        "output_norm.weight": model.output_norm,
    }
    if model.output is not None:
        parameters["output.weight"] = widen.float32(model.output)
    if model.rope_factors is not None and scaling_factors(model.config) is None:
        parameters[FACTORS] = model.rope_factors
    for n, layer in enumerate(model.layers):
        for field in layer_shapes(model.config):
            value, name = getattr(layer, field), f"blk.{n}.{field}"
            if not isinstance(value, Linear):
                parameters[f"{name}.weight"] = value
                continue
            if value.scale is not None or value.norm is not None:
                raise UnsupportedError(f"{name} has a {'factor' if value.norm is None else 'norm inside'}, which has no gradient here")
            if isinstance(value.weights, Blocks) and value.weights.type in TERNARY_TYPES:
                raise UnsupportedError(f"{name} is {value.weights.type.name} of several scales, which has no gradient here")
            parameters[f"{name}.weight"] = value.weights if isinstance(value.weights, Ternary) else widen.float32(value.weights)
            if value.bias is not None:
                parameters[f"{name}.bias"] = value.bias
    if model.output_bias is not None:
        raise UnsupportedError("output.bias has no gradient here")
    return parameters


def _is_known(family: Family, config: Config) -> bool:
    """Whether there are gradients of all that the family does."""
    norms = family.norms in (NORMS, ("attn_norm", "ffn_norm")) and not family.head_norms and config.norm == "rms"
    norms = norms and not config.local_layers
    factors = (config.embedding_scale, config.residual_scale, config.logit_scale) == (1, 1, 1)
    scores = (config.attention_scale, config.score_cap, config.logit_cap) == (None, None, None)
    layers = not config.experts and not config.local_layers
    return norms and factors and scores and layers and config.activation in ("relu2", "silu") and config.rope != "none"


def _checked(config: Config, parameters: Mapping[str, Floats | Ternary], weights: str) -> dict[str, Floats | Ternary]:
    """The parameters, checked and as kernels take them."""
    if not isinstance(parameters, Mapping):
        raise OptionError(f"parameters is a {type(parameters).__name__}, expected a mapping of names to arrays")
    if weights not in get_args(Quantizer):
        raise OptionError(f"weights is {weights!r}, expected one of {', '.join(get_args(Quantizer))}")
    family = FAMILIES.get(config.architecture)
    if family is None or not _is_known(family, config):
        raise UnsupportedError(f"architecture is {config.architecture!r}, gradients are there for BitNet's and Llama's")
    expected = parameter_shapes(config, "output.weight" not in parameters)
    for n in range(config.n_layers):
        for field in family.biases + family.optional_biases:
            if (name := f"blk.{n}.{field}.bias") in parameters or field in family.biases:
                expected[name] = layer_shapes(config)[field][:1]
    if family.rope_factors and scaling_factors(config) is None and FACTORS in parameters:
        expected[FACTORS] = (config.rope_pairs,)
    for name in parameters:
        if name not in expected:
            raise ShapeError(f"parameter {name!r} has no place in a {config.architecture} of {config.n_layers} layers")
    tables: dict[str, Floats | Ternary] = {}
    for name, shape in expected.items():
        if name not in parameters:
            raise ShapeError(f"parameter {name} is missing, expected float32 {list(shape)}")
        value = parameters[name]
        if isinstance(value, Ternary):
            if not _is_matrix(name, shape):
                raise ShapeError(f"parameter {name} is Ternary, expected float32 {list(shape)}")
            for flaw in ternary_flaws(name, value, shape):
                raise ShapeError(f"parameter {flaw}")
        elif not (isinstance(value, np.ndarray) and value.dtype == np.float32 and value.shape == shape):
            kind = f"{getattr(value, 'dtype', type(value).__name__)} {list(np.shape(value))}"
            raise ShapeError(f"parameter {name} is {kind}, expected float32 {list(shape)}")
        else:
            value = np.require(value, requirements=("C", "A"))
            if cpu.has_non_finite(value):
                raise NonFiniteError(f"parameter {name} has NaN or infinity in it")
        tables[name] = value
    return tables


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is one of a layer's matrices."""
    return name.startswith("blk.") and len(shape) == 2


@steady
def quantize(master: Floats) -> Ternary:
    """A matrix of master weights [N, M] as the forward pass has it, and as it is to be exported: codes, and their absmean.

    Raises ShapeError for an array that is no matrix of floats, NonFiniteError for NaN or infinity in it.
    """
    table = np.asarray(master)
    if table.ndim != 2 or table.size == 0 or table.dtype.kind != "f":
        raise ShapeError(f"master weights are {table.dtype} {list(table.shape)}, expected floats [N, M]")
    with np.errstate(over="ignore"):
        table = np.ascontiguousarray(table, np.float32)
    if cpu.has_non_finite(table):
        raise NonFiniteError("master weights have NaN, infinity or a number beyond float32 in them")
    return ternarize.from_masters(table)


# --- the data of a pass ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """The rows of a batch, end to end."""

    tokens: NDArray[np.int64]  # [R]
    targets: NDArray[np.int64]  # [R]
    sequence: NDArray[np.int64]  # [R]
    position: NDArray[np.int64]  # [R]
    cuts: NDArray[np.int64]  # [B + 1] first rows, and the end
    rotations: tuple[Floats, Floats]  # 2 x [R, J]

    @classmethod
    def of(cls, c: Config, ids: NDArray[np.int64], counts: NDArray[np.int64], factors: Floats | Ternary | None) -> "_Batch":
        rows = counts - 1
        cuts = np.concatenate([[0], rows.cumsum()])
        sequence = np.repeat(np.arange(len(rows)), rows)
        position = np.arange(cuts[-1]) - cuts[sequence]
        width = 2 * c.rope_pairs
        scaling = scaling_factors(c)
        factors = factors if scaling is None else scaling
        if isinstance(factors, np.ndarray):
            frequencies = rope_frequencies(c.rope_base, width, factors, c.rope_scaling)
        else:
            frequencies = _frequencies(c.rope_base, width, c.rope_scaling)
        angles = np.multiply.outer(np.arange(rows.max()), frequencies)
        cos, sin = (table[position] for table in rotations(cpu, angles, c))
        return cls(ids[sequence, position], ids[sequence, position + 1], sequence, position, cuts, (cos, sin))


@lru_cache(maxsize=8)
def _frequencies(base: float, width: int, scaling: float) -> NDArray[np.float64]:
    return rope_frequencies(base, width, None, scaling)


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A matrix of a layer as both passes need it."""

    dense: Floats | None  # [N, M] dequantised; None: dequantised each time it is needed
    ternary: Ternary | None = None  # the same for inputs of int8 codes

    def values(self) -> Floats:  # [N, M]
        if self.dense is not None:
            return self.dense
        assert self.ternary is not None
        return _dense(self.ternary)


def _matrix(value: Floats | Ternary, weights: str) -> _Matrix:
    if isinstance(value, Ternary):
        return _Matrix(None, value)
    if weights == "none":
        return _Matrix(value)
    ternary = quantize(value)
    return _Matrix(_dense(ternary), ternary)


def _dense(weights: Ternary) -> Floats:
    return backward.dense(weights.codes, weights.scale, weights.shape)


class _Input:
    """The input of matrices: numbers, or the codes they were quantised to. Only the smaller of the two is stored."""

    def __init__(self, x: Floats, *matrices: _Matrix) -> None:
        quantised = {matrix.ternary is not None for matrix in matrices}
        if len(quantised) > 1:
            raise UnsupportedError("matrices that read the same input are ternary and not: expected one or the other")
        self._stored: Floats | tuple[NDArray[np.int8], Floats] = cpu.quantize(x) if quantised.pop() else x

    def codes(self) -> tuple[NDArray[np.int8], Floats]:
        assert isinstance(self._stored, tuple)
        return self._stored

    def values(self) -> Floats:
        """The numbers that the matrices multiply."""
        return backward.dequantize(*self._stored) if isinstance(self._stored, tuple) else self._stored


# --- a layer --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Layer:
    """The parameters of one layer."""

    block: str  # blk.<n>.
    window: int | None
    gains: Mapping[str, Floats]
    biases: Mapping[str, Floats]
    matrices: Mapping[str, _Matrix]

    def norm(self, c: Config, name: str, x: Floats) -> Floats:
        """The norm of x, or x itself where the family has no such norm."""
        return cpu.rms_norm(x, self.gains[name], c.eps) if name in self.gains else x

    def linears(self, x: "_Input", *names: str) -> list[Floats]:  # [R, M] -> [R, N] each
        """Products of matrices that read the same input."""
        matrices = [self.matrices[name] for name in names]
        ternary = [matrix.ternary for matrix in matrices if matrix.ternary is not None]
        if ternary:
            products = cpu.ternary_matmuls(*x.codes(), *((t.codes, t.scale, t.shape[0]) for t in ternary))
        else:
            products = [cpu.matmul(x.values(), matrix.values()) for matrix in matrices]
        return [y + self.biases[name] if name in self.biases else y for name, y in zip(names, products, strict=True)]


@dataclass(frozen=True, eq=False)
class _Activations:
    """The tensors of a layer's forward pass that its backward pass needs."""

    h: Floats  # [R, D] the layer's input
    attn_in: _Input  # [R, D]
    q: Floats  # [R, H, K] rotated
    k: Floats  # [R, G, K] rotated
    v: Floats  # [R, G, K]
    attended: Floats  # [R, H, K]
    output_in: _Input  # [R, H*K]
    middle: Floats  # [R, D] after the first residual
    ffn_in: _Input  # [R, D]
    gate: Floats  # [R, F]
    up: Floats  # [R, F]
    activated: Floats  # [R, F]
    down_in: _Input  # [R, F]


def _forward(c: Config, w: _Layer, h: Floats, batch: _Batch) -> tuple[Floats, _Activations]:
    """A layer: [R, D] -> [R, D]. The order of operations is network.py's."""
    m = w.matrices
    rope = cpu.rope if c.rope == "halves" else cpu.rope_adjacent
    attn_in = _Input(w.norm(c, "attn_norm", h), m["attn_q"], m["attn_k"], m["attn_v"])
    q, k, v = (y.reshape(len(h), -1, c.head_dim) for y in w.linears(attn_in, "attn_q", "attn_k", "attn_v"))
    q, k = rope(q, *batch.rotations), rope(k, *batch.rotations)
    keys_values = np.zeros((2, len(batch.cuts) - 1, int(batch.position.max()) + 1, *k.shape[1:]), np.float32)
    keys_values[0, batch.sequence, batch.position] = k
    keys_values[1, batch.sequence, batch.position] = v
    attended = cpu.attend(q, keys_values[0], keys_values[1], batch.sequence, batch.position, w.window)
    output_in = _Input(w.norm(c, "attn_sub_norm", attended.reshape(len(h), -1)), m["attn_output"])
    middle = cpu.add(h, w.linears(output_in, "attn_output")[0])
    ffn_in = _Input(w.norm(c, "ffn_norm", middle), m["ffn_gate"], m["ffn_up"])
    gate, up = w.linears(ffn_in, "ffn_gate", "ffn_up")
    activated = cpu.relu2_gate(gate, up) if c.activation == "relu2" else cpu.silu_gate(gate, up)
    down_in = _Input(w.norm(c, "ffn_sub_norm", activated), m["ffn_down"])
    out = cpu.add(middle, w.linears(down_in, "ffn_down")[0])
    return out, _Activations(h, attn_in, q, k, v, attended, output_in, middle, ffn_in, gate, up, activated, down_in)


def _backward(c: Config, w: _Layer, saved: _Activations, dh: Floats, batch: _Batch, gradients: Gradients) -> Floats:
    """The gradient at the layer's output -> at its input, [R, D]. Those of its parameters go into `gradients`."""
    rows = len(dh)

    def norm_back(name: str, x: Floats, dy: Floats) -> Floats:
        if name not in w.gains:
            return dy
        dx, gradients[f"{w.block}{name}.weight"] = backward.rms_norm_back(x, w.gains[name], c.eps, dy, batch.cuts)
        return dx

    def linears_back(x: _Input, **above: Floats) -> Floats:
        """The gradient at the input of matrices that read it; above: by their names, the gradients of their outputs."""
        values = x.values()
        dx = None
        for name, dy in above.items():
            dx = backward.product(dy, w.matrices[name].values(), dx)
            gradients[f"{w.block}{name}.weight"] = backward.transposed_product(dy, values, batch.cuts)
            if name in w.biases:
                gradients[f"{w.block}{name}.bias"] = backward.column_sums(dy, batch.cuts)
        assert dx is not None
        return dx

    def turned_back(dy: Floats) -> Floats:
        cos, sin = batch.rotations
        return (cpu.rope if c.rope == "halves" else cpu.rope_adjacent)(dy, cos, -sin).reshape(rows, -1)

    dx = norm_back("ffn_sub_norm", saved.activated, linears_back(saved.down_in, ffn_down=dh))
    gate_back = backward.relu2_gate_back if c.activation == "relu2" else backward.silu_gate_back
    dgate, dup = gate_back(saved.gate, saved.up, dx)
    dh = cpu.add(dh, norm_back("ffn_norm", saved.middle, linears_back(saved.ffn_in, ffn_gate=dgate, ffn_up=dup)))
    dx = norm_back("attn_sub_norm", saved.attended.reshape(rows, -1), linears_back(saved.output_in, attn_output=dh))
    dq, dk, dv = backward.attend_back(saved.q, saved.k, saved.v, saved.attended, dx.reshape(saved.q.shape), batch.cuts, w.window)
    dx = linears_back(saved.attn_in, attn_q=turned_back(dq), attn_k=turned_back(dk), attn_v=dv.reshape(rows, -1))
    return cpu.add(dh, norm_back("attn_norm", saved.h, dx))


# --- the model ------------------------------------------------------------------------------------------------------------------------


def _run(
    c: Config, tables: Mapping[str, Floats | Ternary], quantised: Mapping[str, _Matrix], batch: _Batch, recompute: bool, factor: float
) -> tuple[float, Gradients]:
    def floats(name: str) -> Floats:
        table = tables[name]
        assert isinstance(table, np.ndarray)
        return table

    def layer(n: int) -> _Layer:
        names = {name: f"blk.{n}.{name}.weight" for name in layer_shapes(c)}
        gains = {name: floats(full) for name, full in names.items() if full not in quantised}
        biases = {name: floats(bias) for name in names if (bias := f"blk.{n}.{name}.bias") in tables}
        return _Layer(
            f"blk.{n}.", c.window_of(n), gains, biases, {name: quantised[full] for name, full in names.items() if full in quantised}
        )

    gradients: Gradients = {}
    layers = [layer(n) for n in range(c.n_layers)]
    h = cpu.embed(floats("token_embd.weight"), batch.tokens)
    stored: list[Floats | _Activations] = []
    for w in layers:
        out, saved = _forward(c, w, h, batch)
        stored.append(h if recompute else saved)
        h = out

    name = "output.weight" if "output.weight" in tables else "token_embd.weight"
    loss, dx, gradients[name] = _head(cpu.rms_norm(h, floats("output_norm.weight"), c.eps), floats(name), batch, factor)
    dh, gradients["output_norm.weight"] = backward.rms_norm_back(h, floats("output_norm.weight"), c.eps, dx, batch.cuts)
    for w in reversed(layers):
        last = stored.pop()
        saved = _forward(c, w, last, batch)[1] if isinstance(last, np.ndarray) else last
        dh = _backward(c, w, saved, dh, batch, gradients)
    if name == "output.weight":
        gradients["token_embd.weight"] = np.zeros_like(floats("token_embd.weight"))
    backward.add_rows(gradients["token_embd.weight"], dh, batch.tokens, batch.cuts)
    if not np.isfinite(loss):
        raise NonFiniteError(f"the loss is {loss}: the model leaves float32's range")
    for name, gradient in gradients.items():
        if cpu.has_non_finite(gradient):
            raise NonFiniteError(f"the gradient of {name} has NaN or infinity in it: the backward pass leaves float32's range")
    return loss, {name: gradients[name] for name in tables}


def _head(x: Floats, table: Floats, batch: _Batch, factor: float) -> tuple[float, Floats, Floats]:
    """The loss, its gradient at the head's input [R, D] and at the head's table [V, D]; some sequences at a time, for the logits."""
    losses, dx, gradient = [], [], None
    most = max(1, _LOGITS // len(table))
    first = 0  # sequence
    while first < len(batch.cuts) - 1:
        start = batch.cuts[first]
        end = max(first + 1, int(np.searchsorted(batch.cuts, start + most, "right")) - 1)
        cuts = batch.cuts[first : end + 1] - start
        rows = slice(start, batch.cuts[end])
        logits = cpu.matmul(x[rows], table)
        losses.append(backward.cross_entropy_in_place(logits, batch.targets[rows], factor))
        dx.append(backward.product(logits, table))
        gradient = backward.transposed_product(logits, x[rows], cuts, gradient)
        first = end
    assert gradient is not None
    return fsum(np.concatenate(losses)) * factor, dx[0] if len(dx) == 1 else np.concatenate(dx), gradient
