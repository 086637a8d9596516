"""Products with matrices in ggml's block types as llama.cpp's CPU backend defines them: bytes times bytes, exact inside a block.

contract/blocks.py has the definition, of the dialect `llama.cpp`: integers inside a unit (a block of 256 weights, or the 32 or 16 that
share all scales), then unit after unit in float32. So there is one order, which depends on the row of weights and the row of activations.
Types whose codes are rows of a grid (grids.py) have no integers here: their rounded activations are multiplied as floats.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import TensorType
from . import block_tiles
from .block_formats import FORMATS, RUN
from .block_plans import PLANS
from .block_rows import SPAN, Numbers, Rows, arrange, room_for, unpack
from .fast import amx
from .fast.block_bytes import CHUNKS, ROWS, close_chunks, close_unit, open_chunks, open_unit, run_step, take_offset
from .fast.emit import LANES, Strided
from .fast.simd import load_tile, pointer_to, store_tile, tile_f32, tile_i32
from .launching import Floats, inlined, launch, parallel, read_only, serial, shared
from .processor import instruction_path
from .ternary_product import blocks_of
from .tiles import ROW_BLOCK, WIDE, rows_ahead
from .workspace import aligned, empty

Bytes = NDArray[np.uint8]

_GROUPS, _TOKENS = (2, 6) if WIDE else (1, 2)  # groups of 16 weight rows, and rows of activations, of a tile


# --- several tokens -------------------------------------------------------------------------------------------------------------------


@inlined
def _tile(zeros, tile, blocks, numbers, rows, strip, first, end, token, valid):
    """`tile` plus the products of chunks first..end with some rows of activations."""
    count, unit_weights = end - first, numbers.runs * RUN
    codes, scales, pairs, floats = pointer_to(strip.codes), pointer_to(strip.scales), pointer_to(strip.pairs), pointer_to(strip.floats)
    q, starts, x_sums, x_scales = pointer_to(rows.q), pointer_to(rows.starts), pointer_to(rows.sums), pointer_to(rows.scales)
    eights, units_of_x = pointer_to(rows.eights), rows.scales.shape[1]
    units = blocks.shape[1] * numbers.units // numbers.blocks  # of a row, which may end with the first block of a chunk
    first_unit, place = first * numbers.units, first * numbers.weights
    q_at, start = token * rows.q.shape[1] + place, token * rows.starts.shape[1] + place // numbers.width
    sums_at, scales_at, run_at = token * units_of_x * numbers.runs + place // RUN, token * units_of_x + first_unit, 0
    for unit in range(min(end * numbers.units, units) - first_unit):
        totals = open_unit(zeros, blocks, Strided(starts, start, rows.starts.shape[1]), valid)
        for run in range(numbers.runs):
            codes_of_run = Strided(codes, run_at * RUN * LANES, count * numbers.weights * LANES)
            scales_of_run = Strided(scales, run_at * LANES, count * LANES * LANES)
            x_of_run = Strided(q, q_at, rows.q.shape[1])
            totals = run_step(
                totals, blocks, codes_of_run, scales_of_run, x_of_run, Strided(starts, start + run, rows.starts.shape[1]), valid
            )
            run_at += 1
            q_at += RUN
        pairs_of_unit = Strided(pairs, unit * LANES * LANES // 2, count * LANES * LANES // 2)
        floats_of_unit = Strided(floats, unit * 2 * LANES, count * numbers.units * 2 * LANES)
        sums, scales_of_x = Strided(x_sums, sums_at, units_of_x * numbers.runs), Strided(x_scales, scales_at + unit, units_of_x)
        totals = take_offset(totals, blocks, pairs_of_unit, sums, valid)
        tile = close_unit(tile, totals, blocks, floats_of_unit, pairs_of_unit, sums, scales_of_x, eights, valid)
        start += unit_weights // numbers.width
        sums_at += numbers.runs
    return tile


@serial
def _several_rows(zeros, integers, groups, tokens, blocks, numbers, rows, r, out):
    """`groups` * 16 rows of the matrix from r on for all rows of activations."""
    n, present, width = blocks.shape[1], rows.q.shape[0], groups * LANES
    chunks, span = (n + numbers.blocks - 1) // numbers.blocks, max(1, SPAN // numbers.weights)
    strip = room_for(min(span, chunks) * groups, numbers)
    tiles = (present + tokens - 1) // tokens
    sums = aligned(tiles * tokens * width * 4).view(np.float32)
    stride = LANES * 4
    for first in range(0, chunks, span):
        end = min(first + span, chunks)
        unpack(blocks, numbers, r, groups, first, end, strip)
        for t in range(tiles):
            valid = min(tokens, present - t * tokens)
            place = np.int64(sums.ctypes.data) + t * tokens * width * 4
            tile = load_tile(zeros, place, tokens * stride, stride) if first else zeros
            tile = _tile(integers, tile, blocks, numbers, rows, strip, first, end, t * tokens, valid)
            store_tile(tile, sums, t * tokens * width, tokens * LANES)
    columns = min(width, out.shape[1] - r)
    for t in range(present):
        for i in range(columns):
            at = (t // tokens * groups + i // LANES) * tokens + t % tokens
            out[t, r + i] = sums[at * LANES + i % LANES]


@parallel
def _arrange(team, x, order, numbers, rows):
    for r in shared(team, x.shape[0]):
        arrange(r, x, order, numbers, rows)


@parallel
def _products(team, blocks, numbers, rows, out):
    for strip in shared(team, (blocks.shape[0] + _GROUPS * LANES - 1) // (_GROUPS * LANES)):
        zeros, integers = tile_f32(_GROUPS, _TOKENS), tile_i32(_GROUPS, _TOKENS)
        _several_rows(zeros, integers, _GROUPS, _TOKENS, blocks, numbers, rows, strip * _GROUPS * LANES, out)


# --- one token ------------------------------------------------------------------------------------------------------------------------


@serial
def _room(x, numbers):
    """Room for a row of activations and whole steps of chunks. No register of it straddles two cache lines."""
    chunks = (x.shape[1] + numbers.weights - 1) // numbers.weights
    chunks = (chunks + CHUNKS - 1) // CHUNKS * CHUNKS
    weights, units = chunks * numbers.weights, chunks * numbers.units
    runs, starts = units * numbers.runs, weights // numbers.width if numbers.offset else 0
    return Rows(
        aligned(weights).view(np.int8).reshape(1, weights),
        aligned(starts * 4).view(np.int32).reshape(1, starts),
        aligned(runs * 2).view(np.int16).reshape(1, units, numbers.runs),
        np.empty(units, np.float32).reshape(1, units),
        np.empty(units, np.float32).reshape(1, units),
    )


@serial
def rows_of_one_token(zeros, blocks, numbers, rows, first, end, out):
    """Results first..end of a matrix: few rows at a time, so that memory is read nearly in order."""
    n = blocks.shape[1]
    chunks, ahead = (n + numbers.blocks - 1) // numbers.blocks, rows_ahead(ROWS, n * blocks.itemsize)
    sums, lanes = np.empty(LANES, np.float32), aligned(ROWS * numbers.registers * LANES * 4).view(np.int32)
    for r in range(first, end, ROWS):
        valid = min(ROWS, end - r)
        tile = zeros
        for chunk in range(0, chunks, CHUNKS):
            for row in range(ROWS):
                start = (r + min(row, valid - 1)) * n
                open_chunks(blocks, start, n, chunk, rows, lanes, row, ahead)
            tile = close_chunks(tile, blocks, r * n, n, valid, chunk, lanes, rows)
        store_tile(tile, sums, 0, LANES)
        for i in range(valid):
            out[r + i] = sums[i]


@parallel
def _products_of_row(team, first, second, third, widths, x, order, numbers, out):
    """out, flat: the results of the three matrices, one after another. A matrix of width 0 is not there."""
    rows = _room(x, numbers)
    arrange(0, x, order, numbers, rows)
    for item in shared(team, blocks_of(widths, ROW_BLOCK)):
        which, block, place = 0, item, 0
        while block * ROW_BLOCK >= widths[which]:
            block -= -(-widths[which] // ROW_BLOCK)
            place += widths[which]
            which += 1
        begin, results = block * ROW_BLOCK, out[place : place + widths[which]]
        end = min(begin + ROW_BLOCK, widths[which])
        rows_of_one_token(tile_f32(1, 1), (first, second, third)[which], numbers, rows, begin, end, results)


# --- products -------------------------------------------------------------------------------------------------------------------------


@lru_cache
def _numbers(kind: TensorType, one_token: bool) -> tuple[Numbers, NDArray[np.int64]]:
    """What the kernel knows of a type, and the order of its runs. Asking for the instruction path takes longer than a small product."""
    plan = PLANS[kind.name]
    offset = np.int32(plan.offset_of_starts(instruction_path(), one_token))
    numbers = Numbers(
        plan.weights,
        plan.blocks,
        plan.units,
        plan.registers,
        plan.unit // RUN,
        plan.activations // plan.unit,
        plan.width(one_token),
        offset,
    )
    return numbers, read_only(np.array(plan.order))


def products(x: Floats, matrices: Sequence[Bytes], kind: TensorType) -> list[Floats]:
    # [R, M], [N, bytes of a row] each, type -> [R, N] each
    """The products that this file defines with up to three matrices of a type. x is rounded once for all of them."""
    # not data.view, which takes longer to see that this is safe
    layout, size = FORMATS[kind.name].layout, kind.block_bytes
    blocks = [read_only(np.ndarray((len(data), data.shape[1] // size), layout, data)) for data in matrices]
    unit = amx.unit() if len(x) >= block_tiles.LEAST else None
    return _products_of_one_token(x, blocks, kind) if len(x) == 1 and unit is None else _products_of_several(x, blocks, kind, unit)


def _products_of_one_token(x: Floats, blocks: list[NDArray], kind: TensorType) -> list[Floats]:
    (a, b, c), (i, j, k) = (*blocks, blocks[0], blocks[0])[:3], (*map(len, blocks), 0, 0)[:3]
    out = empty((1, i + j + k))
    numbers, order = _numbers(kind, True)
    launch(_products_of_row, out.size * x.size // 64, a, b, c, (i, j, k), x, order, numbers, out[0])
    return [out[:, :i], out[:, i : i + j], out[:, i + j :]][: len(blocks)]


def _products_of_several(x: Floats, blocks: list[NDArray], kind: TensorType, unit: NDArray | None) -> list[Floats]:
    numbers, order = _numbers(kind, False)
    units, results = -(-x.shape[1] // numbers.weights) * numbers.units, [empty((len(x), len(b))) for b in blocks]
    rows = (_rows_for if unit is None else block_tiles.rows_for)(len(x), units, numbers)
    launch(_arrange, x.size, x, order, numbers, rows)
    for b, out in zip(blocks, results, strict=True):
        work = out.size * x.shape[1] // 64
        if unit is None:
            launch(_products, work, b, numbers, rows, out)
        else:
            launch(block_tiles.products, work, b, numbers, rows, out, unit)
    return results


def _rows_for(present: int, units: int, numbers: Numbers) -> Rows:
    padded = units * numbers.runs * RUN
    return Rows(
        empty((present, padded), np.int8),
        empty((present, padded // numbers.width if numbers.offset else 0), np.int32),
        empty((present, units, numbers.runs), np.int16),
        *empty((2, present, units)),
    )
