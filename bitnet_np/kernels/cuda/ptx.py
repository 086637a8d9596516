"""Single instructions for the GPU's kernels: the one file that knows PTX.

NVVM, and after it ptxas, fuse a product with the sum that follows, unless one of the two names its rounding. The contract names
every fused operation. So a kernel writes `times` for a product that a sum follows, or `plus` for that sum, and `fma` for a fused one.

A thread of a warp is a lane; four lanes that hold the same row of a fragment are a quad. Offsets count elements, and nothing is checked.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import cgutils, types, typing
from numba.cuda.extending import intrinsic

from ..fast import simd
from ..fast.emit import LANES

I16, I32, I64, F32, F64, HALF = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType(), ir.HalfType()
VOID = ir.VoidType()

float_bits, bits_float, fma = simd.float_bits, simd.bits_float, simd.fma


def _asm(builder: ir.IRBuilder, result: ir.Type, text: str, constraints: str, args: list[ir.Value], effect: bool = True) -> ir.Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(ir.InlineAsm(kind, text, constraints, side_effect=effect), args)


def _calls(name: str, result: Any, *arguments: Any) -> Callable:
    """An intrinsic function that NVVM has under this name."""

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
    """The float16 in the low 16 bits, as a float32."""

    def codegen(context, builder, signature, args):
        return _half_value(builder, builder.trunc(args[0], I16))

    return types.float32(types.uint32), codegen


def _half_value(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.fpext(builder.bitcast(bits, HALF), F32)


@intrinsic
def half_bits(typing_context, x):
    """The bits of x rounded to float16, half to even; those of a NaN if x is beyond float16's range."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(builder.fptrunc(args[0], HALF), I16)
        finite = builder.icmp_unsigned("<", builder.and_(bits, ir.Constant(I16, 0x7FFF)), ir.Constant(I16, 0x7C00))
        return builder.select(finite, bits, ir.Constant(I16, 0x7E00))

    return types.int16(types.float32), codegen


syncthreads = cuda.syncthreads


def _thread(read: Callable[[ir.IRBuilder], ir.Value]) -> Callable:
    @intrinsic
    def number(typing_context):
        def codegen(context, builder, signature, args):
            return builder.zext(
                builder.and_(read(builder), ir.Constant(I32, 1023)), I64
            )  # the largest number: NVVM then divides as if unsigned

        return types.int64(), codegen

    return number


def _tid(builder: ir.IRBuilder) -> ir.Value:
    return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "llvm.nvvm.read.ptx.sreg.tid.x"), [])


this_thread = _thread(_tid)
"""cuda.threadIdx.x, known not to be negative: NVVM would divide cuda.threadIdx.x itself as a signed number."""
thread_again = _thread(lambda builder: _asm(builder, I32, "mov.u32 $0, %tid.x;", "=r", []))
"""The same, read anew at each use, so that what is worked out from it does not stay in registers between uses."""


_CODES = 0x03030303  # the two bits of a code in each byte of a word


def _planes(builder: ir.IRBuilder, word: ir.Value, valid: ir.Value) -> list[ir.Value]:
    """The codes of a word by plane: four words, of which word p holds the codes of plane p times 4^p, without a shift.

    `valid` is all ones, or 0 for zeros.
    """
    return [builder.and_(builder.and_(word, valid), ir.Constant(I32, _CODES << 2 * plane)) for plane in range(4)]


def _all_bits_if(builder: ir.IRBuilder, condition: ir.Value) -> ir.Value:
    return builder.sext(condition, I32)


def dot_tiles(count: int) -> Callable:
    """A function (sums, weights, low, high, valid) -> sums: byte dot products of the first `valid` of `count` tiles of weights.

    sums: of the four planes, for the upper row and then for the lower; plane p is counted 4^p times. weights: 4 words for each tile
    (layout.py). low and high: 4 words of codes for each tile, for its columns below 64 and for the others.
    """

    @intrinsic
    def dot(typing_context, sums, weights, low, high, valid):
        def codegen(context, builder, signature, args):
            *tuples, valid = args
            sums, weights, low, high = (
                [builder.extract_value(value, i) for i in range(kind.count)] for value, kind in zip(tuples, signature.args, strict=False)
            )
            for tile in range(count):
                counts = _all_bits_if(builder, builder.icmp_signed(">", valid, ir.Constant(valid.type, tile)))
                for register in range(4):
                    for plane, four in enumerate(_planes(builder, weights[4 * tile + register], counts)):
                        x = (low, high)[plane // 2][4 * tile + 2 * (plane % 2) + register // 2]
                        at = 4 * (register % 2) + plane
                        sums[at] = _asm(builder, I32, "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [four, x, sums[at]], effect=False)
            return context.make_tuple(builder, signature.return_type, sums)

        return sums(sums, weights, low, high, valid), codegen

    return dot


# --- numbers of tables ----------------------------------------------------------------------------------------------------------------


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32] * 3), "llvm.fma.f32")
    return builder.call(function, [a, b, c])


def _rounded(builder: ir.IRBuilder, operation: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """A product ("mul") or a sum ("add") that nothing is fused with."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(F32, [F32] * 2), f"llvm.nvvm.{operation}.rn.f")
    return builder.call(function, [a, b])


def float_zeros(count: int) -> Callable:
    """A function that gives a tuple of `count` float32 zeros."""
    return _zeros(types.UniTuple(types.float32, count))


def _number(builder: ir.IRBuilder, words: list[ir.Value], step: int, kind: str) -> ir.Value:
    """Number `step` in the four words of a lane."""
    if kind == "float32":
        return builder.bitcast(words[step], F32)
    word = words[step // 2]
    if kind == "float16":
        return _half_value(builder, builder.trunc(builder.lshr(word, ir.Constant(I32, 16 * (step % 2))), I16))
    bits = builder.and_(word, ir.Constant(I32, 0xFFFF0000)) if step % 2 else builder.shl(word, ir.Constant(I32, 16))
    return builder.bitcast(bits, F32)


def multiply_rows(kind: str, rows: int, tokens: int, edge: bool = False) -> Callable:
    """A function (sums, words, x, first, stride, last, far, left) -> sums, which multiplies one block of numbers (floats.py) of `rows` rows
    of a table with those of `tokens` tokens.

    sums: float32 [rows, tokens]; each number adds an fma. words: four of each row. min(first + t * stride, last) is the offset in x of this
    lane's first number of token t; the numbers of this block are `far` further, LANES apart. With `edge` the row ends `left` numbers after
    this lane's first one: zeros follow it, which change no sum, because a sum that began as +0 is never -0.
    """
    steps = 4 if kind == "float32" else 8

    @intrinsic
    def multiply(typing_context, sums, words, x, first, stride, last, far, left):
        def codegen(context, builder, signature, args):
            (sums, words), (array, first, stride, last, far, left) = (
                ([builder.extract_value(value, i) for i in range(value.type.count)] for value in args[:2]),
                args[2:],
            )
            numbers = [[_number(builder, words[4 * row : 4 * row + 4], step, kind) for step in range(steps)] for row in range(rows)]
            for token in range(tokens):
                start = builder.add(builder.select(builder.icmp_signed("<", first, last), first, last), far)
                first = builder.add(first, stride)
                for step in range(steps):
                    place, is_inside = builder.add(start, ir.Constant(I64, LANES * step)), None
                    if edge:
                        is_inside = builder.icmp_signed(">", left, ir.Constant(I64, LANES * step))
                        place = builder.select(is_inside, place, ir.Constant(I64, 0))
                    value = builder.load(_address(context, builder, signature.args[2], array, place), typ=F32)
                    if is_inside is not None:
                        value = builder.select(is_inside, value, ir.Constant(F32, 0.0))
                    for row in range(rows):
                        at = row * tokens + token
                        sums[at] = _fma(builder, numbers[row][step], value, sums[at])
            return context.make_tuple(builder, signature.return_type, sums)

        return sums(sums, words, x, *[types.int64] * 5), codegen

    return multiply


# --- among the lanes of a warp --------------------------------------------------------------------------------------------------------


def _butterfly(builder: ir.IRBuilder, value: ir.Value, distance: int) -> ir.Value:
    """The value of the lane whose number differs in one bit. All 32 lanes must come here together."""
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


def _of_warp(operation: str) -> Callable:
    @intrinsic
    def reduce(typing_context, x):
        def codegen(context, builder, signature, args):
            return _asm(builder, I32, f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;", "=r,r", [args[0]])

        return types.int32(types.int32), codegen

    return reduce


warp_sum, warp_max = _of_warp("add"), _of_warp("max")  # of the integers of all lanes, for each of them; all of a warp come here together


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
    """The sum of 64 numbers by 16 lanes, for each lane of a quad. numbers[part * 4 + i] is number part * 16 + lane mod 4 * 4 + i."""

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
    """A function (sums) -> `columns` dot products, for lanes that share 4 x `columns` of them: those with equal numbers mod 8.

    The lane's number // 8 is its quarter q. sums[(a * columns + b) * 4 + i] is number 4 * q + i of the 16 whose sum by halving (i with i +
    8, i + 4, i + 2, i + 1) is dot product (a ^ q, b). A lane gets the dot products of row q. All 32 lanes must come here together.
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


# --- one kernel after another ---------------------------------------------------------------------------------------------------------


def _since_sm_90(*texts: str) -> Callable:
    """Instructions that devices before sm_90 neither have nor need: NVVM knows which device it compiles for."""

    @intrinsic
    def instruction(typing_context):
        def codegen(context, builder, signature, args):
            name = context.insert_string_const_addrspace(builder, "__CUDA_ARCH")
            reflect = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [name.type]), "__nvvm_reflect")
            with builder.if_then(builder.icmp_signed(">=", builder.call(reflect, [name]), ir.Constant(I32, 900))):
                for text in texts:
                    _asm(builder, VOID, text, "~{memory}", [])
            return context.get_dummy_value()

        return types.none(), codegen

    return instruction


_LET, _AWAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"

let_next_begin = _since_sm_90(_LET)
"""Lets the next kernel of a graph begin as soon as every block is here. It goes as far as its own `await_previous`."""

await_previous = _since_sm_90(_AWAIT)
"""Waits until all kernels before have ended and their writes are seen.

Before it, a kernel may read only what never changes, and write nothing.
"""

in_turn = _since_sm_90(_LET, _AWAIT)
"""`let_next_begin` and `await_previous`: for kernels that have nothing to do before they wait."""


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def _address(context: Any, builder: ir.IRBuilder, array: Any, value: ir.Value, offset: ir.Value) -> ir.Value:
    return builder.gep(context.make_array(array)(context, builder, value).data, [offset])


_GLOBAL = 1  # the address space of global memory


def _load_vector(
    context: Any, builder: ir.IRBuilder, array: Any, address: ir.Value, in_global: bool = False, count: int = 4
) -> list[ir.Value]:
    """`count` numbers by one load, from an address that is aligned to all of them."""
    vector = ir.VectorType(context.get_data_type(array.dtype), count)
    address = builder.bitcast(address, vector.as_pointer(addrspace=address.type.addrspace))
    if in_global:
        address = builder.addrspacecast(address, vector.as_pointer(addrspace=_GLOBAL))
    loaded = builder.load(address, typ=vector)
    loaded.align = count * array.dtype.bitwidth // 8
    return [builder.extract_element(loaded, ir.Constant(I32, i)) for i in range(count)]


@intrinsic
def load4(typing_context, array, offset):
    """Four numbers of 4 bytes from an offset that is a multiple of 4: one load of 16 bytes."""

    def codegen(context, builder, signature, args):
        values = _load_vector(context, builder, signature.args[0], _address(context, builder, signature.args[0], *args))
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(array.dtype, 4)(array, types.int64), codegen


@intrinsic
def get(typing_context, array, offset):
    """array[offset], for an offset that is not negative: no code for one that counts from the end."""

    def codegen(context, builder, signature, args):
        return builder.load(_address(context, builder, signature.args[0], *args), typ=context.get_data_type(array.dtype))

    return array.dtype(array, types.int64), codegen


@intrinsic
def put(typing_context, array, offset, value):
    """array[offset] = value, for an offset that is not negative, like `get`."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], _address(context, builder, signature.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.none(array, types.int64, array.dtype), codegen


@intrinsic
def put4(typing_context, array, offset, a, b, c, d):
    """array[offset : offset + 4] = a, b, c, d, at an offset that is a multiple of 4: one store of 16 bytes."""

    def codegen(context, builder, signature, args):
        kind = ir.VectorType(F32, 4)
        address = _address(context, builder, signature.args[0], *args[:2])
        value = ir.Constant(kind, ir.Undefined)
        for i, number in enumerate(args[2:]):
            value = builder.insert_element(value, number, ir.Constant(I32, i))
        builder.store(value, builder.bitcast(address, kind.as_pointer(addrspace=address.type.addrspace)), align=16)
        return context.get_dummy_value()

    return types.none(array, types.int64, *[types.float32] * 4), codegen


@intrinsic
def prefetch(typing_context, array, offset):
    """Asks for the line of global memory that a number is in. It comes as far as the L2 cache; no thread waits for it."""

    def codegen(context, builder, signature, args):
        address = builder.ptrtoint(_address(context, builder, signature.args[0], *args), I64)
        _asm(builder, VOID, "{ .reg .u64 g; cvta.to.global.u64 g, $0; prefetch.global.L2 [g]; }", "l", [address])
        return context.get_dummy_value()

    return types.none(array, types.int64), codegen


def load_fragments(count: int, in_global: bool = False) -> Callable:
    """A function (array, offset, stride) -> the four words at offset + i * stride, for i below `count`, as one tuple.

    `in_global` tells NVVM that the array is in global memory: it cannot tell if the array was chosen among several.
    """

    @intrinsic
    def load(typing_context, array, offset, stride):
        def codegen(context, builder, signature, args):
            return _load_many(context, builder, signature, count, in_global, *args)

        return types.UniTuple(array.dtype, 4 * count)(array, types.int64, types.int64), codegen

    return load


def load_within(count: int) -> Callable:
    """As `load_fragments` of global memory, with another argument, `last`: larger offsets become that one."""

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
        values += _load_vector(context, builder, kind, _address(context, builder, kind, array, place), in_global)
        offset = builder.add(offset, stride)
    return context.make_tuple(builder, signature.return_type, values)


def load_column(count: int) -> Callable:
    """A function (array, offset, stride, last) -> the `count` float32 of global memory at min(offset + i * stride, last), as a tuple.

    An array of int16 holds float16, which are widened.
    """

    @intrinsic
    def load(typing_context, array, offset, stride, last):
        def codegen(context, builder, signature, args):
            kind = signature.args[0]
            array, *places = args
            addresses = [_address(context, builder, kind, array, place) for place in _places(builder, count, *places)]
            values = [_float_at(context, builder, kind, address) for address in addresses]
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(types.float32, count)(array, types.int64, types.int64, types.int64), codegen

    return load


def _places(builder: ir.IRBuilder, count: int, offset: ir.Value, stride: ir.Value, last: ir.Value) -> list[ir.Value]:
    """min(offset + i * stride, last) for i below `count`."""
    places = []
    for _ in range(count):
        places.append(builder.select(builder.icmp_signed("<", offset, last), offset, last))
        offset = builder.add(offset, stride)
    return places


def _float_at(context: Any, builder: ir.IRBuilder, kind: Any, address: ir.Value) -> ir.Value:
    value = builder.load(address, typ=context.get_data_type(kind.dtype))
    return _half_value(builder, value) if kind.dtype == types.int16 else value


def load_halves(count: int) -> Callable:
    """A function (array, offset) -> `count` float16 of global memory, widened, by one load. `offset` is a multiple of `count`."""

    @intrinsic
    def load(typing_context, array, offset):
        def codegen(context, builder, signature, args):
            kind = signature.args[0]
            bits = _load_vector(context, builder, kind, _address(context, builder, kind, *args), True, count)
            return context.make_tuple(builder, signature.return_type, [_half_value(builder, half) for half in bits])

        return types.UniTuple(types.float32, count)(array, types.int64), codegen

    return load


def chain_column(count: int) -> Callable:
    """A function (total, weights, at, values) -> total, by fma(weights[at + i], values[i], total) for i in order.

    `at` is a multiple of 4.
    """

    @intrinsic
    def chain(typing_context, total, weights, at, values):
        def codegen(context, builder, signature, args):
            total, array, at, values = args
            for i in range(0, count, 4):
                place = builder.add(at, ir.Constant(I64, i))
                four = _load_vector(context, builder, signature.args[1], _address(context, builder, signature.args[1], array, place))
                for j in range(4):
                    total = _fma(builder, four[j], builder.extract_value(values, i + j), total)
            return total

        return types.float32(types.float32, weights, types.int64, values), codegen

    return chain


def load_columns(columns: int, count: int) -> Callable:
    """A function (array, offset, far, valid, stride, last) -> `load_column` at offset + column * far, a column after another.

    `last` is that of the first column. Columns from number `valid` on are the last one before.
    """

    @intrinsic
    def load(typing_context, array, offset, far, valid, stride, last):
        def codegen(context, builder, signature, args):
            kind, values = signature.args[0], []
            array, offset, far, valid, stride, last = args
            places = _places(builder, count, offset, stride, last)  # once for all columns: 64-bit offsets take many registers
            start = _address(context, builder, kind, array, ir.Constant(I64, 0))
            for column in range(columns):
                if column:
                    is_valid = builder.icmp_signed("<", ir.Constant(I64, column), valid)
                    start = builder.gep(start, [builder.select(is_valid, far, ir.Constant(I64, 0))])
                values += [_float_at(context, builder, kind, builder.gep(start, [place])) for place in places]
            return context.make_tuple(builder, signature.return_type, values)

        n = types.int64
        return types.UniTuple(types.float32, columns * count)(array, n, n, n, n, n), codegen

    return load


def fold_columns(columns: int, count: int) -> Callable:
    """A function (totals, factors, old, new, far, values, valid) that folds each column of `load_columns` into a number of `totals`.

    totals[column] becomes fma(totals[column], factors[old + i], values[i] * factors[new + i]) for i below `valid`, in order, and a column
    on, with factors `far` on. The offsets `old` and `new`, and `far`, are multiples of 4.
    """

    @intrinsic
    def fold(typing_context, totals, factors, old, new, far, values, valid):
        def codegen(context, builder, signature, args):
            totals, array, old, new, far, values, valid = args
            for column in range(columns):
                place = _address(context, builder, signature.args[0], totals, ir.Constant(I64, column))
                total = builder.load(place, typ=F32)
                for i in range(0, count, 4):
                    olds, news = (
                        _load_vector(
                            context,
                            builder,
                            signature.args[1],
                            _address(context, builder, signature.args[1], array, builder.add(at, ir.Constant(I64, i))),
                        )
                        for at in (old, new)
                    )
                    for j in range(4):
                        value = builder.extract_value(values, column * count + i + j)
                        folded = _fma(builder, total, olds[j], _rounded(builder, "mul", value, news[j]))
                        total = builder.select(builder.icmp_signed(">", valid, ir.Constant(I64, i + j)), folded, total)
                builder.store(total, place)
                old, new = builder.add(old, far), builder.add(new, far)
            return context.get_dummy_value()

        n = types.int64
        return types.none(totals, factors, n, n, n, values, n), codegen

    return fold


@intrinsic
def copy_async(typing_context, shared, to, source, start, size):
    """Begins to copy 16 bytes from global to shared memory: zeros if `size` is 0 instead of 16. Offsets count words."""

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


# --- tuples of registers --------------------------------------------------------------------------------------------------------------


def _zeros(kind: types.UniTuple) -> Callable:
    @intrinsic
    def make(typing_context):
        return kind(), lambda context, builder, signature, args: ir.Constant(context.get_value_type(kind), None)

    return make


def for_each(function: Callable, picks: Sequence[Sequence[int]]) -> Callable:
    """A function (values, rest) that calls function(i, the values at picks[i], *rest) for each i, one after the other in the code.

    Registers have no index: in a loop that is not unrolled, `values[i]` would have to compare with them all.
    """

    @intrinsic
    def run(typing_context, values, rest):
        kinds = [types.UniTuple(values.dtype, len(pick)) for pick in picks]
        others = list(rest)

        def codegen(context, builder, signature, args):
            fields = [builder.extract_value(args[1], i) for i in range(len(others))]
            for i, (pick, kind) in enumerate(zip(picks, kinds, strict=True)):
                chosen = context.make_tuple(builder, kind, [builder.extract_value(args[0], at) for at in pick])
                call = typing.signature(types.none, types.int64, kind, *others)
                context.compile_internal(builder, function, call, [ir.Constant(I64, i), chosen, *fields])
            return context.get_dummy_value()

        return types.none(values, rest), codegen

    return run


# --- tensor cores ---------------------------------------------------------------------------------------------------------------------

_MMA = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"


def _mma(builder: ir.IRBuilder, a: list[ir.Value], b: list[ir.Value], sums: list[ir.Value], at: int) -> None:
    """sums[at : at + 4] += 16 rows of unsigned bytes times 8 tokens, over 32 columns."""
    four = ir.LiteralStructType([I32] * 4)
    result = _asm(builder, four, _MMA, "=r,=r,=r,=r" + ",r" * 10, [*a, *b, *sums[at : at + 4]], effect=False)
    sums[at : at + 4] = [builder.extract_value(result, i) for i in range(4)]


def zeros(count: int) -> Callable:
    """A function that gives a tuple of `count` int32 zeros."""
    return _zeros(types.UniTuple(types.int32, count))


def multiply(rows: int, tokens: int, half: int) -> Callable:
    """A function (sums, weights, codes) -> sums, which multiplies `rows` tiles of 16 rows with `tokens` tiles of 8 tokens, over 64 columns.

    sums: 4 int32 for each pair of tiles, row tiles outermost. weights: 4 words for each row tile, of which planes 2 * half and 2 * half + 1
    are these columns (layout.py). codes: 4 words for each token tile.
    """

    @intrinsic
    def step(typing_context, sums, weights, codes):
        def codegen(context, builder, signature, args):
            sums, weights, codes = (
                [builder.extract_value(value, i) for i in range(kind.count)] for value, kind in zip(args, signature.args, strict=True)
            )
            for part in range(2):
                shift = ir.Constant(I32, 2 * (2 * half + part))
                for row in range(rows):
                    a = [builder.and_(builder.lshr(word, shift), ir.Constant(I32, _CODES)) for word in weights[4 * row : 4 * row + 4]]
                    for token in range(tokens):
                        _mma(builder, a, codes[4 * token + 2 * part : 4 * token + 2 * part + 2], sums, 4 * (row * tokens + token))
            return context.make_tuple(builder, signature.return_type, sums)

        return sums(sums, weights, codes), codegen

    return step


def multiply_tiles(count: int, tokens: int, step: int) -> Callable:
    """A function (sums, weights, valid, codes, at, stride) -> sums, which multiplies the first `valid` of `count` tiles of the same 16 rows
    with `tokens` tiles of 8 tokens.

    sums: 4 int32 for each token tile and each of the four planes, token tiles outermost; plane p is counted 4^p times. weights: 4 words for
    each tile. The codes of tile i are at `at` + i * step in `codes`: 4 words for its columns below 64, and 16 words further 4 words for the
    others. Those of the next token tile are `stride` further.
    """

    @intrinsic
    def multiply(typing_context, sums, weights, valid, codes, at, stride):
        def codegen(context, builder, signature, args):
            (sums, weights), (valid, array, at, stride) = (
                ([builder.extract_value(value, i) for i in range(value.type.count)] for value in args[:2]),
                args[2:],
            )
            kind = signature.args[3]
            for tile in range(count):
                counts = builder.icmp_signed(">", valid, ir.Constant(I64, tile))
                planes = [_planes(builder, word, _all_bits_if(builder, counts)) for word in weights[4 * tile : 4 * tile + 4]]
                place = builder.select(counts, builder.add(at, ir.Constant(I64, tile * step)), at)
                for token in range(tokens):
                    low, high = (
                        _load_vector(
                            context, builder, kind, _address(context, builder, kind, array, builder.add(place, ir.Constant(I64, far)))
                        )
                        for far in (0, 16)
                    )
                    for plane in range(4):
                        b = (low, high)[plane // 2][2 * (plane % 2) : 2 * (plane % 2) + 2]
                        _mma(builder, [word[plane] for word in planes], b, sums, 16 * token + 4 * plane)
                    place = builder.add(place, stride)
            return context.make_tuple(builder, signature.return_type, sums)

        return sums(sums, weights, types.int64, codes, types.int64, types.int64), codegen

    return multiply
