"""Single instructions for the GPU's kernels.

NVVM, and after it ptxas, fuse a product with the sum that follows, unless one of the two names its rounding. The contract names
every fused operation. A kernel therefore writes `times` for a product that is followed by a sum, or `plus` for that sum, and `fma` for a
fused one.
"""

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.cuda import libdevice, types
from numba.cuda.extending import intrinsic

from ..fast import simd
from .target import device

float_bits, bits_float, fma = simd.float_bits, simd.bits_float, simd.fma
times, plus, fma64 = libdevice.fmul_rn, libdevice.fadd_rn, libdevice.fma_rn


_I32, _F32 = ir.IntType(32), ir.FloatType()


@intrinsic
def number(typing_context, x):
    """What a table or a cache holds as a float32: a float32 itself, or the bits of a float16 (int16) or a bfloat16 (uint16)."""

    def codegen(context, builder, signature, args):
        if x == types.float32:
            return args[0]
        if x == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _F32)
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16)), _F32)

    return types.float32(x), codegen


@device
def half_bits(x):
    """The bits of x rounded to float16, half to even; those of a NaN if x is beyond float16's range."""
    bits = libdevice.float2half_rn(x)
    return bits if bits & 0x7FFF < 0x7C00 else np.int16(0x7E00)


@device
def _exchanged_sum(x, distance):
    return plus(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, distance))


@device
def half_warp_sum(x):
    """The sum of 16 threads' float32 by halving, i with i + 8, i + 4, i + 2, i + 1, never -0, for each. All of a warp come together."""
    return plus(_exchanged_sum(_exchanged_sum(_exchanged_sum(_exchanged_sum(x, 8), 4), 2), 1), np.float32(0.0))


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
