"""Products with ternary matrices on vectors, for calls of many tokens: codes are unpacked once for all of them."""

import numpy as np
from numba import prange

from .byte_dots import WORD_STEPS, close_sums, dot_sixteen, open_sums
from .launching import parallel, serial
from .processor import cpu_features, instruction_path
from .simd import LANES, STEP, load_tile, store_tile, tile_i32
from .ternary_product import Product, blocks_of, matrix_of, row_sums, store_ternary, with_reciprocals
from .ternary_simd import unpack_ordered
from .tiles import TOKENS
from .workspace import aligned

# groups of 16 weight rows, and tokens, of a tile: as many accumulators as registers hold beside what they multiply
_PATH = instruction_path()
_SHAPES = {"avx512-vnni": (4, 4), "avx512": (2, 4), "ssse3": (2, 1), "neon-i8mm": (1, 4), "neon-dotprod": (1, 4)}
_GROUPS, _TOKENS = _SHAPES.get(_PATH, (2, 2))

_VNNI_LEAST = 1 << 31 if "sse4a" in cpu_features() else 16
LEAST = {"avx512-vnni": _VNNI_LEAST, "avx512": 5}.get(_PATH, 3)
"""Tokens from which on this serves. For fewer, but at least three, AVX-512 has the way of ternary.py, which unpacks for every four of them:
AMD's processors, which alone have SSE4A, do so beside their byte dot products, others in their place."""


@serial
def _groups(product, matrix, group):
    """The results of _GROUPS groups of 16 weight rows. So many columns at a time are unpacked as sums in words allow."""
    n, stride, steps = product.q.shape[0], product.q.shape[1], product.steps
    size, present = _GROUPS * LANES, -(-matrix.width // LANES) - group
    room, edge = aligned(_GROUPS * WORD_STEPS * 4 * STEP), np.empty(_TOKENS * size, np.float32)
    sums = aligned((n + _TOKENS) * size * 4).view(np.int32)
    codes, totals = np.int64(room.ctypes.data), np.int64(sums.ctypes.data)
    for begin in range(0, steps, WORD_STEPS):
        count = min(WORD_STEPS, steps - begin)
        for i in range(_GROUPS):
            packed = product.codes.ctypes.data + matrix.begin + ((group + min(i, present - 1)) * steps + begin) * STEP
            for k in range(count):
                unpack_ordered(packed + k * STEP, codes + (i * WORD_STEPS + k) * 4 * STEP, count * STEP)
        for token in range(0, n, _TOKENS):
            tile, place = tile_i32(_GROUPS, _TOKENS), token * size
            if begin:
                tile = load_tile(tile, totals + place * 4, _TOKENS * STEP, STEP)
            part, x = open_sums(tile), token * stride + begin * LANES
            for k in range(count):
                part = dot_sixteen(
                    part, codes + k * 4 * STEP, WORD_STEPS * 4 * STEP, product.q, x + k * LANES, stride, min(_TOKENS, n - token)
                )
            tile = close_sums(tile, part)
            if begin + count < steps:
                store_tile(tile, sums, place, _TOKENS * LANES)
            else:
                store_ternary(tile, _GROUPS, _TOKENS, product, matrix, group, token, edge)


@parallel
def ternary_matmul(codes, second, third, widths, factors, steps, q, scale, out):
    """As the kernel of ternary.py."""
    n, size = q.shape[0], _GROUPS * LANES
    scales, inverse, moderate = with_reciprocals(scale)
    product = Product(codes, steps, q, scales, inverse, moderate, np.zeros(n + TOKENS, np.int32), out)
    row_sums(q, 0, n, product.sums)
    for item in prange(blocks_of(widths, size)):
        matrix, block = matrix_of((codes, second, third), widths, factors, n, size, np.int64(item))
        _groups(product, matrix, block * _GROUPS)
