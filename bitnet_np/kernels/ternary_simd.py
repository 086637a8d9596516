"""Typed SIMD for ternary matrices: their codes out of packed bytes, their products with a few tokens, and the results of sums."""

from collections.abc import Callable
from functools import partial

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import simd
from .byte_dots import SIGNED, broadcast_four, dot_bytes, ordered
from .simd import (
    I8,
    LANES,
    STEP,
    V16F32,
    V16I32,
    V32I16,
    V64I8,
    Tile,
    _address,
    _at,
    _clamped,
    _fma,
    _load,
    _pack,
    _prefetch,
    _splat,
    _unpack,
)


def _code_plane(builder: ir.IRBuilder, path: str, packed: ir.Value, plane: int) -> tuple[ir.Value, int]:
    """Codes of one plane of packed bytes, times 2^n, and n. Codes that stay in place take one instruction to unpack instead of two.

    A code of the first plane is then up to 128. That is still a byte, and two products with 127 still fit the 16 bits of AVX2's and SSE's
    pair sums, but NEON's bytes are signed.
    """
    place = 6 - 2 * plane
    if plane == 0 and path in SIGNED:
        return builder.lshr(packed, ir.Constant(V64I8, [place] * STEP)), 0
    return builder.and_(packed, ir.Constant(V64I8, [3 << place] * STEP)), place


def _code(builder: ir.IRBuilder, packed: ir.Value, plane: int) -> ir.Value:
    """Codes 0..2 of one plane of packed bytes. x86 cannot shift bytes; the mask drops the bits that cross from one to another."""
    shifted = builder.lshr(builder.bitcast(packed, V32I16), ir.Constant(V32I16, [6 - 2 * plane] * 32))
    return builder.and_(builder.bitcast(shifted, V64I8), ir.Constant(V64I8, [3] * STEP))


def _ternary_step(apart: bool) -> Callable:
    @intrinsic
    def ternary_step(typing_context, tile, codes, start, stride, valid, x, x_start, x_stride, x_valid):
        def codegen(context, builder, signature, args):
            tile, codes_array, x_array = signature.args[0], signature.args[1], signature.args[5]
            value, codes, start, stride, valid, x, x_start, x_stride, x_valid = args
            path = simd.instruction_path()
            groups = tile.rows // 4 if apart else tile.rows
            packed = [
                _load(builder, _address(context, builder, codes_array, codes, _clamped(builder, start, stride, g, valid)), V64I8)
                for g in range(groups)
            ]
            rows = [_clamped(builder, x_start, x_stride, column, x_valid) for column in range(tile.columns)]
            sums = _unpack(builder, tile, value)
            for plane in range(4):
                if apart:
                    unpacked = [_code_plane(builder, path, register, plane)[0] for register in packed]
                else:
                    unpacked = [_code(builder, register, plane) for register in packed]
                for column, row in enumerate(rows):
                    offset = builder.add(row, ir.Constant(row.type, 4 * plane))
                    activations = broadcast_four(builder, _address(context, builder, x_array, x, offset))
                    for group in range(groups):
                        i = ((4 * group + plane) if apart else group) * tile.columns + column
                        sums[i] = dot_bytes(builder, path, sums[i], unpacked[group], activations)
            return _pack(builder, value, sums)

        n = types.intp
        return tile(tile, codes, n, n, n, x, n, n, n), codegen

    return ternary_step


# 16 columns of packed weights (packing.py's order: 16 rows in the lanes) times 16 activations of each token:
# tile[i, j] += group i of 16 rows, 64 bytes from start + i * stride, times x[x_start + j * x_stride :][:16], one row's sum in each lane.
# The tile of `ternary_step_apart` has four rows of registers for each group, one for each plane, which `join_planes` adds at the end. It
# needs no shifts, and makes four chains of additions where one token and one group would make only one.
ternary_step = _ternary_step(apart=False)
ternary_step_apart = _ternary_step(apart=True)


@intrinsic
def join_planes(typing_context, tile):
    """A tile of `ternary_step_apart` -> the tile that `ternary_step` makes. Divisions are exact: lanes are multiples of the plane's 2^n."""
    joined = Tile("i32", tile.rows // 4, tile.columns)

    def codegen(context, builder, signature, args):
        registers, path = _unpack(builder, tile, args[0]), simd.instruction_path()
        sums = []
        for i in range(joined.count):
            group, column = divmod(i, tile.columns)
            total = ir.Constant(V16I32, None)
            for plane in range(4):
                place = _code_plane(builder, path, ir.Constant(V64I8, None), plane)[1]
                register = registers[(4 * group + plane) * tile.columns + column]
                total = builder.add(total, builder.ashr(register, ir.Constant(V16I32, [place] * LANES)))
            sums.append(total)
        return _pack(builder, ir.Constant(context.get_value_type(joined), None), sums)

    return joined(tile), codegen


def _unpack_codes(order: Callable) -> Callable:
    @intrinsic
    def unpack_codes(typing_context, packed, codes, ahead):
        def codegen(context, builder, signature, args):
            packed, codes, ahead = args
            _prefetch(builder, _at(builder, builder.add(packed, ahead), I8))
            register = _load(builder, _at(builder, packed, I8), V64I8)
            for k, part in enumerate(order(builder, [_code(builder, register, plane) for plane in range(4)])):
                builder.store(part, _at(builder, builder.add(codes, ir.Constant(codes.type, k * STEP)), V64I8), align=1)
            return context.get_dummy_value()

        n = types.intp
        return types.none(n, n, n), codegen

    return unpack_codes


# Read 64 packed bytes at one address, and write their codes 0..2, 256 bytes, to another: plane after plane, 4 columns of 16 rows each, or
# as `dot_sixteen` reads them. The cache line at packed + ahead is prefetched.
unpack_codes = _unpack_codes(lambda builder, planes: planes)
unpack_ordered = _unpack_codes(ordered)


def _store_scaled(divide: Callable) -> Callable:
    @intrinsic
    def store_scaled(typing_context, tile, sums, scale, inverse, token, factor, address, stride):
        def codegen(context, builder, signature, args):
            tile, *arrays = signature.args[:4]
            value, *values, token, factor, address, stride = args
            registers = _unpack(builder, tile, value)
            factor = _splat(builder, factor, V16F32)
            for column in range(tile.columns):
                here = builder.add(token, ir.Constant(token.type, column))
                numbers = [builder.load(_address(context, builder, *array, here)) for array in zip(arrays, values, strict=True)]
                row_sum, row_scale, row_inverse = map(partial(_splat, builder), numbers, (V16I32, V16F32, V16F32))
                row = builder.add(address, builder.mul(stride, ir.Constant(stride.type, column)))
                for group in range(tile.rows):
                    total = builder.sitofp(builder.sub(registers[group * tile.columns + column], row_sum), V16F32)
                    scaled = builder.fmul(divide(builder, total, row_scale, row_inverse), factor)
                    builder.store(scaled, _at(builder, builder.add(row, ir.Constant(row.type, STEP * group)), V16F32), align=4)
            return context.get_dummy_value()

        n = types.intp
        return types.none(tile, sums, scale, inverse, n, types.float32, n, n), codegen

    return store_scaled


def _by_reciprocal(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, inverse: ir.Value) -> ir.Value:
    """a / b, given 1 / b rounded to the nearest, with the bits of a division (Markstein, "IA-64 and elementary functions", 2000).

    For b in MODERATE and integers a. Proof, for magnitudes a and b in [1, 2), to which powers of two bring all others: the first product
    is less than 1.5 units in the last place from the quotient, so the corrected one, before its only rounding, differs from the quotient by
    less than 3.5 * 2^-48. A quotient of two float32 is never in the middle of two neighbouring float32. It is nearer to a middle than that
    only if a * 2^25 - b * m, in units of their last places and for an odd m, is less than 8 in magnitude. All these cases were tried.
    Nothing underflows: the remainder is a multiple of 2^-47 * a, and no integer but 0 is below 1.
    """
    first = builder.fmul(a, inverse)
    return _fma(builder, _fma(builder, builder.fneg(first), b, a), inverse, first)


# 16 float32 at address + j * stride + 64 * i = (tile[i, j] - sums[token + j]) / scale[token + j] * factor. Both have the same bits;
# `store_scaled_by_reciprocal` is faster, for scales in MODERATE and their reciprocals in `inverse`.
store_scaled = _store_scaled(lambda builder, a, b, inverse: builder.fdiv(a, b))
store_scaled_by_reciprocal = _store_scaled(_by_reciprocal)

MODERATE = 2.0**-60, 2.0**60
"""Between these a division of an integer by a scale can be a product with the scale's reciprocal, and a correction."""
