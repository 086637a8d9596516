"""Single instructions for the GPU's kernels: the one file that knows PTX. simulated.py has their twins in plain Python.

NVVM fuses a product with a sum that it meets, and ptxas does so again, unless one of the two says how it rounds. The contract fuses only
where it says so. So a kernel writes a product whose sum comes next, or that sum, as `times` and `plus`; `fma` is for what is to be fused.

A thread of a warp is a lane; four lanes that hold the same row of a fragment are a quad. Offsets count elements, and nothing is checked.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cuda, njit
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from .. import simd

I16, I32, I64, F32, F64, HALF = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType(), ir.HalfType()
VOID = ir.VoidType()

device = njit(inline="always")  # a function of kernels; the simulator runs it as it is
float_bits, bits_float, fma = simd.float_bits, simd.bits_float, simd.fma


def _asm(builder: ir.IRBuilder, result: ir.Type, text: str, constraints: str, args: list[ir.Value], effect: bool = True) -> ir.Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=effect), args)


def _calls(name: str, result: Any, *arguments: Any) -> Callable:
    """An intrinsic that is one of NVVM's."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(context.get_value_type(signature.return_type), [arg.type for arg in args])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    if len(arguments) == 2:

        @intrinsic
        def two(typing_context, a, b):
            return result(*arguments), codegen

        return two

    @intrinsic
    def three(typing_context, a, b, c):
        return result(*arguments), codegen

    return three


times = _calls("llvm.nvvm.mul.rn.f", types.float32, types.float32, types.float32)
plus = _calls("llvm.nvvm.add.rn.f", types.float32, types.float32, types.float32)
fma64 = _calls("llvm.fma.f64", types.float64, types.float64, types.float64, types.float64)


@intrinsic
def half_value(typing_context, bits):
    """The float16 of the low 16 bits, widened."""

    def codegen(context, builder, signature, args):
        return _half_value(builder, builder.trunc(args[0], I16))

    return types.float32(types.uint32), codegen


def _half_value(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.fpext(builder.bitcast(bits, HALF), F32)


@intrinsic
def half_bits(typing_context, x):
    """x rounded to float16, half to even, as its bits: a NaN where it is beyond float16's range."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(builder.fptrunc(args[0], HALF), I16)
        finite = builder.icmp_unsigned("<", builder.and_(bits, ir.Constant(I16, 0x7FFF)), ir.Constant(I16, 0x7C00))
        return builder.select(finite, bits, ir.Constant(I16, 0x7E00))

    return types.int16(types.float32), codegen


syncthreads = cuda.syncthreads


@intrinsic
def this_thread(typing_context):
    """cuda.threadIdx.x, read here and now: what is worked out from it takes no registers where it is not needed."""

    def codegen(context, builder, signature, args):
        number = _asm(builder, I32, "mov.u32 $0, %tid.x;", "=r", [])
        return builder.zext(builder.and_(number, ir.Constant(I32, 1023)), I64)  # there are no more: it may be divided as if unsigned

    return types.int64(), codegen


def dot_tiles(count: int) -> Callable:
    """A function (sums, weights, low, high, valid) -> sums: byte dot products of the first `valid` of `count` tiles of weights.

    sums: of the upper and of the lower row. weights: 4 words for each tile, two bits each (packing in ternary.py); low and high: 4 words of
    codes for each tile, of its columns below 64 and of the others.
    """

    @intrinsic
    def dot(typing_context, sums, weights, low, high, valid):
        def codegen(context, builder, signature, args):
            *tuples, valid = args
            sums, weights, low, high = (
                [builder.extract_value(value, i) for i in range(kind.count)] for value, kind in zip(tuples, signature.args, strict=False)
            )
            for tile in range(count):
                counts = builder.icmp_signed(">", valid, ir.Constant(valid.type, tile))
                bytes_of = builder.select(counts, ir.Constant(I32, 0x03030303), ir.Constant(I32, 0))
                for place in range(16):
                    word, x = weights[4 * tile + place // 4], (low, high)[place // 8][4 * tile + place // 4 % 2 * 2 + place % 4 // 2]
                    codes = builder.and_(builder.lshr(word, ir.Constant(I32, 2 * (place % 4))), bytes_of)
                    row = place % 2
                    sums[row] = _asm(builder, I32, "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, x, sums[row]], effect=False)
            return context.make_tuple(builder, signature.return_type, sums)

        return sums(sums, weights, low, high, valid), codegen

    return dot


# --- among the lanes of a warp --------------------------------------------------------------------------------------------------------


def _butterfly(builder: ir.IRBuilder, value: ir.Value, distance: int) -> ir.Value:
    """What the lane whose number differs in one bit has. All 32 lanes must come here together."""
    kind = ir.FunctionType(I32, [I32, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.nvvm.shfl.sync.bfly.i32")
    bits = builder.bitcast(value, I32)
    other = builder.call(function, [ir.Constant(I32, -1), bits, ir.Constant(I32, distance), ir.Constant(I32, 31)])
    return builder.bitcast(other, value.type)


@intrinsic
def quad_sum(typing_context, x):
    """The sum of four lanes' integers, in each of them."""

    def codegen(context, builder, signature, args):
        x = args[0]
        for distance in (2, 1):
            x = builder.add(x, _butterfly(builder, x, distance))
        return x

    return types.int32(types.int32), codegen


def _rounded(builder: ir.IRBuilder, operation: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """The operation, mul or add, that nothing is fused with."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32] * 2), f"llvm.nvvm.{operation}.rn.f")
    return builder.call(function, [a, b])


@intrinsic
def half_warp_sum(typing_context, x):
    """The sum of 16 lanes' float32 by halving, i with i + 8, i + 4, i + 2, i + 1, in each of them."""

    def codegen(context, builder, signature, args):
        x = args[0]
        for distance in (8, 4, 2, 1):
            x = builder.fadd(x, _butterfly(builder, x, distance))
        return x

    return types.float32(types.float32), codegen


@intrinsic
def quad_max(typing_context, x):
    """The largest of four lanes' float32, none of them NaN, in each of them."""

    def codegen(context, builder, signature, args):
        x = args[0]
        for distance in (2, 1):
            other = _butterfly(builder, x, distance)
            x = builder.select(builder.fcmp_ordered(">", other, x), other, x)
        return x

    return types.float32(types.float32), codegen


@intrinsic
def fold_quad(typing_context, numbers):
    """The sum of 64 numbers by 16 lanes, in each lane of a quad: numbers[part * 4 + i] is number part * 16 + lane mod 4 * 4 + i of them."""

    def codegen(context, builder, signature, args):
        def number(i):
            return builder.load(_address(context, builder, signature.args[0], args[0], ir.Constant(I64, i)), typ=F32)

        lanes = [ir.Constant(F32, 0)] * 4
        for part in range(4):
            lanes = [_rounded(builder, "add", lanes[i], number(part * 4 + i)) for i in range(4)]
        for distance in (2, 1):
            lanes = [builder.fadd(lane, _butterfly(builder, lane, distance)) for lane in lanes]
        return builder.fadd(*(builder.fadd(lanes[i], lanes[i + 2]) for i in range(2)))

    return types.float32(numbers), codegen


def fold_quarters(columns: int) -> Callable:
    """A function (sums) that gives `columns` dot products, of 4 x `columns` that the lanes with equal numbers mod 8 share.

    Such a lane's number // 8 is its quarter, q: sums[(a * columns + b) * 4 + i] is number 4 * q + i of 16, whose sum by halving (i with
    i + 8, i + 4, i + 2, i + 1) is dot product (a ^ q, b). A lane gets those of row q. All 32 lanes must come here together.
    """

    @intrinsic
    def fold(typing_context, sums):
        def codegen(context, builder, signature, args):
            n = 4 * columns  # numbers of a row
            values = [
                builder.load(_address(context, builder, signature.args[0], args[0], ir.Constant(I64, i)), typ=F32) for i in range(4 * n)
            ]
            for bit in (2, 1):  # a lane keeps the rows without this bit, and gives away the others
                values = [builder.fadd(values[i], _butterfly(builder, values[bit * n + i], 8 * bit)) for i in range(bit * n)]
            totals = []
            for b in range(columns):
                first, second = (builder.fadd(values[4 * b + i], values[4 * b + i + 2]) for i in range(2))
                totals.append(builder.fadd(first, second))
            return context.make_tuple(builder, signature.return_type, totals)

        return types.UniTuple(types.float32, columns)(sums), codegen

    return fold


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def _address(context: Any, builder: ir.IRBuilder, array: Any, value: ir.Value, offset: ir.Value) -> ir.Value:
    return builder.gep(context.make_array(array)(context, builder, value).data, [offset])


_GLOBAL = 1  # the number of that address space


def _load_four(context: Any, builder: ir.IRBuilder, array: Any, address: ir.Value, in_global: bool = False) -> list[ir.Value]:
    vector = ir.VectorType(context.get_data_type(array.dtype), 4)
    address = builder.bitcast(address, vector.as_pointer(addrspace=address.type.addrspace))
    if in_global:
        address = builder.addrspacecast(address, vector.as_pointer(addrspace=_GLOBAL))
    loaded = builder.load(address, typ=vector)
    loaded.align = 16
    return [builder.extract_element(loaded, ir.Constant(I32, i)) for i in range(4)]


@intrinsic
def load4(typing_context, array, offset):
    """Four numbers of 4 bytes from an offset that is a multiple of 4: one load of 16 bytes."""

    def codegen(context, builder, signature, args):
        values = _load_four(context, builder, signature.args[0], _address(context, builder, signature.args[0], *args))
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(array.dtype, 4)(array, types.int64), codegen


def load_fragments(count: int, in_global: bool = False) -> Callable:
    """A function (array, offset, stride) that gives `count` times the four words at offset + i * stride, as one tuple.

    `in_global` tells NVVM where the array is: of one that is chosen among several it does not find out.
    """

    @intrinsic
    def load(typing_context, array, offset, stride):
        def codegen(context, builder, signature, args):
            return _load_many(context, builder, signature, count, in_global, *args)

        return types.UniTuple(array.dtype, 4 * count)(array, types.int64, types.int64), codegen

    return load


def load_within(count: int) -> Callable:
    """As `load_fragments` of global memory, with an argument more: what would be past that offset is read there."""

    @intrinsic
    def load(typing_context, array, offset, stride, last):
        def codegen(context, builder, signature, args):
            return _load_many(context, builder, signature, count, True, *args)

        return types.UniTuple(array.dtype, 4 * count)(array, types.int64, types.int64, types.int64), codegen

    return load


def _load_many(
    context: Any,
    builder: ir.IRBuilder,
    signature: Any,
    count: int,
    in_global: bool,
    array: ir.Value,
    offset: ir.Value,
    stride: ir.Value,
    last: ir.Value | None = None,
) -> ir.Value:
    kind, values = signature.args[0], []
    for _ in range(count):
        place = offset if last is None else builder.select(builder.icmp_signed("<", offset, last), offset, last)
        values += _load_four(context, builder, kind, _address(context, builder, kind, array, place), in_global)
        offset = builder.add(offset, stride)
    return context.make_tuple(builder, signature.return_type, values)


def load_column(count: int) -> Callable:
    """A function (array, offset, stride, last) that gives `count` float32 of global memory, at min(offset + i * stride, last), as a tuple.

    An array of int16 holds float16: they are widened.
    """

    @intrinsic
    def load(typing_context, array, offset, stride, last):
        def codegen(context, builder, signature, args):
            kind, values = signature.args[0], []
            array, offset, stride, last = args
            for _ in range(count):
                place = builder.select(builder.icmp_signed("<", offset, last), offset, last)
                value = builder.load(_address(context, builder, kind, array, place), typ=context.get_data_type(kind.dtype))
                values.append(_half_value(builder, value) if kind.dtype == types.int16 else value)
                offset = builder.add(offset, stride)
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(types.float32, count)(array, types.int64, types.int64, types.int64), codegen

    return load


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32] * 3), "llvm.fma.f32")
    return builder.call(function, [a, b, c])


def load_halves(count: int) -> Callable:
    """A function (array, offset) that gives `count` float16 of global memory, widened: one load. `offset` is a multiple of `count`."""

    @intrinsic
    def load(typing_context, array, offset):
        def codegen(context, builder, signature, args):
            address = _address(context, builder, signature.args[0], *args)
            vector = ir.VectorType(I16, count)
            address = builder.addrspacecast(
                builder.bitcast(address, vector.as_pointer(addrspace=address.type.addrspace)), vector.as_pointer(addrspace=_GLOBAL)
            )
            loaded = builder.load(address, typ=vector)
            loaded.align = 2 * count
            halves = [_half_value(builder, builder.extract_element(loaded, ir.Constant(I32, i))) for i in range(count)]
            return context.make_tuple(builder, signature.return_type, halves)

        return types.UniTuple(types.float32, count)(array, types.int64), codegen

    return load


def chain_column(count: int) -> Callable:
    """A function (total, weights, at, values) -> total: fma(weights[at + i], values[i], total) for i in order. `at` is a multiple of 4."""

    @intrinsic
    def chain(typing_context, total, weights, at, values):
        def codegen(context, builder, signature, args):
            total, array, at, values = args
            for i in range(0, count, 4):
                place = builder.add(at, ir.Constant(I64, i))
                four = _load_four(context, builder, signature.args[1], _address(context, builder, signature.args[1], array, place))
                for j in range(4):
                    total = _fma(builder, four[j], builder.extract_value(values, i + j), total)
            return total

        return types.float32(types.float32, weights, types.int64, values), codegen

    return chain


def fold_column(count: int) -> Callable:
    """A function (total, factors, old, new, values, valid) -> total: fma(total, factors[old + i], values[i] * factors[new + i]) for i below
    `valid`, in order. Both offsets are multiples of 4."""

    @intrinsic
    def fold(typing_context, total, factors, old, new, values, valid):
        def codegen(context, builder, signature, args):
            total, array, old, new, values, valid = args
            for i in range(0, count, 4):
                olds, news = (
                    _load_four(
                        context,
                        builder,
                        signature.args[1],
                        _address(context, builder, signature.args[1], array, builder.add(at, ir.Constant(I64, i))),
                    )
                    for at in (old, new)
                )
                for j in range(4):
                    folded = _fma(builder, total, olds[j], _rounded(builder, "mul", builder.extract_value(values, i + j), news[j]))
                    total = builder.select(builder.icmp_signed(">", valid, ir.Constant(I64, i + j)), folded, total)
            return total

        return types.float32(types.float32, factors, types.int64, types.int64, values, types.int64), codegen

    return fold


@intrinsic
def copy_async(typing_context, shared, to, source, start, size):
    """Begin to copy 16 bytes from global to shared memory, or zeros if `size` is 0 and not 16. Offsets in words."""

    def codegen(context, builder, signature, args):
        text = (
            "{ .reg .u64 s; .reg .u64 g; cvta.to.shared.u64 s, $0; cvta.to.global.u64 g, $1; cp.async.cg.shared.global [s], [g], 16, $2; }"
        )
        addresses = [_address(context, builder, signature.args[i], args[i], args[i + 1]) for i in (0, 2)]
        _asm(builder, VOID, text, "l,l,r,~{memory}", [*(builder.ptrtoint(address, I64) for address in addresses), args[4]])
        return context.get_dummy_value()

    return types.none(shared, types.int64, source, types.int64, types.int32), codegen


def _nothing(text: str) -> Callable:
    @intrinsic
    def instruction(typing_context):
        def codegen(context, builder, signature, args):
            _asm(builder, VOID, text, "~{memory}", [])
            return context.get_dummy_value()

        return types.none(), codegen

    return instruction


commit_copies = _nothing("cp.async.commit_group;")


def wait_copies(pending: int) -> Callable:
    """A function that waits until all but the last `pending` committed groups of this thread's copies have arrived."""
    return _nothing(f"cp.async.wait_group {pending};")


# --- tensor cores ---------------------------------------------------------------------------------------------------------------------

_MMA = "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"


def zeros(count: int) -> Callable:
    """A function that gives a tuple of `count` int32 zeros."""

    @intrinsic
    def make(typing_context):
        kind = types.UniTuple(types.int32, count)
        return kind(), lambda context, builder, signature, args: ir.Constant(context.get_value_type(kind), None)

    return make


def multiply(rows: int, tokens: int, half: int) -> Callable:
    """A function (sums, weights, codes) -> sums: `rows` tiles of 16 weight rows times `tokens` tiles of 8 tokens, over 64 columns.

    sums: 4 int32 for each pair of tiles, row tiles outermost. weights: 4 words for each row tile, of which words 2 half and 2 half + 1
    hold these columns, two bits each (packing in ternary.py). codes: 4 words for each token tile.
    """

    @intrinsic
    def step(typing_context, sums, weights, codes):
        def codegen(context, builder, signature, args):
            sums, weights, codes = (
                [builder.extract_value(value, i) for i in range(kind.count)] for value, kind in zip(args, signature.args, strict=True)
            )
            four = ir.LiteralStructType([I32] * 4)
            bytes_of = ir.Constant(I32, 0x03030303)
            for part in range(2):
                for row in range(rows):
                    word = weights[4 * row + 2 * half + part]
                    a = [builder.and_(builder.lshr(word, ir.Constant(I32, 2 * plane)), bytes_of) for plane in range(4)]
                    for token in range(tokens):
                        b = codes[4 * token + 2 * part : 4 * token + 2 * part + 2]
                        at = 4 * (row * tokens + token)
                        constraints = "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r"
                        result = _asm(builder, four, _MMA, constraints, [*a, *b, *sums[at : at + 4]], effect=False)
                        sums[at : at + 4] = [builder.extract_value(result, i) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, sums)

        return sums(sums, weights, codes), codegen

    return step
