"""Byte dot products: the instructions that each processor has for them, and the sums that they make.

Where no instruction multiplies bytes and adds up int32, `DOTS` has the few that do it together.

Of many tokens, a step multiplies 16 columns of 16 rows, four registers of codes, by 16 activations of each. Its sums are kept as it is
fastest between `open_sums` and `close_sums`. Codes lie in memory as `ordered` puts them.
"""

from collections.abc import Callable
from functools import partial

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import simd
from .simd import (
    I8,
    I16,
    I32,
    I64,
    LANES,
    STEP,
    V16I32,
    V32I16,
    V64I8,
    _address,
    _at,
    _call,
    _clamped,
    _joined,
    _load,
    _pack,
    _slices,
    _splat,
    _unpack,
)

V2I64, V2I32, V16I8 = ir.VectorType(I64, 2), ir.VectorType(I32, 2), ir.VectorType(I8, 16)


def _dot_avx2(builder: ir.IRBuilder, names: tuple[str, str], total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """u8 x s8 -> s16 pairs (at most 2 * 128 * 127, no saturation), then s16 pairs -> s32."""
    lanes = codes.type.count // 2
    products = _call(builder, names[0], ir.VectorType(I16, lanes), codes, x)
    return builder.add(total, _call(builder, names[1], total.type, products, ir.Constant(products.type, [1] * lanes)))


def _dot_one(name: str, builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    return _call(builder, name, total.type, total, codes, x)


def _dot_neon(builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """16 products s8 x s8 -> s16, neighbours added in 16 bits, and their sums to s32: smull, smull2, addp, sadalp."""
    v8i16 = ir.VectorType(I16, 8)
    halves = zip(_slices(builder, codes, 2), _slices(builder, x, 2), strict=True)
    products = [_call(builder, "llvm.aarch64.neon.smull.v8i16", v8i16, *half) for half in halves]
    pairs = _call(builder, "llvm.aarch64.neon.addp.v8i16", v8i16, *products)  # at most 2 * 127 * 63, no overflow
    return builder.add(total, _call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", total.type, pairs))


def _dot_generic(builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """In plain LLVM: widen to 16 bits, multiply, add four neighbours."""
    products = builder.mul(builder.zext(codes, ir.VectorType(I16, STEP)), builder.sext(x, ir.VectorType(I16, STEP)))
    for width in (I16, I32):  # two products of at most 128 * 127 still fit 16 bits
        wide = builder.sext(products, ir.VectorType(width, products.type.count)) if width is I32 else products
        even, odd = (ir.Constant(ir.VectorType(I32, wide.type.count // 2), list(range(k, wide.type.count, 2))) for k in (0, 1))
        products = builder.add(builder.shuffle_vector(wide, wide, even), builder.shuffle_vector(wide, wide, odd))
    return builder.add(total, products)


# instruction path -> the number of hardware registers in a logical one, and the dot product of one of them
DOTS: dict[str, tuple[int, Callable]] = {
    "avx512-vnni": (1, partial(_dot_one, "llvm.x86.avx512.vpdpbusd.512")),
    "avx512": (1, lambda b, *v: _dot_avx2(b, ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"), *v)),
    "avx-vnni": (2, partial(_dot_one, "llvm.x86.avx512.vpdpbusd.256")),
    "avx2": (2, lambda b, *v: _dot_avx2(b, ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"), *v)),
    "ssse3": (4, lambda b, *v: _dot_avx2(b, ("llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"), *v)),
    "neon-i8mm": (4, partial(_dot_one, "llvm.aarch64.neon.sdot.v4i32.v16i8")),  # codes 0..2 are signed bytes too
    "neon-dotprod": (4, partial(_dot_one, "llvm.aarch64.neon.sdot.v4i32.v16i8")),
    "neon": (4, _dot_neon),
    "generic": (1, _dot_generic),
}
SIGNED = ("neon-i8mm", "neon-dotprod", "neon")
"""Paths that multiply signed codes."""


def dot_bytes(builder: ir.IRBuilder, path: str, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """total[i] += sum over j < 4 of codes[4i + j] * x[4i + j]; codes are 0, 1 or 2, x is signed."""
    pieces, dot = DOTS[path]
    sliced = (_slices(builder, value, pieces) for value in (total, codes, x))
    return _joined(builder, [dot(builder, *part) for part in zip(*sliced, strict=True)])


def broadcast_four(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Four bytes of memory, repeated sixteen times, as the byte dot products of x86 can read them from memory."""
    four = builder.load(builder.bitcast(address, I32.as_pointer()), typ=I32)
    four.align = 1
    return builder.bitcast(_splat(builder, four, V16I32), V64I8)


def byte_offset() -> int:
    """The excess of a byte over its code in the products of `byte_step`: 128; 0 on NEON, whose dot products take the signed code itself."""
    return 0 if simd.instruction_path() in SIGNED else 128


@intrinsic
def byte_step(typing_context, tile, codes, start, x, x_start, x_stride):
    """tile[0, j] += 4 columns of 16 rows, 64 bytes of codes, times x[x_start + j * x_stride :][:4], one row's sum in each lane.

    Codes are -127..127, stored as code + 128 and multiplied as code + `byte_offset()`. |x| <= 63, so that AVX2's sums of two products fit
    16 bits.
    """

    def codegen(context, builder, signature, args):
        tile, codes_array, _, x_array = signature.args[:4]
        value, codes, start, x, x_start, x_stride = args
        path = simd.instruction_path()
        packed = _load(builder, _address(context, builder, codes_array, codes, start), V64I8)
        if byte_offset() == 0:
            packed = builder.xor(packed, ir.Constant(V64I8, [0x80] * STEP))
        sums = _unpack(builder, tile, value)
        for column in range(tile.columns):
            offset = builder.add(x_start, builder.mul(x_stride, ir.Constant(x_stride.type, column)))
            activations = broadcast_four(builder, _address(context, builder, x_array, x, offset))
            sums[column] = dot_bytes(builder, path, sums[column], packed, activations)
        return _pack(builder, value, sums)

    n = types.intp
    return tile(tile, codes, n, x, n, n), codegen


# --- many tokens ----------------------------------------------------------------------------------------------------------------------

WORDS: dict[str, tuple[int, str, str]] = {
    "avx512": (1, "llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
    "avx2": (2, "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    "ssse3": (4, "llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
}
"""Paths that keep sums of two products in words of 16 bits: the pieces of a register, what multiplies bytes, and what adds up two words."""

WORD_STEPS = 16
"""Steps whose sums fit words if codes are 0..2: a word is at most 2 * 2 * 128 in each of four registers of a step."""


def ordered(builder: ir.IRBuilder, planes: list[ir.Value]) -> list[ir.Value]:
    """Four registers of codes, each 4 columns of 16 rows, as `dot_sixteen` reads them: with `smmla` 8 columns of 8 rows."""
    if simd.instruction_path() != "neon-i8mm":
        return planes
    halves = []
    for a, b in (planes[:2], planes[2:]):
        words = builder.bitcast(a, V16I32), builder.bitcast(b, V16I32)
        for first in (0, 8):
            order = [row + LANES * which for row in range(first, first + 8) for which in (0, 1)]
            halves.append(builder.bitcast(builder.shuffle_vector(*words, ir.Constant(V16I32, order)), V64I8))
    return halves


@intrinsic
def open_sums(typing_context, tile):
    """What `dot_sixteen` adds to, for the tile to which `close_sums` adds it. `smmla` wants an even number of columns."""

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(tile), None) if _is_apart(simd.instruction_path()) else args[0]

    return tile(tile), codegen


def _is_apart(path: str) -> bool:
    """Whether sums differ from a tile of int32 with a row in each lane, to which they are added in the end."""
    return path in WORDS or path == "neon-i8mm"


@intrinsic
def dot_sixteen(typing_context, sums, codes, stride, x, x_start, x_stride, x_valid):
    """sums[i, j] += 16 columns of group i of 16 rows, times x[x_start + j * x_stride :][:16].

    Group i lies in 256 bytes at the address codes + i * stride, ordered.
    """

    def codegen(context, builder, signature, args):
        tile, x_array = signature.args[0], signature.args[3]
        value, codes, stride, x, x_start, x_stride, x_valid = args
        groups = []
        for i in range(tile.rows):
            place = builder.add(codes, builder.mul(stride, ir.Constant(stride.type, i)))
            places = [builder.add(place, ir.Constant(place.type, STEP * k)) for k in range(4)]
            groups.append([_load(builder, _at(builder, at, I8), V64I8) for at in places])
        offsets = [_clamped(builder, x_start, x_stride, j, x_valid) for j in range(tile.columns)]
        tokens = [_address(context, builder, x_array, x, offset) for offset in offsets]
        return _pack(builder, value, add_sixteen(builder, _unpack(builder, tile, value), groups, tokens))

    n = types.intp
    return sums(sums, n, n, x, n, n, n), codegen


def add_sixteen(builder: ir.IRBuilder, sums: list[ir.Value], groups: list[list[ir.Value]], tokens: list[ir.Value]) -> list[ir.Value]:
    """sums, one for each token of each group, plus products of the groups' ordered codes with 16 activations from an address on."""
    path, count = simd.instruction_path(), len(tokens)
    if path == "neon-i8mm":
        for j in range(0, count, 2):
            eights = _eights(builder, tokens[j : j + 2])
            for i, codes in enumerate(groups):
                pair = slice(i * count + j, i * count + j + 2)
                sums[pair] = add_pairs(builder, sums[pair], codes, eights)
        return sums
    for plane in range(4):
        for j, token in enumerate(tokens):
            four = broadcast_four(builder, builder.gep(token, [ir.Constant(I32, 4 * plane)]))
            for i, codes in enumerate(groups):
                sums[i * count + j] = add_four(builder, sums[i * count + j], codes[plane], four)
    return sums


def add_four(builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Sums of a token plus 4 columns of 16 rows, not by `smmla`."""
    path = simd.instruction_path()
    if path not in WORDS:
        return dot_bytes(builder, path, total, codes, x)
    return builder.bitcast(builder.add(builder.bitcast(total, V32I16), word_products(builder, codes, x)), V16I32)


def word_products(builder: ir.IRBuilder, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Sums of two products of bytes, codes without a sign and x with one, in words."""
    pieces, name, _ = WORDS[simd.instruction_path()]
    parts = zip(_slices(builder, codes, pieces), _slices(builder, x, pieces), strict=True)
    return _joined(builder, [_call(builder, name, ir.VectorType(I16, 32 // pieces), *part) for part in parts])


def _eights(builder: ir.IRBuilder, tokens: list[ir.Value]) -> list[ir.Value]:
    """16 activations of two tokens as two registers: the first 8 of both, and the others."""
    a, b = (_load(builder, token, V2I64) for token in tokens)
    return [builder.bitcast(builder.shuffle_vector(a, b, ir.Constant(V2I32, order)), V16I8) for order in ([0, 2], [1, 3])]


def add_pairs(builder: ir.IRBuilder, sums: list[ir.Value], codes: list[ir.Value], eights: list[ir.Value]) -> list[ir.Value]:
    """Sums of two tokens plus products by `smmla`, which multiplies 2 rows by 2 tokens, 8 columns of each.

    Its sums are in the order row 0 token 0, row 0 token 1, row 1 token 0, row 1 token 1, and so on.
    """
    parts = [part for register in sums for part in _slices(builder, register, 4)]
    for k, x in enumerate(eights):
        rows = [part for register in codes[2 * k : 2 * k + 2] for part in _slices(builder, register, 4)]
        pairs = zip(parts, rows, strict=True)
        parts = [_call(builder, "llvm.aarch64.neon.smmla.v4i32.v16i8", total.type, total, row, x) for total, row in pairs]
    return [_joined(builder, parts[:4]), _joined(builder, parts[4:])]


@intrinsic
def close_sums(typing_context, tile, sums):
    """The tile plus the sums."""

    def codegen(context, builder, signature, args):
        tile, path = signature.args[0], simd.instruction_path()
        if not _is_apart(path):
            return args[1]  # which began as the tile
        totals, registers = _unpack(builder, tile, args[0]), _unpack(builder, tile, args[1])
        if path in WORDS:
            added = [_added_words(builder, path, register) for register in registers]
        else:
            added = [register for i in range(0, tile.count, 2) for register in _by_token(builder, registers[i : i + 2])]
        return _pack(builder, args[0], [builder.add(*pair) for pair in zip(totals, added, strict=True)])

    return tile(tile, tile), codegen


def _added_words(builder: ir.IRBuilder, path: str, words: ir.Value) -> ir.Value:
    pieces, _, name = WORDS[path]
    ones = ir.Constant(ir.VectorType(I16, 32 // pieces), [1] * (32 // pieces))
    parts = _slices(builder, builder.bitcast(words, V32I16), pieces)
    return _joined(builder, [_call(builder, name, ir.VectorType(I32, LANES // pieces), part, ones) for part in parts])


def _by_token(builder: ir.IRBuilder, pair: list[ir.Value]) -> list[ir.Value]:
    return [builder.shuffle_vector(*pair, ir.Constant(V16I32, list(range(token, 2 * LANES, 2)))) for token in (0, 1)]
