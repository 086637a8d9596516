"""Matrices as the judge reads them: which of them take int8 codes, the grid of their rounded inputs, and their numbers in float64."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import TERNARY_TYPES
from ..engine.dialects import Dialect
from ..model import packing, widen
from ..model.records import Blocks, Linear, Table, Ternary, Weights

Array = NDArray[np.float64]

_SMALL_MATRIX = 1 << 20
_BLOCK = 1 << 22  # numbers: a head of 128,256 x 2560 would take 2.6 GB in float64


def reads_codes(linear: Linear, dialect: Dialect) -> bool:
    """Whether the input is quantised to int8, one scale for each token."""
    weights = linear.weights
    if isinstance(weights, Ternary):
        return not dialect.ggml_activations or weights.blocks is None
    return isinstance(weights, Blocks) and weights.type in TERNARY_TYPES and not dialect.ggml_activations


def rounding_step(x: Array, table: Table) -> Array:
    """The spacing of the numbers that each element of an input can be rounded to."""
    if not isinstance(table, Blocks):
        digits = {np.dtype(np.float16): 11, np.dtype(np.uint16): 8}.get(table.dtype, 24)
        return np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-14))) + 1 - digits)
    size = table.type.block
    largest = np.abs(x.reshape(len(x), -1, size)).max(axis=2)
    return np.repeat(largest / 127, size, axis=1)


def dense(weights: Ternary | Blocks) -> NDArray:
    """The matrix [N, M] of -1, 0, +1 in float32, in which products with int8 codes are exact while M < 131,072; of blocks in float64."""
    return packing.unpack(weights).astype(np.float32) if isinstance(weights, Ternary) else widen.float32(weights).astype(np.float64)


def row_blocks(weights: Weights) -> Iterator[tuple[slice, NDArray]]:
    """The rows of [N, M] in float64, of a ternary matrix in float32, without a scale, as many at a time as take little memory."""
    n, m = weights.shape
    if isinstance(weights, Ternary):
        yield slice(0, n), _cached(weights) if _is_small(weights) else dense(weights)
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
    """A matrix of a small model, which is read again for each mistake that is tried."""
    matrix = dense(weights)
    matrix.flags.writeable = False
    return matrix
