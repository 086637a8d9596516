"""Instructions of Hopper's warpgroups, compute capability 9.0: matrix products whose right side lies in shared memory.

Four warps, a warpgroup, multiply 64 rows at a time. The rows of a warp and its results lie in registers as for ptx.py's `multiply`. The
tokens' codes lie in shared memory in core matrices: 8 tokens, 16 bytes of each. With T tokens, chunk m of 16 bytes of a token is at byte
(m * T + token) * 16. The eight chunks of 128 columns are those that layout.py's planes multiply: chunk 2 p + k holds columns
64 * (p // 2) + 16 j + 8 * (p % 2) + 4 k + b of plane p in byte 4 j + b.
"""

from collections.abc import Callable

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .ptx import _CODES, I32, I64, VOID, _address, _asm, _nothing

ROWS = 64  # of a warpgroup
THREADS = 128
_TOKENS = 8  # tokens of a core matrix


@intrinsic
def copy_word_async(typing_context, shared, to, source, start, size):
    """Begins to copy 4 bytes from global to shared memory: zeros if `size` is 0 instead of 4. Offsets count words."""

    def codegen(context, builder, signature, args):
        addresses = [_address(context, builder, signature.args[i], args[i], args[i + 1]) for i in (0, 2)]
        copy = "cvta.to.shared.u64 s, $0; cvta.to.global.u64 g, $1; cp.async.ca.shared.global [s], [g], 4, $2;"
        operands = [*(builder.ptrtoint(address, I64) for address in addresses), args[4]]
        _asm(builder, VOID, f"{{ .reg .u64 s; .reg .u64 g; {copy} }}", "l,l,r,~{memory}", operands)
        return context.get_dummy_value()

    return types.none(shared, types.int64, source, types.int64, types.int32), codegen


show_to_products = _nothing("fence.proxy.async.shared::cta;")
"""Makes what this thread has written to shared memory visible to products, behind a barrier."""


def multiply_group(tokens: int) -> Callable:
    """A function (sums, weights, shared, at) -> sums, by which a warpgroup multiplies 64 rows with `tokens` tokens, over 128 columns.

    sums: 4 int32 for each 8 tokens. weights: 4 words of each lane (layout.py), a tile of 16 rows for each warp. The tokens' codes begin at
    shared[at], a multiple of 4. All threads of the warpgroup come here together; the products have ended when they go on.
    """
    count = tokens // 2

    def text() -> str:
        sums, first = ", ".join(f"${i}" for i in range(count)), 2 * count  # operands: results, the same as inputs, codes, an address
        lines = ["{ .reg .pred p; .reg .b64 s; .reg .b64 d; setp.eq.b32 p, 0, 0; wgmma.fence.sync.aligned;"]
        for plane in range(4):
            weights = ", ".join(f"${first + 4 * plane + i}" for i in range(4))
            lines.append(f"add.s64 d, ${first + 16}, {plane * 2 * tokens};")  # two chunks, in units of 16 bytes
            lines.append(f"wgmma.mma_async.sync.aligned.m64n{tokens}k32.s32.u8.s8 {{{sums}}}, {{{weights}}}, d, p;")
        return " ".join([*lines, "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"])

    constraints = ",".join([*["=r"] * count, *map(str, range(count)), *["r"] * 16, "l", "~{memory}"])

    @intrinsic
    def multiply(typing_context, sums, weights, shared, at):
        def codegen(context, builder, signature, args):
            totals, words = ([builder.extract_value(args[i], j) for j in range(args[i].type.count)] for i in range(2))
            shifts = [ir.Constant(I32, 2 * plane) for plane in range(4)]
            codes = [builder.and_(builder.lshr(word, shift), ir.Constant(I32, _CODES)) for shift in shifts for word in words]
            generic = builder.ptrtoint(_address(context, builder, signature.args[2], args[2], args[3]), I64)
            place = _asm(builder, I64, "cvta.to.shared.u64 $0, $1;", "=l,l", [generic], effect=False)
            sixteens = builder.and_(builder.lshr(place, ir.Constant(I64, 4)), ir.Constant(I64, 0x3FFF))
            between = tokens << 16 | _TOKENS << 32  # chunks of a token, and core matrices of 8 tokens, in units of 16 bytes
            matrix = builder.or_(sixteens, ir.Constant(I64, between))
            result = _asm(builder, ir.LiteralStructType([I32] * count), text(), constraints, [*totals, *codes, matrix])
            return context.make_tuple(builder, signature.return_type, [builder.extract_value(result, i) for i in range(count)])

        return sums(sums, weights, shared, types.int64), codegen

    return multiply
