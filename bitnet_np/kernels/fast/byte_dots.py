"""Byte dot products: the instructions that each processor has for them, one row of `PATHS` each, and the sums that they make.

For many tokens, one step multiplies 16 columns of 16 rows (four registers of codes) by 16 activations of each token. If instructions
multiply two bytes to a word, sums stay words between `open_sums` and `close_sums`, which saves one instruction in two.
"""

from typing import NamedTuple

from llvmlite import ir

from .emit import I16, I32, STEP, V16I32, V32I16, V64I8, Emitter, constant, emitted, first


class Path(NamedTuple):
    """The instructions of a processor, by LLVM's names without "llvm."; empty where it has none."""

    pieces: int  # the processor's registers in a logical one
    dot: str = ""  # int32 plus four products of bytes: of codes without a sign on x86, with one on ARM
    pairs: str = ""  # two products of bytes, codes without a sign and activations with one, as a word: at most 2 * 128 * 127 fits
    words: str = ""  # two products of words as int32
    dot_words: str = ""  # int32 plus two products of words
    pack: str = ""  # two registers of int32 as words
    sign: str = ""  # bytes with the signs of other bytes
    signed: bool = False  # codes have a sign
    tile: tuple[int, int] = (2, 2)  # groups of 16 rows, and tokens, whose sums fit the registers together with the operands


PATHS = {
    "avx512-vnni": Path(1, "x86.avx512.vpdpbusd.512", dot_words="x86.avx512.vpdpwssd.512", pack="x86.avx512.packssdw.512", tile=(4, 4)),
    "avx512": Path(1, pairs="x86.avx512.pmaddubs.w.512", words="x86.avx512.pmaddw.d.512", pack="x86.avx512.packssdw.512", tile=(2, 4)),
    "avx-vnni": Path(2, "x86.avx512.vpdpbusd.256", dot_words="x86.avx512.vpdpwssd.256", pack="x86.avx2.packssdw"),
    "avx2": Path(2, pairs="x86.avx2.pmadd.ub.sw", words="x86.avx2.pmadd.wd", pack="x86.avx2.packssdw", sign="x86.avx2.psign.b"),
    "ssse3": Path(
        4,
        pairs="x86.ssse3.pmadd.ub.sw.128",
        words="x86.sse2.pmadd.wd",
        pack="x86.sse2.packssdw.128",
        sign="x86.ssse3.psign.b.128",
        tile=(2, 1),
    ),
    "neon-dotprod": Path(4, "aarch64.neon.sdot.v4i32.v16i8", signed=True, tile=(1, 4)),
    "neon": Path(4, signed=True),
    "generic": Path(1),
}
"""Instruction path (processor.py) -> its instructions. Where it has none, plain LLVM does the same."""


def own(b: Emitter) -> Path:
    """The instructions of the processor that is compiled for."""
    return PATHS[b.path]


def instruction(b: Emitter, which: str, result: ir.VectorType, *registers: ir.Value) -> ir.Value:
    """An instruction of the path, by its field, on each of the processor's registers of some logical ones."""
    return b.by_pieces(f"llvm.{getattr(own(b), which)}", own(b).pieces, result, *registers)


def dot_bytes(b: Emitter, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """total[i] += sum over j < 4 of codes[4i + j] * x[4i + j]; codes are without a sign, or of the path's, x has one."""
    path = own(b)
    if path.dot:
        return instruction(b, "dot", V16I32, total, codes, x)
    if path.pairs:
        return b.add(total, _sums_of_words(b, word_products(b, codes, x)))
    if path.signed:
        return b.add(total, b.joined([_dot_neon(b, *part) for part in zip(b.slices(codes, 4), b.slices(x, 4), strict=True)]))
    wide = ir.VectorType(I16, STEP)
    words = sums_of_neighbours(b, b.mul(b.zext(codes, wide), b.sext(x, wide)))  # two products of at most 128 * 127 still fit
    return b.add(total, sums_of_neighbours(b, b.sext(words, ir.VectorType(I32, 32))))


def _dot_neon(b: Emitter, codes: ir.Value, x: ir.Value) -> ir.Value:
    """16 products s8 x s8 -> s16, neighbours added in 16 bits, and their sums in s32: smull, smull2, addp, saddlp."""
    v8i16 = ir.VectorType(I16, 8)
    products = [b.named("llvm.aarch64.neon.smull.v8i16", v8i16, *half) for half in zip(b.slices(codes, 2), b.slices(x, 2), strict=True)]
    pairs = b.named("llvm.aarch64.neon.addp.v8i16", v8i16, *products)  # at most 2 * 128 * 127, no overflow
    return b.named("llvm.aarch64.neon.saddlp.v4i32.v8i16", ir.VectorType(I32, 4), pairs)


def sums_of_neighbours(b: Emitter, numbers: ir.Value) -> ir.Value:
    even, odd = (b.shuffled(numbers, range(k, numbers.type.count, 2)) for k in (0, 1))
    return b.add(even, odd)


def word_products(b: Emitter, codes: ir.Value, x: ir.Value) -> ir.Value:
    """Sums of two products of bytes, codes without a sign and x with one, in words."""
    return instruction(b, "pairs", V32I16, codes, x)


def _sums_of_words(b: Emitter, words: ir.Value) -> ir.Value:
    return instruction(b, "words", V16I32, words, constant(V32I16, 1))


def broadcast_four(b: Emitter, pointer: ir.Value) -> ir.Value:
    """Four bytes of memory, repeated sixteen times, as the byte dot products of x86 can read them from memory."""
    return b.bitcast(b.splat(b.load(pointer, I32), V16I32), V64I8)


# --- many tokens ----------------------------------------------------------------------------------------------------------------------

WORD_STEPS = 16
"""Steps whose sums fit words if codes are 0..2: a word is at most 2 * 2 * 128 in each of four registers of a step."""


@emitted(returns=first)
def open_sums(b, tile):
    """What `dot_sixteen` adds to, for the tile to which `close_sums` adds it."""
    return [constant(V16I32, None)] * len(tile) if own(b).pairs else list(tile)


@emitted(returns=first)
def dot_sixteen(b, sums, codes, stride, x, x_start, x_stride, x_valid):
    """sums[i, j] += 16 columns of group i of 16 rows, times x[x_start + j * x_stride :][:16].

    Group i lies in 256 bytes at the address codes + i * stride: four times 4 columns of 16 rows.
    """
    groups = [[b.load(b.pointer(b.place(codes, stride, i, STEP * k)), V64I8) for k in range(4)] for i in range(sums.rows)]
    tokens = [b.moved(x.at(b.clamped(x_start, x_stride, j, x_valid)), 0) for j in range(sums.columns)]
    for plane in range(4):
        for j, token in enumerate(tokens):
            four = broadcast_four(b, b.moved(token, 4 * plane))
            for i, group in enumerate(groups):
                sums[i * sums.columns + j] = add_four(b, sums[i * sums.columns + j], group[plane], four)
    return sums


def add_four(b: Emitter, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """The sums of a token plus 4 columns of 16 rows."""
    if not own(b).pairs:
        return dot_bytes(b, total, codes, x)
    return b.bitcast(b.add(b.bitcast(total, V32I16), word_products(b, codes, x)), V16I32)


@emitted(returns=first)
def close_sums(b, tile, sums):
    """The tile plus the sums."""
    if not own(b).pairs:
        return list(sums)  # which began as the tile
    return [b.add(total, closed(b, words)) for total, words in zip(tile, sums, strict=True)]


def closed(b: Emitter, total: ir.Value) -> ir.Value:
    """A sum of `add_four` as int32."""
    return _sums_of_words(b, b.bitcast(total, V32I16)) if own(b).pairs else total
