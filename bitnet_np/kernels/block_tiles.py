"""Products of ggml's blocks by bytes on matrix tiles (amx.py), for calls of many tokens. contract/blocks.py defines them.

Weights are code * scale, with a sign: one byte, or two planes of bytes. A unit's products of 16 tokens and 16 rows are sums of tiles. These
go through memory to vectors, which add them up as floats while tiles multiply the next unit.
"""

import numpy as np

from .block_formats import RUN
from .fast.amx import ROWS, SIZE, WIDTH, tile_dot, tile_load, tile_store, tile_zero
from .fast.block_bytes import close_unit, minimums, of_plan, sums_of_planes
from .fast.emit import LANES, Strided
from .fast.simd import pointer_to
from .launching import inlined

LEAST = 40
"""Tokens from which on tiles are faster than vectors."""


@inlined
def multiply(unit, blocks, q, stride, low, high, sums):
    """The sums of a unit, a plane after another."""
    tile_zero(unit, 0)
    tile_zero(unit, 1)
    width = of_plan(blocks, "width")
    for k in range(of_plan(blocks, "unit") // width):
        place = k * width * LANES
        tile_load(unit, 4, q + k * width, stride)
        tile_load(unit, 6, low + place, WIDTH)
        tile_dot(unit, 0, 4, 6)
        if of_plan(blocks, "planes") == 2:
            tile_load(unit, 7, high + place, WIDTH)
            tile_dot(unit, 1, 4, 7)
    tile_store(unit, 0, sums, WIDTH)
    if of_plan(blocks, "planes") == 2:
        tile_store(unit, 1, sums + SIZE, WIDTH)


@inlined
def sixteen_tokens(unit, tile, integers, blocks, rows, strip, high, first, units, token, sums):
    """`tile` plus the products of so many units, from number `first` of the rows on, with 16 tokens."""
    weights, tokens, stride = of_plan(blocks, "unit"), rows.q.shape[0], rows.q.shape[1]
    runs = weights // RUN
    q = np.int64(rows.q.ctypes.data) + token * stride + first * weights
    low, upper = np.int64(strip.codes.ctypes.data), np.int64(high.ctypes.data)
    for u in range(units + 1):
        if u < units:
            place = u * weights * LANES
            multiply(unit, blocks, q + u * weights, stride, low + place, upper + place, sums + u % 2 * 2 * SIZE)
        if u:
            here, done = (first + u - 1) * tokens + token, u - 1
            totals = sums_of_planes(integers, blocks, sums + done % 2 * 2 * SIZE)
            floats, pairs = (
                Strided(pointer_to(strip.floats), done * 2 * LANES, 0),
                Strided(pointer_to(strip.pairs), done * LANES * LANES // 2, 0),
            )
            x_sums, scales = Strided(pointer_to(rows.sums), here * runs, runs), Strided(pointer_to(rows.scales), here, 1)
            counts = minimums(integers, blocks, pairs, x_sums, ROWS)
            tile = close_unit(tile, totals, counts, blocks, floats, scales, pointer_to(rows.eights), ROWS)
    return tile
