"""Products of one token with matrices in ggml's block types by bytes, as block_products.py defines them: up to three matrices at once."""

import numpy as np
from numba import prange

from .block_rows import Rows, arrange
from .fast.block_bytes import CHUNKS, ROWS, close_chunks, open_chunks
from .fast.emit import LANES
from .fast.simd import store_tile, tile_f32
from .launching import parallel, serial
from .ternary_product import blocks_of
from .tiles import ROW_BLOCK, rows_ahead
from .workspace import aligned


@serial
def _room(x, numbers):
    """Room for a row of activations and whole steps of chunks, as Rows has it. No register of it straddles two cache lines."""
    chunks = (x.shape[1] + numbers.weights - 1) // numbers.weights
    chunks = (chunks + CHUNKS - 1) // CHUNKS * CHUNKS
    weights, units = chunks * numbers.weights, chunks * numbers.units
    runs, starts = units * numbers.runs, weights // numbers.width if numbers.offset else 0
    return (
        aligned(weights).view(np.int8).reshape(1, weights),
        aligned(starts * 4).view(np.int32).reshape(1, starts),
        aligned(runs * 2).view(np.int16).reshape(1, units, numbers.runs),
        np.empty(units, np.float32).reshape(1, units),
        np.empty(units, np.float32).reshape(1, units),
    )


@serial
def some_rows(zeros, blocks, numbers, rows, first, end, out):
    """Results first..end of a matrix: few rows at a time, so that memory is read nearly in order."""
    n = blocks.shape[1]
    chunks, ahead = (n + numbers.blocks - 1) // numbers.blocks, rows_ahead(ROWS, n * blocks.itemsize)
    sums, lanes = np.empty(LANES, np.float32), aligned(ROWS * numbers.registers * LANES * 4).view(np.int32)
    for r in range(first, end, ROWS):
        valid = min(ROWS, end - r)
        tile = zeros
        for chunk in range(0, chunks, CHUNKS):
            for row in range(ROWS):
                start = (r + min(row, valid - 1)) * n
                open_chunks(blocks, start, n, chunk, rows, lanes, row, ahead)
            tile = close_chunks(tile, blocks, r * n, n, valid, chunk, lanes, rows)
        store_tile(tile, sums, 0, LANES)
        for i in range(valid):
            out[r + i] = sums[i]


@parallel
def products(first, second, third, widths, x, order, numbers, out):
    """out, flat: the results of the three matrices, one after another. A matrix of width 0 is not there."""
    q, starts, sums, scales, eights = _room(x, numbers)
    rows = Rows(q, starts, sums, scales, eights)  # here, because a parallel loop has to know the name
    arrange(0, x, order, numbers, rows)
    for item in prange(blocks_of(widths, ROW_BLOCK)):
        which, block, place = 0, np.int64(item), 0
        while block * ROW_BLOCK >= widths[which]:
            block -= -(-widths[which] // ROW_BLOCK)
            place += widths[which]
            which += 1
        begin, results = block * ROW_BLOCK, out[place : place + widths[which]]
        end = min(begin + ROW_BLOCK, widths[which])
        some_rows(tile_f32(1, 1), (first, second, third)[which], numbers, rows, begin, end, results)
