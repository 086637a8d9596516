"""The layouts of ternary matrices, and the conversions between them: I2_S in files, the packed layout in memory.

In I2_S, rows of codes (0, 1, 2 for -1, 0, +1) follow each other, each padded with zero weights to a multiple of 128. 128 weights take 32
bytes, element e of them in byte e % 32 at bits 6 - 2 * (e // 32). After the last row come 32 more bytes: the float32 scale, and padding.

In the packed layout, which the kernels stream, 16 rows lie side by side: 64 bytes hold 16 columns of them. The 16 lanes of a register, of
four bytes each, are then the 16 rows. A byte dot product with four activations, the same in every lane, needs no sum over lanes and leaves
16 outputs side by side. Column c of those 16 is in byte 4 * row + c % 4 at bits 6 - 2 * (c // 4). Rows and columns are padded with zero
weights to multiples of 16.
On one Zen 4 core the packed matrix product reaches 230 of the 235 GMAC/s that the instruction gives; on I2_S's order, with the same
tile, 165 to 196. Converting 521 MB takes half a second on one core, and the pages of the file are released.

There is no layout with five trits in a byte. It would have a fifth less to read for a decoded token, but needs seven instructions for each
dot product instead of two. From memory, one core streams the weights of 13.8 GB/s of two-bit codes in that layout, and 25.6 GB/s in two-bit
codes; two cores stream 20 and 32.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ShapeError
from .records import Ternary, frozen

LANES = 16  # rows that lie side by side, and columns of a step
BLOCK = 128  # weights in BLOCK_BYTES bytes of I2_S
BLOCK_BYTES = 32
TRAILER = 32


def i2s_row_bytes(width: int) -> int:
    """Bytes of one row of `width` weights in I2_S."""
    return -(-width // BLOCK) * BLOCK_BYTES


def pack(matrix: NDArray, scale: float) -> Ternary:
    """A matrix [N, M] of -1, 0, +1, and the scale that multiplies them, packed. Raises ShapeError for anything else in the matrix."""
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


def unpack_rows(weights: Ternary, rows: NDArray[np.integer]) -> NDArray[np.int8]:
    """Some rows [n, M] of it."""
    m = weights.shape[1]
    packed = weights.codes.reshape(-1, -(-m // LANES), LANES, 4)[rows // LANES, :, rows % LANES]  # row, step, byte
    return (packed[:, :, None] >> _PLACES[:, None] & 3).reshape(len(rows), -1)[:, :m].astype(np.int8) - 1


def to_i2s(weights: Ternary) -> NDArray[np.uint8]:
    """The bytes of an I2_S tensor: codes, scale, padding."""
    trailer = np.zeros(TRAILER, np.uint8)
    trailer[:4] = np.array([weights.scale], "<f4").view(np.uint8)
    return np.concatenate([i2s_codes(unpack(weights)), trailer])


def i2s_codes(matrix: NDArray[np.int8]) -> NDArray[np.uint8]:  # [N, M] of -1, 0, +1 -> [N * i2s_row_bytes(M)]
    """The codes of an I2_S tensor, without the trailer."""
    n, m = matrix.shape
    codes = np.ones((n, i2s_row_bytes(m) * 4), np.uint8)
    np.add(matrix, 1, out=codes[:, :m], casting="unsafe")
    return _packed(codes)


_PLACES = np.array([6, 4, 2, 0], np.uint8)  # the bits of the four codes in a byte


def _join(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:  # [4, ...] -> [...]
    return planes[0] << 6 | planes[1] << 4 | planes[2] << 2 | planes[3]


def _packed(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The bytes in I2_S of rows of codes whose lengths are multiples of 128, end to end."""
    return _join(codes.reshape(-1, 4, BLOCK_BYTES).swapaxes(0, 1)).reshape(-1)


# --- the other layouts of I2_S --------------------------------------------------------------------------------------------------------
#
# bitnet.cpp writes two more under the same type number, and the file does not say which layout it has. All hold the same two-bit fields in
# different orders, so they have equally many of each code, and no 3 in any. Counting codes cannot tell them apart, and nothing can where
# weights are independent of each other: nothing is guessed here. Read in the wrong layout, about half of all weights are wrong.


def from_arm_layout(data: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.uint8]:
    """I2_S from the layout that bitnet.cpp's builds for ARM write since the end of 2025; [N * M / 4 + 32] bytes, M a multiple of 128.

    There 64 weights take 16 bytes, element e of them in byte e % 16 at bits 6 - 2 * (e // 16). Raises ShapeError for other sizes.
    """
    _check_i2_s(data, shape)
    first, second = data[:-TRAILER].reshape(-1, 2, BLOCK_BYTES // 2).swapaxes(0, 1)
    out = np.empty((len(first), 2, BLOCK_BYTES // 2), np.uint8)  # the first and the second 16 bytes of 32, with planes of 16 weights each
    out[:, 0] = first & 0xC0 | (first & 0x0C) << 2 | (second & 0xC0) >> 4 | (second & 0x0C) >> 2
    out[:, 1] = (first & 0x30) << 2 | (first & 0x03) << 4 | (second & 0x30) >> 2 | second & 0x03
    return np.concatenate([out.reshape(-1), data[-TRAILER:]])


def from_four_row_layout(data: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.uint8]:
    """I2_S from the layout of bitnet.cpp built for x86 without ACT_PARALLEL; [N * M / 4 + 32] bytes, M a multiple of 128, N of 4.

    There a byte holds one column of four rows, the first row in the highest bits. Raises ShapeError for other sizes.
    """
    _check_i2_s(data, shape)
    n, m = shape
    if n % 4:
        raise ShapeError(f"a matrix of {n} rows has no layout of four rows to a byte, expected a multiple of 4")
    out = np.empty_like(data)
    out[-TRAILER:] = data[-TRAILER:]
    for group in range(n // 4):  # one at a time, for the memory that codes take
        rows = data[group * m : (group + 1) * m]
        out[group * m : (group + 1) * m] = _packed(np.stack([rows >> 6, rows >> 4 & 3, rows >> 2 & 3, rows & 3]))
    return out


I2S_DEFAULT = "128/32"
I2S_LAYOUTS: dict[str, Callable[[NDArray[np.uint8], tuple[int, int]], NDArray[np.uint8]]] = {
    I2S_DEFAULT: lambda data, shape: data,
    "64/16": from_arm_layout,
    "4-rows": from_four_row_layout,
}
"""The layouts of I2_S in files, and for each the function that converts a tensor's bytes to the first.

Names are the weights that lie together and the bytes they take, or the rows that share a byte.
"""


def _check_i2_s(data: NDArray[np.uint8], shape: tuple[int, int]) -> None:
    n, m = shape
    if m % BLOCK:
        raise ShapeError(f"an I2_S matrix has rows of {m} weights, expected a multiple of {BLOCK}")
    if data.shape != (n * m // 4 + TRAILER,):
        raise ShapeError(f"an I2_S matrix {list(shape)} has {list(data.shape)} bytes, expected {n * m // 4 + TRAILER}")
