"""I2_S, the layout the kernels stream, and its inverse.

Rows of codes (0, 1, 2 for -1, 0, +1), each padded with zero weights to a multiple of 128, one after the other; 128
weights take 32 bytes, element e of them in byte e % 32 at bits 6 - 2 * (e // 32). 32 more bytes follow: the float32 scale
and padding. A tensor of a GGUF file, whose rows are multiples of 128, is used as it lies in the file; the trailing bytes
are also what lets a kernel read 64 bytes at a time.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from .errors import ShapeError
from .model import Blocks, Layer, Linear, Model, Table, Ternary
from .tensor_types import TERNARY_TYPES

BLOCK = 128  # weights in BLOCK_BYTES bytes
BLOCK_BYTES = 32
TRAILER = 32


def row_bytes(width: int) -> int:
    """Bytes of one packed row of `width` weights."""
    return -(-width // BLOCK) * BLOCK_BYTES


def pack(matrix: NDArray, scale: float) -> Ternary:
    """[N, M] of -1, 0, +1 and the scale they are multiplied by -> packed. Anything else in the matrix is an error."""
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ShapeError(f"a ternary matrix has shape {matrix.shape}, expected [N, M] with both at least 1")
    if not np.isin(matrix, (-1, 0, 1)).all():
        raise ShapeError(f"a ternary matrix has values {np.unique(matrix)[:5]}, expected -1, 0 and +1 only")
    n, m = matrix.shape
    codes = np.ones((n, row_bytes(m) * 4), np.uint8)
    codes[:, :m] = matrix + 1
    planes = codes.reshape(n, -1, 4, BLOCK_BYTES)
    packed = planes[:, :, 0] << 6 | planes[:, :, 1] << 4 | planes[:, :, 2] << 2 | planes[:, :, 3]
    trailer = np.zeros(TRAILER, np.uint8)
    trailer[:4] = np.array([scale], "<f4").view(np.uint8)
    return frozen(Ternary(np.concatenate([packed.reshape(-1), trailer]), np.float32(scale), (n, m)))


def unpack(weights: Ternary) -> NDArray[np.int8]:
    """The [N, M] matrix of -1, 0, +1."""
    n, m = weights.shape
    packed = weights.codes[: n * row_bytes(m)].reshape(n, -1, 1, BLOCK_BYTES)
    codes = packed >> np.array([6, 4, 2, 0], np.uint8)[:, None] & 3
    return codes.reshape(n, -1)[:, :m].astype(np.int8) - 1


def to_i2s(weights: Ternary) -> NDArray[np.uint8]:
    """An I2_S tensor's bytes: codes, scale, padding."""
    trailer = np.zeros(TRAILER, np.uint8)
    trailer[:4] = np.array([weights.scale], "<f4").view(np.uint8)
    return np.concatenate([weights.codes[: weights.shape[0] * row_bytes(weights.shape[1])], trailer])


def frozen(record: Any) -> Any:
    """The same record with its arrays read-only, in place: one type for the kernels, and nobody can change a weight by accident."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        elif isinstance(value, (Linear, Ternary, Blocks)):
            frozen(value)
    return record


def take(table: Table, rows: Any) -> NDArray[np.float32]:
    """Some rows of a table, as float32."""
    if isinstance(table, Blocks):
        data = table.data[rows]
        return float32(Blocks(data, table.type, (len(data), table.shape[1])))
    return float32(table[rows])


def float32(table: Table) -> NDArray[np.float32]:
    """A table widened exactly; uint16 holds bfloat16's bits. Blocks become the numbers they stand for."""
    if isinstance(table, Blocks):
        with np.errstate(invalid="ignore", over="ignore"):  # of NaN and infinity, which loading finds
            return dequantize(table.data, GGMLQuantizationType(table.type.number))
    if table.dtype == np.uint16:
        return (table.astype(np.uint32) << 16).view(np.float32)
    return table.astype(np.float32)


class DenseLinear(NamedTuple):
    """A `Linear` as spec.py reads it: (norm(x) matrix^T) * scale + bias."""

    matrix: NDArray  # [N, M]
    scale: float
    int8: bool = True  # the input is quantised to int8, one scale for each token
    bias: NDArray[np.float64] | None = None
    norm: NDArray[np.float64] | None = None
    norm_eps: float | None = None


def dense(record: Model | Layer) -> Any:
    """The same record as spec.py reads it: float64 tables, unpacked matrices. Four to sixteen times the memory: for small models."""

    def widen(value: Any) -> Any:
        if isinstance(value, Linear):
            factor = 1.0 if value.scale is None else float(value.scale)
            bias, norm = (None if array is None else widen(array) for array in (value.bias, value.norm))
            if isinstance(value.weights, Ternary):
                return DenseLinear(unpack(value.weights), float(value.weights.scale) * factor, True, bias, norm, value.norm_eps)
            int8 = isinstance(value.weights, Blocks) and value.weights.type in TERNARY_TYPES
            return DenseLinear(widen(value.weights), factor, int8, bias, norm, value.norm_eps)
        if isinstance(value, Blocks) or (isinstance(value, np.ndarray) and value.dtype != np.float64):
            return float32(value).astype(np.float64)
        if isinstance(value, tuple):
            return tuple(dense(layer) for layer in value)
        return value

    assert is_dataclass(record)
    return replace(record, **{field.name: widen(getattr(record, field.name)) for field in fields(record)})
