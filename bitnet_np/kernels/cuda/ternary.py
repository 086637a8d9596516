"""Products of ternary matrices with int8 codes, by tensor cores.

Weights lie as on the CPU (packing.py): a word has 16 columns of a row, column 4 p + b in byte b at bits 6 - 2 p; the words of 16 rows
follow each other, then those of the next 16 columns. A quad of threads has four neighbours of these words for its two rows, a word in
each thread. Its two products of 32 columns take two of the four fields of each word: the sum is of integers, so the order of columns is
free, and codes are taken in the same order. Weights count as 0, 1, 2, so that a product is (accumulated - sum of codes) / scale * factor.

Codes are words of four, zeros up to the next multiple of COLUMNS.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from .ptx import multiply, times
from .target import WARP, device, kernel

ROWS, COLUMNS = 16, 64  # of weights, in a warp's two products
TOKENS = 8  # of a product
WARPS = 8  # of a block
THREADS = WARPS * WARP
_TILE = ROWS * TOKENS  # sums of a product
_CODES = np.uint32(0x03030303)


@device
def _field(word, p):
    """The codes of field p of a word, one in each byte."""
    return np.uint32(np.uint32(word >> np.uint32(6 - 2 * p)) & _CODES)


@cache
def product(groups: int, share: int) -> Any:
    """A kernel for `groups` times TOKENS tokens at a time. `share` warps share the columns of 16 rows of weights."""
    tiles = WARPS // share
    n_sums, n_parts = 4 * groups, WARPS * groups * _TILE

    @kernel
    def ternary_product(weights, factor, codes, row_sums, scale, out):
        # uint32 [tiles * steps * ROWS], ..., uint32 [R, words], int32 [R], [R] -> [R, N]
        thread, present, width = cuda.threadIdx.x, out.shape[0], out.shape[1]
        lane, warp = thread % WARP, thread // WARP
        g, t = lane // 4, lane % 4
        tile, first = cuda.blockIdx.x * tiles + warp // share, cuda.blockIdx.y * (groups * TOKENS)
        steps = weights.size // ((width + ROWS - 1) // ROWS * ROWS)  # words of a row
        sums, parts = cuda.local.array(n_sums, np.int32), cuda.shared.array(n_parts, np.int32)
        for i in range(n_sums):
            sums[i] = 0
        if tile * ROWS < width:
            for start in range(warp % share * 4, steps, share * 4):
                step, upper, lower = start + t, np.uint32(0), np.uint32(0)
                if step < steps:
                    at = (tile * steps + step) * ROWS + g
                    upper, lower = weights[at], weights[at + 8]
                for group in range(groups):
                    token, i = min(first + group * TOKENS + g, present - 1), 4 * group
                    total = sums[i], sums[i + 1], sums[i + 2], sums[i + 3]
                    for p in (0, 2):
                        a = _field(upper, p), _field(lower, p), _field(upper, p + 1), _field(lower, p + 1)
                        total = multiply(a, (codes[token, 4 * step + p], codes[token, 4 * step + p + 1]), total)
                    sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = total
        for i in range(n_sums):
            row, token = g + i % 4 // 2 * 8, i // 4 * TOKENS + t * 2 + i % 2
            parts[warp * (groups * _TILE) + token * ROWS + row] = sums[i]
        cuda.syncthreads()
        for item in range(thread, tiles * groups * _TILE, THREADS):
            part, place = item // (groups * _TILE), item % (groups * _TILE)
            row, token = (cuda.blockIdx.x * tiles + part) * ROWS + place % ROWS, first + place // ROWS
            if row < width and token < present:
                total = -row_sums[token]
                for other in range(share):
                    total += parts[(part * share + other) * (groups * _TILE) + place]
                out[token, row] = times(np.float32(np.float32(np.int32(total)) / scale[token]), factor)

    return ternary_product
