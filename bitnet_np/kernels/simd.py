"""Typed SIMD registers for Numba, by way of LLVM.

A kernel is written once, on logical registers of 512 bits (16 float32, 16 int32 or 64 bytes). LLVM splits them into the processor's own:
one AVX-512 register, two of AVX2, four of SSE or NEON. The only instruction that it does not find by itself is the byte dot product, which
byte_dots.py names for each instruction set. Integer sums are exact and float steps are lane by lane, so every processor gives the same
bits.

A `Tile` is an array of such registers that Numba carries through a loop as one value, and LLVM keeps in registers. Its shape is part of its
type: a function that takes a tile is compiled once for each shape, and the step functions below unroll themselves over it.

Offsets and strides are in elements of the array they belong to. Nothing is bounds-checked here.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from numba.np.numpy_support import from_dtype

from .block_formats import FORMATS, Bits, Digit, Factor, Flags, Format, Integers
from .processor import architecture, cpu_features, instruction_path

LANES = 16  # float32 or int32 numbers in a logical register
STEP = 64  # bytes in a logical register: packed weights per ternary step

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
V16F32, V16I32, V64I8, V32I16 = ir.VectorType(F32, 16), ir.VectorType(I32, 16), ir.VectorType(I8, 64), ir.VectorType(I16, 32)
V16I8, V16I16, V16HALF, V16I1 = ir.VectorType(I8, 16), ir.VectorType(I16, 16), ir.VectorType(HALF, 16), ir.VectorType(I1, 16)


# --- instruction sets -----------------------------------------------------------------------------------------------------------------


def _converts_half() -> bool:
    """Whether the processor widens float16 itself. Otherwise LLVM calls a runtime library, which may be missing."""
    return "f16c" in cpu_features() or architecture() == "aarch64"


# --- types ----------------------------------------------------------------------------------------------------------------------------


class Tile(types.Type):
    """`rows` x `columns` registers of 16 lanes; `kind` is "f32" or "i32"."""

    def __init__(self, kind: str, rows: int, columns: int):
        self.rows, self.columns = rows, columns
        self.count = rows * columns
        self.vector = {"f32": V16F32, "i32": V16I32}[kind]
        super().__init__(f"Tile({kind}, {rows}x{columns})")


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, tile: Tile):
        super().__init__(manager, tile, ir.ArrayType(tile.vector, tile.count))


def _new_tile(kind: str) -> Callable:
    @intrinsic(prefer_literal=True)
    def new_tile(typing_context, rows, columns):
        if not (isinstance(rows, types.IntegerLiteral) and isinstance(columns, types.IntegerLiteral)):
            return None
        tile = Tile(kind, rows.literal_value, columns.literal_value)
        return tile(rows, columns), lambda context, builder, signature, args: ir.Constant(context.get_value_type(tile), None)

    return new_tile


tile_f32 = _new_tile("f32")  # tile_f32(rows, columns): all zeros
tile_i32 = _new_tile("i32")


def _unpack(builder: ir.IRBuilder, tile: Tile, value: ir.Value) -> list[ir.Value]:
    return [builder.extract_value(value, i) for i in range(tile.count)]


def _pack(builder: ir.IRBuilder, value: ir.Value, registers: list[ir.Value]) -> ir.Value:
    for i, register in enumerate(registers):
        value = builder.insert_value(value, register, i)
    return value


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), list(values))


def _slices(builder: ir.IRBuilder, value: ir.Value, pieces: int) -> list[ir.Value]:
    if pieces == 1:
        return [value]
    n = value.type.count // pieces
    return [builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, n), list(range(p * n, p * n + n)))) for p in range(pieces)]


def _joined(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    while len(parts) > 1:
        n = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(I32, n), list(range(n)))
        parts = [builder.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def _address(context: Any, builder: ir.IRBuilder, array: types.Array | types.CPointer, value: ir.Value, offset: ir.Value) -> ir.Value:
    data = value if isinstance(array, types.CPointer) else context.make_array(array)(context, builder, value).data
    return builder.gep(data, [offset])


@intrinsic
def pointer_to(typing_context, array):
    """A pointer to an array's numbers, which the functions here take in its place.

    Numba counts references to an array at every call that is given it, and a count costs as much as a small tile. The array must live until
    the pointer is no longer used: an argument of the calling function does.
    """

    def codegen(context, builder, signature, args):
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


def _at(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """A pointer to what lies at an address, which is an integer."""
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: ir.IRBuilder, address: ir.Value, vector: ir.Type) -> ir.Value:
    loaded = builder.load(builder.bitcast(address, vector.as_pointer()), typ=vector)
    loaded.align = 1
    return loaded


def _mask(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """The mask of the first `count` of 16 lanes."""
    splat = _splat(builder, builder.trunc(count, I32), V16I32)
    return builder.icmp_signed("<", ir.Constant(V16I32, list(range(LANES))), splat)


def _splat(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType) -> ir.Value:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, vector.count), None))


def _load_masked(builder: ir.IRBuilder, address: ir.Value, vector: ir.VectorType, mask: ir.Value) -> ir.Value:
    suffix = {V16F32: "v16f32", V16I16: "v16i16"}[vector]
    pointer = builder.bitcast(address, vector.as_pointer())
    kind = ir.FunctionType(vector, [pointer.type, I32, V16I1, vector])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.{suffix}.p0")
    return builder.call(function, [pointer, ir.Constant(I32, 1), mask, ir.Constant(vector, None)])


def _load_floats(builder: ir.IRBuilder, array: types.Array, address: ir.Value, mask: ir.Value | None) -> ir.Value:
    """16 numbers of an array of float32, int16 (float16's bits) or uint16 (bfloat16's), widened exactly; masked ones are 0."""

    def load(vector: ir.VectorType) -> ir.Value:
        return _load(builder, address, vector) if mask is None else _load_masked(builder, address, vector, mask)

    if array.dtype == types.float32:
        return load(V16F32)
    bits = load(V16I16)
    if array.dtype == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(bits, V16I32), ir.Constant(V16I32, [16] * LANES)), V16F32)
    return _widened_half(builder, bits)


def _widened_half(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """16 float16 numbers, given by their bits, as float32."""
    if _converts_half():
        return builder.fpext(builder.bitcast(bits, V16HALF), V16F32)
    # The same in integers: shift exponent and fraction into place, and correct the exponent by a product with 2^112 (subnormals included),
    # except an exponent of all ones, which stands for infinity and NaN.
    wide = builder.zext(bits, V16I32)
    sign = builder.shl(builder.and_(wide, ir.Constant(V16I32, [0x8000] * LANES)), ir.Constant(V16I32, [16] * LANES))
    rest = builder.shl(builder.and_(wide, ir.Constant(V16I32, [0x7FFF] * LANES)), ir.Constant(V16I32, [13] * LANES))
    scaled = builder.fmul(builder.bitcast(rest, V16F32), ir.Constant(V16F32, [2.0**112] * LANES))
    special = builder.icmp_unsigned(">=", rest, ir.Constant(V16I32, [0x0F800000] * LANES))
    ones = builder.or_(rest, ir.Constant(V16I32, [0x7F800000] * LANES))
    return builder.bitcast(builder.or_(builder.select(special, ones, builder.bitcast(scaled, V16I32)), sign), V16F32)


def _prefetch(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(I32, n) for n in (0, 2, 1)))  # read, second level, data


@intrinsic
def prefetch(typing_context, array, offset):
    """Ask for the cache line that holds array[offset]; past the end is allowed."""

    def codegen(context, builder, signature, args):
        _prefetch(builder, _address(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.none(array, types.intp), codegen


@intrinsic
def prefetch_line(typing_context, address):
    """Ask for the cache line at an address; any address is allowed."""

    def codegen(context, builder, signature, args):
        _prefetch(builder, _at(builder, args[0], I8))
        return context.get_dummy_value()

    return types.none(types.intp), codegen


# --- one number -----------------------------------------------------------------------------------------------------------------------


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    name = "llvm.fma.f32" if a.type == F32 else f"llvm.fma.v{a.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name), [a, b, c])


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c in float32, rounded once."""
    return types.float32(types.float32, types.float32, types.float32), lambda context, builder, signature, args: _fma(builder, *args)


@intrinsic
def multiply_add(typing_context, a, b, c):
    """a * b + c in float64, fused where that is fast. Only for exact products, which fusing does not change.

    The product of two float32 is exact: it has 48 bits and an exponent within float64's range.
    """

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(F64, [F64] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.f64"), args)

    return types.float64(types.float64, types.float64, types.float64), codegen


@intrinsic
def float_bits(typing_context, x):
    """The 32 bits of a float32, as an int32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], I32)


@intrinsic
def bits_float(typing_context, bits):
    """The float32 that has these 32 bits."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], F32)


@intrinsic
def times_power_of_two(typing_context, x, magic):
    """x * 2^n for n in -300..300, rounded once, where magic = n + 1.5 * 2^23 holds n in its low bits.

    It multiplies by two exact powers of two, because one would leave float32's range before the product does.
    """

    def codegen(context, builder, signature, args):
        n = builder.sub(builder.bitcast(args[1], I32), ir.Constant(I32, 0x4B400000))
        half = builder.ashr(n, ir.Constant(I32, 1))
        x = args[0]
        for exponent in (half, builder.sub(n, half)):
            power = builder.shl(builder.add(exponent, ir.Constant(I32, 127)), ir.Constant(I32, 23))
            x = builder.fmul(x, builder.bitcast(power, F32))
        return x

    return types.float32(types.float32, types.float32), codegen


# --- sums over lanes ------------------------------------------------------------------------------------------------------------------


def _over_lanes(builder: ir.IRBuilder, registers: list[ir.Value], combine: Callable) -> list[ir.Value]:
    """16 lanes of each register combined by halving (i with i+8, i+4, i+2, i+1): a lane of the results for each, 16 registers at a time.

    Each round adds the lower halves of two registers to their upper halves: 15 additions for 16 sums.
    """
    zero = ir.Constant(registers[0].type, None)
    registers = registers + [zero] * (-len(registers) % LANES)
    for width in (16, 8, 4, 2):
        registers = [
            combine(builder, *_lower_and_upper(builder, a, b, width)) for a, b in zip(registers[::2], registers[1::2], strict=True)
        ]
    return registers


def _lower_and_upper(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
    """The lower halves of each `width` lanes of two registers, and the upper ones."""
    lower = [lane + i for lane in range(0, 2 * LANES, width) for i in range(width // 2)]
    upper = [lane + width // 2 for lane in lower]
    low, high = (builder.shuffle_vector(a, b, ir.Constant(V16I32, half)) for half in (lower, upper))
    return low, high


def _sum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return (builder.add if a.type == V16I32 else builder.fadd)(a, b)


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger float32 of each lane; a where b is NaN."""
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


@intrinsic
def store_sums(typing_context, tile, out):
    """out[row * columns + column] = the sum of that register's lanes. `out` has room for the tile's count, rounded up to 16."""

    def codegen(context, builder, signature, args):
        tile, array = signature.args
        for i, sums in enumerate(_over_lanes(builder, _unpack(builder, tile, args[0]), _sum)):
            address = _address(context, builder, array, args[1], ir.Constant(I64, i * LANES))
            builder.store(sums, builder.bitcast(address, tile.vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(tile, out), codegen


@intrinsic
def store_products(typing_context, tile, factor, out, start, stride):
    """out[start + column * stride + row] = the sum of register (row, column)'s lanes, times factor. For full tiles only."""

    def codegen(context, builder, signature, args):
        tile, _, array = signature.args[:3]
        value, factor, out, start, stride = args
        registers = _unpack(builder, tile, value)
        by_column = [registers[row * tile.columns + column] for column in range(tile.columns) for row in range(tile.rows)]
        factor = _splat(builder, factor, V16F32)
        part = ir.VectorType(F32, tile.rows)
        products = [builder.fmul(sums, factor) for sums in _over_lanes(builder, by_column, _sum)]
        for column in range(tile.columns):
            lanes = [column * tile.rows + row for row in range(tile.rows)]
            piece = products[lanes[0] // LANES]
            order = ir.Constant(ir.VectorType(I32, tile.rows), [lane % LANES for lane in lanes])
            offset = builder.add(start, builder.mul(stride, ir.Constant(stride.type, column)))
            address = _address(context, builder, array, out, offset)
            builder.store(builder.shuffle_vector(piece, piece, order), builder.bitcast(address, part.as_pointer()), align=4)
        return context.get_dummy_value()

    n = types.intp
    return types.none(tile, types.float32, out, n, n), codegen


def _store_over_rows(first: float, combine: Callable) -> Callable:
    @intrinsic
    def store_over_rows(typing_context, tile, out, start):
        def codegen(context, builder, signature, args):
            tile, array = signature.args[:2]
            value, out, start = args
            registers = _unpack(builder, tile, value)
            rows = [registers[row * tile.columns : (row + 1) * tile.columns] for row in range(tile.rows)]
            initial = ir.Constant(tile.vector, [first] * LANES)
            lanes = [reduce(partial(combine, builder), row, initial) for row in rows]
            part = ir.VectorType(F32, tile.rows)
            (combined,) = _over_lanes(builder, lanes, combine)
            address = builder.bitcast(_address(context, builder, array, out, start), part.as_pointer())
            order = ir.Constant(ir.VectorType(I32, tile.rows), list(range(tile.rows)))
            builder.store(builder.shuffle_vector(combined, combined, order), address, align=4)
            return context.get_dummy_value()

        return types.none(tile, out, types.intp), codegen

    return store_over_rows


# out[start + row] = the sum of all numbers of a row of the tile by the lane rule, or the largest that is no NaN; for 16 rows at most
store_row_sums = _store_over_rows(0.0, _sum)
store_row_maxima = _store_over_rows(-math.inf, _larger)


# --- float tiles ----------------------------------------------------------------------------------------------------------------------


def _clamped(builder: ir.IRBuilder, start: ir.Value, stride: ir.Value, index: int, valid: ir.Value) -> ir.Value:
    """Offset of row `index` of a tile. Rows past the last valid one repeat it, so that edge tiles need no code of their own."""
    last = builder.sub(valid, ir.Constant(valid.type, 1))
    constant = ir.Constant(valid.type, index)
    row = builder.select(builder.icmp_signed("<", constant, last), constant, last) if index else ir.Constant(valid.type, 0)
    return builder.add(start, builder.mul(stride, row))


def _dot_step(masked: bool) -> Callable:
    @intrinsic
    def dot_step(typing_context, tile, w, w_start, w_stride, w_valid, x, x_start, x_stride, x_valid, count):
        def codegen(context, builder, signature, args):
            tile, w_array, x_array = signature.args[0], signature.args[1], signature.args[5]
            value, w, w_start, w_stride, w_valid, x, x_start, x_stride, x_valid, count = args
            mask = _mask(builder, count) if masked else None

            def load(array: types.Array, base: ir.Value, start: ir.Value, stride: ir.Value, index: int, valid: ir.Value) -> ir.Value:
                offset = _clamped(builder, start, stride, index, valid)
                return _load_floats(builder, array, _address(context, builder, array, base, offset), mask)

            rows = [load(w_array, w, w_start, w_stride, i, w_valid) for i in range(tile.rows)]
            sums = _unpack(builder, tile, value)
            for column in range(tile.columns):
                other = load(x_array, x, x_start, x_stride, column, x_valid)
                for row in range(tile.rows):
                    i = row * tile.columns + column
                    sums[i] = _fma(builder, rows[row], other, sums[i])
            return _pack(builder, value, sums)

        n = types.intp
        return tile(tile, w, n, n, n, x, n, n, n, n), codegen

    return dot_step


# tile[i, j] += w[w_start + i * w_stride :][:16] * x[x_start + j * x_stride :][:16], lane by lane; `dot_tail` takes the first `count` only
dot_step = _dot_step(masked=False)
dot_tail = _dot_step(masked=True)


def _axpy_step(masked: bool) -> Callable:
    @intrinsic
    def axpy_step(typing_context, tile, p, p_start, p_stride, p_valid, v, v_start, count):
        def codegen(context, builder, signature, args):
            tile, p_array, v_array = signature.args[0], signature.args[1], signature.args[5]
            value, p, p_start, p_stride, p_valid, v, v_start, count = args
            values = []
            for column in range(tile.columns):
                offset = builder.add(v_start, ir.Constant(v_start.type, column * LANES))
                mask = _mask(builder, builder.sub(count, ir.Constant(count.type, column * LANES))) if masked else None
                values.append(_load_floats(builder, v_array, _address(context, builder, v_array, v, offset), mask))
            sums = _unpack(builder, tile, value)
            for row in range(tile.rows):
                address = _address(context, builder, p_array, p, _clamped(builder, p_start, p_stride, row, p_valid))
                weight = _splat(builder, builder.load(address), V16F32)
                for column in range(tile.columns):
                    i = row * tile.columns + column
                    sums[i] = _fma(builder, weight, values[column], sums[i])
            return _pack(builder, value, sums)

        n = types.intp
        return tile(tile, p, n, n, n, v, n, n), codegen

    return axpy_step


# tile[i, j] += p[p_start + i * p_stride] * v[v_start + 16 * j :][:16], lane by lane; `axpy_tail` stops after `count` elements of v
axpy_step = _axpy_step(masked=False)
axpy_tail = _axpy_step(masked=True)


@intrinsic
def widen(typing_context, source, start, count, out, position):
    """out[position :][:16] = source[start :][:count], which are float32, or bits of float16 (int16) or bfloat16 (uint16), then zeros.

    A -0 becomes +0.
    """

    def codegen(context, builder, signature, args):
        source_type, out_type = signature.args[0], signature.args[3]
        source, start, count, out, position = args
        numbers = _load_floats(builder, source_type, _address(context, builder, source_type, source, start), _mask(builder, count))
        numbers = builder.fadd(numbers, ir.Constant(V16F32, None))
        address = _address(context, builder, out_type, out, position)
        builder.store(numbers, builder.bitcast(address, V16F32.as_pointer()), align=4)
        return context.get_dummy_value()

    n = types.intp
    return types.none(source, n, n, out, n), codegen


@intrinsic
def store_tile(typing_context, tile, out, start, stride):
    """out[start + row * stride + 16 * column :][:16] = the tile's lanes."""

    def codegen(context, builder, signature, args):
        tile, array = signature.args[:2]
        value, out, start, stride = args
        for i, register in enumerate(_unpack(builder, tile, value)):
            row, column = divmod(i, tile.columns)
            offset = builder.add(start, builder.mul(stride, ir.Constant(stride.type, row)))
            offset = builder.add(offset, ir.Constant(offset.type, column * LANES))
            address = _address(context, builder, array, out, offset)
            builder.store(register, builder.bitcast(address, tile.vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(tile, out, types.intp, types.intp), codegen


@intrinsic
def load_tile(typing_context, tile, address, row_stride, column_stride):
    """tile[i, j] = the 64 bytes at address + i * row_stride + j * column_stride."""

    def codegen(context, builder, signature, args):
        tile = signature.args[0]
        value, address, row_stride, column_stride = args
        registers = []
        for i in range(tile.count):
            row, column = divmod(i, tile.columns)
            place = builder.add(address, builder.mul(row_stride, ir.Constant(row_stride.type, row)))
            place = builder.add(place, builder.mul(column_stride, ir.Constant(column_stride.type, column)))
            registers.append(_load(builder, _at(builder, place, I8), tile.vector))
        return _pack(builder, value, registers)

    n = types.intp
    return tile(tile, n, n, n), codegen


def has_fma() -> bool:
    """Whether the processor has fused multiply-add. Otherwise it is a library call for each number."""
    return "fma" in cpu_features() or architecture() == "aarch64"


def is_wide() -> bool:
    """Whether 32 registers of 512 bits hold the accumulators of a large tile."""
    return "avx512f" in cpu_features()


# --- block types ----------------------------------------------------------------------------------------------------------------------


def _load_lanes(builder: ir.IRBuilder, block: ir.Value, at: list[int]) -> ir.Value:
    """The bytes of a block at the offsets `at`. It reads nothing outside their range."""
    first = min(at)
    loaded = _load(builder, builder.gep(block, [ir.Constant(I64, first)]), ir.VectorType(I8, max(at) - first + 1))
    return _shuffled(builder, loaded, [i - first for i in at])


def _shuffled(builder: ir.IRBuilder, vector: ir.Value, order: list[int]) -> ir.Value:
    if order == list(range(vector.type.count)):
        return vector
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(ir.VectorType(I32, len(order)), order))


def _bytes(values: list[int]) -> ir.Value:
    return ir.Constant(ir.VectorType(I8, len(values)), values)


def _part(builder: ir.IRBuilder, block: ir.Value, part: Bits | Flags | Digit) -> ir.Value:
    if isinstance(part, Flags):
        bits = builder.bitcast(_load(builder, builder.gep(block, [ir.Constant(I64, part.at)]), I16), V16I1)
        return builder.select(bits, _bytes([1 << part.place] * LANES), _bytes([0] * LANES))
    lanes = _load_lanes(builder, block, part.at)
    if isinstance(part, Digit):  # 16 bits hold every product
        below = builder.mul(builder.zext(lanes, V16I16), ir.Constant(V16I16, part.factor))
        below = builder.and_(below, ir.Constant(V16I16, [255] * LANES))
        thrice = builder.mul(below, ir.Constant(V16I16, [3] * LANES))
        return builder.trunc(builder.lshr(thrice, ir.Constant(V16I16, [8] * LANES)), V16I8)
    terms = []
    for shift in sorted(set(part.shift)):  # few processors shift each byte by its own count
        mask = [bits if own == shift else 0 for bits, own in zip(part.mask, part.shift, strict=True)]
        terms.append(builder.and_(builder.lshr(lanes, _bytes([shift] * len(mask))), _bytes(mask)))
    return builder.shl(reduce(builder.or_, terms), _bytes([part.place] * len(part.at)))


def _integer_bytes(builder: ir.IRBuilder, block: ir.Value, integers: Integers) -> ir.Value:
    """Integers as bytes, in a quarter of the registers that int32 takes."""
    joined = reduce(builder.or_, [_part(builder, block, part) for part in integers.parts])
    if integers.bias:
        joined = builder.sub(joined, _bytes([integers.bias] * joined.type.count))
    return _chosen(builder, joined, integers.table) if integers.table else joined


def has_sign(integers: Integers) -> bool:
    """Whether some may be negative."""
    return bool(integers.bias or integers.signed or integers.table)


def _widened_bytes(builder: ir.IRBuilder, numbers: ir.Value, integers: Integers, wide: ir.VectorType = V16I32) -> ir.Value:
    """Integers of more bits."""
    return (builder.sext if has_sign(integers) else builder.zext)(numbers, wide)


def _integers(builder: ir.IRBuilder, block: ir.Value, integers: Integers) -> list[ir.Value]:
    """Integers as float32, 16 in each register."""
    joined = _slices(builder, _integer_bytes(builder, block, integers), integers.runs)
    return [builder.sitofp(_widened_bytes(builder, run, integers), V16F32) for run in joined]


def _chosen(builder: ir.IRBuilder, places: ir.Value, table: tuple[int, ...]) -> ir.Value:
    """The bytes of a table of 16 at these places: by an instruction, or by each bit of the places in turn."""
    count, path = places.type.count, instruction_path()
    if path != "generic":
        name = "llvm.aarch64.neon.tbl1.v16i8" if path.startswith("neon") else "llvm.x86.ssse3.pshuf.b.128"
        numbers = _bytes(list(table))
        return _joined(builder, [_call(builder, name, numbers.type, numbers, part) for part in _slices(builder, places, count // LANES)])
    chosen = [_bytes([number] * count) for number in table]
    for bit in range(4):
        is_set = builder.icmp_unsigned("!=", builder.and_(places, _bytes([1 << bit] * count)), _bytes([0] * count))
        chosen = [builder.select(is_set, odd, even) for even, odd in zip(chosen[::2], chosen[1::2], strict=True)]
    return chosen[0]


def _halves(builder: ir.IRBuilder, block: ir.Value, at: list[int]) -> ir.Value:
    """The float16 numbers of a block at the offsets `at`, widened."""
    bits = _load_lanes(builder, block, [start + i for start in at for i in range(2)])
    return _widened_half(builder, builder.bitcast(bits, V16I16))


def _products(builder: ir.IRBuilder, block: ir.Value, integers: Integers, halves: ir.Value) -> ir.Value:
    """The address of integers times float16 numbers, in memory.

    A load that fills all lanes is free beside arithmetic, while a shuffle contends with the widening of codes: from memory Q6_K runs 1.3
    times as fast. LLVM would turn the loads into shuffles if it knew what they read.
    """
    place = cgutils.alloca_once(builder, V16F32)
    builder.store(builder.fmul(halves, *_integers(builder, block, integers)), place)
    unknown = builder.asm(ir.FunctionType(place.type, [place.type]), "", "=r,0,~{memory}", [place], True)
    return builder.bitcast(unknown, F32.as_pointer())


def _factors(builder: ir.IRBuilder, block: ir.Value, block_format: Format) -> list[Callable[[int], ir.Value]]:
    """The scale and, if the type has one, the minimum, each as a function: number of a run of 16 weights -> its factor in all lanes."""
    factors = [factor for factor in (block_format.scale, block_format.minimum) if factor]
    functions: list[Callable[[int], ir.Value]] = []
    products: dict[Integers, ir.Value] = {}
    for factor in factors:
        if factor.table:
            table = cgutils.global_constant(builder, "factors", ir.Constant(ir.ArrayType(F32, 256), factor.table))
            functions.append(partial(_from_table, builder, block, block_format.start(factor), table, factor))
        elif factor.integers is None:
            functions.append(partial(_constant, _halves(builder, block, [block_format.start(factor)] * LANES)))
        else:
            if factor.integers not in products:  # each lane has the float16 of the factor that uses it
                start = {lane: block_format.start(user) for user in factors if user.integers is factor.integers for lane in user.lanes}
                halves = _halves(builder, block, [start[lane] for lane in range(LANES)])
                products[factor.integers] = _products(builder, block, factor.integers, halves)
            functions.append(partial(_all_lanes, builder, products[factor.integers], factor))
    return functions


def _constant(value: ir.Value, run: int) -> ir.Value:
    return value


def _all_lanes(builder: ir.IRBuilder, products: ir.Value, factor: Factor, run: int) -> ir.Value:
    product = builder.load(builder.gep(products, [ir.Constant(I64, factor.lanes[run])]))
    return _splat(builder, builder.fneg(product) if factor.negative else product, V16F32)


def _from_table(builder: ir.IRBuilder, block: ir.Value, start: int, table: ir.Value, factor: Factor, run: int) -> ir.Value:
    byte = builder.load(builder.gep(block, [ir.Constant(I64, start + factor.lanes[run])]), typ=I8)
    number = builder.load(builder.gep(table, [ir.Constant(I64, 0), builder.zext(byte, I64)]), typ=F32)
    return _splat(builder, number, V16F32)


def _indices(builder: ir.IRBuilder, block: ir.Value, codes: Bits, runs: int) -> list[ir.Value]:
    """Codes as 32-bit integers, 16 in each register. The bits above the lowest four are other codes'."""
    loaded = _load_lanes(builder, block, codes.at)
    repeated = [lane + LANES * (run % runs) for lane in range(LANES) for run in range(4)]  # the bytes of 16 codes in each byte of the lanes
    lanes = builder.bitcast(_shuffled(builder, loaded, repeated), V16I32)
    return [builder.lshr(lanes, ir.Constant(V16I32, [8 * run + codes.shift[0]] * LANES)) for run in range(runs)]


def _block_weights(builder: ir.IRBuilder, array: types.Array, pointer: ir.Value) -> Iterator[ir.Value]:
    """The weights of a block, 16 at a time. A product and a sum may become one fused operation, because the product is exact.

    Where a register holds 16 float32, codes of at most four bits are looked up in a register of all 16 possible weights. That saves a
    product, a sum and a conversion for each register, and the instruction ignores all but the lowest four bits.
    """
    block_format = _FORMATS[array.dtype]
    block = builder.bitcast(pointer, I8.as_pointer())
    scale, *minimum = _factors(builder, block, block_format)

    def weights(run: int, numbers: ir.Value) -> ir.Value:
        products = builder.fmul(numbers, scale(run), flags=("contract",))
        return reduce(lambda total, least: builder.fadd(total, least(run), flags=("contract",)), minimum, products)

    run = 0
    for codes in block_format.codes:
        if is_wide() and (few := codes.four_bits):
            numbers = ir.Constant(V16F32, list(codes.table) or [(i & few.mask[0]) - codes.bias for i in range(LANES)])
            for index in _indices(builder, block, few, codes.runs):
                yield _call(builder, "llvm.x86.avx512.permvar.sf.512", V16F32, weights(run, numbers), index)
                run += 1
        else:
            for numbers in _integers(builder, block, codes):
                yield weights(run, numbers)
                run += 1


@intrinsic
def unpack_block(typing_context, blocks, index, out, position):
    """out[position :] = the weights of blocks[index]: records of one of block_formats.py's layouts -> float32."""

    def codegen(context, builder, signature, args):
        blocks_type, _, out_type, _ = signature.args
        blocks, index, out, position = args
        for run, weights in enumerate(_block_weights(builder, blocks_type, _address(context, builder, blocks_type, blocks, index))):
            offset = builder.add(position, ir.Constant(position.type, run * LANES))
            address = builder.bitcast(_address(context, builder, out_type, out, offset), V16F32.as_pointer())
            builder.store(weights, address, align=4)
        return context.get_dummy_value()

    return types.none(blocks, types.intp, out, types.intp), codegen


@intrinsic
def dot_block(typing_context, tile, blocks, start, stride, valid, x, x_start):
    """tile[i] += the weights of blocks[start + i * stride] * x[x_start :], lane by lane, for a tile of one column."""

    def codegen(context, builder, signature, args):
        tile, blocks_type, x_type = signature.args[0], signature.args[1], signature.args[5]
        value, blocks, start, stride, valid, x, x_start = args
        offsets = [_clamped(builder, start, stride, row, valid) for row in range(tile.rows)]
        rows = [_block_weights(builder, blocks_type, _address(context, builder, blocks_type, blocks, offset)) for offset in offsets]
        sums = _unpack(builder, tile, value)
        for run, weights in enumerate(zip(*rows, strict=True)):
            offset = builder.add(x_start, ir.Constant(x_start.type, run * LANES))
            other = _load(builder, _address(context, builder, x_type, x, offset), V16F32)
            sums = [_fma(builder, w, other, total) for w, total in zip(weights, sums, strict=True)]
        return _pack(builder, value, sums)

    n = types.intp
    return tile(tile, blocks, n, n, n, x, n), codegen


_FORMATS = {from_dtype(block_format.layout): block_format for block_format in FORMATS.values()}
