"""The integers in ggml's blocks, as bytes: codes, and the small factors of scales and minimums, at the places in base/block_formats.py."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

from llvmlite import ir

from ...base.block_formats import Digit, Flags, Integers
from . import emit
from .emit import I8, I16, LANES, V16I32, Emitter, constant


def bytes_of(values: Sequence[int]) -> ir.Value:
    return constant(ir.VectorType(I8, len(values)), list(values))


def load_lanes(b: Emitter, block: ir.Value, at: list[int]) -> ir.Value:
    """The bytes of a block at the offsets `at`. It reads nothing outside their range."""
    least = min(at)
    loaded = b.load(b.moved(block, least), ir.VectorType(I8, max(at) - least + 1))
    return b.shuffled(loaded, [i - least for i in at])


def _word_shift(b: Emitter, codes: ir.Value, places: list[int]) -> ir.Value:
    """Bytes shifted right by `places`, or left where that is negative, as words, because x86 cannot shift bytes: bits cross over."""
    words = b.bitcast(codes, ir.VectorType(I16, len(places) // 2))
    left, right = ([max(0, sign * place) for place in places[::2]] for sign in (-1, 1))
    if any(right):
        words = b.lshr(words, right)
    if any(left):
        words = b.shl(words, left)
    return b.bitcast(words, codes.type)


def bits_of(b: Emitter, codes: ir.Value, shifts: list[int], masks: list[int], place: int) -> ir.Value:
    """(byte >> shift & mask) << place for each byte."""
    if shifts[::2] != shifts[1::2]:  # each byte has its own, in some words
        terms = []
        for shift in sorted(set(shifts)):
            its = [mask if other == shift else 0 for mask, other in zip(masks, shifts, strict=True)]
            terms.append(bits_of(b, codes, [shift] * len(shifts), its, place))
        return reduce(b.or_, terms)
    kept = [mask & 255 >> shift for mask, shift in zip(masks, shifts, strict=True)]
    net = [shift - place for shift in shifts]
    if min(net) < 0 < max(net):  # right and then left
        return _word_shift(b, b.and_(_word_shift(b, codes, shifts), kept), [-place] * len(shifts))
    if any(net):
        codes = _word_shift(b, codes, net)
    elif set(kept) == {255}:
        return codes
    return b.and_(codes, [mask << place for mask in kept])


def _digits(b: Emitter, codes: ir.Value, factors: list[int]) -> ir.Value:
    """Digits of bytes in base 3: factors are 3^place. 16 bits hold every product."""
    words = ir.VectorType(I16, codes.type.count)
    below = b.and_(b.mul(b.zext(codes, words), factors), 255)
    return b.trunc(b.lshr(b.mul(below, 3), 8), codes.type)


Run = tuple[ir.Value, Integers, int]
"""16 integers: a pointer to their block, their record, and their number in it."""


def _part(b: Emitter, runs: Sequence[Run], number: int) -> ir.Value:
    """One part of the integers of some runs."""
    parts: list[tuple[ir.Value, Any, int]] = [(pointer, integers.parts[number], LANES * run) for pointer, integers, run in runs]
    kind = parts[0][1]
    if isinstance(kind, Flags):
        whole = ir.IntType(LANES * len(runs))
        bits = constant(whole, 0)
        for i, (pointer, part, _) in enumerate(parts):
            bits = b.or_(bits, b.shl(b.zext(b.load(b.moved(pointer, part.at), I16), whole), LANES * i))
        flags = b.bitcast(bits, ir.VectorType(ir.IntType(1), whole.width))
        return b.select(flags, bytes_of([1 << kind.place] * whole.width), bytes_of([0] * whole.width))

    def of_lanes(name: str) -> list[int]:
        return [n for _, part, start in parts for n in getattr(part, name)[start : start + LANES]]

    loaded = []
    for pointer in dict.fromkeys(pointer for pointer, _, _ in runs):  # the runs of a block together
        at = [offset for its, part, start in parts if its is pointer for offset in part.at[start : start + LANES]]
        loaded.append(load_lanes(b, pointer, at))
    codes = b.joined(loaded)
    if isinstance(kind, Digit):
        return _digits(b, codes, of_lanes("factor"))
    return bits_of(b, codes, of_lanes("shift"), of_lanes("mask"), kind.place)


def joined_runs(b: Emitter, runs: Sequence[Run], offset: int = 0) -> ir.Value:
    """The integers of some runs, whose records are alike, plus an offset: as bytes, in a quarter of the registers that int32 takes."""
    integers = runs[0][1]
    codes = reduce(b.or_, [_part(b, runs, number) for number in range(len(integers.parts))])
    if integers.table:
        return looked_up(b, codes, [n + offset for n in integers.table])
    return b.add(codes, offset - integers.bias) if offset != integers.bias else codes


def looked_up(b: Emitter, places: ir.Value, table: Sequence[int]) -> ir.Value:
    """The bytes of a table of 16 at these places: by an instruction, or by each bit of the places in turn."""
    count = places.type.count
    if count == emit.STEP and b.path.startswith("avx512"):
        return b.named("llvm.x86.avx512.pshuf.b.512", places.type, bytes_of(list(table) * 4), places)
    if b.path != "generic":
        name = "llvm.aarch64.neon.tbl1.v16i8" if b.path.startswith("neon") else "llvm.x86.ssse3.pshuf.b.128"
        numbers = bytes_of(table)
        return b.joined([b.named(name, numbers.type, numbers, part) for part in b.slices(places, count // LANES)])
    chosen = [bytes_of([number] * count) for number in table]
    for bit in range(4):
        is_set = b.icmp_unsigned("!=", b.and_(places, 1 << bit), constant(places.type, None))
        chosen = [b.select(is_set, odd, even) for even, odd in zip(chosen[::2], chosen[1::2], strict=True)]
    return chosen[0]


def has_sign(integers: Integers) -> bool:
    """Whether some may be negative."""
    return bool(integers.bias or integers.signed or integers.table)


def widened(b: Emitter, numbers: ir.Value, integers: Integers, wide: ir.VectorType = V16I32) -> ir.Value:
    """Integers of more bits."""
    return (b.sext if has_sign(integers) else b.zext)(numbers, wide)
