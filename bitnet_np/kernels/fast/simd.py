"""Vector registers for kernels: one number, rows of numbers, and tiles of dot products.

A kernel is written once, on logical registers of 512 bits. LLVM finds most instructions. Those it does not find are named for each
instruction set: byte dot products in byte_dots.py, table look-ups in block_codes.py and block_floats.py, tiles in amx.py. Integer sums are
exact and float steps are lane by lane, so every processor gives the same bits.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import emit
from .emit import F32, F64, I32, I64, LANES, V16F32, V16HALF, V16I16, V16I32, Emitter, Place, Tile, constant, emitted, first

# --- tiles and memory -----------------------------------------------------------------------------------------------------------------


def _new_tile(kind: str) -> Callable:
    def new_tile(b, rows, columns):
        return [constant({"f32": V16F32, "i32": V16I32}[kind], None)] * (rows * columns)

    return emitted(lambda rows, columns: Tile(kind, rows.literal_value, columns.literal_value), literal=True)(new_tile)


tile_f32 = _new_tile("f32")  # tile_f32(rows, columns): all zeros
tile_i32 = _new_tile("i32")


# Numba counts references to an array at every call that is given it, and a count costs as much as a small tile. So loops take a pointer to
# its numbers, or their address. Numba frees an array after its last use by name, whatever points to it: only a parameter lives until its
# function returns, because the caller holds it. So only of a parameter are these taken, which a test of all kernels sees to.


@intrinsic
def pointer_to(typing_context, parameter):
    """A pointer to the numbers of an array, which is a parameter of the calling function. Functions here take it in the array's place."""

    def codegen(context, builder, signature, args):
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(parameter.dtype)(parameter), codegen


@intrinsic
def address_of(typing_context, parameter):
    """The address of the first number of an array, which is a parameter of the calling function."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, I64)

    return types.int64(parameter), codegen


@emitted()
def prefetch(b, array, offset):
    """Ask for the cache line that holds array[offset]; past the end is allowed."""
    b.prefetch(array.at(offset))


@emitted()
def prefetch_line(b, address):
    """Ask for the cache line at an address; any address is allowed."""
    b.prefetch(b.pointer(address))


@emitted()
def store_tile(b, tile, out, start, stride):
    """out[start + row * stride + 16 * column :][:16] = the tile's lanes."""
    for i, register in enumerate(tile):
        row, column = divmod(i, tile.columns)
        b.store(register, out.at(b.place(start, stride, row, column * LANES)), align=4)


@emitted(returns=first)
def load_tile(b, tile, address, row_stride, column_stride):
    """tile[i, j] = the 64 bytes at address + i * row_stride + j * column_stride."""
    places = (divmod(i, tile.columns) for i in range(len(tile)))
    return [b.load(b.pointer(b.place(b.place(address, row_stride, i), column_stride, j)), tile.vector) for i, j in places]


def load_floats(b: Emitter, array: Place, offset: ir.Value, mask: ir.Value | None) -> ir.Value:
    """16 numbers of an array of float32, int16 (float16's bits) or uint16 (bfloat16's), widened exactly; masked ones are 0."""
    vector = V16F32 if array.dtype == types.float32 else V16I16
    bits = b.load(array.at(offset), vector) if mask is None else b.load_masked(array.at(offset), vector, mask)
    if array.dtype == types.float32:
        return bits
    if array.dtype == types.uint16:
        return b.bitcast(b.shl(b.zext(bits, V16I32), 16), V16F32)
    return widened_half(b, bits)


def widened_half(b: Emitter, bits: ir.Value) -> ir.Value:
    """16 float16 numbers, given by their bits, as float32."""
    if emit.converts_half():
        return b.fpext(b.bitcast(bits, V16HALF), V16F32)
    # The same in integers: shift exponent and fraction into place, and correct the exponent by a product with 2^112 (subnormals included),
    # except an exponent of all ones, which stands for infinity and NaN.
    wide = b.zext(bits, V16I32)
    sign = b.shl(b.and_(wide, 0x8000), 16)
    rest = b.shl(b.and_(wide, 0x7FFF), 13)
    scaled = b.fmul(b.bitcast(rest, V16F32), 2.0**112)
    special = b.icmp_unsigned(">=", rest, constant(V16I32, 0x0F800000))
    return b.bitcast(b.or_(b.select(special, b.or_(rest, 0x7F800000), b.bitcast(scaled, V16I32)), sign), V16F32)


@emitted()
def widen(b, source, start, count, out, position):
    """out[position :][:count] = source[start :][:count], which are float32, or bits of float16 (int16) or bfloat16 (uint16).

    The count is at most 16. A -0 becomes +0.
    """
    mask = b.mask(count)
    b.store_masked(b.fadd(load_floats(b, source, start, mask), 0.0), out.at(position), mask)


# --- one number -----------------------------------------------------------------------------------------------------------------------


@emitted(returns=types.float32, takes=types.float32)
def fma(b, x, y, z):
    """x * y + z in float32, rounded once."""
    return b.fma(x, y, z)


def polynomial(coefficients: Sequence[np.float32]) -> Callable:
    """A function of x: the polynomial with these coefficients in float32, the lowest first, by Horner's rule in fused steps."""

    def horner(b, x):
        return reduce(lambda so_far, number: b.fma(so_far, x, number), [constant(F32, float(number)) for number in reversed(coefficients)])

    return emitted(returns=types.float32, takes=types.float32)(horner)


@emitted(returns=types.float64, takes=types.float64)
def multiply_add(b, x, y, z):
    """x * y + z in float64, fused where that is fast. Only for exact products, which fusing does not change.

    The product of two float32 is exact: it has 48 bits and an exponent within float64's range.
    """
    return b.named("llvm.fmuladd.f64", F64, x, y, z)


@emitted(returns=types.int32, takes=types.float32)
def float_bits(b, x):
    """The 32 bits of a float32, as an int32."""
    return b.bitcast(x, I32)


@emitted(returns=types.float32, takes=types.int32)
def bits_float(b, bits):
    """The float32 that has these 32 bits."""
    return b.bitcast(bits, F32)


@emitted(returns=types.float32, takes=types.float32)
def times_power_of_two(b, x, magic):
    """x * 2^n for n in -300..300, rounded once, where magic = n + 1.5 * 2^23 holds n in its low bits.

    It multiplies by two exact powers of two, because one would leave float32's range before the product does.
    """
    n = b.sub(b.bitcast(magic, I32), 0x4B400000)
    half = b.ashr(n, 1)
    for exponent in (half, b.sub(n, half)):
        x = b.fmul(x, b.bitcast(b.shl(b.add(exponent, 127), 23), F32))
    return x


# --- sums over lanes ------------------------------------------------------------------------------------------------------------------


def _over_lanes(b: Emitter, registers: list[ir.Value], combine: Callable) -> list[ir.Value]:
    """16 lanes of each register combined by halving (i with i+8, i+4, i+2, i+1): a lane of the results for each, 16 registers at a time."""
    return folded(b, registers + [constant(registers[0].type, None)] * (-len(registers) % LANES), (16, 8, 4, 2), combine)


def folded(b: Emitter, registers: Sequence[ir.Value], widths: Sequence[int], combine: Callable) -> list[ir.Value]:
    """The lower halves of each `width` lanes of two neighbours combined with the upper halves, in one register; width after width.

    Four rounds sum up 16 lanes of 16 registers by 15 additions.
    """
    for width in widths:
        lower = [lane + i for lane in range(0, 2 * LANES, width) for i in range(width // 2)]
        upper = [lane + width // 2 for lane in lower]
        pairs = zip(registers[::2], registers[1::2], strict=True)
        registers = [combine(b, b.shuffled(x, lower, y), b.shuffled(x, upper, y)) for x, y in pairs]
    return list(registers)


def total(b: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    return (b.add if x.type == V16I32 else b.fadd)(x, y)


def _larger(b: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger float32 of each lane; x where y is NaN."""
    return b.select(b.fcmp_ordered(">", y, x), y, x)


@emitted()
def store_sums(b, tile, out):
    """out[row * columns + column] = the sum of that register's lanes, never -0. `out` has room for the tile's count, rounded up to 16."""
    for i, sums in enumerate(_over_lanes(b, tile, total)):
        b.store(total(b, sums, constant(sums.type, None)), out.at(i * LANES), align=4)


@emitted()
def store_products(b, tile, factor, out, start, stride):
    """out[start + column * stride + row] = the sum of register (row, column)'s lanes, never -0, times factor. For full tiles only."""
    by_column = [tile[row * tile.columns + column] for column in range(tile.columns) for row in range(tile.rows)]
    factor = b.splat(factor, V16F32)
    products = [b.fmul(b.fadd(sums, 0.0), factor) for sums in _over_lanes(b, by_column, total)]
    for column in range(tile.columns):
        lanes = [column * tile.rows + row for row in range(tile.rows)]
        register = lanes[0] // LANES  # which the next one follows, if lanes go on in it
        part = b.shuffled(products[register], [lane - register * LANES for lane in lanes], products[lanes[-1] // LANES])
        b.store(part, out.at(b.place(start, stride, column)), align=4)


def _store_over_rows(least: float, combine: Callable) -> Callable:
    def store_over_rows(b, tile, out, start):
        rows = [tile[row * tile.columns : (row + 1) * tile.columns] for row in range(tile.rows)]
        (combined,) = _over_lanes(b, [reduce(partial(combine, b), row, constant(V16F32, least)) for row in rows], combine)
        b.store(b.shuffled(combined, range(tile.rows)), out.at(start), align=4)

    return emitted()(store_over_rows)


# out[start + row] = the sum of all numbers of a row of the tile by the lane rule, or the largest that is no NaN; for 16 rows at most
store_row_sums = _store_over_rows(0.0, total)
store_row_maxima = _store_over_rows(-math.inf, _larger)


# --- products of floats ---------------------------------------------------------------------------------------------------------------


def _dot_step(masked: bool) -> Callable:
    def dot_step(b, tile, w, w_start, w_stride, w_valid, x, x_start, x_stride, x_valid, count):
        mask = b.mask(count) if masked else None
        rows = [load_floats(b, w, b.clamped(w_start, w_stride, i, w_valid), mask) for i in range(tile.rows)]
        for column in range(tile.columns):
            other = load_floats(b, x, b.clamped(x_start, x_stride, column, x_valid), mask)
            for row in range(tile.rows):
                i = row * tile.columns + column
                tile[i] = b.fma(rows[row], other, tile[i])
        return tile

    return emitted(returns=first)(dot_step)


# tile[i, j] += w[w_start + i * w_stride :][:16] * x[x_start + j * x_stride :][:16], lane by lane; `dot_tail` takes the first `count` only
dot_step = _dot_step(masked=False)
dot_tail = _dot_step(masked=True)


def _axpy_step(masked: bool) -> Callable:
    def axpy_step(b, tile, p, p_start, p_stride, p_valid, v, v_start, count):
        values = []
        for column in range(tile.columns):
            mask = b.mask(b.sub(count, column * LANES)) if masked else None
            values.append(load_floats(b, v, b.add(v_start, column * LANES), mask))
        for row in range(tile.rows):
            weight = b.splat(b.load(p.at(b.clamped(p_start, p_stride, row, p_valid)), F32), V16F32)
            for column in range(tile.columns):
                i = row * tile.columns + column
                tile[i] = b.fma(weight, values[column], tile[i])
        return tile

    return emitted(returns=first)(axpy_step)


# tile[i, j] += p[p_start + i * p_stride] * v[v_start + 16 * j :][:16], lane by lane; `axpy_tail` stops after `count` elements of v
axpy_step = _axpy_step(masked=False)
axpy_tail = _axpy_step(masked=True)
