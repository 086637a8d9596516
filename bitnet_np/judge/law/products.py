"""Matrices as the judge reads them: which of them take int8 codes, the grid of their rounded inputs, and their numbers in float64."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...base.tensor_types import TERNARY_TYPES
from ...engine.dialects import Dialect
from ...model import packing, widen
from ...model.records import Blocks, Linear, Model, Table, Ternary, Weights
from ...traces.points import FIELDS, Key

Array = NDArray[np.float64]

_SMALL_MATRIX = 1 << 20
_BLOCK = 1 << 22  # numbers: a head of 128,256 x 2560 would take 2.6 GB in float64


def linear_of(model: Model, key: Key) -> Linear:
    """The linear whose product a tensor is, the head's too."""
    return Linear(model.head, model.output_bias) if key.layer is None else getattr(model.layers[key.layer], FIELDS[key.name])


def has_blocks(model: Model) -> bool:
    """Whether a layer has matrices whose weights lie in codes, as of ggml's block types or ternary."""
    return any(not isinstance(linear.weights, np.ndarray) for layer in model.layers for _, linear in layer.linears())


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


def row_blocks(weights: Weights) -> Iterator[tuple[slice, NDArray]]:
    """The rows of [N, M], without a scale, as many at a time as take little memory: in float64, of a ternary matrix in float32, in which
    products with int8 codes are exact while M < 131,072."""
    n, m = weights.shape
    step = n if isinstance(weights, Ternary) or n * m <= _SMALL_MATRIX else max(1, _BLOCK // m)
    for i in range(0, n, step):
        rows = slice(i, min(i + step, n))
        yield rows, _rows(weights, rows)


def rows_of(weights: Weights, rows: NDArray[np.integer]) -> Array:
    """Some rows [n, M] of a matrix in float64, without its scale."""
    return _rows(weights, rows).astype(np.float64, copy=False)


def _rows(weights: Weights, rows: NDArray[np.integer] | slice) -> NDArray:
    if isinstance(weights, np.ndarray) or weights.shape[0] * weights.shape[1] > _SMALL_MATRIX:
        return _read(weights, rows)
    return _cached(weights)[rows]


def _read(weights: Weights, rows: NDArray[np.integer] | slice) -> NDArray:
    if isinstance(weights, Ternary):  # all rows at once are unpacked in a third of the time
        return (packing.unpack(weights)[rows] if isinstance(rows, slice) else packing.unpack_rows(weights, rows)).astype(np.float32)
    return widen.take(weights, rows).astype(np.float64)


@lru_cache(maxsize=128)
def _cached(weights: Ternary | Blocks) -> NDArray:
    """A matrix of a small model, which is read again for each mistake that is tried."""
    matrix = _read(weights, slice(None))
    matrix.flags.writeable = False
    return matrix
