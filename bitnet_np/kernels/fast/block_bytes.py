"""Products of ggml's blocks by bytes: codes, scales and minimums of 16 rows, and their sums.

RANGES. Activations are -127..127 and codes have at most 8 bits, so four products of a lane and 16 of a run fit 18 bits or 19. Of the types
with small integer scales, a lane of Q2_K, Q3_K, Q4_K, Q5_K and Q6_K fits 16 bits even with the offset in it (at most 4 * 127 * 63), and a
run those of Q2_K, Q3_K and Q4_K (16 * 127 * 15); their products with scales of up to 8 bits are made of 16-bit words, the others' of 32-bit
ones. If bytes are multiplied two at a time to words, those of two or four registers are added up first (Plan.word_registers). A whole
block with its offset is at most 256 * 127 * 255 * 32 < 2^28 (IQ4_XS; Q6_K 256 * 127 * 63 * 128), what the offset adds to it
256 * 127 * 32 * 128, and minimums at most 256 * 127 * 63.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.np.numpy_support import from_dtype

from ...base.block_formats import Factor, Integers
from ..processor import is_zen_5
from .block_codes import bytes_of, has_sign, joined_runs, widened
from .block_floats import number_of_byte
from .byte_dots import broadcast_four, dot_bytes, instruction, own, sums_of_neighbours, word_products
from .emit import (
    F32,
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
    Emitter,
    Place,
    Strided,
    constant,
    emitted,
    first,
)
from .plans import PLANS, REGISTER, Plan
from .simd import folded, total, widened_half


class Chunk(NamedTuple):
    """A chunk of some rows of the matrix, as functions take it: the chunk of row i begins at blocks[start + i * stride]."""

    start: Any
    stride: Any
    valid: Any  # rows: the last stands for those beyond
    second: Any  # blocks on to its second one
    gap: Any  # blocks between ROWS rows and the next ones


def _plan(blocks: Place) -> Plan:
    return _PLANS[blocks.dtype]


# --- codes ----------------------------------------------------------------------------------------------------------------------------


def _codes(b: Emitter, plan: Plan, pointers: Sequence[ir.Value], number: int) -> ir.Value:
    """Register `number` of a chunk whose blocks are at `pointers`: 64 codes plus the plan's offset."""
    per_block, chosen = len(plan.runs), plan.order[4 * number : 4 * number + 4]
    return joined_runs(b, [(pointers[run // per_block], *plan.runs[run % per_block]) for run in chosen], plan.offset(b.path))


# --- products of integers -------------------------------------------------------------------------------------------------------------


def _dot(b: Emitter, plan: Plan, so_far: ir.Value, codes: ir.Value, x: ir.Value) -> ir.Value:
    """so_far[i] += sum over j < 4 of codes[4i + j] * x[4i + j], with codes as `_codes` gives them."""
    if not plan.is_wide or plan.offset(b.path) or own(b).signed:
        return dot_bytes(b, so_far, codes, x)
    is_negative = b.icmp_signed("<", codes, constant(V64I8, None))
    magnitudes = b.select(is_negative, b.neg(codes), codes)
    x = instruction(b, "sign", V64I8, x, codes) if own(b).sign else b.select(is_negative, b.neg(x), x)
    return dot_bytes(b, so_far, magnitudes, x)  # two products of at most 128 * 127 fit 16 bits


def _multiplies_words(b: Emitter) -> bool:
    return bool(own(b).words or own(b).dot_words)


def _dot_words(b: Emitter, so_far: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    """so_far[i] += x[2i] * y[2i] + x[2i + 1] * y[2i + 1], of 16-bit words with a sign. so_far: 16 lanes; x and y may be such registers."""
    x, y = (b.bitcast(words, V32I16) for words in (x, y))
    if own(b).dot_words:
        return instruction(b, "dot_words", V16I32, so_far, x, y)
    if own(b).words:
        return b.add(so_far, instruction(b, "words", V16I32, x, y))
    wide = ir.VectorType(I32, 32)
    return b.add(so_far, sums_of_neighbours(b, b.mul(b.sext(x, wide), b.sext(y, wide))))


def _words(b: Emitter, lower: ir.Value, upper: ir.Value | None) -> ir.Value:
    """The low words of one or two registers, side by side in each lane."""
    words = b.and_(lower, 0xFFFF)
    return words if upper is None else b.or_(words, b.shl(upper, 16))


# --- scales and minimums --------------------------------------------------------------------------------------------------------------


def _small(b: Emitter, plan: Plan, blocks: Sequence[ir.Value]) -> list[tuple[Integers, ir.Value]]:
    """The small integer scales of four blocks' 16 runs, in the plan's order, as bytes; and their minimums if they have some."""
    small, made = [], {}
    for factor in (plan.block_format.scale, plan.block_format.minimum):
        if factor and (integers := factor.integers):
            if integers not in made:
                made[integers] = joined_runs(b, [(block, integers, 0) for block in blocks])
            order = [LANES * block + factor.lanes[run] for block in range(len(blocks)) for run in plan.order]
            small.append((integers, b.shuffled(made[integers], order)))
    return small


def _from_table(b: Emitter, factor: Factor, start: int, blocks: Sequence[ir.Value], run: int) -> ir.Value:
    """The number of the table for a run of each of 16 blocks. start: offset of the bytes which choose it."""
    numbers = constant(V16F32, None)
    for i, block in enumerate(blocks):
        numbers = b.insert_element(numbers, number_of_byte(b, block, start, factor, run), constant(I32, i))
    return numbers


def _float16s(b: Emitter, blocks: Sequence[ir.Value], start: int, count: int) -> list[ir.Value]:
    """`count` float16 numbers side by side in each of 16 blocks, widened. They are loaded as one, because loads for each lane are slow."""
    lane = ir.IntType(16 * count)
    bits = constant(ir.VectorType(lane, LANES), None)
    for i, block in enumerate(blocks):
        bits = b.insert_element(bits, b.load(b.moved(block, start), lane), constant(I32, i))
    if count == 1:
        return [widened_half(b, bits)]
    return [widened_half(b, b.trunc(b.lshr(bits, 16 * i), V16I16)) for i in range(count)]


def _store_factors(b: Emitter, plan: Plan, rows: Sequence[Sequence[ir.Value]], floats: Place, start: ir.Value) -> None:
    """floats[start :] = [units, 2, 16]: the scales of each unit of 16 rows, and their minimums if the type has them. rows: their blocks."""
    for unit in range(plan.units):
        number, weight = divmod(unit * plan.unit, plan.block_format.weights)
        blocks = [row[number] for row in rows]
        factors = [factor for factor in (plan.block_format.scale, plan.block_format.minimum) if factor]
        first, *others = (plan.block_format.start(factor) for factor in factors)
        if factors[0].table:
            registers = [_from_table(b, factors[0], first, blocks, weight // LANES)]
        else:
            assert others in ([], [first + 2])  # a minimum follows the scale
            registers = _float16s(b, blocks, first, len(factors))
        for i, register in enumerate(registers):
            b.store(register, floats.at(b.add(start, (2 * unit + i) * LANES)), align=4)


def _blocks(b: Emitter, blocks: Place, places: Chunk, count: int) -> list[list[ir.Value]]:
    """The blocks of a chunk of each of `count` rows."""
    starts = [b.clamped(b.add(places.start, b.mul(places.gap, row // ROWS)), places.stride, row, places.valid) for row in range(count)]
    return [[b.moved(blocks.at(at), 0) for at in (start, b.add(start, places.second))[: _plan(blocks).blocks]] for start in starts]


# --- one row of activations -----------------------------------------------------------------------------------------------------------


def _tree(b: Emitter, registers: Sequence[ir.Value], width: int) -> ir.Value:
    """Registers folded in pairs until one is left, which is made with `width` lanes to a fold, and those before it with twice as many."""
    return folded(b, registers, [width << i for i in reversed(range(len(registers).bit_length() - 1))], total)[0]


_LEVEL = 1 if is_zen_5() else 2  # cache that prefetches fill: on Zen 5, the first one reads Q4_K at 31 GB/s, the second one at 25

ROWS = 4
"""Rows of the matrix that a step for one row of activations takes: their small scales fill a register, and so do the sums of four steps."""


@emitted()
def dot_rows(b, blocks, places, x, sums, chunk, lanes, place, ahead):
    """A chunk of ROWS rows, from the first of `places` on, times number `chunk` of one row x of activations, with the sums of its runs.

    lanes[place :] gets a quarter of the lanes of each unit, of one row after another: [registers, 16]. As many bytes of the matrix are
    asked for, from the address `ahead` on: in order, because the processor loses track of several streams.
    """
    plan = _plan(blocks)
    rows = _blocks(b, blocks, places, ROWS)
    for line in range(0, ROWS * plan.blocks * plan.block_format.layout.itemsize, 64):
        b.prefetch(b.pointer(ahead, line), _LEVEL)
    start = b.mul(chunk, plan.weights)
    q = [b.load(x.at(b.add(start, k * REGISTER)), V64I8) for k in range(plan.weights // REGISTER)]

    def dots(row: int) -> list[ir.Value]:
        return [_dot(b, plan, constant(V16I32, None), _codes(b, plan, rows[row], k), register) for k, register in enumerate(q)]

    if plan.is_scaled:
        registers = _scaled_blocks(b, plan, [block for (block,) in rows], dots, b.load(sums.at(b.mul(chunk, LANES)), V16I16))
    else:
        parts = [[reduce(b.add, dots(row))] if plan.is_k else dots(row) for row in range(ROWS)]
        registers = [_tree(b, part, plan.width // 8) for part in zip(*parts, strict=True)]
    for k, register in enumerate(registers):
        b.store(register, lanes.at(b.add(place, k * LANES)), align=4)


def _scaled_blocks(b: Emitter, plan: Plan, blocks: Sequence[ir.Value], dots: Callable, sums: ir.Value) -> list[ir.Value]:
    """Four lanes of each of ROWS blocks, and as many of its minimums if the type has them.

    dots: number of a block -> its codes times activations, four to a lane. sums: those of the activations' 16 runs.
    """
    twice = b.joined([sums, sums])

    def times_sums(integers: Integers, numbers: ir.Value) -> ir.Value:
        words = [widened(b, part, integers, V32I16) for part in b.slices(numbers, 2)]
        return _tree(b, [_dot_words(b, constant(V16I32, None), part, twice) for part in words], 8)

    (integers, scales), *minimums = _small(b, plan, blocks)
    its = b.slices(scales, len(blocks))
    so_far = _tree(b, [_times_scales(b, plan, dots(i), integers, numbers) for i, numbers in enumerate(its)], 8)
    if offset := plan.offset(b.path):
        so_far = b.sub(so_far, b.mul(times_sums(integers, scales), offset))
    return [so_far, *(times_sums(*minimum) for minimum in minimums)]


def _times_scales(b: Emitter, plan: Plan, dots: Sequence[ir.Value], integers: Integers, scales: ir.Value) -> ir.Value:
    """The sum of a block's registers of codes times activations, four codes to a lane, times the scales of its 16 runs: bytes."""
    so_far = constant(V16I32, None)
    if not _multiplies_words(b) or not plan.fits_words(4, plan.offset(b.path)):
        wide = widened(b, scales, integers)
        for k, dot in enumerate(dots):
            so_far = b.add(so_far, b.mul(dot, b.shuffled(wide, [4 * k + lane // 4 for lane in range(LANES)])))
        return so_far
    for k in range(0, len(dots), 2):
        runs = [4 * (k + half) + lane for lane in range(4) for half in range(2) for _ in range(4)]  # of the packed words
        order = [byte for run in runs for byte in ((LANES, run) if has_sign(integers) else (run, LANES))]  # of the zeros, the first
        words = b.bitcast(b.shuffled(scales, order, bytes_of([0] * LANES)), V32I16)
        words = b.ashr(words, 8) if has_sign(integers) else words
        packed = instruction(b, "pack", V32I16, *dots[k : k + 2])  # four lanes of the first, four of the second, and so on
        so_far = _dot_words(b, so_far, packed, words)
    return so_far


@emitted()
def add_lanes(b, blocks, places, sums, chunk, lanes, totals, floats):
    """Totals [units, 16], at an address, of 16 rows from what `dot_rows` made of them, lanes are rows; after them what `minimums` gives.

    And floats, as those of `unpack_chunk`.
    """
    plan = _plan(blocks)
    _store_factors(b, plan, _blocks(b, blocks, places, LANES), floats, constant(I64, 0))
    share = max(1, plan.units // plan.registers)
    for number in range(plan.registers):
        loaded = [b.load(lanes.at((step * plan.registers + number) * LANES), V16I32) for step in range(LANES // ROWS)]
        left = plan.width // LANES
        rows = b.joined([_tree(b, loaded[step : step + left], 2) for step in range(0, len(loaded), left)])
        for i in range(share):
            unit, register = number * share + i, b.shuffled(rows, [row * share + i for row in range(LANES)])
            if not plan.is_scaled:
                register = b.add(register, _start(b, plan, sums.at(b.mul(b.add(b.mul(chunk, plan.units), unit), plan.unit // LANES))))
            b.store(register, b.pointer(totals, unit * STEP), align=4)


# --- several rows of activations ------------------------------------------------------------------------------------------------------


def _transposed(b: Emitter, registers: Sequence[ir.Value]) -> list[ir.Value]:
    """16 registers of 16 lanes: lane j of register i becomes lane i of register j."""
    turned = list(registers)
    for step in (1, 2, 4, 8):
        one = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
        other = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
        for i in range(LANES):
            if not i & step:
                x, y = turned[i], turned[i + step]
                turned[i], turned[i + step] = b.shuffled(x, one, y), b.shuffled(x, other, y)
    return turned


@emitted()
def unpack_chunk(b, blocks, places, strip, number):
    """Chunk `number` of a strip, of 16 rows, as `run_step` and `close_unit` read it: lanes are rows.

    The strip gets codes [weights / 4, 16, 4], scales [16 runs, 16] if there are any, pairs: minimums of two runs [8, 16, 2] of 16 bits, or
    scales if there are none, floats [units, 2, 16]: scales and minimums.
    """
    plan = _plan(blocks)
    its = _blocks(b, blocks, places, LANES)

    def store(array: Place, size: int, registers: Sequence[ir.Value]) -> None:
        for i, register in enumerate(registers):
            b.store(register, array.at(b.add(b.mul(number, size), i * (size // len(registers)))), align=4)

    turned = []
    for i in range(plan.weights // REGISTER):
        turned += _transposed(b, [b.bitcast(_codes(b, plan, row, i), V16I32) for row in its])
    store(strip.codes, plan.weights * LANES, turned)
    if plan.is_scaled:
        small: tuple[list[ir.Value], list[ir.Value]] = ([], [])
        for row in range(0, LANES, 4):
            four = _small(b, plan, [block for block, *_ in its[row : row + 4]])
            for registers, (integers, numbers) in zip(small, four, strict=False):
                registers += [widened(b, part, integers) for part in b.slices(numbers, 4)]
        factors = _transposed(b, small[0])
        counts = _transposed(b, small[1]) if plan.has_integer_minimum else factors
        if plan.word_registers(b.path):
            factors = [_words(b, scale, scale) for scale in factors]
        elif plan.fits_words(LANES) and _multiplies_words(b):
            factors = [_words(b, scale, None) for scale in factors]
        store(strip.scales, LANES * LANES, factors)
        store(strip.pairs, LANES * LANES // 2, [_words(b, *pair) for pair in zip(counts[::2], counts[1::2], strict=True)])
    _store_factors(b, plan, its, strip.floats, b.mul(number, plan.units * 2 * LANES))


def _start(b: Emitter, plan: Plan, sums: ir.Value) -> ir.Value:
    """What takes the offset off the codes of a unit without small scales, in all lanes. sums: where those of the activations' runs lie."""
    if not plan.offset(b.path):
        return constant(V16I32, None)
    runs = [b.sext(b.load(b.moved(sums, 2 * run), I16), I32) for run in range(plan.unit // LANES)]
    return b.splat(b.mul(reduce(b.add, runs), -plan.offset(b.path)), V16I32)


@emitted(returns=first)
def open_unit(b, tile, blocks, pairs, sums, valid):
    """A tile for the sums of one unit: what takes the offset of its codes off. Pairs and sums are those of `minimums`."""
    plan = _plan(blocks)
    if plan.is_scaled and plan.offset(b.path):
        return [b.mul(product, -plan.offset(b.path)) for product in _times_sums(b, tile, pairs, sums, valid)]
    return [_start(b, plan, b.row(sums, j, valid=valid)) for j in range(tile.columns)] * tile.rows


@emitted(returns=first)
def run_step(b, tile, blocks, codes, scales, q, valid):
    """tile[i, j] += a run of 16 weights of 16 rows, times 16 activations, times the run's scale if there is one.

    Rows of codes and scales are groups i, those of q the `valid` rows j of activations.
    """
    plan, totals, sums = _plan(blocks), list(tile), list(tile)
    factors = [constant(V16I32, 0x10001)] * tile.rows  # words of 1
    if plan.is_scaled:
        sums = [constant(V16I32, None)] * len(tile)
        factors = [b.load(b.row(scales, i), V16I32) for i in range(tile.rows)]
    together = plan.word_registers(b.path)
    words = [constant(V32I16, None)] * len(tile)
    for step in range(4):
        registers = [b.load(b.row(codes, i, step * STEP), V64I8) for i in range(tile.rows)]
        for j in range(tile.columns):
            x = broadcast_four(b, b.row(q, j, 4 * step, valid))
            for i, register in enumerate(registers):
                k = i * tile.columns + j
                if not together:
                    sums[k] = _dot(b, plan, sums[k], register, x)
                    continue
                words[k] = b.add(words[k], word_products(b, register, x))
                if step % together == together - 1:
                    totals[k] = _dot_words(b, totals[k], words[k], factors[i])
                    words[k] = constant(V32I16, None)
    if together or not plan.is_scaled:
        return totals if together else sums
    scaled = [(run, factors[k // tile.columns]) for k, run in enumerate(sums)]
    if plan.fits_words(LANES) and _multiplies_words(b):  # the upper half of each scale is 0
        return [_dot_words(b, totals[k], *pair) for k, pair in enumerate(scaled)]
    return [b.add(totals[k], b.mul(*pair)) for k, pair in enumerate(scaled)]


@emitted(returns=first)
def minimums(b, tile, blocks, pairs, sums, valid):
    """How often each minimum is subtracted, of types that count it.

    Rows of pairs [8, 16] are groups i, those of sums [16] rows of activations j.
    """
    return _times_sums(b, tile, pairs, sums, valid) if _plan(blocks).has_integer_minimum else list(tile)


def _times_sums(b: Emitter, tile: Any, pairs: Strided, sums: Strided, valid: ir.Value) -> list[ir.Value]:
    """The pairs of each group of 16 rows times the sums of each row of activations."""
    products = []
    for k in range(len(tile)):
        i, j = divmod(k, tile.columns)
        totals = [constant(V16I32, None)] * 2
        for pair in range(LANES // 2):
            two = b.splat(b.load(b.row(sums, j, 2 * pair, valid), I32), V16I32)
            totals[pair % 2] = _dot_words(b, totals[pair % 2], b.load(b.row(pairs, i, pair * LANES), V16I32), two)
        products.append(b.add(*totals))
    return products


@emitted(returns=first)
def close_unit(b, tile, totals, counts, blocks, floats, scales, eights, valid):
    """tile += the sums of a unit times the scales of both sides, and its minimums, in float32.

    counts: what `minimums` gives. Rows of floats [2, 16] are groups i, those of scales and rounded sums rows j of activations; `eights` has
    them at the places of the scales.
    """
    plan, results = _plan(blocks), list(tile)

    def splat(numbers: Place, j: int) -> ir.Value:
        return b.splat(b.load(b.row(scales._replace(numbers=numbers), j, valid=valid), F32), V16F32)

    for j in range(tile.columns):
        x_scale = splat(scales.numbers, j)
        for i in range(tile.rows):
            k = i * tile.columns + j
            scale, minimum = (b.load(b.row(floats, i, plus), V16F32) for plus in (0, LANES))
            results[k] = b.fma(b.sitofp(totals[k], V16F32), b.fmul(scale, x_scale), results[k])
            if plan.has_float_minimum:
                results[k] = b.fma(minimum, splat(eights, j), results[k])
            if plan.has_integer_minimum:
                results[k] = b.fma(b.sitofp(counts[k], V16F32), b.fneg(b.fmul(minimum, x_scale)), results[k])
    return results


@emitted(returns=types.intp, literal=True)
def of_plan(b, blocks, name):
    """A number of the plan of these blocks, known when the kernel is compiled."""
    return constant(I64, getattr(_plan(blocks), name))


_PLANS = {from_dtype(plan.block_format.layout): plan for plan in PLANS.values()}
