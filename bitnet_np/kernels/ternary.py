"""int8 codes of activations, and their products with ternary matrices, which are exact sums of integers."""

import numpy as np
from numpy.typing import NDArray

from . import ternary_product, ternary_tiles
from .fast import amx
from .fast.emit import LANES, STEP
from .fast.simd import bits_float, prefetch, tile_i32
from .fast.ternary_steps import join_planes, ternary_step, ternary_step_apart
from .launching import Floats, inlined, launch, parallel, read_only, shared
from .scalar import round_half_even
from .sums import largest_bits
from .ternary_product import Product, blocks_of, matrix_of, row_sums, store_ternary, with_reciprocals
from .tiles import STREAM, TOKENS, WIDE
from .workspace import empty

_GROUPS = 4  # groups of 16 weight rows in a tile of few tokens

# --- codes of activations -------------------------------------------------------------------------------------------------------------


@parallel
def _quantize(team, x, codes, scale):
    for r in shared(team, x.shape[0]):
        row = x[r]
        largest = largest_bits(row)
        if largest >= 0x7F800000:
            scale[r] = np.nan
            for i in range(row.size):
                codes[r, i] = 0
        else:
            absmax = bits_float(largest)
            s = np.float32(127.0) / max(absmax, np.float32(1e-5))
            scale[r] = s
            for i in range(row.size):
                codes[r, i] = np.int8(round_half_even(np.float32(row[i] * s)))


def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:  # [R, M] -> [R, M] int8, [R] steps per unit
    """One scale per row, 127 / max(1e-5, absmax): the b1.58 papers' per-token absmax quantiser.

    This is a kernel of its own, not a part of the norm before it: without any quantising at all a token of the 2B model is decoded less
    than 1 % faster.
    """
    codes, scale = empty(x.shape, np.int8), empty(x.shape[:1])
    launch(_quantize, x.size, x, codes, scale)
    return codes, scale


# --- products with few tokens ---------------------------------------------------------------------------------------------------------


@inlined
def _ternary_tile(zeros, groups, tokens, product, matrix, group, token, edge):
    """The results from column 16 * `group` and from `token` on: 16 * groups columns by tokens, which is the shape of `zeros`.

    For AVX-512: other processors unpack codes once for all tokens.
    """
    codes, q, row = product.codes, product.q, product.steps * STEP
    n, present = min(groups, -(-matrix.width // LANES) - group), min(tokens, q.shape[0] - token)
    tile = zeros
    start, x = matrix.begin + group * row, token * q.shape[1]
    for _ in range(product.steps):
        if token == 0:  # ask for the groups that come next: several streams at once are more than the processor foresees
            for i in range(groups):
                prefetch(codes, start + (groups + i) * row)
        tile = ternary_step(tile, codes, start, row, n, q, x, q.shape[1], present)
        start += STEP
        x += LANES
    store_ternary(tile, groups, tokens, product, matrix, group, token, edge)


@inlined
def _ternary_tile_apart(zeros, tokens, product, matrix, group, edge):
    """As `_ternary_tile` for one group and a call of one or two tokens: the weights are one stream of memory, read once and in order."""
    codes, q = product.codes, product.q
    tile = zeros
    start, x = matrix.begin + group * product.steps * STEP, 0
    for _ in range(product.steps):
        prefetch(codes, start + STREAM)
        tile = ternary_step_apart(tile, codes, start, 0, 1, q, x, q.shape[1], tokens)
        start += STEP
        x += LANES
    store_ternary(join_planes(tile), 1, tokens, product, matrix, group, 0, edge)


@parallel
def _ternary_matmul(team, codes, second, third, widths, factors, steps, q, scale, out):
    n = q.shape[0]
    size = LANES if n <= 2 else _GROUPS * LANES
    scales, inverse, moderate = with_reciprocals(scale)
    product = Product(codes, steps, q, scales, inverse, moderate, np.zeros(n + TOKENS, np.int32), out)
    row_sums(q, 0, n, product.sums)
    edge = np.empty(TOKENS * _GROUPS * LANES, np.float32)
    for item in shared(team, blocks_of(widths, size)):
        matrix, block = matrix_of((codes, second, third), widths, factors, n, size, item)
        if n == 1:
            _ternary_tile_apart(tile_i32(4, 1), 1, product, matrix, block, edge)
        elif n == 2:
            _ternary_tile_apart(tile_i32(4, 2), 2, product, matrix, block, edge)
        elif WIDE:
            for token in range(0, n, TOKENS):
                _ternary_tile(tile_i32(_GROUPS, TOKENS), _GROUPS, TOKENS, product, matrix, block * _GROUPS, token, edge)


# --- products -------------------------------------------------------------------------------------------------------------------------


def ternary_matmuls(q: NDArray[np.int8], scale: Floats, *matrices: tuple[NDArray[np.uint8], np.float32, int]) -> list[Floats]:
    # [R, M] int8, [R], (packed [N, M] (packing.py), scale, N) each -> [R, N] each
    """Products with up to three matrices that read the same input: exact integers, then (sum - row sum) / scale * w_scale in float32.

    The row sum is there because codes of weights count 0, 1, 2. One call for three matrices, because threads that start and wait for each
    other cost as much as a small matrix.
    """
    rows, m = q.shape
    steps = -(-m // LANES)
    unit = amx.unit() if rows >= ternary_tiles.LEAST else None
    if short := -m % (LANES if unit is None else amx.WIDTH):
        q = np.concatenate([q, np.zeros((rows, short), np.int8)], axis=1)
    absent = matrices[0][0], np.float32(0), 0
    (a, f, i), (b, g, j), (c, h, k) = (*matrices, absent, absent)[:3]
    out = empty((rows * (i + j + k),))
    work = out.size * q.shape[1] // 64
    arguments = read_only(a), read_only(b), read_only(c), (i, j, k), (f, g, h), steps, q, scale, out
    if unit is None:
        launch(ternary_product.ternary_matmul if rows >= ternary_product.LEAST else _ternary_matmul, work, *arguments)
    else:
        launch(ternary_tiles.ternary_matmul, work, *arguments, unit, *ternary_tiles.arranged(q, unit))
    ends = 0, rows * i, rows * (i + j), rows * (i + j + k)
    return [out[ends[n] : ends[n + 1]].reshape(rows, matrix[2]) for n, matrix in enumerate(matrices)]


def ternary_matmul(q: NDArray[np.int8], scale: Floats, codes: NDArray[np.uint8], w_scale: np.float32, width: int) -> Floats:
    # [R, M] int8, [R], packed [N, M], N -> [R, N]
    """`ternary_matmuls` for one matrix."""
    return ternary_matmuls(q, scale, (codes, w_scale, width))[0]
