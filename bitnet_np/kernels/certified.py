"""Kernels of the certified head (see ../certified.py): an int8 copy of a table, and intervals in which its logits lie."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .fast.byte_dots import byte_offset, byte_step
from .fast.emit import LANES, STEP
from .fast.simd import bits_float, fma, store_tile, tile_i32
from .floats import widen_row
from .launching import Floats, inlined, launch, parallel, read_only, serial, shared
from .processor import instruction_path
from .scalar import WIDE_LANES, round_half_even
from .sums import largest_bits, wide_dot
from .workspace import empty, for_weights

_COLUMNS = STEP // LANES  # columns of the table in one register, whose lanes are 16 rows
_TOKENS = 4  # rows of x that share one reading of the table
_PAIRS = 2 * _TOKENS  # int8 rows for these, a coarse and a fine one each
_SLICE = 4096  # rows of the table that are read before its pages are given back
_TINY = np.float32(2.0**-120)  # more than numbers too small for float32's full precision lose, all together
_UP = np.float32(1 + 2.0**-20)  # makes a norm in float64, once it is rounded to the nearest float32, an upper bound


class Copy(NamedTuple):
    """A table [V, D] in int8."""

    codes: NDArray[np.uint8]  # the codes of 16 rows side by side, 128 higher
    step: Floats  # [V] the number that a code of 1 stands for
    lost: Floats  # [V] length of a row's difference from its copy, rounded up
    length: Floats  # [V] length of a row, rounded up


class Split(NamedTuple):
    """Rows of x [R, D], each as the sum of a coarse and a fine int8 row and a rest."""

    q: NDArray[np.int8]  # [2 * R, D] the coarse and the fine row of each row of x, of -63..63
    coarse: NDArray[np.float64]  # [R] step of the coarse row
    fine: NDArray[np.float64]  # [R] step of the fine row
    size: NDArray[np.float64]  # [R] length of x
    slack: NDArray[np.float64]  # [R] what a weight of length 1 is uncertain by


@serial
def _quantize_row(row, rest, codes):
    """Store one row as int8 steps of absmax / 127, 128 higher.

    Returns the step, and the lengths of the difference and of the row, rounded up.
    """
    step = np.float32(max(bits_float(largest_bits(row)), _TINY) / np.float32(127))
    for i in range(row.size):
        code = round_half_even(np.float32(row[i] / step))
        rest[i] = fma(-step, code, row[i])
        codes[i] = np.uint8(np.int32(code) + 128)
    lanes = np.empty(WIDE_LANES, np.float64)
    lost, whole = np.sqrt(wide_dot(rest, rest, lanes)), np.sqrt(wide_dot(row, row, lanes))
    return step, np.float32(lost) * _UP + _TINY, np.float32(whole) * _UP


@parallel
def _copy(team, table, codes, step, lost, length):
    n, words = table.shape[0], codes.shape[1] // LANES
    row, rest = np.empty(table.shape[1], np.float32), np.empty(table.shape[1], np.float32)
    padded = np.full(words * _COLUMNS, 128, np.uint8)
    quads = padded.view(np.uint32)
    for group in shared(team, codes.shape[0]):
        for lane in range(LANES):
            r = group * LANES + lane
            if r < n:
                widen_row(table[r], row)
                step[r], lost[r], length[r] = _quantize_row(row, rest, padded)
            for i in range(words):
                codes[group, i * LANES + lane] = quads[i]


def copy(table: NDArray, seen: Callable[[NDArray], None]) -> Copy:  # [V, D]
    """The table in int8. `seen` is called with rows that have been read, some thousand at a time."""
    rows, columns = table.shape
    groups = -(-rows // LANES)
    words = -(-columns // _COLUMNS) * LANES  # four bytes of a row each
    codes = for_weights(groups * words * 4).view(np.uint32).reshape(groups, words)
    step, lost, length = (np.zeros(rows, np.float32) for _ in range(3))
    for first in range(0, rows, _SLICE):
        part, its = slice(first, first + _SLICE), slice(first // LANES, (first + _SLICE) // LANES)
        launch(_copy, table[part].size, read_only(table[part]), codes[its], step[part], lost[part], length[part])
        seen(table[part])
    return Copy(codes.reshape(-1).view(np.uint8), step, lost, length)


@inlined
def _group_sums(zeros, codes, start, q, first, steps, sums):
    tile, x = zeros, first * q.shape[1]
    for _ in range(steps):
        tile = byte_step(tile, codes, start, q, x, q.shape[1])
        start += STEP
        x += _COLUMNS
    store_tile(tile, sums, 0, 0)


@parallel
def _intervals(team, codes, step, lost, length, q, offset, coarse, fine, size, slack, low, high):
    rows, n, steps = low.shape[0], low.shape[1], q.shape[1] // _COLUMNS
    sums = np.empty(_PAIRS * LANES, np.int32)
    for group in shared(team, (n + LANES - 1) // LANES):
        for first in range(0, rows, _TOKENS):
            if rows == 1:
                _group_sums(tile_i32(1, 2), codes, group * steps * STEP, q, 0, steps, sums)
            else:
                _group_sums(tile_i32(1, _PAIRS), codes, group * steps * STEP, q, 2 * first, steps, sums)
            for j in range(min(_TOKENS, rows - first)):
                t = first + j
                for lane in range(min(LANES, n - group * LANES)):
                    r = group * LANES + lane
                    # both wrap around in 32 bits, which their difference fits
                    a = np.float64(np.int32(sums[2 * j * LANES + lane] - offset[2 * t])) * coarse[t]
                    b = np.float64(np.int32(sums[(2 * j + 1) * LANES + lane] - offset[2 * t + 1])) * fine[t]
                    middle = np.float64(step[r]) * (a + b)
                    reach = np.float64(lost[r]) * size[t] + (np.float64(length[r]) + np.float64(lost[r])) * slack[t] + _TINY
                    low[t, r] = middle - reach
                    high[t, r] = middle + reach


def intervals(copy: Copy, x: Split) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # -> 2 x [R, V]
    """Bounds of every logit: the product of the int8 copies, minus and plus lost * size + (length + lost) * slack.

    A sum of products of codes is at most 127 * 63 * D, which must be less than 2^31.
    """
    rows, n = len(x.coarse), len(copy.step)
    padding = -x.q.shape[1] % _COLUMNS, (-rows % _TOKENS if rows > 1 else 0)
    q = np.pad(x.q, ((0, 2 * padding[1]), (0, padding[0])))
    offset = byte_offset(instruction_path()) * q.sum(axis=1, dtype=np.int32)
    low, high = (empty((rows, n), np.float64) for _ in range(2))
    launch(_intervals, q.size * n // 64, *copy, q, offset, x.coarse, x.fine, x.size, x.slack, low, high)
    return low, high
