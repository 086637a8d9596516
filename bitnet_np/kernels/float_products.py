"""Products of several tokens with rows of weights as float32, a strip of the matrix at a time.

A strip is MANY_ROWS rows by DEPTH columns. It is computed once for PART tokens, and stays in the first cache meanwhile. The activations of
these columns, and the sums of the strips beside it, stay in the second.
"""

import numpy as np
from numba import prange

from .launching import parallel, rule, serial
from .simd import LANES, dot_step, load_tile, pointer_to, store_sums, store_tile, tile_f32, widen
from .tiles import DEPTH, MANY_ROWS, PART, ROW_BLOCK, TOKENS
from .workspace import aligned_floats


@rule
def columns_of(begin, width):
    """The columns of a strip that begins with column `begin`, in whole registers: those past the last are 0."""
    return min(DEPTH, -(-(width - begin) // LANES) * LANES)


@rule
def pieces(rows, tokens):
    """The pieces of a product by so many rows of weights, which the steps of a parallel loop own."""
    return -(-rows // ROW_BLOCK) * -(-tokens // PART)


@serial
def piece(item, rows, tokens):
    """The first row of weights of a piece, the row after its last, its first token, and how many tokens it has."""
    blocks = -(-rows // ROW_BLOCK)
    first, token = item % blocks * ROW_BLOCK, item // blocks * PART
    return first, min(first + ROW_BLOCK, rows), token, min(PART, tokens - token)


@serial
def room_for(x):
    """Memory for the rows of x, arranged."""
    return aligned_floats(x.shape[0], -(-x.shape[1] // LANES) * LANES)


@serial
def arrange(x, t, arranged):
    """Copy row t of x to where `multiply_strip` reads it: the columns of a strip of all rows lie together.

    Columns of a wide x lie so far apart that they share few sets of a cache.
    """
    n, width = x.shape
    flat = arranged.reshape(-1)
    for begin in range(0, width, DEPTH):
        count, present = columns_of(begin, width), min(DEPTH, width - begin)
        place = n * begin + t * count
        for i in range(count):
            flat[place + i] = x[t, begin + i] if i < present else np.float32(0.0)


@serial
def new_strip():
    """Memory for a strip: row i begins at i * DEPTH."""
    return aligned_floats(MANY_ROWS, DEPTH)


@serial
def new_sums(rows, tokens):
    """Memory for the lanes of the sums of some rows and tokens [rows, whole tiles of tokens]. Strips begin with rows 0, MANY_ROWS, ..."""
    return aligned_floats(-(-rows // MANY_ROWS) * MANY_ROWS, -(-tokens // TOKENS) * TOKENS * LANES)


@serial
def multiply_strip(strip, column, rows, begin, width, x, token, tokens, sums, out):
    """Add the products of `rows` rows of weights, columns from `begin` on of `width`, to the sums of `tokens` tokens from `token` on.

    x: arranged. `sums`: from the strip's first row on. With the last columns the results are stored from out[token, column] on.
    """
    n, count, totals = out.shape[0], columns_of(begin, width), np.empty(-(-MANY_ROWS * TOKENS // LANES) * LANES, np.float32)
    ws, xs, data = pointer_to(strip), pointer_to(x), np.int64(sums.ctypes.data)
    for t in range(0, tokens, TOKENS):
        present, place = min(TOKENS, tokens - t), t * MANY_ROWS * LANES
        tile = tile_f32(MANY_ROWS, TOKENS)
        if begin:
            tile = load_tile(tile, data + place * 4, TOKENS * LANES * 4, LANES * 4)
        first = n * begin + (token + t) * count
        for i in range(0, count, LANES):
            tile = dot_step(tile, ws, i, DEPTH, rows, xs, first + i, count, present, LANES)
        if begin + count < width:
            store_tile(tile, sums, place, TOKENS * LANES)
        else:
            store_sums(tile, totals)
            for j in range(present):
                for i in range(rows):
                    out[token + t + j, column + i] = totals[i * TOKENS + j]


@serial
def _some_rows(w, first, end, x, token, tokens, out):
    """Results first..end of some rows of x, which is arranged."""
    strip, sums, stride, ws = new_strip(), new_sums(end - first, tokens), w.strides[0] // w.itemsize, pointer_to(w)
    for begin in range(0, w.shape[1], DEPTH):
        count = min(DEPTH, w.shape[1] - begin)
        for n in range(first, end, MANY_ROWS):
            rows = min(MANY_ROWS, end - n)
            for i in range(rows):
                for k in range(0, count, LANES):
                    widen(ws, (n + i) * stride + begin + k, min(LANES, count - k), strip, i * DEPTH + k)
            multiply_strip(strip, n, rows, begin, w.shape[1], x, token, tokens, sums[n - first :], out)


@parallel
def matmul(w, x, out):
    """As the kernel of floats.py. It is one of its own, which is compiled where it is used."""
    arranged = room_for(x)
    for t in prange(x.shape[0]):
        arrange(x, t, arranged)
    for item in prange(pieces(w.shape[0], x.shape[0])):
        first, end, token, tokens = piece(np.int64(item), w.shape[0], x.shape[0])
        _some_rows(w, first, end, arranged, token, tokens, out)
