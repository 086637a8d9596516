"""The law for products with matrices and for the codes that they read, with its bounds: see operations.py."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .. import spec
from ..base.tensor_types import TERNARY_TYPES
from ..engine.dialects import EXACT, Dialect
from ..model import packing, widen
from ..model.records import Blocks, Linear, Model, Table, Ternary, Weights
from . import roundings
from .expected import WIDE, Array, Expected, Storage, U, half_steps, kept, type_of
from .precision import ROUNDOFF
from .roundings import to_float16

_SMALL_MATRIX = 1 << 20
_BLOCK = 1 << 22  # numbers: a head of 128,256 x 2560 would take 2.6 GB in float64

# --- codes ----------------------------------------------------------------------------------------------------------------------------


def reads_codes(linear: Linear, dialect: Dialect) -> bool:
    """Whether the input is quantised to int8, one scale for each token."""
    weights = linear.weights
    if isinstance(weights, Ternary):
        return not dialect.ggml_activations or weights.blocks is None
    return isinstance(weights, Blocks) and weights.type in TERNARY_TYPES and not dialect.ggml_activations


def ambiguous(exact: Array) -> NDArray[np.bool_]:
    """Numbers so near to k + 0.5 that two roundings in float32 decide to which side they go."""
    return np.abs(np.abs(exact - np.floor(exact)) - 0.5) <= 4 * U * np.abs(exact) + 1e-12


def codes(x: Array, *, types: Storage = WIDE) -> Expected:
    """The int8 codes of an input: exact, but for ambiguous ones, and those that a narrow input or scale may move over a boundary."""
    q, scale = spec.quantize(x)
    expected = Expected(q, np.zeros_like(q), 0, ambiguous(x * scale).astype(np.float64))
    if types.is_wide:
        return expected
    flips = types.near_boundary(x * scale).astype(np.float64)
    return expected._replace(worst=flips, square=flips)


def code_scale(x: Array, *, types: Storage = WIDE) -> Expected:
    """Steps per unit, 127 / absmax: one division, of a number that may be rounded."""
    scale = spec.quantize(x)[1]
    return Expected(scale, scale, 2).stored(types, scale, more=(types.scale * scale,))


# --- matrices -------------------------------------------------------------------------------------------------------------------------


def product(x: Array, linear: Linear, dialect: Dialect = EXACT, *, types: Storage = WIDE) -> Expected:
    """The product with a matrix, its scale and its bias: two roundings more."""
    weights, has_codes = linear.weights, reads_codes(linear, dialect)
    if isinstance(weights, Ternary) and weights.blocks is not None and not has_codes:
        weights = weights.blocks
    expected = ternary_matmul(x, weights) if isinstance(weights, Ternary) else matmul(x, weights, has_codes, dialect)
    factor = 1.0 if linear.scale is None else float(linear.scale)
    expected = _plus(expected if linear.scale is None else expected.times(factor), linear.bias)
    if types.is_wide:
        return expected
    results = [kept(types.output, expected.value, 1 + (linear.scale is not None))]
    if linear.bias is not None:
        results.append(ROUNDOFF[types.output] * (np.abs(expected.value) + np.abs(linear.bias)))
    factor = abs(factor) * (float(weights.scale) if isinstance(weights, Ternary) else 1.0)
    return _stored(types, expected, x, weights, has_codes, dialect, factor, results)


def head(model: Model, dialect: Dialect, x: Array, *, types: Storage = WIDE) -> Expected:
    """The product with the output matrix, which the engine may have converted; its scale; and its cap, three steps of slopes below 1.

    In some dialects its input is rounded to float16.
    """
    c = model.config
    expected = _plus(matmul(to_float16(x) if dialect.in_float16 else x, model.head, False, dialect), model.output_bias)
    if not c.plain_logits:  # a cap makes errors smaller, but its own tanh is rounded
        expected = expected.times(1 / c.logit_scale)
        steps = expected.steps + (3 if c.logit_cap is None else 11)
        expected = expected._replace(value=spec.soft_cap(expected.value, c.logit_cap), steps=steps)
    if types.is_wide:
        return expected
    results = [kept(types.output, expected.value, 1 + (c.logit_scale != 1) + 3 * (c.logit_cap is not None))]
    return _stored(types, expected, x, model.head, False, dialect, 1 / c.logit_scale, results, types.precision.head)


def _plus(expected: Expected, bias: NDArray[np.float32] | None) -> Expected:
    if bias is None:
        return expected
    wide = bias.astype(np.float64)
    return expected._replace(value=expected.value + wide, unit=expected.unit + np.abs(wide), steps=expected.steps + 1)


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


def matmul(x: Array, table: Table, has_codes: bool, dialect: Dialect) -> Expected:
    """The product with a table of x, quantised to int8 or rounded as in the dialect; ambiguous roundings have a reach."""
    if has_codes:
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
        reach = reach + np.abs(_half_spacing(inputs, 32)) @ np.abs(minimums).T
    return Expected(value, unit, x.shape[1], reach)


def _stored(
    types: Storage,
    expected: Expected,
    x: Array,
    weights: Table | Ternary,
    has_codes: bool,
    dialect: Dialect,
    factor: float,
    results: list[Array],
    head_type: str = "float32",
) -> Expected:
    """The product with the roundings to narrow types of its input, weights and sums; `results` are those of what comes behind."""
    u = ROUNDOFF[types.output]
    delta_sum, delta_square = ROUNDOFF[types.inputs[0]] * np.abs(x), (ROUNDOFF[types.inputs[0]] * x) ** 2
    if has_codes:
        q, scale = spec.quantize(x)
        flips = types.near_boundary(x * scale) / scale
        x = q / scale
        delta_sum, delta_square = flips + u * np.abs(x), flips**2 + (u * x) ** 2
        results = [*results, (u + types.scale) * np.abs(expected.value)]  # of the scale, which a row shares
    elif dialect.ggml_activations and not isinstance(weights, Ternary):
        step = rounding_step(x, weights)
        delta_sum, delta_square = delta_sum + step * (delta_sum > 0), delta_square + step**2 * (delta_square > 0)
    n = weights.shape[0]
    worst, square = np.zeros((len(x), n)), np.zeros((len(x), n))
    alone = common = 0.0  # the squared effect of rounded weights on a factor of everything: if tokens had their own, and as they share them
    acc = ROUNDOFF[types.precision.acc]
    own = "float32" if isinstance(weights, Ternary) or type_of(weights) == types.output else types.output
    needed = bool(delta_sum.any()) or acc or own != "float32" or head_type != "float32"
    for rows, matrix in row_blocks(weights) if needed else ():
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
    worst, square = worst + sum(results), square + sum(result**2 for result in results)
    shared = n if has_codes else max(1.0, n / x.shape[1])
    every = float((square * expected.value**2).sum())
    shared = shared if every == 0 else max(1.0, shared * (1 - alone / every) + common / every)
    return expected._replace(worst=worst, square=square, shared=shared)


def _half_spacing(x: Array, size: int) -> Array:
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


# --- their numbers --------------------------------------------------------------------------------------------------------------------


def dense(weights: Ternary) -> NDArray[np.float32]:
    """The matrix [N, M] of -1, 0, +1. Products with int8 codes are exact in float32 while M < 131,072."""
    return _cached(weights) if _is_small(weights) else packing.unpack(weights).astype(np.float32)


def row_blocks(weights: Weights) -> Iterator[tuple[slice, Array]]:
    """The rows of [N, M] in float64, without a scale, as many at a time as take little memory."""
    n, m = weights.shape
    if isinstance(weights, Ternary):
        yield slice(0, n), dense(weights).astype(np.float64)
        return
    step = n if isinstance(weights, Blocks) and _is_small(weights) else max(1, _BLOCK // m)
    for i in range(0, n, step):
        rows = slice(i, min(i + step, n))
        yield rows, _cached(weights) if step == n and isinstance(weights, Blocks) else widen.take(weights, rows).astype(np.float64)


def rows_of(weights: Weights, rows: NDArray[np.integer]) -> Array:
    """Some rows [n, M] of a matrix in float64, without its scale."""
    if not isinstance(weights, np.ndarray) and _is_small(weights):
        return _cached(weights)[rows].astype(np.float64, copy=False)
    return (packing.unpack_rows(weights, rows) if isinstance(weights, Ternary) else widen.take(weights, rows)).astype(np.float64)


def _is_small(weights: Weights) -> bool:
    return weights.shape[0] * weights.shape[1] <= _SMALL_MATRIX


@lru_cache(maxsize=128)
def _cached(weights: Ternary | Blocks) -> NDArray:
    """A matrix of a small model, which is read again for each mistake that is tried: float32 of a ternary one, or float64."""
    matrix = packing.unpack(weights).astype(np.float32) if isinstance(weights, Ternary) else widen.float32(weights).astype(np.float64)
    matrix.flags.writeable = False
    return matrix


# --- experts --------------------------------------------------------------------------------------------------------------------------


def of_experts(linears: Sequence[Linear], dialect: Dialect, x: Array, experts: Array, *, types: Storage = WIDE) -> Expected:
    """Each slot's input [T, M], or [T, k*M] where every slot has its own, times the matrix of the slot's expert -> [T, k*N]."""
    flat, rows = experts.astype(np.intp).reshape(-1), x.reshape(-1, linears[0].shape[1])
    parts = []
    for expert in np.unique(flat):
        slots = np.flatnonzero(flat == expert)
        parts.append((slots, product(rows[slots // (flat.size // len(rows))], linears[expert], dialect, types=types)))

    def joined(field: str) -> Array:
        out = np.empty((flat.size, linears[0].shape[0]))
        for slots, part in parts:
            out[slots] = getattr(part, field)
        return out.reshape(len(experts), -1)

    expected = Expected(joined("value"), joined("unit"), joined("steps"), joined("reach"))
    if types.is_wide:
        return expected
    return expected._replace(worst=joined("worst"), square=joined("square"), shared=max(part.shared for _, part in parts))
