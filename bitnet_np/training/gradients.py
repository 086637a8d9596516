"""Training's forward and backward pass: loss and gradients of whole batches, in float32 kernels. spec.py says what they are.

The forward pass is inference's own (network.py), of the model with quantised weights; an observer keeps the tensors that the backward pass
needs. Master weights are quantised as loading a Hugging Face folder does (ternarize.py), so that the loss is the exported model's. The
backward pass is the straight-through estimator of the published recipe (spec.py, "THE CONVENTION").

Rows are the tokens that predict one, all but each sequence's last, end to end. Every sum over rows is over a sequence first, then over
sequences in order: so gradients do not depend on how many threads there are, and a batch's are, to the bit, the sum of its sequences'.
Of a tied embedding that is true for what it gets as the head and for what it gets as the input; the two are added at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ContextLimitError, NonFiniteError, OptionError, ShapeError, UnsupportedError
from ..base.tensor_types import TERNARY_TYPES
from ..base.validate import instance, positive
from ..engine.cache import Attend
from ..engine.forward_pass import whole_rows
from ..engine.network import Runtime, run_layer
from ..engine.tokens import Rows, Tokens, check_tokens
from ..kernels import backward, cpu
from ..kernels.float_state import steady
from ..model import packing, ternarize, widen
from ..model.checks import check_model, ternary_flaws
from ..model.families import FAMILIES, NORMS, Family, layer_shapes
from ..model.records import GATE_UP, MATRICES, QKV, Blocks, Config, Layer, Linear, Model, Ternary
from ..model.rope import rope_fields, scaling_factors

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
    if not isinstance(parameters, Mapping):
        raise OptionError(f"parameters is a {type(parameters).__name__}, expected a mapping of names to arrays")
    if weights not in get_args(Quantizer):
        raise OptionError(f"weights is {weights!r}, expected one of {', '.join(get_args(Quantizer))}")
    runtime = Runtime(model_of(config, parameters, weights))
    ids, counts = check_tokens(config, tokens, lengths)
    if counts.min() < 2:
        raise ShapeError(f"sequence {int(counts.argmin())} has {counts.min()} token, expected at least 2: one to predict and one before it")
    if counts.max() > config.context:
        raise ContextLimitError(f"sequence {int(counts.argmax())} has {counts.max()} tokens, the model's context is {config.context}")
    if divisor is not None:
        positive("divisor", divisor)
    batch = _Batch.of(runtime, ids, counts)
    loss, gradients = _run(runtime, batch, recompute, 1 / (len(batch.targets) if divisor is None else divisor))
    return loss, {name: gradients[name] for name in parameters if name != FACTORS}


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
    if model.output_bias is not None:
        raise UnsupportedError("output.bias has no gradient here")
    parameters: dict[str, Floats | Ternary] = {"token_embd.weight": widen.float32(model.token_embd)}
    behind: dict[str, Floats | Ternary] = {}
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
                behind[f"{name}.bias"] = value.bias
    parameters["output_norm.weight"] = model.output_norm
    if model.output is not None:
        parameters["output.weight"] = widen.float32(model.output)
    if model.rope_factors is not None and scaling_factors(model.config) is None:
        behind[FACTORS] = model.rope_factors
    return parameters | behind


def _is_known(family: Family, config: Config) -> bool:
    """Whether there are gradients of all that the family does."""
    norms = family.norms in (NORMS, ("attn_norm", "ffn_norm")) and not family.head_norms and config.norm == "rms"
    factors = (config.embedding_scale, config.residual_scale, config.logit_scale) == (1, 1, 1)
    scores = (config.attention_scale, config.score_cap, config.logit_cap) == (None, None, None)
    layers = not config.experts and not config.local_layers
    return norms and factors and scores and layers and config.activation in ("relu2", "silu") and config.rope != "none"


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


def _taken(left: dict[str, Floats | Ternary], name: str, shape: tuple[int, ...]) -> Any:
    """A parameter of those that nobody has taken yet, as kernels take it. Raises ShapeError or NonFiniteError."""
    if name not in left:
        raise ShapeError(f"parameter {name} is missing, expected float32 {list(shape)}")
    value = left.pop(name)
    if isinstance(value, Ternary):
        if not name.startswith("blk.") or len(shape) != 2:  # no matrix of a layer
            raise ShapeError(f"parameter {name} is Ternary, expected float32 {list(shape)}")
        for flaw in ternary_flaws(name, value, shape):
            raise ShapeError(f"parameter {flaw}")
        return value
    if not (isinstance(value, np.ndarray) and value.dtype == np.float32 and value.shape == shape):
        kind = f"{getattr(value, 'dtype', type(value).__name__)} {list(np.shape(value))}"
        raise ShapeError(f"parameter {name} is {kind}, expected float32 {list(shape)}")
    if cpu.has_non_finite(value := np.require(value, requirements=("C", "A"))):
        raise NonFiniteError(f"parameter {name} has NaN or infinity in it")
    return value


def model_of(c: Config, parameters: Mapping[str, Floats | Ternary], weights: Quantizer = "ternary") -> Model:
    """The model of these parameters, as it is computed and as it is to be exported. Raises what `loss_and_gradients` says of them."""
    family = FAMILIES.get(c.architecture)
    if family is None or not _is_known(family, c):
        raise UnsupportedError(f"architecture is {c.architecture!r}, gradients are there for BitNet's and Llama's")
    left, shapes = dict(parameters), layer_shapes(c)
    tables = {name: _taken(left, name, shape) for name, shape in parameter_shapes(c, "output.weight" not in parameters).items()}

    def linear(name: str, field: str) -> Linear:
        value, bias = tables[f"{name}.weight"], f"{name}.bias"
        biased = field in family.biases or (field in family.optional_biases and bias in parameters)
        ternary = weights == "ternary" and not isinstance(value, Ternary)
        return Linear(ternarize.from_masters(value) if ternary else value, _taken(left, bias, shapes[field][:1]) if biased else None)

    def layer(n: int) -> Layer:
        names = {field: f"blk.{n}.{field}" for field in shapes}
        of_matrices = {field: linear(name, field) for field, name in names.items() if field in MATRICES}
        for siblings in (QKV, GATE_UP):
            if len({isinstance(of_matrices[field].weights, Ternary) for field in siblings}) > 1:
                raise UnsupportedError("matrices that read the same input are ternary and not: expected one or the other")
        fields: dict[str, Any] = {field: tables[f"{name}.weight"] for field, name in names.items() if field not in MATRICES}
        return Layer(**fields | of_matrices)

    layers = tuple(layer(n) for n in range(c.n_layers))
    own_factors = family.rope_factors and scaling_factors(c) is None and FACTORS in parameters
    rope = rope_fields(c, _taken(left, FACTORS, (c.rope_pairs,))) if own_factors else _rope(c)
    for name in left:
        raise ShapeError(f"parameter {name!r} has no place in a {c.architecture} of {c.n_layers} layers")
    whole: dict[str, Any] = {name: tables.get(f"{name}.weight") for name in ("token_embd", "output_norm", "output")}
    return Model(config=c, layers=layers, **whole, **rope)


@lru_cache(maxsize=8)
def _rope(c: Config) -> dict[str, Any]:
    return rope_fields(c, None)


@dataclass(frozen=True)
class _Batch:
    """The rows of a batch, end to end: all tokens but each sequence's last, which predict the ones after them."""

    rows: Rows
    targets: NDArray[np.int64]  # [R]
    cuts: NDArray[np.int64]  # [B + 1] first rows, and the end
    attend: Attend
    rotations: Any  # of network.py

    @classmethod
    def of(cls, runtime: Runtime, ids: NDArray[np.int64], counts: NDArray[np.int64]) -> "_Batch":
        rows, attend = whole_rows(runtime, Tokens(ids[:, : counts.max() - 1], counts - 1))
        targets, cuts = ids[rows.sequence, rows.position + 1], np.concatenate([[0], rows.last + 1])
        return cls(rows, targets, cuts, attend, runtime.rotations(rows.position))


# --- a layer --------------------------------------------------------------------------------------------------------------------------


_KEPT = (*NORMS, "Qcur_rope", "Kcur_rope", "Vcur", "kqv_out", "ffn_inp", "ffn_gate", "ffn_up", "ffn_out")
"""The tensors of a layer's forward pass that its backward pass needs; of the inputs of ternary matrices the codes and scales."""


def _forward(runtime: Runtime, n: int, h: Floats, batch: _Batch) -> tuple[Floats, dict[str, NDArray]]:
    """Layer n: [R, D] -> [R, D], and the tensors that are kept, with its input as "attn_inp"."""
    saved: dict[str, NDArray] = {"attn_inp": h}

    def keep(name: str, layer: int | None, array: NDArray) -> None:
        tensor, _, end = name.rpartition("_")
        if end == "codes" and tensor in NORMS:
            del saved[tensor]  # the codes take a quarter of its memory
        if name in _KEPT or end in ("codes", "scale"):
            saved[name] = array

    return run_layer(runtime, n, h, batch.rotations, batch.attend, keep), saved


def _dense(linear: Linear) -> Floats:  # -> [N, M]
    w = linear.weights
    assert not isinstance(w, Blocks)
    return packing.unpack(w).astype(np.float32) * w.scale if isinstance(w, Ternary) else w


def _backward(runtime: Runtime, n: int, saved: Mapping[str, NDArray], dh: Floats, batch: _Batch, gradients: Gradients) -> Floats:
    """The gradient at the output of layer n -> at its input, [R, D]. Those of its parameters go into `gradients`."""
    c, w, rows = runtime.model.config, runtime.model.layers[n], len(dh)

    def norm_back(name: str, source: str, dy: Floats) -> Floats:
        gain = getattr(w, name)
        if gain is None:
            return dy
        dx, gradients[f"blk.{n}.{name}.weight"] = backward.rms_norm_back(saved[source], gain, c.eps, dy, batch.cuts)
        return dx

    def linears_back(norm: str, source: str, **above: Floats) -> Floats:
        """The gradient at the input of matrices that read it, which lies behind a norm or not; above: by their names, at their outputs."""
        name = source if getattr(w, norm) is None else norm
        codes = saved.get(f"{name}_codes")
        values = saved[name] if codes is None else backward.dequantize(codes, saved[f"{name}_scale"])
        dx = None
        for field, dy in above.items():
            linear = getattr(w, field)
            dx = backward.product(dy, _dense(linear), dx)
            gradients[f"blk.{n}.{field}.weight"] = backward.transposed_product(dy, values, batch.cuts)
            if linear.bias is not None:
                gradients[f"blk.{n}.{field}.bias"] = backward.column_sums(dy, batch.cuts)
        assert dx is not None
        return norm_back(norm, source, dx)

    def turned_back(dy: Floats) -> Floats:
        cos, sin = batch.rotations[False]
        return (cpu.rope if c.rope == "halves" else cpu.rope_adjacent)(dy, cos, -sin).reshape(rows, -1)

    q, k, v, attended = (saved[name].reshape(rows, -1, c.head_dim) for name in ("Qcur_rope", "Kcur_rope", "Vcur", "kqv_out"))
    dx = linears_back("ffn_sub_norm", "ffn_out", ffn_down=dh)
    gate_back = backward.relu2_gate_back if c.activation == "relu2" else backward.silu_gate_back
    dgate, dup = gate_back(saved["ffn_gate"], saved["ffn_up"], dx)
    dh = cpu.add(dh, linears_back("ffn_norm", "ffn_inp", ffn_gate=dgate, ffn_up=dup))
    dx = linears_back("attn_sub_norm", "kqv_out", attn_output=dh)
    dq, dk, dv = backward.attend_back(q, k, v, attended, dx.reshape(q.shape), batch.cuts, c.window_of(n))
    dx = linears_back("attn_norm", "attn_inp", attn_q=turned_back(dq), attn_k=turned_back(dk), attn_v=dv.reshape(rows, -1))
    return cpu.add(dh, dx)


# --- the model ------------------------------------------------------------------------------------------------------------------------


def _run(runtime: Runtime, batch: _Batch, recompute: bool, factor: float) -> tuple[float, Gradients]:
    model, gradients = runtime.model, Gradients()
    assert isinstance(model.token_embd, np.ndarray)
    assert isinstance(model.head, np.ndarray)
    h = cpu.embed(model.token_embd, batch.rows.tokens)
    stored: list[Floats | dict[str, NDArray]] = []
    for n in range(model.config.n_layers):
        out, saved = _forward(runtime, n, h, batch)
        stored.append(h if recompute else saved)
        h = out

    name, eps = "token_embd.weight" if model.output is None else "output.weight", model.config.eps
    loss, dx, gradients[name] = _head(cpu.rms_norm(h, model.output_norm, eps), model.head, batch, factor)
    dh, gradients["output_norm.weight"] = backward.rms_norm_back(h, model.output_norm, eps, dx, batch.cuts)
    for n in reversed(range(model.config.n_layers)):
        last = stored.pop()
        saved = _forward(runtime, n, last, batch)[1] if isinstance(last, np.ndarray) else last
        dh = _backward(runtime, n, saved, dh, batch, gradients)
    if model.output is not None:
        gradients["token_embd.weight"] = np.zeros_like(model.token_embd)
    backward.add_rows(gradients["token_embd.weight"], dh, batch.rows.tokens, batch.cuts)
    if not np.isfinite(loss):
        raise NonFiniteError(f"the loss is {loss}: the model leaves float32's range")
    for name, gradient in gradients.items():
        if cpu.has_non_finite(gradient):
            raise NonFiniteError(f"the gradient of {name} has NaN or infinity in it: the backward pass leaves float32's range")
    return loss, gradients


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
