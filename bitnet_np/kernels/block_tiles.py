"""Products of ggml's blocks by bytes on matrix tiles (amx.py), for calls of many tokens. contract/blocks.py defines them.

Weights are code * scale, with a sign: one byte, or two planes of bytes. A unit's products of 16 tokens and 16 rows are sums of tiles. These
go through memory to vectors, which add them up as floats while tiles multiply the next unit.
"""

import numpy as np

from .block_formats import RUN
from .block_rows import SPAN, Numbers, Rows, room_for, unpack
from .fast.amx import ROWS, SIZE, WIDTH, configure, tile_dot, tile_load, tile_release, tile_store, tile_zero
from .fast.block_bytes import close_unit, make_planes, of_plan, sums_of_planes
from .fast.emit import LANES, Strided
from .fast.simd import load_tile, pointer_to, store_tile, tile_f32, tile_i32
from .launching import inlined, parallel, serial, shared
from .workspace import aligned, empty

LEAST = 40
"""Tokens from which on tiles are faster than vectors."""

_GROUPS = 4  # groups of 16 weight rows whose results are written together: few pages then take many of them at a time


def rows_for(present: int, units: int, numbers: Numbers) -> Rows:
    """Room for the activations of so many tokens, with whole tiles of tokens. Those beyond the last have scales and sums of 0.

    Codes lie in rows of an odd number of cache lines, because rows of most even numbers share few sets of a cache. What belongs to a unit
    lies together for all tokens.
    """
    lines, tokens = -(-units * numbers.runs * RUN // WIDTH), -(-present // ROWS) * ROWS
    scales, eights = empty((2, units, tokens))
    for floats in (scales, eights):
        floats[:, present:] = 0  # arithmetic is slow with the tiny numbers that any bits may be
    return Rows(
        empty((tokens, (lines + 1 - lines % 2) * WIDTH), np.int8),
        empty((tokens, 0), np.int32),  # weights on tiles have their signs
        empty((units, tokens, numbers.runs), np.int16).transpose(1, 0, 2),
        scales.T,
        eights.T,
    )


@inlined
def _multiply(unit, blocks, q, stride, low, high, sums):
    """The sums of a unit, a plane after another."""
    tile_zero(unit, 0)
    tile_zero(unit, 1)
    width = of_plan(blocks, "tile_width")
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
def _sixteen_tokens(unit, tile, integers, blocks, rows, strip, high, first, units, token, sums):
    """`tile` plus the products of so many units, from number `first` of the rows on, with 16 tokens."""
    weights, tokens, stride = of_plan(blocks, "unit"), rows.q.shape[0], rows.q.shape[1]
    runs = weights // RUN
    q = np.int64(rows.q.ctypes.data) + token * stride + first * weights
    low, upper = np.int64(strip.codes.ctypes.data), np.int64(high.ctypes.data)
    for u in range(units + 1):
        if u < units:
            place = u * weights * LANES
            _multiply(unit, blocks, q + u * weights, stride, low + place, upper + place, sums + u % 2 * 2 * SIZE)
        if u:
            here, done = (first + u - 1) * tokens + token, u - 1
            totals = sums_of_planes(integers, blocks, sums + done % 2 * 2 * SIZE)
            floats, pairs = (
                Strided(pointer_to(strip.floats), done * 2 * LANES, 0),
                Strided(pointer_to(strip.pairs), done * LANES * LANES // 2, 0),
            )
            x_sums, scales = Strided(pointer_to(rows.sums), here * runs, runs), Strided(pointer_to(rows.scales), here, 1)
            tile = close_unit(tile, totals, blocks, floats, pairs, x_sums, scales, pointer_to(rows.eights), ROWS)
    return tile


@serial
def _several_rows(memory, zeros, integers, blocks, numbers, rows, r, out):
    """_GROUPS * 16 rows of the matrix from r on, or those that are left, for all tokens."""
    n, tokens, columns = blocks.shape[1], rows.q.shape[0], min(_GROUPS * LANES, out.shape[1] - r)
    chunks, span = (n + numbers.blocks - 1) // numbers.blocks, max(1, SPAN // numbers.weights)
    most = min(span, chunks)
    strip, high = room_for(most, numbers), aligned(most * numbers.weights * LANES if of_plan(blocks, "planes") == 2 else 1)
    room, results = aligned(4 * SIZE), aligned(_GROUPS * tokens * LANES * 4).view(np.float32)
    unit, sums, target = configure(memory, ROWS, of_plan(blocks, "tile_width")), np.int64(room.ctypes.data), np.int64(results.ctypes.data)
    for group in range((columns + LANES - 1) // LANES):
        for first in range(0, chunks, span):
            end = min(first + span, chunks)
            unpack(blocks, numbers, r + group * LANES, 1, first, end, strip)
            for run in range((end - first) * numbers.weights // RUN):
                make_planes(blocks, strip.codes, strip.scales, high, run)
            first_unit = first * numbers.units
            units = min(end * numbers.units, n * numbers.units // numbers.blocks) - first_unit
            for token in range(0, tokens, ROWS):
                place = (group * tokens + token) * LANES
                tile = load_tile(zeros, target + place * 4, 0, LANES * 4) if first else zeros
                tile = _sixteen_tokens(unit, tile, integers, blocks, rows, strip, high, first_unit, units, token, sums)
                store_tile(tile, results, place, 0)
    tile_release(unit)
    for token in range(out.shape[0]):
        for i in range(columns):
            out[token, r + i] = results[(i // LANES * tokens + token) * LANES + i % LANES]


@parallel
def products(team, blocks, numbers, rows, out, memory):
    """As the kernel of block_products.py, on units like that of `memory`."""
    own = memory.copy()
    for strip in shared(team, (out.shape[1] + _GROUPS * LANES - 1) // (_GROUPS * LANES)):
        start = strip * _GROUPS * LANES
        _several_rows(own, tile_f32(1, ROWS), tile_i32(1, ROWS), blocks, numbers, rows, start, out)
