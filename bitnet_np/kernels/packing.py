"""Kernels that write ternary matrices in the packed layout (model/packing.py), in which products stream them.

They read what files hold: codes, or weights, which they round. Weights are ggml's blocks, or the floats that a model was trained with, its
masters.
"""

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import TensorType
from .fast.emit import LANES
from .float_products import fill, widen_some
from .ggml.products import Bytes, records
from .launching import launch, parallel, read_only, serial, shared
from .workspace import for_weights

_PARTS = 64  # parts of a matrix whose magnitudes are summed, each by one owner
_TURNS = 4  # sums that take turns, so that one number need not wait for the sum of the last


def _empty(shape: tuple[int, int]) -> NDArray[np.uint32]:
    """Room for a packed matrix, with zero weights in the rows that fill up the last 16."""
    n, m = shape
    groups, steps = -(-n // LANES), -(-m // LANES)
    packed = for_weights(groups * steps * LANES * 4).view(np.uint32)
    if n % LANES:
        packed[(groups - 1) * steps * LANES :] = 0x55555555
    return packed


@parallel
def _from_i2s(team, source, row_words, steps, rows, target):
    for group in shared(team, (rows + LANES - 1) // LANES):
        for lane in range(min(LANES, rows - group * LANES)):
            row = (group * LANES + lane) * row_words
            for step in range(steps):
                block, part = step // 8, step % 8  # 16 columns are half of one plane of a block of 128
                first, place = row + block * 8 + part % 2 * 4, np.uint32(6 - part // 2 * 2)
                word = np.uint32(0)
                for plane in range(4):
                    codes = np.uint32(np.uint32(source[first + plane] >> place) & np.uint32(0x03030303))
                    word = np.uint32(np.uint32(word << np.uint32(2)) | codes)
                target[(group * steps + step) * LANES + lane] = word


def from_i2s(codes: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.uint8]:
    # I2_S bytes of [N, M], rows padded to 128 -> packed
    """The packed matrix of I2_S bytes."""
    n, m = shape
    packed = _empty(shape)
    launch(_from_i2s, packed.size, read_only(codes.view(np.uint32)), -(-m // 128) * 8, -(-m // LANES), n, packed)
    return packed.view(np.uint8)


@serial
def _pack_row(codes, packed, group, lane):
    """Write a row's codes to its lane of a group of rows. They come four in a word, filled up with zero weights to a multiple of 16."""
    steps = codes.size // 4
    for step in range(steps):
        word = np.uint32(0)
        for plane in range(4):
            word = np.uint32(np.uint32(word << np.uint32(2)) | codes[step * 4 + plane])
        packed[(group * steps + step) * LANES + lane] = word


@parallel
def _from_quarters(team, data, rows, packed):
    height, m = data.shape
    codes = np.ones((m + LANES - 1) // LANES * LANES, np.uint8)
    for group in shared(team, (rows + LANES - 1) // LANES):
        for lane in range(min(LANES, rows - group * LANES)):
            row = group * LANES + lane
            source, place = data[row % height], np.uint8(row // height * 2)
            for i in range(m):
                codes[i] = np.uint8(source[i] >> place) & np.uint8(3)
            _pack_row(codes.view(np.uint32), packed, group, lane)


def from_quarters(data: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:  # [ceil(N / 4), M], N -> packed
    """The packed matrix of transformers' bytes.

    A byte holds one column of four rows that are a quarter of the matrix apart, the first in the lowest bits.
    """
    packed = _empty((rows, data.shape[1]))
    launch(_from_quarters, packed.size, read_only(data), rows, packed)
    return packed.view(np.uint8)


@parallel
def _rounded(team, w, size, rows, steps, packed):
    """w: the matrix [N, elements of a row], whose elements have `size` weights each."""
    n = w.shape[1]
    row = np.empty((n * size + LANES - 1) // LANES * LANES, np.float32)
    codes = np.empty(row.size, np.uint8)
    for group in shared(team, (rows + LANES - 1) // LANES):
        for lane in range(min(LANES, rows - group * LANES)):
            fill(w, (group * LANES + lane) * n, n, size, row, 0)
            for i in range(row.size):
                position = np.float64(row[i]) * steps
                codes[i] = np.uint8(1) + np.uint8(position > 0.5) - np.uint8(position < -0.5)  # half to even, and the clamp
            _pack_row(codes.view(np.uint32), packed, group, lane)


def from_masters(masters: NDArray, steps: float, size: int = 1) -> NDArray[np.uint8]:
    # [N, M] float32, float16 or bfloat16's bits -> packed
    """The masters times `steps`, in float64, rounded half to even and cut to -1, 0, +1. An element may be a block of `size` weights."""
    packed = _empty((len(masters), masters.shape[1] * size))
    launch(_rounded, masters.size * size, read_only(masters), size, len(masters), steps, packed)
    return packed.view(np.uint8)


def from_blocks(data: Bytes, kind: TensorType, steps: float) -> NDArray[np.uint8]:  # [N, bytes of a row], type -> packed
    """`from_masters` of the weights of blocks."""
    return from_masters(records(data, kind), steps, kind.block)


@parallel
def _magnitude_sums(team, table, sums):
    n, m = table.shape
    row = np.empty(m, np.float32)
    for part in shared(team, sums.shape[0]):
        first, end = part * n // sums.shape[0], (part + 1) * n // sums.shape[0]
        for r in range(end - first):
            widen_some(table[first + r], 0, m, row, 0)
            bits = row.view(np.uint32)
            for i in range(m):
                exponent = bits[i] >> np.uint32(23) & np.uint32(0xFF)
                leading = np.uint32(exponent > 0) << np.uint32(23)  # the bit that is not stored
                sums[part, i % _TURNS, exponent] += np.int64(bits[i] & np.uint32(0x7FFFFF) | leading)


def magnitude_sums(table: NDArray) -> NDArray[np.int64]:  # [N, M] float32, float16 or bfloat16's bits -> [256]
    """The exact sum of |x|, by exponents as they are stored: entry e counts times 2^(max(e, 1) - 150).

    Entries are sums of integers, so their order is free. They hold the sums of 2^39 numbers.
    """
    sums = np.zeros((_PARTS, _TURNS, 256), np.int64)
    launch(_magnitude_sums, table.size, read_only(table), sums)
    return sums.sum(axis=(0, 1))
