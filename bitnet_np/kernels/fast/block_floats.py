"""ggml's blocks as floats, 16 weights of the tables in base/block_formats.py at a time."""

from collections.abc import Callable, Iterator
from functools import reduce

from llvmlite import ir
from numba.core import cgutils
from numba.np.numpy_support import from_dtype

from ...base.block_formats import FORMATS, Bits, Factor, Format, Integers
from . import emit
from .block_codes import joined_runs, load_lanes, widened
from .emit import F32, I8, I64, LANES, V16F32, V16I16, V16I32, Emitter, Place, constant, emitted, first
from .simd import widened_half

# --- scales and minimums --------------------------------------------------------------------------------------------------------------


def _integers(b: Emitter, block: ir.Value, integers: Integers) -> list[ir.Value]:
    """Integers as float32, 16 in each register."""
    runs = joined_runs(b, [(block, integers, run) for run in range(integers.runs)])
    return [b.sitofp(widened(b, run, integers), V16F32) for run in b.slices(runs, integers.runs)]


def _float16s(b: Emitter, block: ir.Value, at: list[int]) -> ir.Value:
    """The float16 numbers of a block at the offsets `at`, widened."""
    return widened_half(b, b.bitcast(load_lanes(b, block, [start + i for start in at for i in range(2)]), V16I16))


def _products(b: Emitter, block: ir.Value, integers: Integers, numbers: ir.Value) -> ir.Value:
    """The address of integers times float16 numbers, in memory.

    A load that fills all lanes is free while arithmetic runs, but a shuffle contends with the widening of codes: from memory, Q6_K runs 1.3
    times as fast. LLVM would turn the loads into shuffles if it knew what they read.
    """
    place = cgutils.alloca_once(b.builder, V16F32)
    b.store(b.fmul(numbers, *_integers(b, block, integers)), place, align=64)
    unknown = b.asm(ir.FunctionType(place.type, [place.type]), "", "=r,0,~{memory}", [place], True)
    return b.bitcast(unknown, F32.as_pointer())


def number_of_byte(b: Emitter, block: ir.Value, start: int, factor: Factor, run: int) -> ir.Value:
    """The number that a byte of the block chooses from the factor's table. start: offset of the first byte."""
    table = cgutils.global_constant(b.builder, "factors", constant(ir.ArrayType(F32, 256), list(factor.table)))
    byte = b.load(b.moved(block, start + factor.lanes[run]), I8)
    return b.builder.load(b.gep(table, [constant(I64, 0), b.zext(byte, I64)]), typ=F32)


def _factors(b: Emitter, block: ir.Value, block_format: Format) -> list[Callable[[int], ir.Value]]:
    """The scale and, if the type has one, the minimum, each as a function: number of a run of 16 weights -> its factor in all lanes."""
    factors = [factor for factor in (block_format.scale, block_format.minimum) if factor]
    products = {}
    for integers in dict.fromkeys(factor.integers for factor in factors if factor.integers):
        start = {lane: block_format.start(user) for user in factors if user.integers is integers for lane in user.lanes}
        numbers = _float16s(b, block, [start[lane] for lane in range(LANES)])  # each lane has the float16 of the factor that uses it
        products[integers] = _products(b, block, integers, numbers)

    def function(factor: Factor) -> Callable[[int], ir.Value]:
        start, integers = block_format.start(factor), factor.integers
        if factor.table:
            return lambda run: b.splat(number_of_byte(b, block, start, factor, run), V16F32)
        if integers is None:
            number = _float16s(b, block, [start] * LANES)
            return lambda run: number
        return lambda run: _all_lanes(b, products[integers], factor, run)

    return [function(factor) for factor in factors]


def _all_lanes(b: Emitter, products: ir.Value, factor: Factor, run: int) -> ir.Value:
    product = b.load(b.gep(products, [constant(I64, factor.lanes[run])]), F32)
    return b.splat(b.fneg(product) if factor.negative else product, V16F32)


# --- weights --------------------------------------------------------------------------------------------------------------------------


def _indices(b: Emitter, block: ir.Value, codes: Bits, runs: int) -> list[ir.Value]:
    """Codes as 32-bit integers, 16 in each register. The bits above the lowest four are other codes'."""
    loaded = load_lanes(b, block, codes.at)
    repeated = [lane + LANES * (run % runs) for lane in range(LANES) for run in range(4)]  # the bytes of 16 codes in each byte of the lanes
    lanes = b.bitcast(b.shuffled(loaded, repeated), V16I32)
    return [b.lshr(lanes, 8 * run + codes.shift[0]) for run in range(runs)]


def _block_weights(b: Emitter, blocks: Place, index: ir.Value) -> Iterator[ir.Value]:
    """The weights of a block, 16 at a time. A product and a sum may become one fused operation, because the product is exact.

    If a register holds 16 float32, codes of at most four bits are looked up in a register of all 16 possible weights. That saves a
    product, a sum and a conversion for each register, and the instruction ignores all but the lowest four bits.
    """
    block_format, block = _FORMATS[blocks.dtype], b.moved(blocks.at(index), 0)
    scale, *minimum = _factors(b, block, block_format)

    def weights(run: int, numbers: ir.Value) -> ir.Value:
        products = b.fmul(numbers, scale(run), flags=("contract",))
        return reduce(lambda so_far, least: b.fadd(so_far, least(run), flags=("contract",)), minimum, products)

    run = 0
    for codes in block_format.codes:
        if emit.is_wide() and (few := codes.four_bits):
            numbers = constant(V16F32, list(codes.table) or [(i & few.mask[0]) - codes.bias for i in range(LANES)])
            for index in _indices(b, block, few, codes.runs):
                yield b.named("llvm.x86.avx512.permvar.sf.512", V16F32, weights(run, numbers), index)
                run += 1
        else:
            for numbers in _integers(b, block, codes):
                yield weights(run, numbers)
                run += 1


@emitted()
def unpack_block(b, blocks, index, out, position):
    """out[position :] = the weights of blocks[index]: records of one of the layouts in base/block_formats.py -> float32."""
    for run, weights in enumerate(_block_weights(b, blocks, index)):
        b.store(weights, out.at(b.add(position, run * LANES)), align=4)


@emitted(returns=first)
def dot_block(b, tile, blocks, start, stride, valid, x, x_start):
    """tile[i] += the weights of blocks[start + i * stride] * x[x_start :], lane by lane, for a tile of one column."""
    rows = [_block_weights(b, blocks, b.clamped(start, stride, row, valid)) for row in range(tile.rows)]
    sums = list(tile)
    for run, weights in enumerate(zip(*rows, strict=True)):
        other = b.load(x.at(b.add(x_start, run * LANES)), V16F32)
        sums = [b.fma(w, other, so_far) for w, so_far in zip(weights, sums, strict=True)]
    return sums


_FORMATS = {from_dtype(block_format.layout): block_format for block_format in FORMATS.values()}
