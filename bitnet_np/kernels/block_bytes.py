"""Typed SIMD for products of ggml's blocks by bytes: codes, scales and minimums of 16 rows, and their sums. It stands beside simd.py.

RANGES. Activations are -127..127 and codes have at most 8 bits, so four products of a lane and 16 of a run fit 18 bits or 19. Of the types
with small integer scales, a lane of Q2_K, Q3_K, Q4_K, Q5_K and Q6_K fits 16 bits even with the offset in it (at most 4 * 127 * 63), and a
run those of Q2_K, Q3_K and Q4_K (16 * 127 * 15); their products with scales of up to 8 bits are made of 16-bit words, the others' of 32-bit
ones. Where bytes are multiplied two at a time to words, those of two or four registers are added up first (Plan.word_registers). A whole
block with its offset is at most 256 * 127 * 255 * 32 < 2^28 (IQ4_XS; Q6_K 256 * 127 * 63 * 128), what the offset adds to it
256 * 127 * 32 * 128, and minimums at most 256 * 127 * 63.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from . import byte_dots, simd
from .block_formats import Bits, Digit, Factor, Flags, Integers
from .block_plans import PLANS, REGISTER, Plan
from .simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    STEP,
    V16F32,
    V16I16,
    V16I32,
    V32I16,
    V64I8,
)

_OF_512_BITS = ("avx512-vnni", "avx512")
"""Instruction paths on which a logical register is one of the processor's."""

V64I1, V64I16, V32I32 = ir.VectorType(ir.IntType(1), STEP), ir.VectorType(I16, STEP), ir.VectorType(I32, 32)


# --- codes ----------------------------------------------------------------------------------------------------------------------------


def _word_shift(builder: ir.IRBuilder, codes: ir.Value, places: list[int]) -> ir.Value:
    """Bytes shifted right by `places`, or left where that is negative, as words, because x86 cannot shift bytes: bits cross over."""
    words = builder.bitcast(codes, V32I16)
    left, right = ([max(0, sign * place) for place in places[::2]] for sign in (-1, 1))
    if any(right):
        words = builder.lshr(words, ir.Constant(V32I16, right))
    if any(left):
        words = builder.shl(words, ir.Constant(V32I16, left))
    return builder.bitcast(words, V64I8)


def _bits(builder: ir.IRBuilder, codes: ir.Value, shifts: list[int], masks: list[int], place: int) -> ir.Value:
    """(byte >> shift & mask) << place for 64 bytes."""
    if shifts[::2] != shifts[1::2]:  # each byte has its own, in some words
        terms = []
        for shift in sorted(set(shifts)):
            own = [mask if other == shift else 0 for mask, other in zip(masks, shifts, strict=True)]
            terms.append(_bits(builder, codes, [shift] * STEP, own, place))
        return reduce(builder.or_, terms)
    kept = [mask & 255 >> shift for mask, shift in zip(masks, shifts, strict=True)]
    net = [shift - place for shift in shifts]
    if min(net) < 0 < max(net):  # right and then left
        codes = builder.and_(_word_shift(builder, codes, shifts), simd._bytes(kept))
        return _word_shift(builder, codes, [-place] * STEP)
    if any(net):
        codes = _word_shift(builder, codes, net)
    elif set(kept) == {255}:
        return codes
    return builder.and_(codes, simd._bytes([mask << place for mask in kept]))


def _part(builder: ir.IRBuilder, pointers: Sequence[ir.Value], runs: Sequence[tuple[Integers, int]], number: int) -> ir.Value:
    """One part of the codes of four runs, each in the block at its pointer."""
    parts: list[tuple[ir.Value, Any, int]] = [
        (pointer, codes.parts[number], 16 * run) for pointer, (codes, run) in zip(pointers, runs, strict=True)
    ]
    kind = parts[0][1]
    if isinstance(kind, Flags):
        bits = ir.Constant(I64, 0)
        for i, (pointer, part, _) in enumerate(parts):
            assert isinstance(part, Flags)
            word = simd._load(builder, builder.gep(pointer, [ir.Constant(I64, part.at)]), I16)
            bits = builder.or_(bits, builder.shl(builder.zext(word, I64), ir.Constant(I64, LANES * i)))
        return builder.select(builder.bitcast(bits, V64I1), simd._bytes([1 << kind.place] * STEP), simd._bytes([0] * STEP))
    loaded = []
    for pointer in dict.fromkeys(pointers):  # the runs of a block together
        at = [offset for own, part, first in parts if own is pointer for offset in part.at[first : first + LANES]]
        loaded.append(simd._load_lanes(builder, pointer, at))
    codes = simd._joined(builder, loaded)
    if isinstance(kind, Digit):
        factors = [n for _, part, first in parts for n in part.factor[first : first + LANES]]
        below = builder.and_(builder.mul(builder.zext(codes, V64I16), ir.Constant(V64I16, factors)), ir.Constant(V64I16, [255] * STEP))
        thrice = builder.mul(below, ir.Constant(V64I16, [3] * STEP))
        return builder.trunc(builder.lshr(thrice, ir.Constant(V64I16, [8] * STEP)), V64I8)
    shifts, masks = ([n for _, part, first in parts for n in getattr(part, name)[first : first + LANES]] for name in ("shift", "mask"))
    return _bits(builder, codes, shifts, masks, kind.place)


def _looked_up(builder: ir.IRBuilder, path: str, places: ir.Value, table: tuple[int, ...]) -> ir.Value:
    if path in _OF_512_BITS:
        return simd._call(builder, "llvm.x86.avx512.pshuf.b.512", V64I8, simd._bytes(list(table) * 4), places)
    return simd._chosen(builder, places, table)


def _codes(builder: ir.IRBuilder, plan: Plan, pointers: Sequence[ir.Value], number: int) -> ir.Value:
    """Register `number` of a chunk whose blocks are at `pointers`: 64 codes plus the plan's offset."""
    path, per_block = simd.instruction_path(), len(plan.runs)
    chosen = plan.order[4 * number : 4 * number + 4]
    runs, places = [plan.runs[run % per_block] for run in chosen], [pointers[run // per_block] for run in chosen]
    integers, offset = runs[0][0], plan.offset(path)
    codes = reduce(builder.or_, [_part(builder, places, runs, part) for part in range(len(integers.parts))])
    if integers.table:
        return _looked_up(builder, path, codes, tuple(n + offset for n in integers.table))
    if integers.signed and offset:
        return builder.xor(codes, simd._bytes([offset] * STEP))
    return codes


# --- products of integers -------------------------------------------------------------------------------------------------------------


def _sums_of_neighbours(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    even, odd = (ir.Constant(ir.VectorType(I32, numbers.type.count // 2), list(range(k, numbers.type.count, 2))) for k in (0, 1))
    return builder.add(builder.shuffle_vector(numbers, numbers, even), builder.shuffle_vector(numbers, numbers, odd))


def _dot(builder: ir.IRBuilder, plan: Plan, total: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """total[i] += sum over j < 4 of codes[4i + j] * x[4i + j], with codes as `_codes` gives them."""
    path = simd.instruction_path()
    if not plan.is_wide or plan.offset(path) or path in byte_dots.SIGNED:
        return byte_dots.dot_bytes(builder, path, total, codes, x)
    is_negative = builder.icmp_signed("<", codes, ir.Constant(V64I8, None))
    magnitudes = builder.select(is_negative, builder.neg(codes), codes)
    if path in _WITH_SIGN:
        name, pieces = _WITH_SIGN[path]
        parts = zip(*(simd._slices(builder, numbers, pieces) for numbers in (x, codes)), strict=True)
        x = simd._joined(builder, [simd._call(builder, name, pair[0].type, *pair) for pair in parts])
    else:
        x = builder.select(is_negative, builder.neg(x), x)
    return byte_dots.dot_bytes(builder, path, total, magnitudes, x)  # two products of at most 128 * 127 fit 16 bits


_WITH_SIGN = {"avx2": ("llvm.x86.avx2.psign.b", 2), "ssse3": ("llvm.x86.ssse3.psign.b.128", 4)}
"""What gives bytes the signs of other bytes, and the hardware registers in a logical one."""

_WORD_PRODUCTS = {
    "avx512-vnni": ("llvm.x86.avx512.vpdpwssd.512", "llvm.x86.avx512.packssdw.512", 1),
    "avx512": ("llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx512.packssdw.512", 1),
    "avx-vnni": ("llvm.x86.avx512.vpdpwssd.256", "llvm.x86.avx2.packssdw", 2),
    "avx2": ("llvm.x86.avx2.pmadd.wd", "llvm.x86.avx2.packssdw", 2),
    "ssse3": ("llvm.x86.sse2.pmadd.wd", "llvm.x86.sse2.packssdw.128", 4),
}
"""Instruction path -> products of words of which two neighbours are added, what makes words of two registers of int32, and the hardware
registers in a logical one."""


def _dot_words(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """total[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1], of 16-bit words with a sign. total: 16 lanes; a and b may be such registers."""
    a, b = (builder.bitcast(x, V32I16) for x in (a, b))
    name, _, pieces = _WORD_PRODUCTS.get(simd.instruction_path(), ("", "", 0))
    if not name:
        return builder.add(total, _sums_of_neighbours(builder, builder.mul(*(builder.sext(x, V32I32) for x in (a, b)))))
    parts = []
    for part, *pair in zip(*(simd._slices(builder, x, pieces) for x in (total, a, b)), strict=True):
        if "vpdp" in name:
            parts.append(simd._call(builder, name, part.type, part, *pair))
        else:
            parts.append(builder.add(part, simd._call(builder, name, part.type, *pair)))
    return simd._joined(builder, parts)


def _packed(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Two registers of int32 as 16-bit words, which they must fit: four lanes of the first, four of the second, and so on."""
    _, name, pieces = _WORD_PRODUCTS[simd.instruction_path()]
    parts = zip(*(simd._slices(builder, x, pieces) for x in (a, b)), strict=True)
    return simd._joined(builder, [simd._call(builder, name, ir.VectorType(I16, 32 // pieces), *pair) for pair in parts])


def _scaled(builder: ir.IRBuilder, total: ir.Value, sums: ir.Value, scales: ir.Value, words: bool) -> ir.Value:
    """total + sums * scales. words: whether sums fit 16 bits, in which case the upper half of each scale is 0."""
    if words and simd.instruction_path() in _WORD_PRODUCTS:
        return _dot_words(builder, total, sums, scales)
    return builder.add(total, builder.mul(sums, scales))


def _words(builder: ir.IRBuilder, lower: ir.Value, upper: ir.Value | None) -> ir.Value:
    """The low words of one or two registers, side by side in each lane."""
    words = builder.and_(lower, ir.Constant(V16I32, [0xFFFF] * LANES))
    return words if upper is None else builder.or_(words, builder.shl(upper, ir.Constant(V16I32, [16] * LANES)))


# --- scales and minimums --------------------------------------------------------------------------------------------------------------


def _integers_of_blocks(builder: ir.IRBuilder, blocks: Sequence[ir.Value], integers: Integers) -> ir.Value:
    """The 16 small integers of each of four blocks, as bytes."""
    parts = [part for part in integers.parts if isinstance(part, Bits)]
    assert len(parts) == len(integers.parts)
    assert not integers.table
    first = min(at for part in parts for at in part.at)
    size = max(at for part in parts for at in part.at) - first + 1
    loaded = [simd._load_lanes(builder, block, list(range(first, first + size)) + [first] * (LANES - size)) for block in blocks]
    windows, terms = simd._joined(builder, loaded), []
    for part in parts:
        codes = simd._shuffled(builder, windows, [LANES * block + at - first for block in range(len(blocks)) for at in part.at])
        terms.append(_bits(builder, codes, part.shift * len(blocks), part.mask * len(blocks), part.place))
    numbers = reduce(builder.or_, terms)
    return builder.sub(numbers, simd._bytes([integers.bias] * STEP)) if integers.bias else numbers


def _small(builder: ir.IRBuilder, plan: Plan, blocks: Sequence[ir.Value]) -> list[tuple[Integers, ir.Value]]:
    """The small integer scales of four blocks' 16 runs, in the plan's order, as bytes; and their minimums if they have some."""
    small, made = [], {}
    for factor in (plan.block_format.scale, plan.block_format.minimum):
        if factor and (integers := factor.integers):
            if integers not in made:
                made[integers] = _integers_of_blocks(builder, blocks, integers)
            order = [LANES * block + factor.lanes[run] for block in range(len(blocks)) for run in plan.order]
            small.append((integers, simd._shuffled(builder, made[integers], order)))
    return small


def _from_table(builder: ir.IRBuilder, factor: Factor, start: int, blocks: Sequence[ir.Value], runs: Sequence[int]) -> ir.Value:
    """The number of the table for one run in each of 16 blocks. start: offset of the bytes which choose it."""
    table = cgutils.global_constant(builder, "factors", ir.Constant(ir.ArrayType(F32, 256), factor.table))
    numbers = ir.Constant(V16F32, None)
    for i, (block, run) in enumerate(zip(blocks, runs, strict=True)):
        byte = builder.load(builder.gep(block, [ir.Constant(I64, start + factor.lanes[run])]), typ=I8)
        number = builder.load(builder.gep(table, [ir.Constant(I64, 0), builder.zext(byte, I64)]), typ=F32)
        numbers = builder.insert_element(numbers, number, ir.Constant(I32, i))
    return numbers


def _halves(builder: ir.IRBuilder, blocks: Sequence[ir.Value], start: int, count: int) -> list[ir.Value]:
    """`count` float16 numbers side by side in each of 16 blocks, widened. They are loaded as one, because loads for each lane are slow."""
    lane = ir.IntType(16 * count)
    bits = ir.Constant(ir.VectorType(lane, LANES), None)
    for i, block in enumerate(blocks):
        number = simd._load(builder, builder.gep(block, [ir.Constant(I64, start)]), lane)
        bits = builder.insert_element(bits, number, ir.Constant(I32, i))
    if count == 1:
        return [simd._widened_half(builder, bits)]
    places = (ir.Constant(bits.type, [16 * i] * LANES) for i in range(count))
    return [simd._widened_half(builder, builder.trunc(builder.lshr(bits, place), V16I16)) for place in places]


def _factors(builder: ir.IRBuilder, plan: Plan, blocks: Sequence[Sequence[ir.Value]], units: Sequence[tuple[int, int]]) -> list[ir.Value]:
    """The scales of 16 units, each (row, unit of its chunk), and their minimums if the type has them. blocks: of each row, the chunk's."""
    places = [divmod(unit * plan.unit, plan.block_format.weights) for _, unit in units]
    own = [blocks[row][block] for (row, _), (block, _) in zip(units, places, strict=True)]
    factors = [factor for factor in (plan.block_format.scale, plan.block_format.minimum) if factor]
    first, *others = (plan.block_format.start(factor) for factor in factors)
    if factors[0].table:
        return [_from_table(builder, factors[0], first, own, [weight // LANES for _, weight in places])]
    assert others in ([], [first + 2])  # a minimum lies behind the scale
    return _halves(builder, own, first, len(factors))


# --- one row of activations -----------------------------------------------------------------------------------------------------------


def _plan(array: types.Array) -> Plan:
    return _PLANS[array.dtype]


def _tree(builder: ir.IRBuilder, registers: Sequence[ir.Value], width: int) -> ir.Value:
    """Registers folded in pairs until one is left, which is made with `width` lanes to a fold, and those before it with twice as many."""
    if len(registers) == 1:
        return registers[0]
    half = len(registers) // 2
    lower, upper = (_tree(builder, part, 2 * width) for part in (registers[:half], registers[half:]))
    return simd._sum(builder, *simd._lower_and_upper(builder, lower, upper, width))


ROWS, CHUNKS = 4, 4
"""How many rows, and chunks of each, a step for one row of activations takes: 16 in all, whose sums fill a register."""


@intrinsic
def open_chunks(typing_context, blocks, start, row_blocks, chunk, q, starts, sums, lanes, row, ahead):
    """Lanes of the integers of CHUNKS chunks of a row of the matrix, from number `chunk` on, times one row of activations.

    The row begins at blocks[start]; no block beyond its end is read. q [weights], starts [weights / 4] and sums [weights / 16] are those of
    the activations. The row gets lanes[row * registers * 16 :]: a quarter of the lanes of each unit, of one chunk after another.
    As many bytes of the matrix are asked for, `ahead` bytes further on, a line at a time: of many at once the processor forgets some.
    """

    def codegen(context, builder, signature, args):
        blocks_type, lanes_type = signature.args[0], signature.args[7]
        blocks, start, row_blocks, chunk = args[:4]
        lanes, row, ahead = args[7:]
        plan, path = _plan(blocks_type), simd.instruction_path()
        step = plan.blocks * plan.block_format.layout.itemsize
        own = _blocks_of_chunks(context, builder, (blocks_type, blocks), start, row_blocks, chunk)

        def load(number: int, per_chunk: int, plus: int, vector: ir.Type) -> ir.Value:
            place = builder.add(builder.mul(chunk, ir.Constant(I64, per_chunk)), ir.Constant(I64, plus))
            return simd._load(builder, simd._address(context, builder, signature.args[number], args[number], place), vector)

        def dots(i: int) -> list[ir.Value]:
            for line in range(-(-i * step // 64), -(-(i + 1) * step // 64)):
                simd._prefetch(builder, builder.gep(own[0][0], [builder.add(ahead, ir.Constant(I64, 64 * line))]))
            products = []
            for k in range(plan.weights // REGISTER):
                x, opened = load(4, plan.weights, i * plan.weights + REGISTER * k, V64I8), ir.Constant(V16I32, None)
                if plan.offset_of_starts(path, one_row=True):
                    opened = load(5, plan.weights // 4, i * plan.weights // 4 + LANES * k, V16I32)
                products.append(_dot(builder, plan, opened, _codes(builder, plan, own[i], k), x))
            return products

        if plan.is_scaled:
            sums = [load(6, LANES, 2 * LANES * i, V32I16) for i in range(CHUNKS // 2)]
            registers = _scaled_blocks(builder, plan, [block for (block,) in own], dots, sums)
        else:
            chunks = [[reduce(builder.add, dots(i))] if plan.is_k else dots(i) for i in range(CHUNKS)]
            registers = [_tree(builder, parts, 2 * plan.lanes_left) for parts in zip(*chunks, strict=True)]
        for k, register in enumerate(registers):
            place = builder.add(builder.mul(row, ir.Constant(I64, plan.registers * LANES)), ir.Constant(I64, k * LANES))
            address = simd._address(context, builder, lanes_type, lanes, place)
            builder.store(register, builder.bitcast(address, V16I32.as_pointer()), align=4)
        return context.get_dummy_value()

    n = types.intp
    return types.none(blocks, n, n, n, q, starts, sums, lanes, n, n), codegen


def _blocks_of_chunks(
    context: Any, builder: ir.IRBuilder, array: tuple[types.Array, ir.Value], start: ir.Value, row_blocks: ir.Value, chunk: ir.Value
) -> list[list[ir.Value]]:
    """Where the blocks of CHUNKS chunks of a row lie, from number `chunk` on. The row's last block stands for those beyond its end."""
    plan = _plan(array[0])
    row = builder.bitcast(simd._address(context, builder, *array, start), I8.as_pointer())
    first, last = builder.mul(chunk, ir.Constant(I64, plan.blocks)), builder.sub(row_blocks, ir.Constant(I64, 1))
    blocks = []
    for i in range(CHUNKS * plan.blocks):
        place = builder.add(first, ir.Constant(I64, i))
        place = builder.select(builder.icmp_signed("<", place, last), place, last)
        blocks.append(builder.gep(row, [builder.mul(place, ir.Constant(I64, plan.block_format.layout.itemsize))]))
    return [blocks[i : i + plan.blocks] for i in range(0, len(blocks), plan.blocks)]


def _scaled_blocks(
    builder: ir.IRBuilder, plan: Plan, blocks: Sequence[ir.Value], dots: Callable[[int], list[ir.Value]], sums: Sequence[ir.Value]
) -> list[ir.Value]:
    """Four lanes of each of CHUNKS blocks, and as many of its minimums if the type has them.

    dots: number of a block -> its codes times activations, four to a lane. sums: those of the activations' runs, two blocks in a register.
    """

    def times_sums(integers: Integers, numbers: ir.Value) -> ir.Value:
        words = [simd._widened_bytes(builder, part, integers, V32I16) for part in simd._slices(builder, numbers, len(sums))]
        return _tree(builder, [_dot_words(builder, ir.Constant(V16I32, None), *pair) for pair in zip(words, sums, strict=True)], 8)

    (integers, scales), *minimums = _small(builder, plan, blocks)
    own = simd._slices(builder, scales, len(blocks))
    total = _tree(builder, [_times_scales(builder, plan, dots(i), integers, numbers) for i, numbers in enumerate(own)], 8)
    if offset := plan.offset(simd.instruction_path()):
        total = builder.sub(total, builder.mul(times_sums(integers, scales), ir.Constant(V16I32, [offset] * LANES)))
    return [total, *(times_sums(*minimum) for minimum in minimums)]


def _times_scales(builder: ir.IRBuilder, plan: Plan, dots: Sequence[ir.Value], integers: Integers, scales: ir.Value) -> ir.Value:
    """The sum of a block's registers of codes times activations, four codes to a lane, times the scales of its 16 runs: bytes."""
    total, path = ir.Constant(V16I32, None), simd.instruction_path()
    if path not in _WORD_PRODUCTS or not plan.fits_words(4, plan.offset(path)):
        wide = simd._widened_bytes(builder, scales, integers)
        for k, dot in enumerate(dots):
            own = simd._shuffled(builder, wide, [4 * k + lane // 4 for lane in range(LANES)])
            total = builder.add(total, builder.mul(dot, own))
        return total
    zeros, has_sign = simd._bytes([0] * LANES), simd.has_sign(integers)
    for k in range(0, len(dots), 2):
        runs = [4 * (k + half) + lane for lane in range(4) for half in range(2) for _ in range(4)]  # of the words that `_packed` makes
        order = [byte for run in runs for byte in ((LANES, run) if has_sign else (run, LANES))]  # of the zeros, the first
        words = builder.bitcast(builder.shuffle_vector(scales, zeros, ir.Constant(ir.VectorType(I32, STEP), order)), V32I16)
        if has_sign:
            words = builder.ashr(words, ir.Constant(V32I16, [8] * 32))
        total = _dot_words(builder, total, _packed(builder, *dots[k : k + 2]), words)
    return total


@intrinsic
def close_chunks(typing_context, tile, blocks, first, row_blocks, valid, chunk, lanes, scales, eights):
    """tile[0], lanes 0..3, += the units of CHUNKS chunks of ROWS rows, from number `chunk` on, one unit after another.

    Rows begin at blocks[first + i * row_blocks]. lanes: what `open_chunks` made of the rows.
    scales and eights [units] are those of the activations, padded to whole steps. Units beyond the end of a row add nothing.
    """

    def codegen(context, builder, signature, args):
        blocks_type = signature.args[1]
        value, blocks, first, row_blocks, valid, chunk, lanes = args[:7]
        plan = _plan(blocks_type)
        starts, array = [simd._clamped(builder, first, row_blocks, row, valid) for row in range(ROWS)], (blocks_type, blocks)
        rows = [_blocks_of_chunks(context, builder, array, start, row_blocks, chunk) for start in starts]

        def summed(number: int) -> ir.Value:
            """The sums of one register of each row: row after row, in it chunk after chunk."""
            places = (ir.Constant(I64, (row * plan.registers + number) * LANES) for row in range(ROWS))
            loaded = [simd._load(builder, simd._address(context, builder, signature.args[6], lanes, place), V16I32) for place in places]
            left = plan.lanes_left
            return simd._joined(builder, [_tree(builder, loaded[row : row + left], 2) for row in range(0, ROWS, left)])

        minimums = summed(1) if plan.has_integer_minimum else None
        sums = [summed(number) for number in range(1 if plan.is_k else plan.registers)]
        share, terms = plan.units // len(sums), [(i, unit, row) for i in range(CHUNKS) for unit in range(plan.units) for row in range(ROWS)]
        order = [((unit // share * ROWS + row) * CHUNKS + i) * share + unit % share for i, unit, row in terms]
        integers = simd._slices(builder, simd._shuffled(builder, simd._joined(builder, sums), order), plan.units)
        here = builder.mul(chunk, ir.Constant(I64, plan.units))
        left = builder.sub(builder.mul(row_blocks, ir.Constant(I64, plan.units // plan.blocks)), here)
        tile, per_register = simd._slices(builder, builder.extract_value(value, 0), LANES // ROWS)[0], LANES // ROWS

        def of_x(number: int, plus: int) -> ir.Value:
            place = builder.add(here, ir.Constant(I64, plus))
            return _repeated(builder, simd._address(context, builder, signature.args[number], args[number], place), ROWS)

        for k, units in enumerate(integers):
            own = terms[LANES * k : LANES * k + LANES]
            factors = _factors(builder, plan, [rows[row][i] for i, _, row in own], [(lane, unit) for lane, (_, unit, _) in enumerate(own)])
            x_scale = of_x(7, per_register * k)
            pairs = [(builder.sitofp(units, V16F32), builder.fmul(factors[0], x_scale))]
            if minimums is not None:
                counts = builder.sitofp(simd._shuffled(builder, minimums, order), V16F32)
                pairs.append((counts, builder.fneg(builder.fmul(factors[1], x_scale))))
            elif plan.has_float_minimum:
                pairs.append((factors[1], of_x(8, per_register * k)))
            parts = [tuple(simd._slices(builder, x, per_register) for x in pair) for pair in pairs]
            for i in range(per_register):
                after = tile
                for a, b in parts:
                    after = simd._fma(builder, a[i], b[i], after)
                is_there = builder.icmp_signed("<", ir.Constant(I64, k * per_register + i), left)
                tile = builder.select(is_there, after, tile)
        return builder.insert_value(value, simd._shuffled(builder, tile, [lane % ROWS for lane in range(LANES)]), 0)

    n = types.intp
    return tile(tile, blocks, n, n, n, n, lanes, scales, eights), codegen


def _repeated(builder: ir.IRBuilder, address: ir.Value, times: int) -> ir.Value:
    """16 / times numbers of memory, each in so many lanes."""
    few = simd._load(builder, address, ir.VectorType(F32, LANES // times))
    return simd._shuffled(builder, few, [lane // times for lane in range(LANES)])


def _splat_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return simd._splat(builder, simd._load(builder, address, F32), V16F32)


# --- several rows of activations ------------------------------------------------------------------------------------------------------


def _transposed(builder: ir.IRBuilder, registers: Sequence[ir.Value]) -> list[ir.Value]:
    """16 registers of 16 lanes: lane j of register i becomes lane i of register j."""
    turned = list(registers)
    for step in (1, 2, 4, 8):
        first = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        second = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        for i in range(LANES):
            if not i & step:
                a, b = turned[i], turned[i + step]
                turned[i], turned[i + step] = (builder.shuffle_vector(a, b, ir.Constant(V16I32, order)) for order in (first, second))
    return turned


def _pointers(context: Any, builder: ir.IRBuilder, array: types.Array, value: ir.Value, args: Sequence[ir.Value]) -> list[list[ir.Value]]:
    """The blocks of a chunk in each of 16 rows: start, stride, valid rows, and the second block's distance from the first."""
    start, stride, valid, second = args
    rows = []
    for row in range(LANES):
        offset = simd._clamped(builder, start, stride, row, valid)
        offsets = [offset, builder.add(offset, second)][: _plan(array).blocks]
        rows.append([builder.bitcast(simd._address(context, builder, array, value, at), I8.as_pointer()) for at in offsets])
    return rows


@intrinsic
def unpack_chunk(
    typing_context, blocks, start, stride, valid, second, codes, codes_at, scales, scales_at, pairs, pairs_at, floats, floats_at
):
    """One chunk of 16 rows, as `run_step` and `close_unit` read it: lanes are rows.

    The first blocks of the rows are blocks[start + i * stride], the second ones `second` blocks on. codes [weights / 4, 16, 4], scales
    [16 runs, 16] if there are any, pairs: minimums of two runs [8, 16, 2] of 16 bits, or scales if there are none, floats [units, 2, 16]:
    scales and minimums.
    """

    def codegen(context, builder, signature, args):
        blocks_type = signature.args[0]
        blocks, start, stride, valid, second = args[:5]
        plan = _plan(blocks_type)
        rows = _pointers(context, builder, blocks_type, blocks, (start, stride, valid, second))

        def store(number: int, registers: Sequence[ir.Value]) -> None:
            array, offset = signature.args[5 + 2 * number], args[6 + 2 * number]
            for i, register in enumerate(registers):
                place = builder.add(offset, ir.Constant(offset.type, i * LANES * (4 if number == 0 else 1)))
                address = simd._address(context, builder, array, args[5 + 2 * number], place)
                builder.store(register, builder.bitcast(address, register.type.as_pointer()), align=4)

        turned = []
        for i in range(plan.weights // REGISTER):
            turned += _transposed(builder, [builder.bitcast(_codes(builder, plan, row, i), V16I32) for row in rows])
        store(0, turned)
        if plan.is_scaled:
            small: tuple[list[ir.Value], list[ir.Value]] = ([], [])
            for first in range(0, LANES, 4):
                four = _small(builder, plan, [block for block, *_ in rows[first : first + 4]])
                for registers, (integers, numbers) in zip(small, four, strict=False):
                    registers += [simd._widened_bytes(builder, part, integers) for part in simd._slices(builder, numbers, 4)]
            scales = _transposed(builder, small[0])
            path = simd.instruction_path()
            counts = _transposed(builder, small[1]) if plan.has_integer_minimum else scales
            if plan.word_registers(path):
                store(1, [_words(builder, scale, scale) for scale in scales])
            elif plan.fits_words(LANES) and path in _WORD_PRODUCTS:
                store(1, [_words(builder, scale, None) for scale in scales])
            else:
                store(1, scales)
            store(2, [_words(builder, *pair) for pair in zip(counts[::2], counts[1::2], strict=True)])
        nothing = ir.Constant(V16F32, None)
        factors = [_factors(builder, plan, rows, [(row, unit) for row in range(LANES)]) for unit in range(plan.units)]
        store(3, [factor for own in factors for factor in [*own, nothing][:2]])
        return context.get_dummy_value()

    n = types.intp
    return types.none(blocks, n, n, n, n, codes, n, scales, n, pairs, n, floats, n), codegen


@intrinsic
def open_unit(typing_context, tile, blocks, starts, start, stride, valid):
    """A tile for the sums of one unit: 0, or starts[start + j * stride] where nothing else takes the offset off."""

    def codegen(context, builder, signature, args):
        tile, blocks_type, starts_type = signature.args[:3]
        value, _, starts, start, stride, valid = args
        plan = _plan(blocks_type)
        if plan.is_scaled or not plan.offset(simd.instruction_path()):
            return ir.Constant(context.get_value_type(tile), None)
        opened = _starts(context, builder, (starts_type, starts), start, stride, valid, tile.columns)
        return simd._pack(builder, value, opened * tile.rows)

    n = types.intp
    return tile(tile, blocks, starts, n, n, n), codegen


def _starts(
    context: Any, builder: ir.IRBuilder, array: tuple[types.Array, ir.Value], start: ir.Value, stride: ir.Value, valid: ir.Value, count: int
) -> list[ir.Value]:
    """For each row of activations, what takes the offset off, in all lanes."""
    rows = [simd._clamped(builder, start, stride, j, valid) for j in range(count)]
    return [simd._splat(builder, simd._load(builder, simd._address(context, builder, *array, row), I32), V16I32) for row in rows]


@intrinsic
def run_step(typing_context, tile, blocks, codes, at, group, scales, s_at, s_group, q, q_at, q_stride, starts, start, stride, valid):
    """tile[i, j] += a run of 16 weights of 16 rows, times q[q_at + j * q_stride :][:16], times the run's scale if there is one.

    Group i of rows is `group` and `s_group` elements after the one before it. starts[start + j * stride] takes the offset off scaled runs,
    where `take_offset` does not.
    """

    def codegen(context, builder, signature, args):
        tile, blocks_type, codes_type, _, _, scales_type, _, _, q_type, _, _, starts_type = signature.args[:12]
        value, _, codes, at, group, scales, s_at, s_group, q, q_at, q_stride, starts, start, stride, valid = args
        plan = _plan(blocks_type)
        totals = simd._unpack(builder, tile, value)
        sums = totals
        if plan.is_scaled:
            opened = [ir.Constant(V16I32, None)] * tile.columns
            if plan.offset_of_starts(simd.instruction_path(), one_row=False):
                opened = _starts(context, builder, (starts_type, starts), start, stride, valid, tile.columns)
            sums = opened * tile.rows
        tokens = [simd._clamped(builder, q_at, q_stride, j, valid) for j in range(tile.columns)]
        factors = [ir.Constant(V16I32, [0x10001] * LANES)] * tile.rows  # words of 1
        if plan.is_scaled:
            places = [builder.add(s_at, builder.mul(s_group, ir.Constant(s_group.type, i))) for i in range(tile.rows)]
            factors = [simd._load(builder, simd._address(context, builder, scales_type, scales, place), V16I32) for place in places]
        together = plan.word_registers(simd.instruction_path())
        words = [ir.Constant(V32I16, None)] * tile.count
        for step in range(4):
            registers = []
            for i in range(tile.rows):
                place = builder.add(at, builder.mul(group, ir.Constant(group.type, i)))
                place = builder.add(place, ir.Constant(at.type, step * STEP))
                registers.append(simd._load(builder, simd._address(context, builder, codes_type, codes, place), V64I8))
            for j, token in enumerate(tokens):
                place = builder.add(token, ir.Constant(token.type, 4 * step))
                x = byte_dots.broadcast_four(builder, simd._address(context, builder, q_type, q, place))
                for i, register in enumerate(registers):
                    k = i * tile.columns + j
                    if not together:
                        sums[k] = _dot(builder, plan, sums[k], register, x)
                        continue
                    words[k] = builder.add(words[k], byte_dots.word_products(builder, register, x))
                    if step % together == together - 1:
                        totals[k] = _dot_words(builder, totals[k], words[k], factors[i])
                        words[k] = ir.Constant(V32I16, None)
        if plan.is_scaled and not together:
            for k, total in enumerate(sums):
                totals[k] = _scaled(builder, totals[k], total, factors[k // tile.columns], plan.fits_words(LANES))
        return simd._pack(builder, value, totals if plan.is_scaled or together else sums)

    n = types.intp
    return tile(tile, blocks, codes, n, n, scales, n, n, q, n, n, starts, n, n, n), codegen


@intrinsic
def close_unit(
    typing_context,
    tile,
    totals,
    blocks,
    floats,
    f_at,
    f_group,
    pairs,
    p_at,
    p_group,
    sums,
    s_at,
    s_stride,
    scales,
    eights,
    at,
    stride,
    valid,
):
    """tile += the sums of a unit times the scales of both sides, and its minimums, in float32.

    floats [2, 16] at f_at + i * f_group; pairs [8, 16] at p_at + i * p_group; sums [16] of the activations at s_at + j * s_stride; scales
    of the activations, and rounded sums, at `at` + j * stride.
    """

    def codegen(context, builder, signature, args):
        tile, totals_tile, blocks_type, floats_type = signature.args[:4]
        value, totals, _, floats, f_at, f_group, pairs, p_at, p_group, sums, s_at, s_stride, scales, eights, at, stride, valid = args
        pairs_type, sums_type, scales_type, eights_type = (signature.args[n] for n in (6, 9, 12, 13))
        plan = _plan(blocks_type)
        results, integers = simd._unpack(builder, tile, value), simd._unpack(builder, totals_tile, totals)

        def load(array: tuple[types.Array, ir.Value], start: ir.Value, stride: ir.Value, i: int, plus: int, vector: ir.Type) -> ir.Value:
            place = builder.add(start, builder.mul(stride, ir.Constant(stride.type, i)))
            place = builder.add(place, ir.Constant(start.type, plus))
            return simd._load(builder, simd._address(context, builder, *array, place), vector)

        def factor(i: int, plus: int) -> ir.Value:
            return load((floats_type, floats), f_at, f_group, i, plus, V16F32)

        def splat(array: tuple[types.Array, ir.Value], start: ir.Value, stride: ir.Value, j: int) -> ir.Value:
            return _splat_at(builder, simd._address(context, builder, *array, simd._clamped(builder, start, stride, j, valid)))

        of_pairs = (pairs_type, pairs, p_at, p_group), (sums_type, sums, s_at, s_stride)
        for j in range(tile.columns):
            x_scale = splat((scales_type, scales), at, stride, j)
            for i in range(tile.rows):
                k = i * tile.columns + j
                product = builder.fmul(factor(i, 0), x_scale)
                results[k] = simd._fma(builder, builder.sitofp(integers[k], V16F32), product, results[k])
                if plan.has_float_minimum:
                    results[k] = simd._fma(builder, factor(i, LANES), splat((eights_type, eights), at, stride, j), results[k])
                if plan.has_integer_minimum:
                    least = _times_sums(context, builder, *of_pairs, i, j, valid)
                    product = builder.fneg(builder.fmul(factor(i, LANES), x_scale))
                    results[k] = simd._fma(builder, builder.sitofp(least, V16F32), product, results[k])
        return simd._pack(builder, value, results)

    n = types.intp
    arrays = (tile, totals, blocks, floats, n, n, pairs, n, n, sums, n, n, scales, eights, n, n, n)
    return tile(*arrays), codegen


_Strided = tuple[types.Array, ir.Value, ir.Value, ir.Value]
"""An array, the first place in it, and the distance to the next one."""


def _times_sums(context: Any, builder: ir.IRBuilder, pairs: _Strided, sums: _Strided, i: int, j: int, valid: ir.Value) -> ir.Value:
    """The pairs of group i of 16 rows times the sums of token j, which is at most the last of `valid` ones."""
    totals = [ir.Constant(V16I32, None)] * 2
    (_, _, start, stride), (_, _, s_start, s_stride) = pairs, sums
    group, row = builder.add(start, builder.mul(stride, ir.Constant(stride.type, i))), simd._clamped(builder, s_start, s_stride, j, valid)
    for pair in range(LANES // 2):
        two = simd._load(builder, simd._address(context, builder, sums[0], sums[1], builder.add(row, ir.Constant(row.type, 2 * pair))), I32)
        place = builder.add(group, ir.Constant(group.type, pair * LANES))
        counts = simd._load(builder, simd._address(context, builder, pairs[0], pairs[1], place), V16I32)
        totals[pair % 2] = _dot_words(builder, totals[pair % 2], counts, simd._splat(builder, two, V16I32))
    return reduce(builder.add, totals)


@intrinsic
def take_offset(typing_context, totals, blocks, pairs, p_at, p_group, sums, s_at, s_stride, valid):
    """The sums of a unit without what its offset added to them, where starts have not taken it off. Arguments are those of `close_unit`."""

    def codegen(context, builder, signature, args):
        tile, blocks_type, pairs_type, _, _, sums_type = signature.args[:6]
        value, _, pairs, p_at, p_group, sums, s_at, s_stride, valid = args
        plan, path = _plan(blocks_type), simd.instruction_path()
        if plan.offset(path) == plan.offset_of_starts(path, one_row=False):
            return value
        registers = simd._unpack(builder, tile, value)
        of_pairs = (pairs_type, pairs, p_at, p_group), (sums_type, sums, s_at, s_stride)
        offset = ir.Constant(V16I32, [plan.offset(path)] * LANES)
        for k, register in enumerate(registers):
            added = builder.mul(_times_sums(context, builder, *of_pairs, k // tile.columns, k % tile.columns, valid), offset)
            registers[k] = builder.sub(register, added)
        return simd._pack(builder, value, registers)

    n = types.intp
    return totals(totals, blocks, pairs, n, n, sums, n, n, n), codegen


@intrinsic
def make_planes(typing_context, blocks, codes, at, scales, s_at, high):
    """Turn a run's codes of 16 rows, as `unpack_chunk` left them, into bytes of weights, which are code * scale and have a sign.

    Weights of two planes are 256 * h + l: l takes the place of the code in `codes`, and h has the same place in `high`.
    """

    def codegen(context, builder, signature, args):
        blocks_type, codes_type, _, scales_type, _, high_type = signature.args
        _, codes, at, scales, s_at, high = args
        plan, scale = _plan(blocks_type), None
        eight, low = ir.Constant(V32I16, [8] * 32), ir.Constant(V32I16, [255] * 32)
        if plan.is_scaled:
            wide = simd._load(builder, simd._address(context, builder, scales_type, scales, s_at), V16I32)
            once = builder.and_(wide, ir.Constant(V16I32, [0xFFFF] * LANES))
            scale = builder.bitcast(builder.or_(once, builder.shl(wide, ir.Constant(V16I32, [16] * LANES))), V32I16)
        for step in range(4):
            place = builder.add(at, ir.Constant(at.type, step * STEP))
            address = simd._address(context, builder, codes_type, codes, place)
            signed = builder.sub(simd._load(builder, address, V64I8), simd._bytes([plan.offset(simd.instruction_path())] * STEP))
            target = builder.bitcast(address, V64I8.as_pointer())
            if scale is None:
                builder.store(signed, target, align=1)
                continue
            words = builder.bitcast(signed, V32I16)  # bytes 2i and 2i + 1 in one
            even, odd = (builder.mul(builder.ashr(part, eight), scale) for part in (builder.shl(words, eight), words))
            lower = builder.or_(builder.and_(even, low), builder.shl(odd, eight))
            builder.store(builder.bitcast(lower, V64I8), target, align=1)
            if plan.planes == 2:
                half = ir.Constant(V32I16, [128] * 32)  # l is -128..127, so h is rounded to the nearest
                even, odd = (builder.lshr(builder.add(part, half), eight) for part in (even, odd))
                upper = builder.bitcast(builder.or_(even, builder.shl(odd, eight)), V64I8)
                address = simd._address(context, builder, high_type, high, place)
                builder.store(upper, builder.bitcast(address, V64I8.as_pointer()), align=1)
        return context.get_dummy_value()

    n = types.intp
    return types.none(blocks, codes, n, scales, n, high), codegen


@intrinsic(prefer_literal=True)
def of_plan(typing_context, blocks, name):
    """A number of the plan of these blocks, known when the kernel is compiled."""
    if not isinstance(name, types.StringLiteral):
        return None
    number = getattr(_plan(blocks), name.literal_value)
    return types.intp(blocks, name), lambda context, builder, signature, args: ir.Constant(I64, number)


@intrinsic
def sums_of_planes(typing_context, tile, blocks, address):
    """A tile of integers from int32 [columns, 16] in memory, plus 256 times those 1024 bytes on if weights have two planes."""

    def codegen(context, builder, signature, args):
        tile, blocks_type, _ = signature.args
        value, _, address = args
        registers = []
        for i in range(tile.count):
            parts = []
            for plane in range(_plan(blocks_type).planes):
                place = builder.add(address, ir.Constant(address.type, STEP * (i + plane * LANES)))
                parts.append(simd._load(builder, simd._at(builder, place, I8), V16I32))
            parts[1:] = [builder.shl(part, ir.Constant(V16I32, [8] * LANES)) for part in parts[1:]]
            registers.append(reduce(builder.add, parts))
        return simd._pack(builder, value, registers)

    return tile(tile, blocks, types.intp), codegen


_PLANS = {from_dtype(plan.block_format.layout): plan for plan in PLANS.values()}
