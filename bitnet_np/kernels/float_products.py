"""Products of several tokens with float matrices and with ggml's blocks, whose weights are widened one strip of the matrix at a time.

A strip is MANY_ROWS rows by DEPTH columns. It is widened once for PART tokens, and stays in the first-level cache during that time. The
activations of these columns, and the sums of the neighbouring strips, stay in the second-level cache.
"""

import numpy as np
from numba import types
from numba.extending import overload

from .fast.block_floats import unpack_block
from .fast.emit import LANES
from .fast.simd import address_of, dot_step, load_tile, pointer_to, prefetch_line, store_products, store_sums, store_tile, tile_f32, widen
from .launching import Floats, launch, parallel, rule, serial, shared
from .tiles import DEPTH, MANY_ROWS, PART, TOKENS
from .workspace import aligned_floats, empty

ROWS = 48  # rows of weights that share one reading of the activations, which leave the second cache where they are wide
STRIDE = DEPTH + LANES
"""Numbers from a row of a strip to the next. With DEPTH, a power of two, all rows of a tile would lie in one set of the first cache."""

_LINE = 64  # bytes of a cache line


@rule
def columns_of(begin, width):
    """The columns of a strip that begins with column `begin`, in whole registers: those past the last are 0."""
    return min(DEPTH, -(-(width - begin) // LANES) * LANES)


@rule
def place_of(begin, token, width, n):
    """Where row `token` of n arranged rows has its columns from `begin` on, those of a strip."""
    return n * (begin + begin // DEPTH * LANES) + token * (columns_of(begin, width) + LANES)


@serial
def widen_some(source, start, count, out, position):
    """out[position :][:count] = source[start :][:count] as float32, -0 as +0."""
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        widen(source, start + i, LANES, out, position + i)
    if whole < count:
        widen(source, start + whole, count - whole, out, position + whole)


def fill(w, first, count, size, out, position):
    """out[position :] = `count` elements of a matrix from number `first` on as float32, then zeros up to a whole register.

    An element is a block of `size` weights or a float. `position` counts floats from the start of `out`, whatever its shape. For kernels:
    Numba chooses one of the following by the type of the matrix.
    """


def fill_blocks(w, first, count, size, out, position):
    for i in range(count):
        unpack_block(w, first + i, out, position + i * size)


@serial
def _widen_row(w, first, count, out, position):
    numbers = pointer_to(out)
    widen_some(pointer_to(w), first, count, out, position)
    for i in range(position + count, position + -(-count // LANES) * LANES):
        numbers[i] = np.float32(0)


def _fill_floats(w, first, count, size, out, position):
    _widen_row(w, first, count, out, position)


@overload(fill, inline="always")
def _fill(w, first, count, size, out, position):
    return fill_blocks if isinstance(w.dtype, types.Record) else _fill_floats


@parallel
def _arrange(team, x, out):
    """Copy x to where `_some_rows` reads it: the columns of a strip of all rows lie together.

    Columns of a wide x lie so far apart that they share few sets of a cache.
    """
    n, width = x.shape
    for t in shared(team, n):
        for begin in range(0, width, DEPTH):
            fill(x, t * width + begin, min(DEPTH, width - begin), 1, out, place_of(begin, t, width, n))


def arranged(x: Floats) -> Floats:  # [R, M]
    """The rows of x as `matmul` reads them."""
    n, width = x.shape
    out = empty((n * (-(-width // LANES) - (-width // DEPTH)) * LANES,))
    launch(_arrange, x.size, x, out)
    return out


@serial
def _multiply(strip, column, rows, begin, width, x, token, tokens, sums, out, ahead, step, size):
    """Add the products of `rows` rows of weights, columns from `begin` on of `width`, to the sums of `tokens` tokens from `token` on.

    With the last columns the results are stored from out[token, column] on. Meanwhile MANY_ROWS rows of `size` bytes, `step` bytes apart
    from the address `ahead` on, are asked for: the weights that are multiplied next.
    """
    lines, tiles = -(-size // _LINE), -(-tokens // TOKENS)
    per_tile = -(-lines // tiles)
    n, count, totals = out.shape[0], columns_of(begin, width), np.empty(-(-MANY_ROWS * TOKENS // LANES) * LANES, np.float32)
    ws, xs, data, results = pointer_to(strip), pointer_to(x), address_of(sums), pointer_to(out)
    for t in range(0, tokens, TOKENS):
        present, place = min(TOKENS, tokens - t), t * MANY_ROWS * LANES
        tile = tile_f32(MANY_ROWS, TOKENS)
        for line in range(t // TOKENS * per_tile, min((t // TOKENS + 1) * per_tile, lines)):
            for i in range(MANY_ROWS):
                prefetch_line(ahead + i * step + line * _LINE)
        if begin:
            tile = load_tile(tile, data + place * 4, TOKENS * LANES * 4, LANES * 4)
        first = place_of(begin, token + t, width, n)
        for i in range(0, count, LANES):
            tile = dot_step(tile, ws, i, STRIDE, rows, xs, first + i, count + LANES, present, LANES)
        if begin + count < width:
            store_tile(tile, sums, place, TOKENS * LANES)
        elif rows == MANY_ROWS and present == TOKENS:
            store_products(tile, np.float32(1), results, (token + t) * out.shape[1] + column, out.shape[1])
        else:
            store_sums(tile, totals)
            for j in range(present):
                for i in range(rows):
                    out[token + t + j, column + i] = totals[i * TOKENS + j]


@serial
def _some_rows(w, size, first, end, x, token, tokens, out):
    """Results first..end of some rows of x, which is arranged."""
    strip, sums = (
        aligned_floats(MANY_ROWS, STRIDE),
        aligned_floats(-(-ROWS // MANY_ROWS), -(-tokens // TOKENS) * TOKENS * MANY_ROWS * LANES),
    )
    step, width, data = w.strides[0], w.shape[1] * size, address_of(w)
    for begin in range(0, width, DEPTH):
        count = min(DEPTH, width - begin) // size
        for n in range(first, end, MANY_ROWS):
            rows = min(MANY_ROWS, end - n)
            for i in range(rows):
                fill(w, (n + i) * (step // w.itemsize) + begin // size, count, size, strip, i * STRIDE)
            row, column = (n + MANY_ROWS, begin) if n + MANY_ROWS < end else (first, begin + DEPTH)  # of the strip that follows
            ahead, lanes = data + row * step + column // size * w.itemsize, sums[(n - first) // MANY_ROWS]
            _multiply(strip, n, rows, begin, width, x, token, tokens, lanes, out, ahead, step, count * w.itemsize)


@parallel
def matmul(team, w, size, x, out):
    """As the kernels of floats.py and ggml/blocks.py. w: the matrix, whose elements have `size` weights each. x: arranged."""
    blocks = -(-w.shape[0] // ROWS)
    for item in shared(team, blocks * -(-out.shape[0] // PART)):
        first, token = item % blocks * ROWS, item // blocks * PART
        _some_rows(w, size, first, min(first + ROWS, w.shape[0]), x, token, min(PART, out.shape[0] - token), out)
