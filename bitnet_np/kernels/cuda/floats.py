"""Tables of numbers, and products with them in the contract's order: 16 threads are the 16 lanes of one row."""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from ..fast.emit import LANES
from .ptx import fma, half_warp_sum, number, plus
from .target import kernel, place

ROWS = 8  # rows of a table that a block multiplies
THREADS = ROWS * LANES


@kernel
def embed(table, tokens, out):  # [V, D], [R] -> [R, D]
    i, width = place(), out.shape[1]
    if i < out.size:  # + 0 as on the CPU, where 1 * x + 0 makes 0 of -0
        out[i // width, i % width] = plus(number(table[tokens[i // width], i % width]), np.float32(0.0))


@cache
def matmul(tokens: int) -> Any:
    """The product of a table with `tokens` tokens at a time: a row of the grid for each such group of tokens."""

    @kernel
    def matmul(table, x, out):  # [N, M], [R, M] -> [R, N]
        lane, row, first = cuda.threadIdx.x % LANES, cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES, cuda.blockIdx.y * tokens
        here, last = min(row, table.shape[0] - 1), x.shape[0] - 1
        sums = cuda.local.array(tokens, np.float32)
        for t in range(tokens):
            sums[t] = np.float32(0.0)
        for i in range(lane, table.shape[1], LANES):
            weight = number(table[here, i])
            for t in range(tokens):
                sums[t] = fma(weight, x[min(first + t, last), i], sums[t])
        for t in range(tokens):
            total = half_warp_sum(sums[t])
            if lane == 0 and row < table.shape[0] and first + t <= last:
                out[first + t, row] = total

    return matmul
