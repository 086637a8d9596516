"""Products of ternary matrices with int8 codes, by tensor cores.

Weights lie as on the CPU (packing.py): a word has 16 columns of a row, column 4 p + b in byte b at bits 6 - 2 p; the words of 16 rows
follow each other, then those of the next 16 columns. A quad of threads has four neighbours of these words for its two rows, a word in
each thread. Its two products of 32 columns take two of the four fields of each word: the sum is of integers, so the order of columns is
free, and codes are taken in the same order. Weights count as 0, 1, 2, so that a product is (accumulated - sum of codes) / scale * factor.

Codes are words of four, zeros up to the next multiple of COLUMNS.
"""

import numpy as np
from numba import cuda

from .ptx import multiply, times
from .target import WARP, device, kernel

ROWS, COLUMNS = 16, 64  # of weights, in a warp's two products
TOKENS = 8  # of a product
WARPS = 8  # of a block
THREADS = WARPS * WARP
_TILE = ROWS * TOKENS  # sums of a product
_SUMS = WARPS * _TILE
_CODES = np.uint32(0x03030303)


@device
def _field(word, p):
    """The codes of field p of a word, one in each byte."""
    return np.uint32(np.uint32(word >> np.uint32(6 - 2 * p)) & _CODES)


@kernel
def product(weights, factor, codes, row_sums, scale, out):
    """16 rows times 8 tokens by a block, whose warps share the columns.

    uint32 [tiles * steps * ROWS], ..., uint32 [R, words], int32 [R], [R] -> [R, N]
    """
    thread, present, width = cuda.threadIdx.x, out.shape[0], out.shape[1]
    warp, g, t = thread // WARP, thread % WARP // 4, thread % 4
    tile, first = cuda.blockIdx.x, cuda.blockIdx.y * TOKENS
    steps = weights.size // ((width + ROWS - 1) // ROWS * ROWS)  # words of a row
    parts, zero = cuda.shared.array(_SUMS, np.int32), np.int32(0)
    total, token = (zero, zero, zero, zero), min(first + g, present - 1)
    for start in range(warp * 4, steps, WARPS * 4):
        step, upper, lower = start + t, np.uint32(0), np.uint32(0)
        if step < steps:
            at = (tile * steps + step) * ROWS + g
            upper, lower = weights[at], weights[at + 8]
        for p in (0, 2):
            a = _field(upper, p), _field(lower, p), _field(upper, p + 1), _field(lower, p + 1)
            total = multiply(a, (codes[token, 4 * step + p], codes[token, 4 * step + p + 1]), total)
    at = warp * _TILE + 2 * t * ROWS + g
    parts[at], parts[at + ROWS], parts[at + 8], parts[at + ROWS + 8] = total
    cuda.syncthreads()
    token, row = first + thread // ROWS, tile * ROWS + thread % ROWS
    if thread < _TILE and row < width and token < present:
        together = -row_sums[token]
        for other in range(WARPS):
            together += parts[other * _TILE + thread]
        out[token, row] = times(np.float32(np.float32(np.int32(together)) / scale[token]), factor)
