"""Products with ternary matrices on matrix tiles (fast/amx.py), for calls of several tokens."""

import numpy as np
from numpy.typing import NDArray

from .fast.amx import ROWS, SIZE, WIDTH, configure, tile_dot, tile_load, tile_release, tile_store, tile_zero
from .fast.emit import LANES, STEP
from .fast.simd import address_of, load_tile, prefetch, tile_i32
from .fast.ternary_steps import unpack_codes
from .launching import inlined, launch, parallel, serial, shared
from .ternary_product import Product, blocks_of, matrix_of, row_sums, store_ternary, with_reciprocals
from .tiles import TOKENS
from .workspace import aligned, empty

LEAST = 5
"""Tokens from which on tiles are faster than vectors."""

_PAIR = 2 * ROWS  # rows of weights, and tokens, that two by two tiles of sums belong to
_BLOCK = 8  # tiles of columns at a time: this many tiles of two groups' unpacked weights fill a third of the first-level cache
_AHEAD = 2  # tiles that are unpacked before they are multiplied, so that the processor does both at once
_ROOM = _BLOCK * 2 * SIZE  # bytes for a block of weights
_SHARED = 3 << 18  # bytes of activations that one pair of groups after another is multiplied by: they stay in the second cache


@serial
def _arrange_group(memory, q, token, room, sums):
    """Copy the activations of up to 16 tokens to `room`, tile by tile, and sum up each token's."""
    columns, present = q.shape[1], min(ROWS, q.shape[0] - token)
    unit = configure(memory, present, WIDTH)
    source, target = address_of(q) + token * columns, address_of(room) + token * columns
    for k in range(columns // WIDTH):
        tile_load(unit, 4, source + k * WIDTH, columns)
        tile_store(unit, 4, target + k * SIZE, WIDTH)
    tile_release(unit)
    row_sums(q, token, token + present, sums)


@inlined
def _unpack(one, other, codes, steps, ahead):
    """Two tiles of weights, side by side. Columns beyond the last keep whatever was there: activations are zero there.

    The bytes `ahead` are asked for, those of the two groups that come next.
    """
    for step in range(min(4, steps)):
        unpack_codes(one + step * STEP, codes + step * SIZE // 4, ahead)
        unpack_codes(other + step * STEP, codes + SIZE + step * SIZE // 4, ahead)


@inlined
def _multiply(unit, codes, first, second):
    """Add the products of two tiles of weights with one tile of activations, or with two if there is a second."""
    tile_load(unit, 6, codes, WIDTH)
    tile_load(unit, 4, first, WIDTH)
    tile_dot(unit, 0, 4, 6)
    tile_load(unit, 7, codes + SIZE, WIDTH)
    tile_dot(unit, 1, 4, 7)
    if second:
        tile_load(unit, 5, second, WIDTH)
        tile_dot(unit, 2, 5, 6)
        tile_dot(unit, 3, 5, 7)


@inlined
def _move_sums(load_or_store, unit, sums, both):
    load_or_store(unit, 0, sums, WIDTH)
    load_or_store(unit, 1, sums + SIZE, WIDTH)
    if both:
        load_or_store(unit, 2, sums + 2 * SIZE, WIDTH)
        load_or_store(unit, 3, sums + 3 * SIZE, WIDTH)


@inlined
def _ask_for_results(product, matrix, group, first, end):
    """Prefetch where the results of two groups for tokens first..end go, which takes longer than to compute them: they lie far apart."""
    for token in range(first, end):
        place = matrix.place + token * matrix.width + group * LANES
        prefetch(product.out, place)
        prefetch(product.out, place + LANES)


@serial
def _two_groups(memory, room, edge, product, matrix, group, first_token, end_token, arranged):
    """The results of two groups of 16 weight rows for tokens first_token..end_token. `room` is for weights and sums."""
    unit = configure(memory, min(ROWS, product.q.shape[0]), WIDTH)
    tiles, steps = product.q.shape[1] // WIDTH, product.steps
    codes, x = address_of(room), address_of(arranged)
    one = address_of(product.codes) + matrix.begin + group * steps * STEP
    other = one + steps * STEP if (group + 1) * LANES < matrix.width else one
    for begin in range(0, tiles, _BLOCK):
        count = min(_BLOCK, tiles - begin)
        for token in range(first_token, end_token, _PAIR):
            both = token + ROWS < end_token
            first = x + (token // ROWS * tiles + begin) * SIZE
            sums = codes + _BLOCK * 2 * SIZE + (token - first_token) * _PAIR * 4
            if begin + count == tiles:
                _ask_for_results(product, matrix, group, token, min(token + _PAIR, end_token))
            if begin == 0:
                tile_zero(unit, 0)
                tile_zero(unit, 1)
                tile_zero(unit, 2)
                tile_zero(unit, 3)
            else:
                _move_sums(tile_load, unit, sums, both)
            for k in range(count + _AHEAD):
                if token == first_token and k < count:
                    packed = (begin + k) * 4 * STEP
                    _unpack(one + packed, other + packed, codes + k * 2 * SIZE, steps - (begin + k) * 4, 2 * steps * STEP)
                if k >= _AHEAD:
                    done = first + (k - _AHEAD) * SIZE
                    _multiply(unit, codes + (k - _AHEAD) * 2 * SIZE, done, done + tiles * SIZE if both else 0)
            _move_sums(tile_store, unit, sums, both)
            if begin + count == tiles:
                for i in range(0, min(_PAIR, end_token - token), TOKENS):
                    tile = load_tile(tile_i32(2, TOKENS), sums + i // ROWS * 2 * SIZE + i % ROWS * WIDTH, SIZE, WIDTH)
                    store_ternary(tile, 2, TOKENS, product, matrix, group, token + i, edge)
    tile_release(unit)


@parallel
def _arrange(team, q, memory, arranged, sums):
    own = memory.copy()
    for group in shared(team, -(-q.shape[0] // ROWS)):
        _arrange_group(own, q, group * ROWS, arranged, sums)


def arranged(q: NDArray[np.int8], memory: NDArray) -> tuple[NDArray[np.int8], NDArray[np.int32]]:  # [R, a multiple of 64]
    """The rows of q as `ternary_matmul` reads them, and the sum of each, on units like `memory`'s."""
    n, columns = q.shape
    tiles, sums = empty((-(-n // ROWS) * ROWS, columns), np.int8), empty((n + TOKENS,), np.int32)
    launch(_arrange, q.size // 4, q, memory, tiles, sums)  # one thread arranges 32 tokens sooner than others wake up
    return tiles, sums


@parallel
def ternary_matmul(team, codes, second, third, widths, factors, steps, q, scale, out, memory, arranged, sums):
    """As the kernels of ternary_product.py, for q [n, a multiple of 64], on units like `memory`'s."""
    n, columns = q.shape
    scales, inverse, moderate = with_reciprocals(scale)
    product = Product(codes, steps, q, scales, inverse, moderate, sums, out)
    parts = -(-n * columns // _SHARED)
    span = -(-n // (parts * _PAIR)) * _PAIR
    pairs = blocks_of(widths, _PAIR)
    room, edge, own = aligned(_ROOM + span * _PAIR * 4), np.empty(TOKENS * _PAIR, np.float32), memory.copy()
    for item in shared(team, -(-n // span) * pairs):
        matrix, block = matrix_of((codes, second, third), widths, factors, n, _PAIR, item % pairs)
        token = item // pairs * span
        _two_groups(own, room, edge, product, matrix, 2 * block, token, min(token + span, n), arranged)
