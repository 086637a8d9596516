"""Ternary matrices: their codes out of packed bytes, their products with a few tokens, and the results of sums."""

from collections.abc import Callable

from llvmlite import ir

from .byte_dots import add_four, broadcast_four, closed, own
from .emit import STEP, V16F32, V16I32, V32I16, V64I8, Emitter, Tile, constant, emitted, first

WORD_STEPS = 8
"""Steps of few tokens whose sums fit words: a word is at most 2 * 2 * 8 * 128 in a step, two planes of codes up to 8."""


def _places(b: Emitter) -> list[int]:
    """The lowest bits of the codes of each row of a tile of sums; planes take the rows in turn. Sums in words have two rows."""
    return [2, 0] if own(b).pairs else [0 if own(b).signed else 6, 4, 2, 0]


def _codes(b: Emitter, packed: ir.Value) -> list[ir.Value]:
    """The codes of each plane of packed bytes, times 2^place. Codes that stay in place take one instruction to unpack instead of two.

    A code of the first plane is then up to 128. That is still a byte, but NEON's bytes are signed. Where sums are words, codes are at most
    8, and one shift serves two planes.
    """
    if own(b).pairs:
        upper = b.bitcast(b.lshr(b.bitcast(packed, V32I16), 4), V64I8)  # x86 cannot shift bytes; the mask drops the bits that cross over
        return [b.and_(half, 3 << place) for half in (upper, packed) for place in _places(b)]
    return [b.and_(packed, 3 << 6 - 2 * plane) if place or plane else b.lshr(packed, 6) for plane, place in enumerate(_places(b))]


@emitted(returns=lambda tile: Tile("i32", 4 * tile.rows, tile.columns))
def open_planes(b, tile):
    """What `ternary_step` adds to, for the tile of sums to which `add_planes` adds it: a row for each plane, as few tokens need several
    chains of additions. Sums in words leave two rows of four unused.
    """
    return [constant(V16I32, None)] * (4 * len(tile))


@emitted(returns=first)
def ternary_step(b, sums, codes, start, stride, valid, x, x_start, x_stride, x_valid):
    """16 columns of packed weights (packing.py's order: 16 rows in the lanes) times 16 activations of each token.

    Groups of 16 rows lie `stride` bytes apart from codes[start] on.
    """
    rows = [b.clamped(x_start, x_stride, column, x_valid) for column in range(sums.columns)]
    fours = [[broadcast_four(b, x.at(b.add(row, 4 * plane))) for row in rows] for plane in range(4)]
    for group in range(sums.rows // 4):
        for plane, unpacked in enumerate(_codes(b, b.load(codes.at(b.clamped(start, stride, group, valid)), V64I8))):
            for column, four in enumerate(fours[plane]):
                i = (4 * group + plane % len(_places(b))) * sums.columns + column
                sums[i] = add_four(b, sums[i], unpacked, four)
    return sums


@emitted(returns=first)
def add_planes(b, tile, sums):
    """The tile plus the sums, a row of the matrix in each lane. Divisions are exact: lanes are multiples of 2^place."""
    for group in range(tile.rows):
        for row, place in enumerate(_places(b)):
            for column in range(tile.columns):
                i = group * tile.columns + column
                total = closed(b, sums[(4 * group + row) * tile.columns + column])
                tile[i] = b.add(tile[i], b.ashr(total, place))
    return tile


@emitted()
def unpack_codes(b, packed, codes, ahead):
    """Read 64 packed bytes at one address, and write their codes 0..2, 256 bytes, to another: plane after plane, 4 columns of 16 rows each.

    The cache line at packed + ahead is prefetched.
    """
    b.prefetch(b.pointer(b.add(packed, ahead)))
    register = b.load(b.pointer(packed), V64I8)
    for plane in range(4):
        shifted = b.lshr(b.bitcast(register, V32I16), 6 - 2 * plane)  # as in `_codes`
        b.store(b.and_(b.bitcast(shifted, V64I8), 3), b.pointer(codes, plane * STEP))


def _store_scaled(divide: Callable) -> Callable:
    def store_scaled(b, tile, sums, scale, inverse, token, factor, address, stride):
        factor = b.splat(factor, V16F32)
        for column in range(tile.columns):
            here = b.add(token, column)
            row_sum = b.splat(b.load(sums.at(here), V16I32.element), V16I32)
            row_scale, row_inverse = (b.splat(b.load(array.at(here), V16F32.element), V16F32) for array in (scale, inverse))
            row = b.place(address, stride, column)
            for group in range(tile.rows):
                total = b.sitofp(b.sub(tile[group * tile.columns + column], row_sum), V16F32)
                b.store(b.fmul(divide(b, total, row_scale, row_inverse), factor), b.pointer(row, STEP * group), align=4)

    return emitted()(store_scaled)


def _by_reciprocal(b: Emitter, x: ir.Value, y: ir.Value, inverse: ir.Value) -> ir.Value:
    """x / y, given 1 / y rounded to the nearest, with the bits of a division (Markstein, "IA-64 and elementary functions", 2000).

    For y in MODERATE and integers x. Proof, for magnitudes x and y in [1, 2), to which powers of two bring all others: the first product
    is less than 1.5 units in the last place from the quotient, so the corrected one, before its only rounding, differs from the quotient by
    less than 3.5 * 2^-48. A quotient of two float32 is never in the middle of two neighbouring float32. It is nearer to a middle than that
    only if x * 2^25 - y * m, in units of their last places and for an odd m, is less than 8 in magnitude. All these cases were tried.
    Nothing underflows: the remainder is a multiple of 2^-47 * x, and no integer but 0 is below 1.
    """
    product = b.fmul(x, inverse)
    return b.fma(b.fma(b.fneg(product), y, x), inverse, product)


# 16 float32 at address + j * stride + 64 * i = (tile[i, j] - sums[token + j]) / scale[token + j] * factor. Both have the same bits;
# `store_scaled_by_reciprocal` is faster, for scales in MODERATE and their reciprocals in `inverse`.
store_scaled = _store_scaled(lambda b, x, y, inverse: b.fdiv(x, y))
store_scaled_by_reciprocal = _store_scaled(_by_reciprocal)

MODERATE = 2.0**-60, 2.0**60
"""Between these a division of an integer by a scale can be a product with the scale's reciprocal, and a correction."""
