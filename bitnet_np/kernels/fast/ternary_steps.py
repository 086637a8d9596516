"""Ternary matrices: their codes out of packed bytes, their products with a few tokens, and the results of sums."""

from collections.abc import Callable
from functools import reduce

from llvmlite import ir

from .byte_dots import broadcast_four, dot_bytes, own
from .emit import STEP, V16F32, V16I32, V32I16, V64I8, Emitter, Tile, emitted, first


def _place(b: Emitter, plane: int) -> int:
    """The lowest bit of the codes that `_code_in_place` leaves."""
    return 0 if plane == 0 and own(b).signed else 6 - 2 * plane


def _code_in_place(b: Emitter, packed: ir.Value, plane: int) -> ir.Value:
    """Codes of one plane of packed bytes, times 2^`_place`. Codes that stay in place take one instruction to unpack instead of two.

    A code of the first plane is then up to 128. That is still a byte, and two products with 127 still fit the 16 bits of AVX2's and SSE's
    pair sums, but NEON's bytes are signed.
    """
    return b.and_(packed, 3 << 6 - 2 * plane) if _place(b, plane) or plane else b.lshr(packed, 6)


@emitted(returns=first)
def ternary_step(b, tile, codes, start, x, x_start, x_stride, x_valid):
    """16 columns of packed weights (packing.py's order: 16 rows in the lanes) times 16 activations of each token.

    The tile has a row of registers for each plane of codes: no codes are shifted, and few tokens make several chains of additions.
    `join_planes` adds them at the end.
    """
    packed = b.load(codes.at(start), V64I8)
    rows = [b.clamped(x_start, x_stride, column, x_valid) for column in range(tile.columns)]
    for plane in range(4):
        unpacked = _code_in_place(b, packed, plane)
        for column, row in enumerate(rows):
            i = plane * tile.columns + column
            tile[i] = dot_bytes(b, tile[i], unpacked, broadcast_four(b, x.at(b.add(row, 4 * plane))))
    return tile


@emitted(returns=lambda tile: Tile("i32", 1, tile.columns))
def join_planes(b, tile):
    """The sums of a tile of `ternary_step`, a row of the matrix in each lane. Divisions are exact: lanes are multiples of a plane's 2^n."""
    planes = [b.ashr(register, _place(b, i // tile.columns)) for i, register in enumerate(tile)]
    return [reduce(b.add, planes[column :: tile.columns]) for column in range(tile.columns)]


@emitted()
def unpack_codes(b, packed, codes, ahead):
    """Read 64 packed bytes at one address, and write their codes 0..2, 256 bytes, to another: plane after plane, 4 columns of 16 rows each.

    The cache line at packed + ahead is prefetched.
    """
    b.prefetch(b.pointer(b.add(packed, ahead)))
    register = b.load(b.pointer(packed), V64I8)
    for plane in range(4):
        shifted = b.lshr(b.bitcast(register, V32I16), 6 - 2 * plane)  # x86 cannot shift bytes; the mask drops the bits that cross over
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
