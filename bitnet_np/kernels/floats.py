"""Tables of float32, float16 or bfloat16: their rows, and products with float32 in the contract's order."""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from .launching import Floats, launch, parallel, read_only, serial
from .simd import LANES, axpy_step, axpy_tail, pointer_to, store_sums, store_tile, tile_f32
from .tiles import MANY_ROWS, PART, ROW_BLOCK, STREAM, TOKENS, dot_tile
from .workspace import empty

# --- embedding ------------------------------------------------------------------------------------------------------------------------


@serial
def widen_row(row, out):
    """A row of float32, float16 or bfloat16 bits as float32. 1 * x + 0 is x, but for the sign of a zero."""
    one = np.ones(1, np.float32)
    width = out.size
    for i in range(0, width - width % LANES, LANES):
        store_tile(axpy_step(tile_f32(1, 1), one, 0, 0, 1, row, i, LANES), out, i, LANES)
    if width % LANES:
        rest = np.empty(LANES, np.float32)
        start = width - width % LANES
        store_tile(axpy_tail(tile_f32(1, 1), one, 0, 0, 1, row, start, width - start), rest, 0, LANES)
        for i in range(start, width):
            out[i] = rest[i - start]


@parallel
def _embed(table, tokens, out):
    for r in prange(tokens.size):
        widen_row(table[tokens[r]], out[r])


def embed(table: NDArray, tokens: NDArray[np.int64]) -> Floats:  # [V, D], [R] -> [R, D]
    out = empty((tokens.size, table.shape[1]))
    launch(_embed, out.size, read_only(table), tokens, out)
    return out


# --- float matmul ---------------------------------------------------------------------------------------------------------------------


@serial
def matmul_tiles(zeros, rows, tokens, w, first, end, x, out):
    """Output columns first..end for all rows of x, in tiles of the shape of `zeros`, which is rows x tokens."""
    totals = np.empty(-(-rows * tokens // LANES) * LANES, np.float32)
    width, stride, ws, xs = x.shape[1], w.strides[0] // w.itemsize, pointer_to(w), pointer_to(x)
    for n in range(first, end, rows):
        valid = min(rows, end - n)
        for t in range(0, x.shape[0], tokens):
            present = min(tokens, x.shape[0] - t)
            ahead = 0 if t else rows * stride if rows > 1 else STREAM // w.itemsize  # the next rows
            store_sums(dot_tile(zeros, ws, n * stride, stride, valid, xs, t * width, width, present, width, rows, ahead), totals)
            for j in range(present):
                for i in range(valid):
                    out[t + j, n + i] = totals[i * tokens + j]


@parallel
def _matmul(w, x, out):
    blocks, parts = (w.shape[0] + ROW_BLOCK - 1) // ROW_BLOCK, (x.shape[0] + PART - 1) // PART
    for item in prange(blocks * parts):
        first, token = item % blocks * ROW_BLOCK, item // blocks * PART
        end = min(first + ROW_BLOCK, w.shape[0])
        if x.shape[0] == 1:
            matmul_tiles(tile_f32(1, 1), 1, 1, w, first, end, x, out)
        else:
            matmul_tiles(tile_f32(MANY_ROWS, TOKENS), MANY_ROWS, TOKENS, w, first, end, x[token : token + PART], out[token : token + PART])


def matmul(x: Floats, weights: NDArray) -> Floats:  # [R, M], [N, M] float32, float16 or bfloat16 bits -> [R, N]
    """Contract-order dot products.

    With one row of x, weight rows are read one after the other, so that memory is one stream in order: 28 GB/s on one Zen 4 core, where
    plain reads reach 30. Four weight rows at a time, which share the loads of x, reach 17.
    """
    out = empty((x.shape[0], weights.shape[0]))
    launch(_matmul, x.shape[0] * weights.size // 8, read_only(weights), x, out)
    return out
