"""The error that narrow types allow in one operation, beyond float32's: how a Precision becomes a bound.

Eager engines round every tensor that they write: the inputs of an operation, the steps inside it and its result. Each such rounding changes
a number by at most `delta`, and the result by as much times the derivative. For independent roundings with effects d_i

    |error| <= min(sum d_i, 6 sqrt(sum d_i^2))

as for float32's own (operations.py); the sums of squares serve its statistics. Fused engines round less, and stay within the same bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import spec
from ..engine.dialects import Dialect
from ..model.records import Blocks, Linear, Model, Table, Ternary
from . import operations as op
from .operations import Expected
from .precision import FLOAT32, ROUNDOFF, Precision

Array = NDArray[np.float64]

_TINY = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}
"""Half the spacing of each type's subnormal numbers, where it is not negligible."""


class Storage(NamedTuple):
    """The types of one operation's numbers."""

    inputs: tuple[str, ...]
    output: str
    precision: Precision = FLOAT32

    @property
    def is_wide(self) -> bool:
        """Whether everything is float32."""
        return self.output == "float32" and all(t == "float32" for t in self.inputs) and self.precision == FLOAT32


class Allowance(NamedTuple):
    """The effect of roundings on a result: the sum of their sizes, the sum of their squares."""

    worst: Array | float
    square: Array | float
    shared: float = 1.0  # elements of the result that have the same errors in common, about


Allow = Callable[..., Allowance]
"""(storage, expected, *inputs) -> what narrow types allow an operation."""


def half_steps(x: Array, kind: str) -> Array:
    """The largest error of each number of [.., width] that is kept in this type."""
    size = np.abs(x)
    if kind in ROUNDOFF:
        return ROUNDOFF[kind] * size + _TINY[kind] if ROUNDOFF[kind] else np.zeros_like(size)
    if kind in ("int8", "int4"):
        most = {"int8": 127, "int4": 7}[kind]
        return np.broadcast_to(size.max(axis=-1, keepdims=True) / (2 * most), size.shape)
    block = {"q8_0": 32, "q4_0": 32, "q6_K": 16}[kind]
    if x.shape[-1] % block:
        block = x.shape[-1]
    largest = np.repeat(size.reshape(*x.shape[:-1], -1, block).max(axis=-1), block, axis=-1)
    # a code's half step, and a step kept as float16; q4_0's other end is a whole step short; q6_K's steps are 8 bits of a larger one
    steps = {"q8_0": 0.5 / 127, "q4_0": 1 / 8, "q6_K": 1 / 31}[kind]
    return largest * steps + ROUNDOFF["float16"] * size


def rounded(x: Array, kind: str) -> Array:
    """Numbers [.., width] in codes of this type, about as engines round to it: to the nearest step."""
    step = 2 * half_steps(x, kind)
    return np.rint(x / np.where(step == 0, 1, step)) * step


def stored(*effects: Array | float) -> Allowance:
    """Independent roundings with these effects on each element."""
    return Allowance(sum(effects), sum(effect * effect for effect in effects))


def _kept(kind: str, value: Array, times: int = 1) -> Array:
    """The rounding of a result to its type, and of steps inside that are as large as it."""
    return times * (ROUNDOFF[kind] * np.abs(value) + _TINY[kind])


def _with_factor(allowance: Allowance, effect: Array, value: Array) -> Allowance:
    """The allowance of a result with these values where a factor, too, is rounded, to this effect: all elements share its error."""
    own, size = allowance.square * value**2, effect * np.abs(value)
    every = float((own + size**2).sum())
    shared = allowance.shared if every == 0 else max(allowance.shared, (float(size.sum()) ** 2 + float(own.sum())) / every)
    return Allowance(allowance.worst + effect, allowance.square + effect**2, shared)


# --- operations -----------------------------------------------------------------------------------------------------------------------


def result(storage: Storage, expected: Expected, *inputs: Array) -> Allowance:
    """An operation that copies, such as the embedding: its result alone is rounded."""
    return stored(_kept(storage.output, expected.value))


def scaled_embedding(storage: Storage, expected: Expected, x: Array) -> Allowance:
    """The embedding times a factor, which some engines keep in the result's type."""
    kept = _kept(storage.output, expected.value)
    return _with_factor(stored(kept), kept, expected.value)


def norm(storage: Storage, expected: Expected, x: Array) -> Allowance:
    """A norm: its input; the normed numbers, the weight and the result. Numbers that lose a mean keep the errors of their own size."""
    size = np.maximum(np.abs(expected.value), expected.unit)
    inside = _kept(storage.output, size)
    effects = stored(_kept(storage.inputs[0], size), inside, inside, _kept(storage.output, expected.value))
    return effects._replace(shared=len(x))  # all rows share the rounded weight


def add(storage: Storage, expected: Expected, *terms: Array, factor: float = 1.0) -> Allowance:
    """A sum: its terms, and the result; of three terms a sum in between. factor: multiplies all terms but the first, and is rounded."""
    terms = (terms[0], *(term * factor for term in terms[1:]))
    effects = [ROUNDOFF[kind] * np.abs(term) for kind, term in zip(storage.inputs, terms, strict=True)]
    if factor != 1:
        effects += [_kept(storage.output, term) for term in terms[1:]]
    sums = [ROUNDOFF[storage.output] * expected.unit] if len(terms) > 2 else []
    allowance = stored(*effects, _kept(storage.output, expected.value), *sums)
    return allowance if factor == 1 else _with_factor(allowance, _kept(storage.output, np.sum(terms[1:], axis=0)), expected.value)


def add_positions(storage: Storage, expected: Expected, x: Array) -> Allowance:
    """The embedding plus rows of a table."""
    return add(storage._replace(inputs=(*storage.inputs, storage.output)), expected, x, expected.value - x)


def gate(storage: Storage, expected: Expected, gate_input: Array, up: Array) -> Allowance:
    """A gated activation: both inputs (an activation's slope times its input is at most twice itself, and SiLU's 1 + |x| times), two steps
    inside, and the result."""
    value = np.abs(expected.value)
    slope = np.maximum(2 * value, expected.unit)
    step = _kept(storage.output, value)
    return stored(ROUNDOFF[storage.inputs[0]] * slope, ROUNDOFF[storage.inputs[1]] * value, step, step, step)


def activation(storage: Storage, expected: Expected, x: Array) -> Allowance:
    """GELU, whose slope is at most 1.13, of an input; and its result."""
    return stored(
        1.13 * ROUNDOFF[storage.inputs[0]] * np.abs(x), ROUNDOFF[storage.output] * np.abs(x), _kept(storage.output, expected.value)
    )


def rope(storage: Storage, expected: Expected, x: Array, *, model: Model) -> Allowance:
    """RoPE: inputs, cosines and sines, products, and their sum. Heads share cosines and sines."""
    c = model.config
    heads = np.abs(x).reshape(len(x), -1, c.head_dim)
    first, second = op.pair_slices(c)
    both = np.zeros_like(heads)
    squares = np.zeros_like(heads)
    both[..., first] = both[..., second] = heads[..., first] + heads[..., second]
    squares[..., first] = squares[..., second] = heads[..., first] ** 2 + heads[..., second] ** 2
    both, squares = c.rope_magnitude * both, c.rope_magnitude**2 * squares
    u, v = ROUNDOFF[storage.output], ROUNDOFF[storage.inputs[0]]
    kept = _kept(storage.output, expected.value)
    worst = (2 * u + v) * both.reshape(x.shape) + kept
    return Allowance(worst, (2 * u**2 + v**2) * squares.reshape(x.shape) + kept**2, heads.shape[1])


def codes(storage: Storage, expected: Expected, x: Array) -> Allowance:
    """int8 codes of narrow numbers, whose scale is narrow too: those that it may move over a boundary."""
    scale = spec.quantize(x)[1]
    flips = _near_boundary(x * scale, storage).astype(np.float64)
    return Allowance(flips, flips)


def code_scale(storage: Storage, expected: Expected, x: Array) -> Allowance:
    """A quotient of a rounded number."""
    return stored(ROUNDOFF[storage.inputs[0]] * expected.value, _kept(storage.output, expected.value), _scale(storage) * expected.value)


def _scale(storage: Storage) -> float:
    """The relative error of a scale that is kept in the precision's own type for scales."""
    return ROUNDOFF[storage.precision.scale]


def _near_boundary(exact: Array, storage: Storage) -> NDArray[np.bool_]:
    """Numbers that roundings of the input, of its scale and of their product may move over a boundary between two codes."""
    relative = ROUNDOFF[storage.inputs[0]] + 2 * ROUNDOFF[storage.output] + _scale(storage)
    return (np.abs(np.abs(exact - np.floor(exact)) - 0.5) <= relative * np.abs(exact)) & (relative > 0)


def product(storage: Storage, expected: Expected, x: Array, *, linear: Linear, dialect: Dialect) -> Allowance:
    """The product with a matrix, with its scale and bias."""
    factor = 1.0 if linear.scale is None else abs(float(linear.scale))
    if isinstance(linear.weights, Ternary):
        factor *= float(linear.weights.scale)
    kept = [_kept(storage.output, expected.value, 1 + (linear.scale is not None))]
    if linear.bias is not None:
        kept.append(ROUNDOFF[storage.output] * (np.abs(expected.value) + np.abs(linear.bias)))
    return _product(storage, expected, x, linear.weights, op.reads_codes(linear, dialect), dialect, factor, kept)


def top_experts(k: int, storage: Storage, expected: Expected, logits: Array) -> Allowance:
    """Experts whose logits are as near to each other as roundings of logits and of probabilities."""
    error = 4 * max(ROUNDOFF[storage.inputs[0]], ROUNDOFF[storage.output]) * (1 + float(np.abs(logits).max()))
    reach = np.asarray(op.top_experts(k, logits, error + 8 * op.U).reach)
    return Allowance(reach, reach**2)


def expert_weights(storage: Storage, expected: Expected, logits: Array, experts: Array) -> Allowance:
    """A softmax of rounded logits: each probability is wrong by its own share of that, and by the sum's; steps inside, and the result."""
    off = 2 * ROUNDOFF[storage.inputs[0]] * np.abs(logits).max(axis=1, keepdims=True)
    inside = _kept(storage.output, expected.value)
    return stored(expected.value * np.expm1(off), inside, inside, inside)._replace(shared=expected.value.shape[1])


def of_experts(storage: Storage, expected: Expected, x: Array, experts: Array, *, linears: Sequence[Linear], dialect: Dialect) -> Allowance:
    """Products, each with the matrix of its slot's expert."""
    parts = []
    for expert, slots, inputs in op.by_expert(x, experts, linears):
        own = op.product(inputs, linears[expert], dialect)
        parts.append((slots, product(storage, own, inputs, linear=linears[expert], dialect=dialect)))
    worst, square = (op.scattered(experts, linears, [(slots, getattr(a, name)) for slots, a in parts]) for name in ("worst", "square"))
    return Allowance(worst, square, max(allowance.shared for _, allowance in parts))


def mix(storage: Storage, expected: Expected, y: Array, weights: Array) -> Allowance:
    """A weighted sum: results, weights, products, partial sums, and the result."""
    slots = np.abs(y).reshape(*weights.shape, -1)
    terms = slots * np.abs(weights)[..., None]  # [T, k, D]
    u = ROUNDOFF[storage.inputs[0]] + ROUNDOFF[storage.inputs[1]] + 2 * ROUNDOFF[storage.output]
    kept = _kept(storage.output, expected.value)
    return Allowance(u * terms.sum(axis=1) + kept, u**2 * (terms**2).sum(axis=1) + kept**2, slots.shape[2])


def shared_expert(storage: Storage, expected: Expected, y: Array, x: Array, *, gain: NDArray[np.float32]) -> Allowance:
    """The shared expert's result and its sigmoid, of a rounded product of rounded numbers; and the result."""
    u, v = ROUNDOFF[storage.inputs[1]], ROUNDOFF[storage.output]
    wide = np.abs(gain.astype(np.float64))
    size = np.abs(expected.value)
    off = (u + v) * (np.abs(x) @ wide)[:, None] + 3 * v
    return stored(size * off, ROUNDOFF[storage.inputs[0]] * size, _kept(storage.output, expected.value))._replace(shared=y.shape[1])


def pool(storage: Storage, expected: Expected, x: Array) -> Allowance:
    """The mean of rows, or one of them: the rows, the sums on the way and the result."""
    return stored((ROUNDOFF[storage.inputs[0]] + ROUNDOFF[storage.output]) * expected.unit, _kept(storage.output, expected.value))


def head(storage: Storage, expected: Expected, x: Array, *, model: Model, dialect: Dialect) -> Allowance:
    """The product with the output matrix, which the engine may have converted; its scale; and its cap, three steps of slopes below 1."""
    c = model.config
    kept = [_kept(storage.output, expected.value, 1 + (c.logit_scale != 1) + 3 * (c.logit_cap is not None))]
    return _product(storage, expected, x, model.head, False, dialect, 1 / c.logit_scale, kept, storage.precision.head)


def _product(
    storage: Storage,
    expected: Expected,
    x: Array,
    weights: Table | Ternary,
    reads_codes: bool,
    dialect: Dialect,
    factor: float,
    kept: list[Array],
    head_type: str = "float32",
) -> Allowance:
    """Roundings of the input, of the weights, of sums and of the result."""
    u = ROUNDOFF[storage.output]
    delta_sum, delta_square = ROUNDOFF[storage.inputs[0]] * np.abs(x), (ROUNDOFF[storage.inputs[0]] * x) ** 2
    if reads_codes:
        q, scale = spec.quantize(x)
        flips = _near_boundary(x * scale, storage) / scale
        x = q / scale
        delta_sum, delta_square = flips + u * np.abs(x), flips**2 + (u * x) ** 2
        kept = [*kept, (u + _scale(storage)) * np.abs(expected.value)]  # of the scale, which a row shares
    elif dialect.ggml_activations and not isinstance(weights, Ternary):
        step = op.rounding_step(x, weights)
        delta_sum, delta_square = delta_sum + step * (delta_sum > 0), delta_square + step**2 * (delta_square > 0)
    table = weights.blocks if isinstance(weights, Ternary) and weights.blocks is not None and not reads_codes else weights
    n = weights.shape[0]
    worst, square = np.zeros((len(x), n)), np.zeros((len(x), n))
    alone = common = 0.0  # the squared effect of rounded weights on a factor of everything: if tokens had their own, and as they share them
    inputs, acc = bool(delta_sum.any()), ROUNDOFF[storage.precision.acc]
    own = "float32" if isinstance(weights, Ternary) or type_of(weights) == storage.output else storage.output
    if inputs or acc or own != "float32" or head_type != "float32":
        blocks = [(slice(0, n), op.dense(table).astype(np.float64))] if isinstance(table, Ternary) else op.row_blocks(table)
        for rows, matrix in blocks:
            size = np.abs(matrix)
            worst[:, rows] = factor * (delta_sum @ size.T)
            square[:, rows] = factor**2 * (delta_square @ (matrix**2).T)
            for kind in {own, head_type} - {"float32"}:
                steps = half_steps(matrix, kind)
                worst[:, rows] += factor * (np.abs(x) @ steps.T)
                squares, value = factor**2 * ((x**2) @ (steps**2).T), expected.value[:, rows]
                square[:, rows] += squares
                alone += float((squares * value**2).sum())
                common += factor**2 * float(((value.T @ x) ** 2 * steps**2).sum())
            if acc:
                unit = factor * (np.abs(x) @ size.T)
                worst[:, rows] += acc * unit * x.shape[1]
                square[:, rows] += (acc * unit) ** 2 * x.shape[1]
    worst, square = worst + sum(kept), square + sum(k**2 for k in kept)
    shared = n if reads_codes else max(1.0, n / x.shape[1])
    every = float((square * expected.value**2).sum())
    return Allowance(worst, square, shared if every == 0 else max(1.0, shared * (1 - alone / every) + common / every))


def type_of(table: Table) -> str:
    """The float type that a table is stored in; "" for blocks, whose numbers engines widen to their own type."""
    if isinstance(table, Blocks):
        return ""
    return {np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}.get(table.dtype, "")


def _score_errors(storage: Storage, q: Array, k: Array, model: Model) -> tuple[Array, Array]:
    """The effects of roundings on scores [H, T, S], and their squares: queries, keys (also in the cache), product, factor and mask."""
    c, precision, u = model.config, storage.precision, ROUNDOFF[storage.output]
    queries, keys = (x.reshape(len(x), -1, c.head_dim) for x in (q, k))
    query_errors, key_errors = (ROUNDOFF[kind] * np.abs(x) for kind, x in zip(storage.inputs, (queries, keys), strict=False))
    key_errors = key_errors + half_steps(keys, precision.kv)
    if precision.kv != "float32":  # the dot product takes queries of the keys' type, of 8 bits where they have 4
        query_errors = query_errors + half_steps(queries, "q8_0" if precision.kv == "q4_0" else precision.kv)
    keys, key_errors = (spec.by_query_head(x, c.heads) for x in (keys, key_errors))

    def dots(a: Array, b: Array) -> Array:
        return np.einsum("thk,shk->hts", a, b)

    scale = op.score_scale(c)
    s = dots(queries, keys) * scale
    steps = 3 if c.score_cap is None else 6  # a cap divides, takes tanh and multiplies; its slope is at most 1
    off = (dots(query_errors, np.abs(keys)) + dots(np.abs(queries), key_errors)) * scale + steps * u * np.abs(s)
    squares = (dots(query_errors**2, keys**2) + dots(queries**2, key_errors**2)) * scale**2
    return off, squares + steps * (u * s) ** 2


def visible_scores(storage: Storage, expected: Expected, q: Array, k: Array, *, model: Model) -> Allowance:
    """Scores as they are dumped. Those of a query share its errors."""
    off, squares = (op.by_query(x) for x in _score_errors(storage, q, k, model))
    return Allowance(off, squares, len(q))


def probabilities(storage: Storage, expected: Expected, scores: Array) -> Allowance:
    """A softmax: its scores, three steps inside (exponential, sum, quotient) and the result."""
    p, s = (op.by_head(x) for x in (expected.value, scores))
    off = ROUNDOFF[storage.inputs[0]] * np.abs(s)
    total, square = ((p**n * off**n).sum(axis=-1, keepdims=True) for n in (1, 2))
    kept = _kept(storage.output, p)
    worst, squares = p * (off + total) + 4 * kept, p**2 * (off**2 + square) + 4 * kept**2
    return Allowance(op.by_query(worst), op.by_query(squares), len(scores))


def attend(storage: Storage, expected: Expected, q: Array, k: Array, v: Array, *, model: Model, layer: int) -> Allowance:
    """Attention. With a score wrong by d, relative to the others, its probability p is wrong by p d, and the output o by p d (v - o).

    Roundings: queries, keys (also in the cache), scores three times (product, factor, mask), probabilities, values (also in the cache),
    sums, and the result. Elements of a head share the errors of its scores.
    """
    c, precision = model.config, storage.precision
    t = len(q)
    u = ROUNDOFF[storage.output]
    fine = ROUNDOFF[precision.probs] or u
    acc = ROUNDOFF[precision.attn_acc]
    heads = v.reshape(t, -1, c.head_dim)
    deltas = ROUNDOFF[storage.inputs[2]] * np.abs(heads) + half_steps(heads, precision.kv)
    values, value_errors = (spec.by_query_head(x, c.heads) for x in (heads, deltas))
    mask = spec.causal_mask(t, t, window=c.window_of(layer))
    p = spec.softmax(op.scores(model, q, k)[0] + mask)
    visible = mask == 0
    off, squares = _score_errors(storage, q, k, model)
    largest = np.where(visible, np.minimum(off, 6 * np.sqrt(squares)), 0).max(axis=-1, keepdims=True)  # [H, T, 1]
    growth = np.expm1(np.clip(2 * largest, 1e-12, 60)) / np.clip(2 * largest, 1e-12, 60)  # beyond the first order
    off, squares = p * off * growth, p**2 * squares * growth**2

    def summed(weights: Array, x: Array) -> Array:
        return np.einsum("hts,shk->thk", weights, x)

    out = expected.value.reshape(t, c.heads, c.head_dim)
    total, total_square = (x.sum(axis=-1).T[..., None] for x in (off, squares))  # [T, H, 1]
    worst = summed(off, np.abs(values)) + np.abs(out) * total
    square = summed(squares, values**2) - 2 * out * summed(squares, values) + out**2 * total_square
    worst = worst + fine * summed(p, np.abs(values)) + summed(p, value_errors)
    square = np.maximum(square, 0) + fine**2 * summed(p**2, values**2) + summed(p**2, value_errors**2)
    if acc:
        seen = visible.sum(axis=-1)[:, None, None]
        size = summed(p, np.abs(values))
        worst, square = worst + acc * seen * size, square + seen * (acc * size) ** 2
    kept = _kept(storage.output, out)
    return Allowance((worst + kept).reshape(t, -1), (square + kept**2).reshape(t, -1), c.head_dim)
