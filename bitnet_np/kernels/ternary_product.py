"""Products with ternary matrices on vectors, and what matrix tiles (ternary_tiles.py) share with them: arrays, and how results are stored.

For few tokens, codes are unpacked in registers; for many, they are unpacked once for all.
"""

from typing import Any, NamedTuple

import numpy as np

from .fast import ternary_steps
from .fast.byte_dots import PATHS, WORD_STEPS, close_sums, dot_sixteen, open_sums
from .fast.emit import LANES, STEP, has_fma
from .fast.simd import address_of, load_tile, prefetch, store_tile, tile_i32
from .fast.ternary_steps import MODERATE, add_planes, open_planes, store_scaled, store_scaled_by_reciprocal, ternary_step, unpack_codes
from .launching import inlined, parallel, rule, serial, shared
from .processor import instruction_path, is_amd, is_zen_5
from .tiles import STREAM, STREAMS, TOKENS, WIDE
from .workspace import aligned

_LEAST_DIVISOR, _MOST_DIVISOR = MODERATE if has_fma() else (np.inf, -np.inf)  # none
_PATH = PATHS[instruction_path()]
_GROUPS, _TOKENS = _PATH.tile  # groups of 16 weight rows, and tokens, of a tile of many tokens
_STEPS = ternary_steps.WORD_STEPS if _PATH.pairs else 1 << 31 if STREAMS == 1 else 16  # of few tokens until it is another stream's turn
_BESIDE = STREAMS if WIDE else 1  # streams that take turns together, of one token: their sums, four for each, fit the registers
_BESIDE_TWO = -(-_BESIDE // 2)  # of two tokens

_NEVER = 1 << 31  # more tokens than there are
_LEAST_VNNI = 16 if not is_amd() else 24 if is_zen_5() else _NEVER
LEAST = {"avx512-vnni": _LEAST_VNNI, "avx512": 5}.get(instruction_path(), 3)
"""From this many tokens on, codes are unpacked once for all of them. For fewer, but at least three, AVX-512 unpacks once for every four.
Zen 4 unpacks in parallel with its byte dot products. On Intel's processors, unpacking takes the place of dot products, and on Zen 5, which
does twice as many of them, reading the activations of four tokens for each group of rows takes as long."""


class Product(NamedTuple):
    """The arrays of a product with up to three matrices.

    A tile reads scales and sums of TOKENS tokens from its first on, however many there are: they are that much longer than n.
    """

    codes: Any  # packed (packing.py), of the first matrix; offsets from it lead to the others
    steps: Any  # steps of LANES columns of the weights: 16 rows have STEP bytes for each
    q: Any  # [n, at least steps * LANES] int8
    scale: Any  # [n + TOKENS]
    inverse: Any  # [n + TOKENS], 1 / scale
    moderate: Any  # whether `inverse` can be used
    sums: Any  # [n + TOKENS] int32, of the rows of q, to be filled in
    out: Any  # flat, of all matrices


class Matrix(NamedTuple):
    """One matrix of a product."""

    begin: Any  # offset of its codes from the first matrix's
    factor: Any  # the scale of its weights
    place: Any  # offset of its results [n, width] in `out`
    width: Any  # its rows, which are columns of its results


@serial
def row_sums(q, first, end, sums):
    for r in range(first, end):
        row, total = q[r], np.int32(0)
        for i in range(row.size):
            total = np.int32(total + row[i])
        sums[r] = total


@serial
def with_reciprocals(scale):
    """The scales and their reciprocals, TOKENS longer, and whether the reciprocals can be used."""
    padded, inverse = np.empty(scale.size + TOKENS, np.float32), np.empty(scale.size + TOKENS, np.float32)
    moderate = True
    for i in range(padded.size):
        padded[i] = scale[min(i, scale.size - 1)]
        inverse[i] = np.float32(1) / padded[i]
        moderate &= _LEAST_DIVISOR <= padded[i] <= _MOST_DIVISOR
    return padded, inverse, moderate


@rule
def blocks_of(widths, size):
    """The number of blocks of `size` columns into which three matrices are cut, one matrix after another."""
    return -(-widths[0] // size) - (-widths[1] // size) - (-widths[2] // size)


@serial
def block_of(widths, size, block):
    """The number of the matrix that a block belongs to, the block's number in it, and the columns of the matrices before it."""
    which, before = 0, 0
    while block * size >= widths[which]:
        block -= -(-widths[which] // size)
        before += widths[which]
        which += 1
    return which, block, before


@serial
def matrix_of(codes, widths, factors, n, size, block):
    """The matrix that a block belongs to, of three with these codes, and the block's number in it. The product has n tokens."""
    which, block, before = block_of(widths, size, block)
    begin = address_of(codes[which]) - address_of(codes[0])  # three arrays as if they were one
    return Matrix(begin, factors[which], n * before, widths[which]), block


@inlined
def store_ternary(tile, groups, tokens, product, matrix, group, token, edge):
    """Store a finished tile. One that does not lie wholly inside the matrix's results is stored in `edge` and copied from there."""
    column, start, width = group * LANES, matrix.place + token * matrix.width, matrix.width
    columns, rows = min(groups * LANES, width - column), min(tokens, product.q.shape[0] - token)
    inside = columns == groups * LANES and rows == tokens
    address = address_of(product.out) + (start + column) * 4 if inside else address_of(edge)
    stride = width * 4 if inside else groups * LANES * 4
    if product.moderate:
        store_scaled_by_reciprocal(tile, product.sums, product.scale, product.inverse, token, matrix.factor, address, stride)
    else:
        store_scaled(tile, product.sums, product.scale, product.inverse, token, matrix.factor, address, stride)
    if not inside:
        for j in range(rows):
            for i in range(columns):
                product.out[start + j * width + column + i] = edge[j * groups * LANES + i]


# --- few tokens -----------------------------------------------------------------------------------------------------------------------


@inlined
def _some_tokens(zeros, one, beside, tokens, product, matrix, block, token, sums, edge):
    """The results of STREAMS groups of 16 weight rows for `tokens` tokens. Each group is one stream of memory, read in order.

    zeros: a tile of `beside` groups, whose sums are in registers at once; one: of one group.
    """
    codes, q, steps, present = product.codes, product.q, product.steps, min(tokens, product.q.shape[0] - token)
    groups = -(-matrix.width // LANES)
    distance = -(-groups // STREAMS)  # from a group to the next: streams that lie close together are read no faster than one
    streams, row = -(-(groups - block) // distance), q.shape[1]
    for begin in range(0, steps, _STEPS):
        for stream in range(0, streams, beside):
            start, x = matrix.begin + ((block + stream * distance) * steps + begin) * STEP, token * row + begin * LANES
            part = open_planes(zeros)
            for _ in range(min(_STEPS, steps - begin)):
                for i in range(beside):
                    prefetch(codes, start + i * distance * steps * STEP + STREAM)
                part = ternary_step(part, codes, start, distance * steps * STEP, streams - stream, q, x, row, present)
                start += STEP
                x += LANES
            place = stream * tokens * LANES
            tile = load_tile(zeros, address_of(sums) + place * 4, tokens * STEP, STEP) if begin else zeros
            store_tile(add_planes(tile, part), sums, place, tokens * LANES)
    for stream in range(streams):
        tile = load_tile(one, address_of(sums) + stream * tokens * STEP, 0, STEP)
        store_ternary(tile, 1, tokens, product, matrix, block + stream * distance, token, edge)


@parallel
def few_tokens(team, codes, second, third, widths, factors, steps, q, scale, out):
    n, edge, sums = q.shape[0], np.empty(TOKENS * LANES, np.float32), np.empty(STREAMS * TOKENS * LANES, np.int32)
    scales, inverse, moderate = with_reciprocals(scale)
    product = Product(codes, steps, q, scales, inverse, moderate, np.zeros(n + TOKENS, np.int32), out)
    row_sums(q, 0, n, product.sums)
    for item in shared(team, blocks_of(widths, STREAMS * LANES)):
        matrix, block = matrix_of((codes, second, third), widths, factors, n, STREAMS * LANES, item)
        if n == 1:
            _some_tokens(tile_i32(_BESIDE, 1), tile_i32(1, 1), _BESIDE, 1, product, matrix, block, 0, sums, edge)
        elif n == 2:
            _some_tokens(tile_i32(_BESIDE_TWO, 2), tile_i32(1, 2), _BESIDE_TWO, 2, product, matrix, block, 0, sums, edge)
        elif WIDE:  # elsewhere LEAST is 3
            for token in range(0, n, TOKENS):
                _some_tokens(tile_i32(1, TOKENS), tile_i32(1, TOKENS), 1, TOKENS, product, matrix, block, token, sums, edge)


# --- many tokens ----------------------------------------------------------------------------------------------------------------------


@serial
def _groups(product, matrix, group, room, sums, edge):
    """The results of _GROUPS groups of 16 weight rows. So many columns at a time are unpacked, to `room`, as sums in words allow."""
    n, stride, steps = product.q.shape[0], product.q.shape[1], product.steps
    size, present = _GROUPS * LANES, -(-matrix.width // LANES) - group
    codes, totals, weights = address_of(room), address_of(sums), address_of(product.codes) + matrix.begin
    for begin in range(0, steps, WORD_STEPS):
        count = min(WORD_STEPS, steps - begin)
        for i in range(_GROUPS):
            packed = weights + ((group + min(i, present - 1)) * steps + begin) * STEP
            for k in range(count):
                unpack_codes(packed + k * STEP, codes + (i * WORD_STEPS + k) * 4 * STEP, count * STEP)
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
def many_tokens(team, codes, second, third, widths, factors, steps, q, scale, out):
    n, size = q.shape[0], _GROUPS * LANES
    scales, inverse, moderate = with_reciprocals(scale)
    product = Product(codes, steps, q, scales, inverse, moderate, np.zeros(n + TOKENS, np.int32), out)
    row_sums(q, 0, n, product.sums)
    room, edge = aligned(_GROUPS * WORD_STEPS * 4 * STEP), np.empty(_TOKENS * size, np.float32)
    sums = aligned((n + _TOKENS) * size * 4).view(np.int32)
    for item in shared(team, blocks_of(widths, size)):
        matrix, block = matrix_of((codes, second, third), widths, factors, n, size, item)
        _groups(product, matrix, block * _GROUPS, room, sums, edge)
