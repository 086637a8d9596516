"""Single instructions for the GPU's kernels, where Numba has no name for them.

NVVM, and after it ptxas, fuse a product with the sum that follows, unless one of the two names its rounding. The contract names
every fused operation. So a kernel writes `times` for a product that a sum follows, or `plus` for that sum, and `fma` for a fused one.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from ..fast import simd

_I16, _I32, _HALF, _F32 = ir.IntType(16), ir.IntType(32), ir.HalfType(), ir.FloatType()

float_bits, bits_float, fma = simd.float_bits, simd.bits_float, simd.fma


def _calls(name: str, result: Any, *arguments: Any) -> Callable:
    """The code of a function that NVVM has under this name, and its types."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(context.get_value_type(signature.return_type), [arg.type for arg in args])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return lambda: (result(*arguments), codegen)


_TIMES = _calls("llvm.nvvm.mul.rn.f", types.float32, types.float32, types.float32)
_PLUS = _calls("llvm.nvvm.add.rn.f", types.float32, types.float32, types.float32)
_FMA64 = _calls("llvm.fma.f64", types.float64, types.float64, types.float64, types.float64)


@intrinsic
def times(typing_context, a, b):
    """a * b, which no sum is fused with."""
    return _TIMES()


@intrinsic
def plus(typing_context, a, b):
    """a + b, which no product is fused with."""
    return _PLUS()


@intrinsic
def fma64(typing_context, a, b, c):
    return _FMA64()


@intrinsic
def half_value(typing_context, bits):
    """The float16 of these bits, as a float32."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], _HALF), _F32)

    return types.float32(types.int16), codegen


@intrinsic
def half_bits(typing_context, x):
    """The bits of x rounded to float16, half to even; those of a NaN if x is beyond float16's range."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(builder.fptrunc(args[0], _HALF), _I16)
        finite = builder.icmp_unsigned("<", builder.and_(bits, ir.Constant(_I16, 0x7FFF)), ir.Constant(_I16, 0x7C00))
        return builder.select(finite, bits, ir.Constant(_I16, 0x7E00))

    return types.int16(types.float32), codegen


@intrinsic
def half_warp_sum(typing_context, x):
    """The sum of 16 threads' float32 by halving, i with i + 8, i + 4, i + 2, i + 1, never -0, for each. All of a warp come together."""

    def codegen(context, builder, signature, args):
        kind, x = ir.FunctionType(_I32, [_I32] * 4), args[0]
        exchange = cgutils.get_or_insert_function(builder.module, kind, "llvm.nvvm.shfl.sync.bfly.i32")
        for distance in (8, 4, 2, 1):
            everyone, last = ir.Constant(_I32, -1), ir.Constant(_I32, 31)
            other = builder.call(exchange, [everyone, builder.bitcast(x, _I32), ir.Constant(_I32, distance), last])
            x = builder.fadd(x, builder.bitcast(other, _F32))
        return builder.fadd(x, ir.Constant(_F32, 0.0))

    return types.float32(types.float32), codegen


_MMA = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"


@intrinsic
def multiply(typing_context, a, b, sums):
    """sums + 16 rows of unsigned bytes times 8 columns of signed ones, over 32 bytes of each, by a warp's tensor core.

    Thread 4 g + t has, of rows g and g + 8, the bytes from 4 t on in a[0] and a[1], and from 16 + 4 t on in a[2] and a[3]; of column g
    the same bytes in b[0] and b[1]; and the sums of row g and columns 2 t, 2 t + 1 in sums[0] and sums[1], of row g + 8 in the others.
    """

    def codegen(context, builder, signature, args):
        values = [builder.extract_value(value, i) for value, kind in zip(args, signature.args, strict=True) for i in range(kind.count)]
        four = ir.LiteralStructType([_I32] * 4)
        instruction = ir.InlineAsm(ir.FunctionType(four, [_I32] * 10), _MMA, "=r,=r,=r,=r" + ",r" * 10, side_effect=False)
        result = builder.call(instruction, values)
        return context.make_tuple(builder, signature.return_type, [builder.extract_value(result, i) for i in range(4)])

    word, number = types.uint32, types.int32
    return types.UniTuple(number, 4)(types.UniTuple(word, 4), types.UniTuple(word, 2), types.UniTuple(number, 4)), codegen
