"""The two layouts of ternary matrices, and what turns one into the other.

I2_S is how they lie in files: rows of codes (0, 1, 2 for -1, 0, +1), each padded with zero weights to a multiple of 128, one after the
other; 128 weights take 32 bytes, element e of them in byte e % 32 at bits 6 - 2 * (e // 32). 32 more bytes follow: the float32 scale and
padding.

Kernels stream them packed: 16 rows side by side, 64 bytes for 16 columns of them, so that a register's 16 lanes of four bytes are the
16 rows and a byte dot product with four activations, the same in every lane, needs no sum over lanes and leaves 16 outputs side by
side. Column c of a step is in byte 4 * row + c % 4 at bits 6 - 2 * (c // 4). Rows and columns are padded to multiples of 16 with zero
weights.
On one Zen 4 core the packed matrix product reaches 230 of the 235 GMAC/s that the instruction gives; on I2_S's order, with the same
tile, 165 to 196. Converting 521 MB takes 0.1 s on two of them, and the pages of the file are given back.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import ShapeError
from .kernels import cpu
from .kernels.simd import LANES
from .model import Layer, Model, Ternary

BLOCK = 128  # weights in BLOCK_BYTES bytes of I2_S
BLOCK_BYTES = 32
TRAILER = 32


def i2s_row_bytes(width: int) -> int:
    """Bytes of one row of `width` weights in I2_S."""
    return -(-width // BLOCK) * BLOCK_BYTES


def pack(matrix: NDArray, scale: float) -> Ternary:
    """[N, M] of -1, 0, +1 and the scale they are multiplied by -> packed. Anything else in the matrix is an error."""
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ShapeError(f"a ternary matrix has shape {matrix.shape}, expected [N, M] with both at least 1")
    if not np.isin(matrix, (-1, 0, 1)).all():
        raise ShapeError(f"a ternary matrix has values {np.unique(matrix)[:5]}, expected -1, 0 and +1 only")
    n, m = matrix.shape
    codes = np.ones((-(-n // LANES) * LANES, -(-m // LANES) * LANES), np.uint8)
    codes[:n, :m] = matrix + 1
    planes = codes.reshape(-1, LANES, codes.shape[1] // LANES, 4, 4)  # group, row, step, plane, byte
    packed = _join(planes.transpose(3, 0, 2, 1, 4))
    return frozen(Ternary(packed.reshape(-1), np.float32(scale), (n, m)))


def unpack(weights: Ternary) -> NDArray[np.int8]:
    """The [N, M] matrix of -1, 0, +1."""
    n, m = weights.shape
    packed = weights.codes.reshape(-(-n // LANES), -(-m // LANES), 1, LANES, 4)  # group, step, plane, row, byte
    codes = packed >> _PLACES[:, None, None] & 3
    return codes.transpose(0, 3, 1, 2, 4).reshape(-(-n // LANES) * LANES, -1)[:n, :m].astype(np.int8) - 1


def from_i2s(codes: NDArray[np.uint8], scale: float, shape: tuple[int, int]) -> Ternary:
    """The codes of an I2_S tensor (its trailer not needed) -> packed."""
    size = shape[0] * i2s_row_bytes(shape[1])
    if codes.size < size:
        raise ShapeError(f"a ternary matrix of shape {shape} has {codes.size} bytes of I2_S codes, expected {size}")
    return frozen(Ternary(cpu.stream_i2s(codes[:size], shape), np.float32(scale), shape))


def to_i2s(weights: Ternary) -> NDArray[np.uint8]:
    """An I2_S tensor's bytes: codes, scale, padding."""
    n, m = weights.shape
    codes = np.ones((n, i2s_row_bytes(m) * 4), np.uint8)
    codes[:, :m] = unpack(weights) + 1
    packed = _join(codes.reshape(n, -1, 4, BLOCK_BYTES).transpose(2, 0, 1, 3))
    trailer = np.zeros(TRAILER, np.uint8)
    trailer[:4] = np.array([weights.scale], "<f4").view(np.uint8)
    return np.concatenate([packed.reshape(-1), trailer])


_PLACES = np.array([6, 4, 2, 0], np.uint8)  # of the four codes of a byte


def _join(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:  # [4, ...] -> [...]
    return planes[0] << 6 | planes[1] << 4 | planes[2] << 2 | planes[3]


def frozen(record: Any) -> Any:
    """The same record with its arrays read-only, in place: one type for the kernels, and nobody can change a weight by accident."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return record


def float32(table: NDArray) -> NDArray[np.float32]:
    """A float table widened exactly; uint16 holds bfloat16's bits."""
    if table.dtype == np.uint16:
        return (table.astype(np.uint32) << 16).view(np.float32)
    return table.astype(np.float32)


class DenseTernary(NamedTuple):
    """A ternary matrix as spec.py reads it."""

    matrix: NDArray[np.int8]  # [N, M] of -1, 0, +1
    scale: float


def dense(record: Model | Layer) -> Any:
    """The same record as spec.py reads it: float64 tables, unpacked matrices. Four to sixteen times the memory: for small models."""

    def widen(value: Any) -> Any:
        if isinstance(value, Ternary):
            return DenseTernary(unpack(value), float(value.scale))
        if isinstance(value, np.ndarray):
            return value if value.dtype == np.float64 else float32(value).astype(np.float64)
        if isinstance(value, tuple):
            return tuple(dense(layer) for layer in value)
        return value

    assert is_dataclass(record)
    return replace(record, **{field.name: widen(getattr(record, field.name)) for field in fields(record)})
