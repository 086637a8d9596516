"""Products with matrices in ggml's block types as llama.cpp's CPU backend defines them: bytes times bytes, exact inside a block.

contract/blocks.py has the definition, of the dialect `llama.cpp`: integers inside a unit (a block of 256 weights, or the 32 or 16 that
share all scales), then unit after unit in float32. So there is one order, which depends on the row of weights and the row of activations.
Types whose codes are rows of a grid (grids.py) have no integers here: their rounded activations are multiplied as floats.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.block_formats import FORMATS, RUN
from ...base.tensor_types import TensorType
from ..fast.block_bytes import ROWS, Chunk, add_lanes, close_unit, dot_rows, minimums, of_plan, open_unit, run_step, unpack_chunk
from ..fast.emit import LANES, Strided
from ..fast.plans import PLANS
from ..fast.simd import address_of, load_tile, pointer_to, store_tile, tile_f32, tile_i32
from ..launching import Floats, inlined, launch, parallel, read_only, serial, shared
from ..ternary_product import block_of, blocks_of
from ..tiles import ROW_BLOCK, STREAMS, WIDE
from ..workspace import aligned, empty
from .activations import round_row

Bytes = NDArray[np.uint8]

_SPAN = 1024  # weights of a row that are unpacked at a time: with 32 rows, a first-level cache
_SHAPE = (2, 6) if WIDE else (1, 2)  # groups of 16 weight rows, and rows of activations, of a tile
_GROUPS = 4  # groups whose results are written together: few pages then take many of them at a time


class Rows(NamedTuple):
    """Activations as a product reads them; rows are padded to whole chunks."""

    q: Any  # [R, at least padded] int8, in the plan's order
    sums: Any  # [R, units, runs of a unit] int16
    scales: Any  # [R, units] float32
    eights: Any  # [R, units] float32: sums as Q8_1's, which types with a float minimum read


class Lanes(NamedTuple):
    """The memory of 16 rows' products with one token, chunk by chunk: see `dot_rows` and `add_lanes` of fast/block_bytes.py."""

    quarters: Any  # int32, 4 times what 4 rows make of a chunk
    totals: Any  # [units + 1, 16] int32
    floats: Any  # [units, 2, 16] float32
    sums: Any  # [16] float32


class Strip(NamedTuple):
    """Unpacked weights of some groups of 16 rows: `unpack_chunk` of fast/block_bytes.py."""

    codes: Any
    scales: Any
    pairs: Any
    floats: Any


@serial
def _arrange_row(r, x, size, order, rows):
    """Row r of the activations, rounded, in the plan's order, and its sums. size: numbers that share a scale. order: runs of a chunk."""
    runs, n, count = rows.sums.shape[2], x.shape[1] // RUN, x.shape[1] // size
    codes, scale, eights = np.empty(x.shape[1], np.int8), np.empty(count, np.float32), np.empty(count, np.float32)
    round_row(x[r], size, codes, scale, eights)
    q, sums = rows.q[r], rows.sums[r]
    for first in range(0, sums.size, order.size):
        for k in range(order.size):
            place, source = (first + k) * RUN, (first + order[k]) * RUN
            total = np.int32(0)
            if first + order[k] < n:
                for i in range(RUN):
                    q[place + i] = codes[source + i]
                    total += np.int32(codes[source + i])
            else:  # the last chunk may be longer than the row
                for i in range(RUN):
                    q[place + i] = 0
            sums[(first + k) // runs, (first + k) % runs] = np.int16(total)
    for i in range(rows.scales.shape[1]):
        at = i * runs * RUN // size
        rows.scales[r, i] = scale[at] if at < count else np.float32(0)
        rows.eights[r, i] = eights[at] if at < count else np.float32(0)


# --- several tokens -------------------------------------------------------------------------------------------------------------------


@serial
def _room_for(chunks, weights, units):
    """A strip for `chunks` chunks of 16 rows each, which have `weights` weights and `units` units."""
    return Strip(
        aligned(chunks * weights * LANES),
        aligned(chunks * LANES * LANES * 4).view(np.int32),
        aligned(chunks * LANES * LANES * 2).view(np.int32),
        aligned(chunks * units * 2 * LANES * 4).view(np.float32),
    )


@inlined
def _chunk_of(blocks, row, valid, chunk, gap=0):
    """Number `chunk` of some rows of the matrix, `valid` of which are there; `gap` rows lie between ROWS of them and the next."""
    n, first = blocks.shape[1], chunk * of_plan(blocks, "blocks")
    return Chunk(row * n + first, n, valid, min(1, n - 1 - first), gap * n)


@serial
def _unpack(blocks, r, groups, first, end, strip):
    """Chunks first..end of some groups of rows."""
    for group in range(groups):
        row = min(r + group * LANES, blocks.shape[0] - 1)
        for chunk in range(first, end):
            i = group * (end - first) + chunk - first
            unpack_chunk(blocks, _chunk_of(blocks, row, min(LANES, blocks.shape[0] - row), chunk), strip, i)


@inlined
def _tile(integers, tile, blocks, rows, strip, first, end, token, valid):
    """`tile` plus the products of chunks first..end with some rows of activations."""
    weights, units = of_plan(blocks, "weights"), of_plan(blocks, "units")
    runs = rows.sums.shape[2]  # not the plan's: the compiler would unroll the loop, for which AVX2 has too few registers
    codes, scales, pairs, floats = pointer_to(strip.codes), pointer_to(strip.scales), pointer_to(strip.pairs), pointer_to(strip.floats)
    q, x_sums, x_scales, eights = pointer_to(rows.q), pointer_to(rows.sums), pointer_to(rows.scales), pointer_to(rows.eights)
    count, units_of_x, run_at, first_unit = end - first, rows.scales.shape[1], 0, first * units
    q_at, unit_at = token * rows.q.shape[1] + first * weights, token * units_of_x + first_unit
    there = blocks.shape[1] * units // of_plan(blocks, "blocks")  # units of a row, which may end with the first block of a chunk
    for unit in range(min(end * units, there) - first_unit):
        pairs_of_unit = Strided(pairs, unit * LANES * LANES // 2, count * LANES * LANES // 2)
        sums = Strided(x_sums, (unit_at + unit) * runs, units_of_x * runs)
        totals = open_unit(integers, blocks, pairs_of_unit, sums, valid)
        for _ in range(runs):
            codes_of_run = Strided(codes, run_at * RUN * LANES, count * weights * LANES)
            scales_of_run = Strided(scales, run_at * LANES, count * LANES * LANES)
            totals = run_step(totals, blocks, codes_of_run, scales_of_run, Strided(q, q_at, rows.q.shape[1]), valid)
            run_at += 1
            q_at += RUN
        floats_of_unit = Strided(floats, unit * 2 * LANES, count * units * 2 * LANES)
        counts = minimums(integers, blocks, pairs_of_unit, sums, valid)
        tile = close_unit(tile, totals, counts, blocks, floats_of_unit, Strided(x_scales, unit_at + unit, units_of_x), eights, valid)
    return tile


@serial
def _several_rows(zeros, integers, blocks, rows, r, out, strip, results):
    """_GROUPS * 16 rows of the matrix from r on, or those that are left, for all rows of activations, in tiles of _SHAPE."""
    (groups, tokens), present, width = _SHAPE, rows.q.shape[0], _SHAPE[0] * LANES
    chunks, span = -(-blocks.shape[1] // of_plan(blocks, "blocks")), max(1, _SPAN // of_plan(blocks, "weights"))
    tiles, columns = -(-present // tokens), min(_GROUPS * LANES, out.shape[1] - r)
    target, stride = address_of(results), LANES * 4
    for part in range(-(-columns // width)):
        for first in range(0, chunks, span):
            end = min(first + span, chunks)
            _unpack(blocks, r + part * width, groups, first, end, strip)
            for t in range(tiles):
                place = (part * tiles + t) * tokens * width
                tile = load_tile(zeros, target + place * 4, tokens * stride, stride) if first else zeros
                tile = _tile(integers, tile, blocks, rows, strip, first, end, t * tokens, min(tokens, present - t * tokens))
                store_tile(tile, results, place, tokens * LANES)
    for t in range(out.shape[0]):
        for i in range(columns):
            part, group = i // width, i // LANES % groups
            out[t, r + i] = results[(((part * tiles + t // tokens) * groups + group) * tokens + t % tokens) * LANES + i % LANES]


@parallel
def _arrange(team, x, size, order, rows):
    for r in shared(team, x.shape[0]):
        _arrange_row(r, x, size, order, rows)


@parallel
def _products(team, blocks, rows, out):
    (groups, tokens), weights = _SHAPE, of_plan(blocks, "weights")
    most = min(max(1, _SPAN // weights), -(-blocks.shape[1] // of_plan(blocks, "blocks")))  # chunks that are unpacked at a time
    strip = _room_for(most * groups, weights, of_plan(blocks, "units"))
    results = aligned(_GROUPS * -(-out.shape[0] // tokens) * tokens * LANES * 4).view(np.float32)
    for item in shared(team, -(-blocks.shape[0] // (_GROUPS * LANES))):
        _several_rows(tile_f32(*_SHAPE), tile_i32(*_SHAPE), blocks, rows, item * _GROUPS * LANES, out, strip, results)


# --- one token ------------------------------------------------------------------------------------------------------------------------


@serial
def rows_of_one_token(zeros, integers, blocks, rows, first, end, out, lanes):
    """Results first..end of a matrix, 16 at a time. Of a matrix of whole 16 rows, they are ROWS of each of four streams."""
    n, per_chunk, units = blocks.shape[1], of_plan(blocks, "blocks"), of_plan(blocks, "units")
    size, matrix, data = of_plan(blocks, "registers") * LANES, address_of(blocks), address_of(lanes.totals)
    into, factors = pointer_to(lanes.quarters), pointer_to(lanes.floats)
    q, x_sums, x_scales, eights = pointer_to(rows.q), pointer_to(rows.sums), pointer_to(rows.scales), pointer_to(rows.eights)
    near, apart, turn = LANES, ROWS, ROWS * per_chunk  # rows of a stream; rows and blocks from one stream to the next
    if STREAMS > 1 and len(blocks) % LANES == 0:
        near, apart = ROWS, len(blocks) // (LANES // ROWS)
        turn = apart * n
    for group in range(first // LANES, -(-end // LANES)):
        tile, base, valid = zeros, group * near, min(LANES, end - group * LANES)
        parts = -(-valid // ROWS)
        for chunk in range(-(-n // per_chunk)):
            ahead = matrix + ((base + near) * n + chunk * near * per_chunk) * blocks.itemsize  # the next rows of a stream
            for part in range(parts):
                places = _chunk_of(blocks, base + part * apart, valid - part * ROWS, chunk)
                dot_rows(blocks, places, q, x_sums, chunk, into, part * size, ahead + part * turn * blocks.itemsize)
            add_lanes(blocks, _chunk_of(blocks, base, valid, chunk, apart - ROWS), x_sums, chunk, into, data, factors)
            for unit in range(min(units, n * units // per_chunk - chunk * units)):
                total, count = load_tile(integers, data + unit * LANES * 4, 0, 0), load_tile(integers, data + units * LANES * 4, 0, 0)
                of_unit, scales = Strided(factors, unit * 2 * LANES, 0), Strided(x_scales, chunk * units + unit, 0)
                tile = close_unit(tile, total, count, blocks, of_unit, scales, eights, 1)
        store_tile(tile, lanes.sums, 0, LANES)
        for part in range(parts):
            for i in range(min(ROWS, valid - part * ROWS)):
                out[base + part * apart + i] = lanes.sums[part * ROWS + i]


@parallel
def _products_of_row(team, first, second, third, widths, x, size, order, out):
    """out, flat: the results of the three matrices, one after another. A matrix of width 0 is not there."""
    per_chunk, runs = of_plan(first, "units"), of_plan(first, "unit") // RUN
    units = -(-x.shape[1] // of_plan(first, "weights")) * per_chunk
    rows = Rows(
        aligned(units * runs * RUN).view(np.int8).reshape(1, units * runs * RUN),  # no register straddles two cache lines
        np.empty((1, units, runs), np.int16),
        np.empty((1, units), np.float32),
        np.empty((1, units), np.float32),
    )
    _arrange_row(0, x, size, order, rows)
    lanes = Lanes(
        aligned(of_plan(first, "registers") * LANES * LANES).view(np.int32),
        aligned((per_chunk + 1) * LANES * 4).view(np.int32),
        aligned(per_chunk * 2 * LANES * 4).view(np.float32),
        np.empty(LANES, np.float32),
    )
    for item in shared(team, blocks_of(widths, ROW_BLOCK)):
        which, block, place = block_of(widths, ROW_BLOCK, item)
        begin, results = block * ROW_BLOCK, out[place : place + widths[which]]
        end = min(begin + ROW_BLOCK, widths[which])
        rows_of_one_token(tile_f32(1, 1), tile_i32(1, 1), (first, second, third)[which], rows, begin, end, results, lanes)


# --- products -------------------------------------------------------------------------------------------------------------------------


def records(data: Bytes, kind: TensorType) -> NDArray[np.void]:  # -> [N, blocks of a row] records, the same memory
    """The matrix as kernels take it."""
    # not data.view, which takes longer to see that this is safe
    return read_only(np.ndarray((len(data), data.shape[1] // kind.block_bytes), FORMATS[kind.name].layout, data))


def products(x: Floats, matrices: Sequence[Bytes], kind: TensorType) -> list[Floats]:
    # [R, M], [N, bytes of a row] each, type -> [R, N] each
    """The products that this file defines with up to three matrices of a type. x is rounded once for all of them."""
    blocks = [records(data, kind) for data in matrices]
    plan = PLANS[kind.name]
    arranged = x, plan.activations, _order(kind)
    if len(x) == 1:
        (a, b, c), (i, j, k) = (*blocks, blocks[0], blocks[0])[:3], (*map(len, blocks), 0, 0)[:3]
        out = empty((1, i + j + k))
        launch(_products_of_row, out.size * x.size // 64, a, b, c, (i, j, k), *arranged, out[0])
        return [out[:, :i], out[:, i : i + j], out[:, i + j :]][: len(blocks)]
    results = [empty((len(x), len(b))) for b in blocks]
    units, runs = -(-x.shape[1] // plan.weights) * plan.units, plan.unit // RUN
    q, sums = empty((len(x), units * runs * RUN), np.int8), empty((len(x), units, runs), np.int16)
    rows = Rows(q, sums, *empty((2, len(x), units)))
    launch(_arrange, x.size, *arranged, rows)
    for b, out in zip(blocks, results, strict=True):
        launch(_products, out.size * x.shape[1] // 64, b, rows, out)
    return results


@cache
def _order(kind: TensorType) -> NDArray[np.int64]:
    return read_only(np.array(PLANS[kind.name].order))
