"""What a wrong operation may have done instead: known mistakes, tried one by one on the data.

The list comes from defects that engines have had: their issue trackers, and what their authors ask an oracle to find.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import operations as op
from . import packing, spec
from .families import NORMS
from .model import Config, Layer, Linear, Model, Ternary
from .points import MAY_BE_QUANTIZED, Key
from .transformer import BITNET_CPP, EXACT, LLAMA_CPP, Dialect

Array = NDArray[np.float64]
Values = Mapping[Key, Array]


@dataclass(frozen=True)
class Hypothesis:
    """One mistake: what to call it, and what it computes from the tensors of the forward pass."""

    text: str
    compute: Callable[[Values], Array] = field(repr=False)


def hypotheses(model: Model, dialect: Dialect, operation: op.Operation) -> Iterator[Hypothesis]:
    """Every mistake known for an operation, the most specific ones first."""
    name, n = operation.key
    find = _BY_NAME.get(name, _nothing)
    layer = None if n is None else model.layers[n]
    for text, compute in find(_Context(model, dialect, operation, layer)):
        yield Hypothesis(text, compute)


@dataclass(frozen=True)
class _Context:
    model: Model
    dialect: Dialect
    operation: op.Operation
    layer: Layer | None

    @property
    def config(self) -> Config:
        return self.model.config

    @property
    def index(self) -> int:
        assert self.operation.key.layer is not None
        return self.operation.key.layer

    def inputs(self, values: Values) -> list[Array]:
        return [values[key] for key in self.operation.inputs]

    def of(self, function: Callable[..., Array]) -> Callable[[Values], Array]:
        """A mistake that needs the operation's inputs only."""
        return lambda values: function(*self.inputs(values))


DECLARE = "declare the dialect"
"""What the text of a hypothesis has in it that is no mistake."""

Found = Iterator[tuple[str, Callable[[Values], Array]]]


# --- matrices -------------------------------------------------------------------------------------------------------------------------

_FIELDS = {
    "Qcur": "attn_q",
    "Kcur": "attn_k",
    "Vcur": "attn_v",
    "attn_o_out": "attn_output",
    "ffn_gate": "ffn_gate",
    "ffn_up": "ffn_up",
    "ffn_down": "ffn_down",
}


def _linear(c: _Context) -> Found:
    linear: Linear = getattr(c.layer, _FIELDS[c.operation.key.name])
    if linear.bias is not None:
        bias = linear.bias
        yield "the bias is missing", c.of(lambda x: op.product(x, linear, c.dialect).value - bias)
        yield "the bias is subtracted", c.of(lambda x: op.product(x, linear, c.dialect).value - 2.0 * bias)
    for dialect in (EXACT, LLAMA_CPP):
        if dialect.ggml_activations != c.dialect.ggml_activations:
            text = f"activations are rounded as in another dialect: declare {dialect.name}"
            yield text, c.of(lambda x, dialect=dialect: op.product(x, linear, dialect).value)
    if isinstance(linear.weights, Ternary) and linear.bias is None and linear.scale is None:
        yield from _ternary(c, linear.weights)


def _ternary(c: _Context, weights: Ternary) -> Found:
    name = c.operation.key.name
    w_scale = float(weights.scale)

    def times(x: Array, matrix: NDArray, factor: float = 1.0, s: Array | None = None) -> Array:
        q, scale = spec.quantize(x)
        return q @ matrix.T.astype(np.float64) / (scale if s is None else s) * w_scale * factor

    def per_tensor(x: Array) -> Array:
        scale = 127 / np.abs(x).max()
        return np.rint(x * scale) @ op.dense(weights).T.astype(np.float64) / scale * w_scale

    def in_halves(x: Array) -> Array:
        q, scale = spec.quantize(x)
        return op.half(q @ op.dense(weights).T.astype(np.float64)) / scale * w_scale

    def truncated(x: Array) -> Array:
        single = x.astype(np.float32)  # in float32 the largest number may come out below 127
        scale = np.float32(127) / np.abs(single).max(axis=1, keepdims=True)
        return np.trunc(single * scale).astype(np.float64) @ op.dense(weights).T.astype(np.float64) / scale * w_scale

    def unshifted(x: Array) -> Array:
        return times(x, op.dense(weights) + 1)

    def wrapped(x: Array) -> Array:
        q, scale = spec.quantize(x)
        total = q @ (op.dense(weights) + 1).T.astype(np.float64)
        return (((total + 32768) % 65536 - 32768) - q.sum(axis=1, keepdims=True)) / scale * w_scale

    yield "the weight scale is missing", c.of(lambda x: times(x, op.dense(weights), 1 / w_scale))
    yield "the weight scale divides instead of multiplying", c.of(lambda x: times(x, op.dense(weights), w_scale**-2))
    yield "the activation scale is not divided out", c.of(lambda x: times(x, op.dense(weights), s=np.ones((len(x), 1))))
    yield "the activation scale multiplies instead of dividing", c.of(lambda x: times(x, op.dense(weights), s=1 / spec.quantize(x)[1]))
    yield "one activation scale for the whole tensor instead of one for each token", c.of(per_tensor)
    yield "activations are not quantised to int8", c.of(lambda x: x @ op.dense(weights).T.astype(np.float64) * w_scale)
    yield "codes are truncated instead of rounded", c.of(truncated)
    yield "codes 0, 1, 2 are not shifted to -1, 0, +1", c.of(unshifted)
    yield "sums wrap around in 16 bits", c.of(wrapped)
    yield "sums are kept in float16", c.of(in_halves)
    yield "I2_S is read in the layout of 64 weights in 16 bytes", c.of(lambda x: times(x, _relaid(weights, 64)))
    yield "I2_S is read in the layout of 4 rows to a byte", c.of(lambda x: times(x, _four_rows(weights)))
    yield "code pairs of each byte are read in the opposite order", c.of(lambda x: times(x, _relaid(weights, 128, reverse=True)))
    if weights.shape[0] == weights.shape[1]:
        yield "the weight matrix is transposed", c.of(lambda x: times(x, op.dense(weights).T))
    for other, field_name in _FIELDS.items():
        matrix: Linear | None = getattr(c.layer, field_name)
        if other != name and matrix is not None and matrix.shape == weights.shape:
            yield f"the weights of {other} are used", c.of(lambda x, matrix=matrix: op.product(x, matrix).value)
    for step, text in ((-1, "previous"), (1, "next")):
        if 0 <= c.index + step < len(c.model.layers):
            matrix = getattr(c.model.layers[c.index + step], _FIELDS[name])
            yield f"the weights of the {text} layer are used", c.of(lambda x, matrix=matrix: op.product(x, matrix).value)
    source = c.operation.inputs[0].name
    before = {"attn_sub_norm": "kqv_out", "ffn_sub_norm": "ffn_out", "ffn_norm": "ffn_inp"}.get(source)
    if before:
        raw = Key(before, c.index)
        yield f"the input is {before}, {source} is skipped", lambda values: op.ternary_matmul(values[raw], weights).value


def _relaid(weights: Ternary, block: int, reverse: bool = False) -> NDArray:
    """The matrix as another layout of the same bytes would have it."""
    n, m = weights.shape
    packed = packing.to_i2s(weights)[: -packing.TRAILER].reshape(-1, 1, block // 4)
    shifts = np.array([0, 2, 4, 6] if reverse else [6, 4, 2, 0], np.uint8)
    return (packed >> shifts[:, None] & 3).reshape(n, -1)[:, :m].astype(np.int8) - 1


def _four_rows(weights: Ternary) -> NDArray:
    n, m = weights.shape
    packed = packing.to_i2s(weights)[: -packing.TRAILER]
    shifts = np.array([6, 4, 2, 0], np.uint8)
    codes = (packed[:, None] >> shifts & 3).astype(np.int8) - 1  # a byte holds one column of four rows
    rows = packing.i2s_row_bytes(m) * 4
    if n % 4 or codes.size != n * rows:
        return np.zeros((n, m), np.int8)
    return codes.reshape(n // 4, rows, 4).transpose(0, 2, 1).reshape(n, rows)[:, :m]


# --- norms ----------------------------------------------------------------------------------------------------------------------------


def _norm(c: _Context) -> Found:
    name = c.operation.key.name
    gain = (c.model.output_norm if c.layer is None else getattr(c.layer, name)).astype(np.float64)
    eps = c.config.eps
    if c.config.norm == "layer" and not name.endswith("sub_norm"):
        yield "the norm is missing: its input comes out unchanged", c.of(lambda x: x)
        yield "the mean is not subtracted, as in RMSNorm", c.of(lambda x: spec.rms_norm(x, gain, eps))
        yield "the norm's bias is missing", c.of(lambda x: spec.layer_norm(x, gain, 0.0, eps))
        return

    def layer_norm(x: Array) -> Array:
        centred = x - x.mean(axis=1, keepdims=True)
        return spec.rms_norm(centred, gain, eps)

    def outside(x: Array) -> Array:
        return x / (np.sqrt(np.mean(x * x, axis=1, keepdims=True)) + eps) * gain

    def by_head(x: Array) -> Array:
        heads = x.reshape(len(x), -1, c.config.head_dim)
        return (heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + eps)).reshape(x.shape) * gain

    yield "the norm is missing: its input comes out unchanged", c.of(lambda x: x)
    yield "the norm's weight is missing", c.of(lambda x: spec.rms_norm(x, np.ones(1), eps))
    yield "the norm is missing, only its weight is applied", c.of(lambda x: x * gain)
    yield "1 is added to the norm's weight", c.of(lambda x: spec.rms_norm(x, 1 + gain, eps))
    yield "the norm's weight is applied twice", c.of(lambda x: spec.rms_norm(x, gain * gain, eps))
    yield "the mean is subtracted, as in LayerNorm", c.of(layer_norm)
    yield "the sum of squares is not divided by the width", c.of(lambda x: x / np.sqrt(np.sum(x * x, axis=1, keepdims=True) + eps) * gain)
    yield "the norm divides by the mean square, without the root", c.of(lambda x: x / (np.mean(x * x, axis=1, keepdims=True) + eps) * gain)
    for other in (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3):
        if not np.isclose(other, eps, rtol=1e-3):
            yield f"epsilon is {other:g} instead of {eps:.3g}", c.of(lambda x, other=other: spec.rms_norm(x, gain, other))
    yield "epsilon is outside the root", c.of(outside)
    if name == "attn_sub_norm":
        yield "the norm is taken for each head by itself", c.of(by_head)
    if c.layer is not None:
        for other_name in NORMS:
            weight = getattr(c.layer, other_name)
            if other_name != name and weight is not None and weight.shape == gain.shape:
                yield f"the weight of {other_name} is used", c.of(lambda x, weight=weight: spec.rms_norm(x, weight.astype(np.float64), eps))
    else:
        weight = c.model.layers[-1].ffn_norm.astype(np.float64)
        yield "the last layer is skipped", lambda values: spec.rms_norm(values[_before_last(c.model)], gain, eps)


def _before_last(model: Model) -> Key:
    last = len(model.layers) - 2
    return Key("inp_embd", None) if last < 0 else Key("l_out", last)


# --- positions ------------------------------------------------------------------------------------------------------------------------


def _rope(c: _Context) -> Found:
    k, base, pairs, width = c.config.head_dim, c.config.rope_base, c.config.rope, c.config.rope_width
    factors = 1.0 if c.model.rope_factors is None else c.model.rope_factors.astype(np.float64)

    def rotated(
        x: Array, position: Array, base: float = base, pairs: str = pairs, width: int | None = width, factors: Any = factors, by: float = 1
    ) -> Array:
        turned = spec.rope(x.reshape(len(x), -1, k), position * by / c.config.rope_scaling, base, pairs, width, factors)
        return turned.reshape(x.shape)

    def at(shift: float = 0, scale: float = 1, **options: object) -> Callable[[Values], Array]:
        return c.of(lambda x: rotated(x, scale * (np.arange(len(x)) + shift), **options))  # type: ignore[arg-type]

    if pairs == "halves":
        yield "pairs are interleaved (2i, 2i+1) instead of halves (i, i + K/2)", at(pairs="adjacent")
    else:
        yield "pairs are halves (i, i + K/2) instead of adjacent (2i, 2i+1)", at(pairs="halves")
    if c.config.rope_scaling != 1:
        yield "positions are not scaled", at(by=c.config.rope_scaling)
    if c.model.rope_factors is not None:
        yield "the factors of the frequencies are not applied", at(factors=1.0)
    if width is not None:
        yield "all of each head is rotated, not a part", c.of(lambda x: rotated(x, np.arange(float(len(x))), width=None, factors=1.0))
    yield "the rotation is missing", c.of(lambda x: x)
    yield "positions are too large by one", at(1)
    yield "positions are too small by one", at(-1)
    yield "the rotation turns the other way", at(scale=-1)
    yield "the rotation is applied twice", at(scale=2)
    yield "every token is rotated as the last position", c.of(lambda x: rotated(x, np.full(len(x), len(x) - 1.0)))
    yield (
        "angles are stepped in float32, as ggml does: declare the dialect bitnet.cpp (--as bitnet.cpp)",
        c.of(lambda x: op.rope(c.model, BITNET_CPP, x).value),
    )
    for other in (10000.0, 500000.0, 1000000.0):
        if other != base:
            yield f"the frequency base is {other:g} instead of {base:g}", at(base=other)
    yield "one head width serves all heads: frequencies run over the whole row", c.of(lambda x: _rope_row(x, base))
    yield "the last token is one position too far: it was fed twice", c.of(lambda x: rotated(x, _fed_twice(len(x))))
    for period in range(1, 65):  # of shorter sequences the longer periods change nothing, and so explain nothing
        yield f"positions restart every {period} tokens", c.of(partial(_restarted, rotated, period))


def _restarted(rotated: Callable[..., Array], period: int, x: Array) -> Array:
    return rotated(x, np.arange(len(x)) % period) if period < len(x) else np.full_like(x, np.nan)


def _fed_twice(t: int) -> Array:
    return np.arange(t) + (np.arange(t) == t - 1.0)


def _rope_row(x: Array, base: float) -> Array:
    return spec.rope(x[:, None, :], np.arange(len(x)), base)[:, 0]


# --- attention ------------------------------------------------------------------------------------------------------------------------


def _attention(c: _Context) -> Found:
    heads, groups, width = c.config.heads, c.config.kv_heads, c.config.head_dim
    limit = c.config.window_of(c.index)
    window = np.inf if limit is None else limit

    def attend(q: Array, k: Array, v: Array, mask: Array, scale: float = width**-0.5, shared: Array | None = None) -> Array:
        t = len(q)
        chosen = np.arange(heads) // (heads // groups) if shared is None else shared
        q = q.reshape(t, heads, width)
        k, v = (x.reshape(t, groups, width)[:, chosen] for x in (k, v))
        s = np.einsum("thk,shk->hts", q, k) * scale + mask
        with np.errstate(invalid="ignore"):
            p = np.nan_to_num(np.exp(s - s.max(axis=-1, keepdims=True)))
            p = np.nan_to_num(p / p.sum(axis=-1, keepdims=True))
        return np.einsum("hts,shk->thk", p, v).reshape(t, -1)

    def masked(allowed: Callable[[Array, Array], NDArray[np.bool_]], **options: object) -> Callable[[Values], Array]:
        def compute(q: Array, k: Array, v: Array) -> Array:
            i, j = np.arange(len(q))[:, None], np.arange(len(q))
            return attend(q, k, v, np.where(allowed(i, j), 0.0, -np.inf), **options)  # type: ignore[arg-type]

        return c.of(compute)

    causal = partial(_windowed, window)

    def right(*qkv: Array) -> Array:
        return op.attend(c.model, c.dialect, c.index, *qkv).value

    def ones(q: Array, k: Array, v: Array) -> Array:
        return attend(q, k, v, (spec.causal_mask(len(q), len(q), window=limit) == 0).astype(np.float64))

    def heads_last(q: Array, k: Array, v: Array) -> Array:
        return right(q, k, v).reshape(len(q), heads, width).transpose(0, 2, 1).reshape(len(q), -1)

    raw = tuple(Key(name, c.index) for name in ("Qcur", "Kcur", "Vcur"))
    if limit is not None:
        yield "the window is missing: all tokens before are seen", masked(lambda i, j: j <= i)
        yield "the window is too long by one: it does not count the token itself", masked(partial(_windowed, limit + 1))
        yield "the window is too short by one", masked(partial(_windowed, limit - 1))
        yield f"blocks of {limit} tokens instead of a window", masked(lambda i, j: (j <= i) & (j // limit == i // limit))
    yield "the mask is missing: tokens see the future", masked(lambda i, j: j > i - window)
    yield "the mask is off by one: a token sees the next one", masked(lambda i, j: (j <= i + 1) & (j > i - window))
    yield "the mask is off by one: a token does not see itself", masked(lambda i, j: ((j < i) & (j > i - window)) | ((i == 0) & (j == 0)))
    yield "the mask is 1 and 0, and added", c.of(ones)
    yield "key-value heads are dealt out in turn (h % G) instead of in groups", masked(causal, shared=np.arange(heads) % groups)
    yield "every query head reads the first key-value head", masked(causal, shared=np.zeros(heads, int))
    yield "key-value heads are in the opposite order", masked(causal, shared=groups - 1 - np.arange(heads) // (heads // groups))
    yield "scores are not scaled by 1/sqrt(K)", masked(causal, scale=1.0)
    yield "scores are divided by K instead of its root", masked(causal, scale=1 / width)
    yield "scores are divided by the root of the model width", masked(causal, scale=c.config.width**-0.5)
    yield "scores are multiplied by sqrt(K)", masked(causal, scale=width**0.5)
    yield "heads and head width are transposed in the output", c.of(heads_last)
    yield "queries and keys are not rotated", lambda v: right(*(v[key] for key in raw))
    yield "keys are not rotated", lambda v: right(v[c.operation.inputs[0]], v[raw[1]], v[raw[2]])
    yield "values are the keys", c.of(lambda q, k, v: right(q, k, k))
    yield "keys and values are swapped", c.of(lambda q, k, v: right(q, v, k))
    yield "keys and values of the first token are lost", masked(lambda i, j: causal(i, j) & ((j > 0) | (i == 0)))
    yield "each token sees itself only", masked(lambda i, j: j == i)
    for seen in (2, 4, 8, 16, 32, 64):
        yield f"only the last {seen} tokens are seen", masked(partial(_windowed, seen))
    if not c.dialect.halves:
        halves = replace(c.dialect, halves=True)
        rounded = c.of(lambda *qkv: op.attend(c.model, halves, c.index, *qkv).value)
        yield "float16 roundings: declare the dialect bitnet.cpp (--as bitnet.cpp)", rounded


def _windowed(window: float, i: Array, j: Array) -> NDArray[np.bool_]:
    return (j <= i) & (j > i - window)


# --- the rest -------------------------------------------------------------------------------------------------------------------------


def _gelu(c: _Context) -> Found:
    yield "the exact GELU instead of its approximation by tanh, or the other way round", c.of(_OTHER_GELU[c.config.activation])
    yield "SiLU instead of GELU", c.of(lambda x: x / (1 + np.exp(-x)))
    yield "relu instead of GELU", c.of(lambda x: np.maximum(x, 0))
    yield "relu squared instead of GELU", c.of(lambda x: np.maximum(x, 0) ** 2)


_OTHER_GELU = {"gelu": spec.gelu_tanh, "gelu_tanh": spec.gelu}


def _gate(c: _Context) -> Found:
    if not c.config.gated:
        yield from _gelu(c)
        return

    right = "relu(gate)^2 * up" if c.config.activation == "relu2" else "SiLU(gate) * up"
    if c.config.activation == "relu2":
        yield f"SiLU(gate) * up instead of {right}", c.of(spec.silu_gate)
    else:
        yield f"relu(gate)^2 * up instead of {right}", c.of(spec.relu2_gate)
        yield "SiLU(up) * gate: gate and up are swapped", c.of(lambda g, u: spec.silu_gate(u, g))
    yield f"GELU(gate) * up instead of {right}", c.of(lambda g, u: spec.gelu_tanh(g) * u)
    yield "relu(gate) * up, not squared", c.of(lambda g, u: np.maximum(g, 0) * u)
    yield "gate^2 * up, without relu", c.of(lambda g, u: g * g * u)
    yield "gate and up are swapped", c.of(lambda g, u: spec.relu2_gate(u, g))
    yield "SiLU(up) * gate: gate and up are swapped, and SiLU for relu squared", c.of(lambda g, u: spec.silu_gate(u, g))
    yield "up is not multiplied in", c.of(lambda g, u: np.maximum(g, 0) ** 2)
    yield "relu(gate * up)", c.of(lambda g, u: np.maximum(g * u, 0))


def _residual(c: _Context) -> Found:
    name = c.operation.key.name
    if len(c.operation.inputs) == 3:
        yield "the residual is missing", c.of(lambda h, ffn, attention: ffn + attention)
        yield "attention's branch is missing", c.of(lambda h, ffn, attention: h + ffn)
        yield "the feed-forward's branch is missing", c.of(lambda h, ffn, attention: h + attention)
        return
    start = "inp_embd" if c.model.position_embd is None else "inpL"
    first = Key(start, None) if not c.index else Key("l_out", c.index - 1)
    normed = Key("attn_norm" if name == "ffn_inp" else "ffn_norm", c.index)
    yield "the residual is missing", c.of(lambda a, b: b)
    yield "the branch is missing, only the residual comes through", c.of(lambda a, b: a)
    yield "the residual is the normed input", lambda v: v[normed] + v[c.operation.inputs[1]]
    yield "the residual is subtracted", c.of(lambda a, b: b - a)
    yield "the branch is subtracted", c.of(lambda a, b: a - b)
    yield "the residual is added twice", c.of(lambda a, b: 2 * a + b)
    if name == "l_out":
        yield "the residual is the layer's input", lambda v: v[first] + v[c.operation.inputs[1]]
    yield "the layer's output is the layer's input: the layer is skipped", lambda v: v[first]


def _head(c: _Context) -> Found:
    model = c.model
    table = packing.float32(model.head).astype(np.float64)
    last = Key("l_out", len(model.layers) - 1)

    def int8(x: Array) -> Array:
        q, scale = spec.quantize(x)
        return q @ table.T / scale

    yield "the final norm is skipped", lambda values: values[last] @ table.T
    yield "the head's input is quantised to int8", c.of(int8)
    yield "the head's input is rounded to float16: declare the dialect bitnet.cpp (--as bitnet.cpp)", c.of(lambda x: op.half(x) @ table.T)
    if model.output is not None:
        embedding = packing.float32(model.token_embd).astype(np.float64)
        yield "the head is tied to the embedding, the file has one of its own", c.of(lambda x: x @ embedding.T)


def _embedding(c: _Context) -> Found:
    def shifted(tokens: Array, by: int) -> Array:
        return op.embed(c.model, (tokens.astype(np.int64) + by) % c.config.vocab).value

    yield (
        "embeddings are scaled by the root of the width",
        c.of(lambda t: op.embed(c.model, t.astype(np.int64)).value * c.config.width**0.5),
    )
    yield "token ids are too large by one", c.of(lambda t: shifted(t, 1))
    yield "token ids are too small by one", c.of(lambda t: shifted(t, -1))


def _codes(c: _Context) -> Found:
    def truncated(x: Array) -> Array:
        return np.trunc(x * spec.quantize(x)[1])

    yield "codes are truncated instead of rounded", c.of(truncated)
    yield "codes are rounded down", c.of(lambda x: np.floor(x * spec.quantize(x)[1]))
    yield "one scale for the whole tensor instead of one for each token", c.of(lambda x: np.rint(x * 127 / np.abs(x).max()))


def _scale(c: _Context) -> Found:
    yield "it is the reciprocal, absmax / 127", c.of(lambda x: 1 / spec.quantize(x)[1])
    yield "one scale for the whole tensor instead of one for each token", c.of(lambda x: np.full((len(x), 1), 127 / np.abs(x).max()))


_BY_NAME: dict[str, Callable[[_Context], Found]] = {
    **dict.fromkeys(_FIELDS, _linear),
    **dict.fromkeys((*NORMS, "result_norm"), _norm),
    **dict.fromkeys(("Qcur_rope", "Kcur_rope"), _rope),
    **dict.fromkeys(("ffn_inp", "l_out"), _residual),
    "kqv_out": _attention,
    "ffn_out": _gate,
    "result_output": _head,
    "inp_embd": _embedding,
    **{name + "_codes": _codes for name in MAY_BE_QUANTIZED},
    **{name + "_scale": _scale for name in MAY_BE_QUANTIZED},
}


def _nothing(c: _Context) -> Found:
    yield from ()


def generic(theirs: Array, value: Array, earlier: Array | None) -> Iterator[tuple[str, Array]]:
    """Mistakes that any operation can make: what it gave, against what it should have given."""
    yield "the sign is flipped", -value
    factor = float((theirs * value).sum() / max((value * value).sum(), 1e-300))
    yield f"everything is {factor:.6g} times what it should be", factor * value
    if len(value) > 1:
        for shift, text in ((1, "previous"), (-1, "next")):
            moved = np.roll(value, shift, axis=0)
            moved[0 if shift == 1 else -1] = theirs[0 if shift == 1 else -1]
            if len(value) > 2:
                yield f"every row is that of the {text} token", moved
        yield "rows are in the opposite order", value[::-1]
        yield "every row is that of the last token", np.broadcast_to(value[-1], value.shape)
        yield "every row is that of the first token", np.broadcast_to(value[0], value.shape)
    if earlier is not None and earlier.shape == value.shape:
        yield "it is the same tensor of the previous layer: stale", earlier
    for block in (16, 32, 64, 128):
        if value.shape[1] % block == 0 and value.shape[1] > block:
            pieces = value.reshape(len(value), -1, block)
            yield f"blocks of {block} are in the opposite order", pieces[:, ::-1].reshape(value.shape)
            yield f"rows and columns of blocks of {block} are transposed", pieces.transpose(0, 2, 1).reshape(value.shape)
    yield "columns are in the opposite order", value[:, ::-1]
    if len(value) > 3:
        yield "a constant is added to each column: a bias", value + (theirs - value).mean(axis=0)
    if value.shape[1] > 3:
        factors = (theirs * value).sum(axis=1, keepdims=True) / np.maximum((value * value).sum(axis=1, keepdims=True), 1e-300)
        yield "each position is wrong by a factor of its own: a scale", factors * value


def permuted(theirs: Array, value: Array) -> bool:
    """Whether a row has the right numbers in another order."""
    return bool(np.allclose(np.sort(theirs, axis=1), np.sort(value, axis=1), rtol=1e-4, atol=1e-6))


def local(
    model: Model, dialect: Dialect, operation: op.Operation, inputs: list[Array], value: Array, theirs: Array, wrong: NDArray[np.bool_]
) -> str | None:
    """What the places of wrong numbers say by themselves. wrong: which elements are, [T, width]."""
    rows, columns = np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))
    if rows.size == 0:
        return None
    if wrong.sum() == 1:
        return f"one number alone is wrong: position {rows[0]}, element {columns[0]}"
    name, n = operation.key
    if name in _FIELDS and n is not None and columns.size <= _FEW:
        return _misread(getattr(model.layers[n], _FIELDS[name]), dialect, inputs[0], theirs, columns)
    if name == "kqv_out":
        return _foreign_values(model, dialect, inputs[2], theirs)
    if columns.size <= _FEW < value.shape[1]:
        return f"only {_listed('element', columns)} of each position: the rest of the tensor is right"
    if rows.size <= max(1, len(value) // 4):
        return f"only {_listed('position', rows)}: the other {len(value) - rows.size} are right"
    return None


_FEW = 4  # columns, or listed numbers


def _listed(what: str, numbers: NDArray) -> str:
    more = f" and {numbers.size - _FEW} more" if numbers.size > _FEW else ""
    return f"{what}{'s' * (numbers.size > 1)} {', '.join(map(str, numbers[:_FEW]))}{more}"


def _misread(linear: Linear, dialect: Dialect, x: Array, theirs: Array, columns: NDArray) -> str:
    """Which block of a row of weights was read from elsewhere, if one was. Products of int8 codes show that: they are integers."""
    somewhere = f"only {_listed('element', columns)} of each position: rows of the weights are misread, the others are right"
    weights = linear.weights
    if not isinstance(weights, Ternary) or not op.reads_codes(linear, dialect):
        return somewhere
    matrix = op.dense(weights).astype(np.float64)
    q, scale = spec.quantize(x)
    factor = float(weights.scale) * (1.0 if linear.scale is None else float(linear.scale)) / scale[:, 0]
    row = int(columns[0])
    product = theirs[:, row] - (0.0 if linear.bias is None else float(linear.bias[row]))
    for block in (128, 64, 32, 16):
        blocks = matrix.shape[1] // block
        cut = matrix[:, : blocks * block].reshape(len(matrix), blocks, block)
        parts = np.einsum("tbm,nbm->nbt", q[:, : blocks * block].reshape(len(q), blocks, block), cut[[row]])[0]  # [blocks, T]
        missing = product / factor - q @ matrix[row]  # what the misread block adds
        for b in range(blocks):
            others = [(r, b) for r in (row - 1, row + 1) if 0 <= r < len(matrix)] + [(row, c) for c in (b - 1, b + 1) if 0 <= c < blocks]
            for r, c in others:
                changed = q[:, b * block : (b + 1) * block] @ cut[r, c] - parts[b]
                if np.abs(changed - missing).max() <= 0.25:  # sums of integers
                    where = f"row {r}" if r != row else f"weights {c * block} to {(c + 1) * block - 1}"
                    return f"weights {b * block} to {(b + 1) * block - 1} of row {row} are read from {where}"
    return somewhere


def _foreign_values(model: Model, dialect: Dialect, v: Array, theirs: Array) -> str | None:
    """Attention gives sums of values. What is not one of this sequence's has come from elsewhere; how many, the rank says."""
    c = model.config
    t = len(v)
    if t + 1 >= c.head_dim:
        return None
    v = (op.half(v) if dialect.halves else v).reshape(t, c.kv_heads, c.head_dim)
    out = theirs.reshape(t, c.heads, c.head_dim)
    ranks, hidden = [], False
    for head in range(c.heads):
        values, sums = v[:, head // (c.heads // c.kv_heads)], out[:, head]
        least = 1e-3 * np.abs(sums).max()
        ranks.append(int((np.linalg.svd(_outside(values, sums), compute_uv=False) > least).sum()))
        hidden |= any(np.abs(_outside(values[: i + 1], sums[i])).max() > least for i in range(t))
    most = max(ranks)
    if most == 0 and hidden:
        return "values are summed that a token must not see: the mask, or a cache that holds another sequence's"
    if most == 0:
        return "sums of the right values with wrong weights: scores or softmax are wrong"
    if min(ranks) == 0 or most >= min(t, c.head_dim - t):
        return None
    return f"values that are not of this sequence are summed too, {most} of them: a cache slot that was not cleared, or another's"


def _outside(values: Array, sums: Array) -> Array:
    """What is left of [.., K] without its part in the span of values [n, K]."""
    basis, size, _ = np.linalg.svd(values.T, full_matrices=False)
    basis = basis[:, size > 1e-9 * size[0]]
    return sums - sums @ basis @ basis.T
