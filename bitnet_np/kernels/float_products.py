"""Products of several tokens with rows of weights as float32, a strip of the matrix at a time.

A strip is MANY_ROWS rows by DEPTH columns. It is computed once for PART tokens, and stays in the first cache meanwhile. The activations of
these columns, and the sums of the strips beside it, stay in the second.
"""

import numpy as np

from .launching import serial
from .simd import LANES, load_tile, pointer_to, store_sums, store_tile, tile_f32
from .tiles import DEPTH, MANY_ROWS, TOKENS, dot_tile
from .workspace import aligned


@serial
def arrange(x, t, arranged):
    """Copy row t of x to where `multiply_strip` reads it: DEPTH columns of all rows lie together.

    Columns of a wide x lie so far apart that they share few sets of a cache.
    """
    n, width = x.shape
    for begin in range(0, width, DEPTH):
        count = min(DEPTH, width - begin)
        place = n * begin + t * count
        for i in range(count):
            arranged[place + i] = x[t, begin + i]


@serial
def new_strip():
    """Memory for a strip: row i begins at i * DEPTH."""
    return aligned(MANY_ROWS * DEPTH * 4).view(np.float32)


@serial
def new_sums(rows, tokens):
    """Memory for the lanes of the sums of some rows and tokens [rows, whole tiles of tokens]. Strips begin with rows 0, MANY_ROWS, ..."""
    whole_rows, whole_tokens = -(-rows // MANY_ROWS) * MANY_ROWS, -(-tokens // TOKENS) * TOKENS
    return aligned(whole_rows * whole_tokens * LANES * 4).view(np.float32).reshape(whole_rows, whole_tokens * LANES)


@serial
def multiply_strip(strip, column, rows, begin, count, x, token, tokens, sums, out):
    """Add the products of `rows` rows of weights, columns begin..begin+count, to the sums of `tokens` tokens from `token` on.

    x: arranged. `sums`: from the strip's first row on. With the last columns the results are stored from out[token, column] on.
    """
    n, width, totals = out.shape[0], x.size // out.shape[0], np.empty(-(-MANY_ROWS * TOKENS // LANES) * LANES, np.float32)
    ws, xs, data = pointer_to(strip), pointer_to(x), np.int64(sums.ctypes.data)
    for t in range(0, tokens, TOKENS):
        present, place = min(TOKENS, tokens - t), t * MANY_ROWS * LANES
        tile = tile_f32(MANY_ROWS, TOKENS)
        if begin:
            tile = load_tile(tile, data + place * 4, TOKENS * LANES * 4, LANES * 4)
        tile = dot_tile(tile, ws, 0, DEPTH, rows, xs, n * begin + (token + t) * count, count, present, count)
        if begin + count < width:
            store_tile(tile, sums, place, TOKENS * LANES)
        else:
            store_sums(tile, totals)
            for j in range(present):
                for i in range(rows):
                    out[token + t + j, column + i] = totals[i * TOKENS + j]
