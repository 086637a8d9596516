"""Products of several tokens with tables of floats and with ggml's blocks, whose weights are widened a strip of the matrix at a time.

A strip is MANY_ROWS rows by DEPTH columns. It is computed once for PART tokens, and stays in the first cache meanwhile. The activations of
these columns, and the sums of the strips beside it, stay in the second.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from .fast.block_floats import unpack_block
from .fast.emit import LANES
from .fast.simd import dot_step, load_tile, pointer_to, prefetch_line, store_sums, store_tile, tile_f32, widen
from .launching import Floats, inlined, launch, parallel, rule, serial, shared
from .tiles import DEPTH, MANY_ROWS, PART, TOKENS
from .workspace import aligned_floats, empty

ROWS = 24  # rows of weights of a piece
STRIDE = DEPTH + LANES
"""Numbers from a row of a strip to the next. With DEPTH, a power of two, all rows of a tile would lie in one set of the first cache."""

_LINE = 64  # bytes of a cache line


class Ahead(NamedTuple):
    """Weights as the matrix has them, which are asked for while others are multiplied: MANY_ROWS rows."""

    address: Any
    stride: Any  # bytes from a row to the next
    size: Any  # bytes of each row


@serial
def strip_after(w, size, row, begin, first, end):
    """The weights of the strip that follows the one of `row` and `begin`, where rows first..end have one after another.

    w: the matrix [N, elements of a row], of which an element has `size` weights.
    """
    count = min(DEPTH, w.shape[1] * size - begin) // size
    row, begin = (row + MANY_ROWS, begin) if row + MANY_ROWS < end else (first, begin + DEPTH)
    return Ahead(np.int64(w.ctypes.data) + row * w.strides[0] + begin // size * w.itemsize, w.strides[0], count * w.itemsize)


@rule
def columns_of(begin, width):
    """The columns of a strip that begins with column `begin`, in whole registers: those past the last are 0."""
    return min(DEPTH, -(-(width - begin) // LANES) * LANES)


@rule
def place_of(begin, token, width, n):
    """Where row `token` of n arranged rows has its columns from `begin` on, those of a strip."""
    return n * (begin + begin // DEPTH * LANES) + token * (columns_of(begin, width) + LANES)


@rule
def pieces(rows, tokens):
    """The pieces of a product by so many rows of weights, which threads share."""
    return -(-rows // ROWS) * -(-tokens // PART)


@serial
def piece(item, rows, tokens):
    """The first row of weights of a piece, the row after its last, its first token, and how many tokens it has."""
    blocks = -(-rows // ROWS)
    first, token = item % blocks * ROWS, item // blocks * PART
    return first, min(first + ROWS, rows), token, min(PART, tokens - token)


def arranged(x: Floats) -> Floats:  # [R, M]
    """The rows of x as `matmul` reads them."""
    n, width = x.shape
    out = empty((n * (-(-width // LANES) - (-width // DEPTH)) * LANES,))
    launch(_arrange, x.size, x, out)
    return out


@serial
def widen_some(source, start, count, out, position):
    """out[position :][:count] = source[start :][:count] as float32, -0 as +0."""
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        widen(source, start + i, LANES, out, position + i)
    if whole < count:
        widen(source, start + whole, count - whole, out, position + whole)


@inlined
def fill(w, first, count, size, out, position):
    """out[position :] = `count` elements of a matrix from number `first` on as float32, then zeros up to a whole register.

    An element is a block of `size` weights or a float. `position` counts floats from the start of `out`, whatever its shape.
    """
    fill_elements(w, first, count, size, out, position)


def fill_elements(w, first, count, size, out, position):
    """See `fill`. Numba chooses one of the following by the type of the matrix."""


def _fill_blocks(w, first, count, size, out, position):
    for i in range(count):
        unpack_block(w, first + i, out, position + i * size)


def _fill_floats(w, first, count, size, out, position):
    widen_some(pointer_to(w), first, count, out, position)
    numbers = pointer_to(out)
    for i in range(position + count, position + -(-count // LANES) * LANES):
        numbers[i] = np.float32(0)


@overload(fill_elements, inline="always")
def _fill_elements(w, first, count, size, out, position):
    return _fill_blocks if isinstance(w.dtype, types.Record) else _fill_floats


@serial
def arrange(x, t, arranged):
    """Copy row t of x to where `multiply_strip` reads it: the columns of a strip of all rows lie together.

    Columns of a wide x lie so far apart that they share few sets of a cache.
    """
    n, width = x.shape
    for begin in range(0, width, DEPTH):
        fill(x, t * width + begin, min(DEPTH, width - begin), 1, arranged, place_of(begin, t, width, n))


@parallel
def _arrange(team, x, out):
    for t in shared(team, x.shape[0]):
        arrange(x, t, out)


@serial
def new_sums(rows, tokens):
    """Memory for the lanes of the sums of some rows and tokens [rows, whole tiles of tokens]. Strips begin with rows 0, MANY_ROWS, ..."""
    return aligned_floats(-(-rows // MANY_ROWS) * MANY_ROWS, -(-tokens // TOKENS) * TOKENS * LANES)


@serial
def multiply_strip(strip, column, rows, begin, width, x, token, tokens, sums, out, ahead):
    """Add the products of `rows` rows of weights, columns from `begin` on of `width`, to the sums of `tokens` tokens from `token` on.

    x: arranged. `sums`: from the strip's first row on. With the last columns the results are stored from out[token, column] on. Meanwhile
    the weights `ahead` are asked for.
    """
    lines, tiles = -(-ahead.size // _LINE), -(-tokens // TOKENS)
    per_tile = -(-lines // tiles)
    n, count, totals = out.shape[0], columns_of(begin, width), np.empty(-(-MANY_ROWS * TOKENS // LANES) * LANES, np.float32)
    ws, xs, data = pointer_to(strip), pointer_to(x), np.int64(sums.ctypes.data)
    for t in range(0, tokens, TOKENS):
        present, place = min(TOKENS, tokens - t), t * MANY_ROWS * LANES
        tile = tile_f32(MANY_ROWS, TOKENS)
        for line in range(t // TOKENS * per_tile, min((t // TOKENS + 1) * per_tile, lines)):
            for i in range(MANY_ROWS):
                prefetch_line(ahead.address + i * ahead.stride + line * _LINE)
        if begin:
            tile = load_tile(tile, data + place * 4, TOKENS * LANES * 4, LANES * 4)
        first = place_of(begin, token + t, width, n)
        for i in range(0, count, LANES):
            tile = dot_step(tile, ws, i, STRIDE, rows, xs, first + i, count + LANES, present, LANES)
        if begin + count < width:
            store_tile(tile, sums, place, TOKENS * LANES)
        else:
            store_sums(tile, totals)
            for j in range(present):
                for i in range(rows):
                    out[token + t + j, column + i] = totals[i * TOKENS + j]


@serial
def _some_rows(w, size, first, end, x, token, tokens, out):
    """Results first..end of some rows of x, which is arranged."""
    strip, sums = aligned_floats(MANY_ROWS, STRIDE), new_sums(end - first, tokens)
    stride, width = w.strides[0] // w.itemsize, w.shape[1] * size
    for begin in range(0, width, DEPTH):
        count = min(DEPTH, width - begin) // size
        for n in range(first, end, MANY_ROWS):
            rows = min(MANY_ROWS, end - n)
            for i in range(rows):
                fill(w, (n + i) * stride + begin // size, count, size, strip, i * STRIDE)
            ahead = strip_after(w, size, n, begin, first, end)
            multiply_strip(strip, n, rows, begin, width, x, token, tokens, sums[n - first :], out, ahead)


@parallel
def matmul(team, w, size, x, out):
    """As the kernels of floats.py and blocks.py. w: the matrix, of which an element has `size` weights. x: arranged."""
    for item in shared(team, pieces(w.shape[0], out.shape[0])):
        first, end, token, tokens = piece(item, w.shape[0], out.shape[0])
        _some_rows(w, size, first, end, x, token, tokens, out)
