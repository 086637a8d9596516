"""The law for one operation on given inputs: its expected output, and how far float32 may be from it.

An engine's dump is judged operation by operation (graph.py lists them): each is evaluated here in float64 from the engine's own inputs,
so an early error neither hides nor fakes a later one. The rules are spec.py's, which is the law for whole models; roundings.py adds where
other engines round. Nothing here is shared with the kernels. tests/judge/test_operations.py ties the two laws together.

HOW FAR. The unit of an element is u = 2^-24 times the result of the same operation on absolute values: for a dot product
sum |a_i b_i|. An honest float32 implementation that adds `steps` rounded terms, in any order, stays within

    |error| <= reach of flips + u * unit * min(steps, 6 sqrt(steps))            for each element
    mean of (error / (u * unit))^2 / steps <= 0.4                               over a tensor
    |sum error * value / sum value^2| <= u * common + 4 standard deviations     over a tensor: no common factor

The first is the worst case (Higham, Accuracy and Stability, 3.1) or, for long sums, the probabilistic bound with lambda = 6
(Higham and Mary, SIAM J. Sci. Comput. 41, 2019). The second is the variance test of TOSA's conformance rules for dot products,
which catches small errors that sit everywhere. The third catches small wrong factors: `common` counts the roundings that all
elements of a tensor may share, such as that of a scale. Sums of integers are exact, but engines
that multiply dequantised numbers round there too, so a ternary matmul counts as a dot product.

FLIPS. A code, or a float16, is ambiguous if the number before rounding is nearer to a rounding boundary than float32 can tell;
the reach of flips is the change that all ambiguous ones together can make.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import spec
from ..base.tensor_types import TERNARY_TYPES
from ..engine.dialects import EXACT, Dialect
from ..model import packing, widen
from ..model.records import Blocks, Config, Linear, Model, Pooling, Table, Ternary, Weights
from . import roundings
from .roundings import to_float16

Array = NDArray[np.float64]

U = 2.0**-24
"""Half a unit in the last place of float32, relative."""


class Expected(NamedTuple):
    """The expected output of an operation, and what its bound is made of."""

    value: Array
    unit: Array  # the operation on absolute values, same shape or broadcastable
    steps: float | Array  # rounded terms of a sum
    reach: float | Array = 0.0  # change that ambiguous roundings of inputs can make
    common: float = 6.0  # roundings, in units of u, that all elements can share
    worst: float | Array = 0.0  # what larger roundings add, such as to narrow types: the sum of their sizes, and of their squares
    square: float | Array = 0.0
    shared: float = 1.0  # elements that have these roundings in common, about


def embed(model: Model, tokens: NDArray[np.int64]) -> Expected:
    value = widen.take(model.token_embd, tokens).astype(np.float64)
    return Expected(value, np.abs(value), 0)


def add_positions(model: Model, x: Array) -> Expected:
    assert model.position_embd is not None
    return add(x, widen.take(model.position_embd, np.arange(len(x))).astype(np.float64))


def rms_norm(x: Array, gain: NDArray[np.float32], eps: float) -> Expected:
    """RMSNorm: a sum of D squares under a root (which halves its relative error), then six roundings."""
    value = spec.rms_norm(x, gain.astype(np.float64), eps)
    return Expected(value, np.abs(value), x.shape[1] / 4 + 6, common=6 + x.shape[1] ** 0.5 / 2)


def layer_norm(x: Array, gain: NDArray[np.float32], bias: NDArray[np.float32] | None, eps: float) -> Expected:
    """LayerNorm: a mean and a sum of D squares. The mean is wrong by roundings of the numbers' own size, which all differences share."""
    width = x.shape[1]
    shift = 0.0 if bias is None else bias.astype(np.float64)
    value = spec.layer_norm(x, gain.astype(np.float64), shift, eps)
    centred = x - x.mean(axis=1, keepdims=True)
    root = np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
    size = (np.abs(centred) + np.abs(x).mean(axis=1, keepdims=True)) / root * np.abs(gain) + np.abs(shift)
    return Expected(value, size, width / 4 + 8, common=8 + width**0.5 / 2)


def head_norm(x: Array, gain: NDArray[np.float32], eps: float) -> Expected:
    """The norm of each head by itself: [T, H*K]."""
    heads = rms_norm(x.reshape(-1, gain.size), gain, eps)
    return heads._replace(value=heads.value.reshape(x.shape), unit=heads.unit.reshape(x.shape))


def reads_codes(linear: Linear, dialect: Dialect) -> bool:
    """Whether the input is quantised to int8, one scale for each token."""
    weights = linear.weights
    if isinstance(weights, Ternary):
        return not dialect.ggml_activations or weights.blocks is None
    return isinstance(weights, Blocks) and weights.type in TERNARY_TYPES and not dialect.ggml_activations


def product(x: Array, linear: Linear, dialect: Dialect = EXACT) -> Expected:
    """The product with a matrix, its scale and its bias: two roundings more."""
    weights = linear.weights
    if not isinstance(weights, Ternary):
        expected = matmul(x, weights, reads_codes(linear, dialect), dialect)
    elif weights.blocks is None or reads_codes(linear, dialect):
        expected = ternary_matmul(x, weights)
    else:
        expected = matmul(x, weights.blocks, False, dialect)
    if linear.scale is not None:
        factor = float(linear.scale)
        expected = expected._replace(value=expected.value * factor, unit=expected.unit * abs(factor), reach=expected.reach * abs(factor))
    if linear.bias is not None:
        bias = linear.bias.astype(np.float64)
        expected = expected._replace(value=expected.value + bias, unit=expected.unit + np.abs(bias), steps=expected.steps + 1)
    return expected


def matmul(x: Array, table: Table, codes: bool, dialect: Dialect) -> Expected:
    """The product with a table of x, quantised to int8 (`codes`) or rounded as in the dialect; ambiguous roundings have a reach."""
    if codes:
        q, scale = spec.quantize(x)
        inputs, step, doubt = q / scale, 1 / scale, ambiguous(x * scale)
    elif dialect.ggml_activations:
        inputs = roundings.matrix_input(x, table)
        step = rounding_step(x, table)
        doubt = np.abs(np.abs(x - inputs) - step / 2) <= 8 * U * np.abs(x)
    else:
        inputs, step, doubt = x, np.zeros((1, 1)), np.zeros(x.shape, np.bool_)
    n = table.shape[0]
    value, unit = np.empty((len(x), n)), np.empty((len(x), n))
    reach: float | Array = 0.0
    for rows, matrix in row_blocks(table):
        value[:, rows] = inputs @ matrix.T
        absolute = np.abs(matrix)
        if doubt.any():
            reach = np.zeros((len(x), n)) if isinstance(reach, float) else reach
            reach[:, rows] = (doubt * step) @ absolute.T
        if dialect.ggml_activations and isinstance(table, Blocks):
            absolute += absolute.max(axis=1, keepdims=True)  # codes and what is subtracted from them are summed apart
        unit[:, rows] = np.abs(inputs) @ absolute.T
    if dialect.ggml_activations and isinstance(table, Blocks) and table.type in roundings.MINIMUM_TYPES:
        minimums = roundings.minimums(table)
        value += roundings.rounded_sums(x) @ minimums.T
        reach = reach + np.abs(half_spacing(inputs, 32)) @ np.abs(minimums).T
    return Expected(value, unit, x.shape[1], reach)


def half_spacing(x: Array, size: int) -> Array:
    """The spacing of float16 at the sum of each `size` numbers that is nearly on a rounding boundary, and 0 at other sums."""
    totals = x.reshape(len(x), -1, size).sum(axis=2)
    spacing = np.spacing(np.abs(totals).astype(np.float16)).astype(np.float64)
    doubt = np.abs(np.abs(totals - to_float16(totals)) - spacing / 2) <= 2.0**-9 * np.abs(totals)
    return doubt * spacing


def rounding_step(x: Array, table: Table) -> Array:
    """The spacing of the numbers that each element of an input can be rounded to."""
    if not isinstance(table, Blocks):
        digits = {np.dtype(np.float16): 11, np.dtype(np.uint16): 8}.get(table.dtype, 24)
        return np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-14))) + 1 - digits)
    size = table.type.block
    largest = np.abs(x.reshape(len(x), -1, size)).max(axis=2)
    return np.repeat(largest / 127, size, axis=1)


def dense(weights: Ternary) -> NDArray[np.float32]:
    """The matrix [N, M] of -1, 0, +1. Products with int8 codes are exact in float32 while M < 131,072."""
    return _cached_dense(weights) if weights.shape[0] * weights.shape[1] <= _SMALL_MATRIX else packing.unpack(weights).astype(np.float32)


_SMALL_MATRIX = 1 << 20
_BLOCK = 1 << 22  # numbers: a head of 128,256 x 2560 would take 2.6 GB in float64


def row_blocks(table: Table) -> Iterator[tuple[slice, Array]]:
    """The rows of [N, M] in float64, as many at a time as take little memory."""
    n, m = table.shape
    if isinstance(table, Blocks) and n * m <= _SMALL_MATRIX:
        yield slice(0, n), _cached_table(table)
        return
    step = max(1, _BLOCK // m)
    for i in range(0, n, step):
        rows = slice(i, min(i + step, n))
        yield rows, widen.take(table, rows).astype(np.float64)


@lru_cache(maxsize=64)
def _cached_table(table: Blocks) -> Array:
    """A table of a small model, which is read again for each mistake that is tried."""
    return widen.float32(table).astype(np.float64)


@lru_cache(maxsize=64)
def _cached_dense(weights: Ternary) -> NDArray[np.float32]:
    """A matrix of a small model, which is read again for each mistake that is tried."""
    matrix = packing.unpack(weights).astype(np.float32)
    matrix.flags.writeable = False
    return matrix


def rows_of(weights: Weights, rows: NDArray[np.integer]) -> Array:
    """Some rows [n, M] of a matrix in float64, without its scale."""
    is_small = weights.shape[0] * weights.shape[1] <= _SMALL_MATRIX
    if isinstance(weights, Ternary):
        return (dense(weights)[rows] if is_small else packing.unpack_rows(weights, rows)).astype(np.float64)
    if isinstance(weights, Blocks) and is_small:
        return _cached_table(weights)[rows]
    return widen.take(weights, rows).astype(np.float64)


def ambiguous(exact: Array) -> NDArray[np.bool_]:
    """Numbers so near to k + 0.5 that two roundings in float32 decide to which side they go."""
    return np.abs(np.abs(exact - np.floor(exact)) - 0.5) <= 4 * U * np.abs(exact) + 1e-12


def codes(x: Array) -> Expected:
    """The int8 codes of an input: exact, but for ambiguous ones."""
    q, scale = spec.quantize(x)
    return Expected(q, np.zeros_like(q), 0, ambiguous(x * scale).astype(np.float64))


def code_scale(x: Array) -> Expected:
    """Steps per unit, 127 / absmax: one division."""
    scale = spec.quantize(x)[1]
    return Expected(scale, scale, 2)


def ternary_matmul(x: Array, weights: Ternary) -> Expected:
    """The product of an input's codes with a ternary matrix; it takes the unquantised input, to know which codes are ambiguous."""
    q, scale = spec.quantize(x)
    matrix = dense(weights)
    w_scale = float(weights.scale) / scale
    value = (q.astype(np.float32) @ matrix.T).astype(np.float64) * w_scale
    unit = (np.abs(q).astype(np.float32) @ np.abs(matrix).T).astype(np.float64) * w_scale
    rows, columns = np.nonzero(ambiguous(x * scale))
    reach = np.zeros(value.shape)
    for row, column in zip(rows, columns, strict=True):
        reach[row] += np.abs(matrix[:, column])
    return Expected(value, unit, x.shape[1] + 3, reach * w_scale)  # products, and the scale, the quotient and the factor


def pair_slices(config: Config) -> tuple[slice, slice]:
    """The slices of a head that hold the first and the second numbers of its rotated pairs."""
    j = config.rope_pairs
    return (slice(0, j), slice(j, 2 * j)) if config.rope == "halves" else (slice(0, 2 * j, 2), slice(1, 2 * j, 2))


def complex_pairs(config: Config, x: NDArray) -> NDArray[np.complex128]:
    """The rotated pairs of heads [n, heads * K] as complex numbers, [n, heads, J]: a rotation multiplies them."""
    heads = x.reshape(len(x), -1, config.head_dim).astype(np.float64)
    first, second = pair_slices(config)
    return heads[..., first] + 1j * heads[..., second]


def rope(model: Model, dialect: Dialect, x: Array, start: int = 0) -> Expected:
    """RoPE of positions from `start` on: two products, and those of cosine and sine with the magnitude, which is itself a few roundings.

    In most engines the angle is a float32, wrong by a rounding or two of its own size, which all heads share.
    """
    c = model.config
    t = len(x)
    heads, angle = x.reshape(t, -1, c.head_dim), roundings.angles(model, dialect, t, start)
    first, second = pair_slices(c)
    unit = np.abs(heads)
    unit[..., first] = unit[..., second] = (unit[..., first] + unit[..., second]) * (1 + angle[:, None, :])
    if c.rope_magnitude == 1:
        return Expected(spec.rotate(heads, angle, c.rope).reshape(t, -1), unit.reshape(t, -1), 4)
    unit[..., : 2 * c.rope_pairs] *= c.rope_magnitude
    return Expected(spec.rotate(heads, angle, c.rope, c.rope_magnitude).reshape(t, -1), unit.reshape(t, -1), 12)


def scores(model: Model, q: Array, k: Array) -> tuple[Array, Array]:
    """Scores [H, T, S] of every query with every key, scaled and capped, and the scaled ones on absolute values.

    A cap makes an error of a score smaller, never larger.
    """
    c = model.config
    q, k = q.reshape(len(q), c.heads, c.head_dim), k.reshape(len(k), c.kv_heads, c.head_dim)
    k, scale = spec.by_query_head(k, c.heads), score_scale(c)
    s = np.einsum("thk,shk->hts", q, k) * scale
    return spec.soft_cap(s, c.score_cap), np.einsum("thk,shk->hts", np.abs(q), np.abs(k)) * scale


def visible_scores(model: Model, dialect: Dialect, layer: int, q: Array, k: Array) -> Expected:
    """Scores as they are dumped, [T, H * T]: 0 where a query does not see the key."""
    c = model.config
    if dialect.in_float16:
        q, k = to_float16(q), to_float16(k)
    sees = spec.causal_mask(len(q), len(q), window=c.window_of(layer)) == 0
    s, unit = (by_query(np.where(sees, x, 0)) for x in scores(model, q, k))
    return Expected(s, unit, c.head_dim + (2 if c.score_cap is None else 10))  # a cap divides, takes tanh and multiplies


def probabilities(model: Model, layer: int, scores: Array) -> Expected:
    """The softmax of scores [T, H * T]. An error of a score changes its probability by as much, relatively, and the others by their sum.

    The exponent is rounded four times at most: the difference from the largest score, its product with log2(e), that constant, and the
    reduction of its range. Each is relative to the difference, so it grows with it, unlike roundings of a sum, which partly cancel.
    """
    t = len(scores)
    sees = spec.causal_mask(t, t, window=model.config.window_of(layer)) == 0
    s = np.where(sees, by_head(scores), -np.inf)
    p = spec.softmax(s)
    away = np.where(sees, s.max(axis=-1, keepdims=True) - s, 0)
    total, square = ((p**n * away**n).sum(axis=-1, keepdims=True) for n in (1, 2))
    worst, squares = 4 * U * p * (away + total), 4 * (U * p) ** 2 * (away**2 + square)
    steps = np.broadcast_to(np.minimum(sees.sum(axis=-1), 36)[:, None] + 8, p.shape)
    return Expected(by_query(p), by_query(p), by_query(steps), worst=by_query(worst), square=by_query(squares))


def by_query(x: Array) -> Array:
    """[H, T, S] -> [T, H * S]."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def by_head(x: Array) -> Array:
    """[T, H * T] -> [H, T, T]."""
    return x.reshape(len(x), -1, len(x)).transpose(1, 0, 2)


def score_scale(c: Config) -> float:
    """The factor of q . k."""
    return c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale


def attend(model: Model, dialect: Dialect, layer: int, q: Array, k: Array, v: Array) -> Expected:
    """Attention of the layer with this number, with its window.

    A wrong score changes its probability by as much, relatively, and the others through their sum: twice the worst score error.
    With float16 probabilities each is rounded as the engine rounds it, and ambiguous if float32 cannot tell to which side.
    """
    c = model.config
    t = len(q)
    if dialect.in_float16:
        q, k, v = to_float16(q), to_float16(k), to_float16(v)
    values = spec.by_query_head(v.reshape(t, c.kv_heads, c.head_dim), c.heads)
    s, s_unit = scores(model, q, k)
    mask = spec.causal_mask(t, t, window=c.window_of(layer))
    s = s + mask
    p, largest = spec.softmax(s), s.max(axis=-1, keepdims=True)
    visible = mask == 0
    wrong_score = np.where(visible, s_unit * min(c.head_dim, 6 * c.head_dim**0.5) + 2 * np.abs(np.where(visible, s - largest, 0)), 0)
    if c.score_cap is not None:
        wrong_score = wrong_score + 8 * np.abs(np.where(visible, s, 0))  # division, tanh and product, each relative
    steps = np.maximum(2 * wrong_score.max(axis=-1), 0) + np.minimum(visible.sum(axis=-1), 36) + 8  # [H, T]
    reach: float | Array = 0.0
    if dialect.in_float16:
        spacing = np.spacing(p.astype(np.float16)).astype(np.float64)
        rounded = to_float16(p)
        doubt = visible & (np.abs(np.abs(p - rounded) - spacing / 2) <= p * U * steps[..., None])
        reach = np.einsum("hts,shk->thk", doubt * spacing, np.abs(values)).reshape(t, -1)
        p = rounded
    value = np.einsum("hts,shk->thk", p, values)
    unit = np.einsum("hts,shk->thk", p, np.abs(values))
    every = np.broadcast_to(steps.T[..., None], value.shape)
    return Expected(value.reshape(t, -1), unit.reshape(t, -1), every.reshape(t, -1), reach)


def add(*terms: Array) -> Expected:
    """A sum. Terms of a float64 engine, dumped as float32, are rounded as well as the result, which may be much smaller: a rounding each,
    and one."""
    return Expected(np.sum(terms, axis=0), np.sum(np.abs(terms), axis=0), len(terms))


def add_scaled(factor: float, h: Array, *branches: Array) -> Expected:
    """The residual stream and outputs of branches times their scale, which is rounded too where it is not 1."""
    terms = [h, *(branch * factor for branch in branches)]
    expected = add(*terms)
    return expected if factor == 1 else expected._replace(steps=expected.steps + 2)


def scaled_embedding(c: Config, x: Array) -> Expected:
    """A product with a factor that is rounded itself; engines of bfloat16 round it further (narrow.py)."""
    value = x * c.embedding_scale
    return Expected(value, np.abs(value), 2)


def relu2_gate(gate: Array, up: Array) -> Expected:
    """relu(gate)^2 * up: a square and a product; and the inputs' own roundings, that of the gate twice, in a float64 engine's dump."""
    value = spec.relu2_gate(gate, up)
    return Expected(value, np.abs(value), 5)


def silu_gate(gate: Array, up: Array) -> Expected:
    """SiLU(gate) * up: an exponential (2 roundings, in some engines of a rounded argument), a sum, a division, a product.

    Compilers such as XLA take sigmoid(x) from tanh: (1 + tanh(x / 2)) / 2, which is as wrong as 1 is, also where it is small.
    """
    value = spec.silu_gate(gate, up)
    return Expected(value, np.abs(value) * (1 + np.abs(gate)) + np.abs(gate * up) / 2, 6)


def gelu_gate(gate: Array, up: Array, dialect: Dialect = EXACT) -> Expected:
    """GELU by tanh of the gate, times up."""
    one = gelu_tanh(gate, dialect)
    size = np.abs(up)
    return Expected(one.value * up, one.unit * size, one.steps + 2, one.reach * size)


def gelu(x: Array) -> Expected:
    """GELU. Engines compute 1 + erf, so that the error is that of numbers as large as x."""
    value = spec.gelu(x)
    return Expected(value, np.abs(x), 8)


def gelu_tanh(x: Array, dialect: Dialect = EXACT) -> Expected:
    """GELU by tanh. ggml's float16 table may give the neighbour of the right entry, and an ambiguous input the neighbouring entry."""
    value = spec.gelu_tanh(x)
    if not dialect.ggml_activations:
        return Expected(value, np.abs(x), 8)
    inside = np.abs(x) < 10
    x = np.where(inside, x, 0)
    rounded = to_float16(x)
    entry = to_float16(spec.gelu_tanh(rounded))
    doubt = np.abs(np.abs(x - rounded) - np.spacing(np.abs(rounded).astype(np.float16)).astype(np.float64) / 2) <= 4 * U * np.abs(x)
    spacing = np.spacing(np.abs(entry).astype(np.float16)).astype(np.float64)
    reach = np.where(inside, spacing + doubt * 2 * np.spacing(np.abs(rounded).astype(np.float16)).astype(np.float64), 0)
    return Expected(np.where(inside, entry, value), np.abs(value) + np.abs(x), 8, reach)


def top_experts(k: int, logits: Array, error: float = 8 * U) -> Expected:
    """The numbers of each token's experts, slot by slot. Those are discrete, as codes are.

    Engines compare probabilities, so an expert whose logit is within a few roundings of another's, or whose probability is hardly above
    0, may have that one's slot. error: of a logit, relative to 1 and to its distance from the largest.
    """
    value = spec.top_experts(logits, k)
    behind = logits.max(axis=1, keepdims=True) - logits
    behind = np.minimum(behind, _NO_CHANCE)
    own = np.take_along_axis(behind, value, axis=1)[:, :, None]
    near = np.abs(own - behind[:, None, :]) <= error * (1 + own)
    reach = np.where(near, np.abs(np.arange(logits.shape[1]) - value[:, :, None]), 0).max(axis=2)
    return Expected(value.astype(np.float64), np.zeros(value.shape), 0, reach.astype(np.float64))


def next_experts(logits: NDArray, k: int, error: Array | float) -> NDArray[np.intp]:
    """The numbers of each token's experts, the last of which is the next best one where that is no farther away than `error`."""
    experts = spec.top_experts(logits, k + 1)
    last, following = (np.take_along_axis(logits, experts[:, [slot]], axis=1)[:, 0] for slot in (k - 1, k))
    near = last - following <= error
    experts[near, k - 1] = experts[near, k]
    return np.ascontiguousarray(experts[:, :k])


_NO_CHANCE = 80.0  # e^-80 is near the smallest normal float32


def expert_weights(normalized: bool, logits: Array, experts: Array) -> Expected:
    """The softmax of the logits at a token's experts: exponentials of rounded differences, their sum, and quotients."""
    value = spec.expert_weights(logits, experts.astype(np.intp), normalized)
    behind = logits.max(axis=1, keepdims=True) - np.take_along_axis(logits, experts.astype(np.intp), axis=1)
    return Expected(value, value * (1 + behind), min(logits.shape[1], 36) + 8)


def of_experts(linears: Sequence[Linear], dialect: Dialect, x: Array, experts: Array) -> Expected:
    """Each slot's input [T, M], or [T, k*M] where every slot has its own, times the matrix of the slot's expert -> [T, k*N]."""
    parts = [(slots, product(inputs, linears[expert], dialect)) for expert, slots, inputs in by_expert(x, experts, linears)]

    def joined(field: str) -> Array:
        return scattered(experts, linears, [(slots, getattr(part, field)) for slots, part in parts])

    return Expected(joined("value"), joined("unit"), joined("steps"), joined("reach"))


def by_expert(x: Array, experts: Array, linears: Sequence[Linear]) -> Iterator[tuple[int, NDArray[np.intp], Array]]:
    """Yields the number of each expert that is taken, its slots, as indices of all T * k, and their inputs [n, M]."""
    flat, rows = experts.astype(np.intp).reshape(-1), x.reshape(-1, linears[0].shape[1])
    for expert in np.unique(flat):
        slots = np.flatnonzero(flat == expert)
        yield int(expert), slots, rows[slots // (flat.size // len(rows))]


def scattered(experts: Array, linears: Sequence[Linear], parts: Sequence[tuple[NDArray[np.intp], Array | float]]) -> Array:
    """The slots' results [T, k*N] out of those of each expert's slots [n, N], or one number for all of them."""
    out = np.empty((experts.size, linears[0].shape[0]))
    for slots, part in parts:
        out[slots] = part
    return out.reshape(len(experts), -1)


def mix(y: Array, weights: Array) -> Expected:
    """The sum of weights times the results of a token's experts."""
    slots = y.reshape(*weights.shape, -1)
    return Expected(spec.mix(slots, weights), spec.mix(np.abs(slots), np.abs(weights)), 2 * weights.shape[1] + 1)


def shared_expert(gain: NDArray[np.float32], y: Array, x: Array) -> Expected:
    """The shared expert's result times the sigmoid of its gate, whose error a row shares."""
    wide = gain.astype(np.float64)
    factor = spec.sigmoid(x @ wide)[:, None]
    value = y * factor
    slope = (1 - factor) * (1 + (np.abs(x) @ np.abs(wide))[:, None])
    return Expected(value, np.abs(value) * (1 + slope), x.shape[1] + 8, shared=float(y.shape[1]))


def pool(pooling: Pooling, x: Array) -> Expected:
    """The pooled output [1, D]: the mean of all rows, a sum and a factor; or a row, with room for the rounding of one factor."""
    steps = len(x) + 2 if pooling == "mean" else 1
    return Expected(spec.pool(x, pooling), spec.pool(np.abs(x), pooling), steps)


def head(model: Model, dialect: Dialect, x: Array) -> Expected:
    """The product with the output matrix; in some dialects its input is rounded to float16."""
    x = to_float16(x) if dialect.in_float16 else x
    expected = matmul(x, model.head, False, dialect)
    if model.output_bias is not None:
        bias = model.output_bias.astype(np.float64)
        expected = expected._replace(value=expected.value + bias, unit=expected.unit + np.abs(bias), steps=expected.steps + 1)
    return expected if model.config.plain_logits else finished_logits(model.config, expected)


def finished_logits(c: Config, expected: Expected) -> Expected:
    """Logits scaled and capped, with the errors that they had before. A cap makes those smaller, but its own tanh is rounded."""
    value, unit, reach = expected.value / c.logit_scale, expected.unit / c.logit_scale, expected.reach / c.logit_scale
    steps = expected.steps + (3 if c.logit_cap is None else 11)
    return expected._replace(value=spec.soft_cap(value, c.logit_cap), unit=unit, steps=steps, reach=reach)
