"""Products with matrices in ggml's block types as llama.cpp's CPU backend defines them: bytes times bytes, exact inside a block.

THE DEFINITION, of the dialect `llama.cpp`. A row x of activations is rounded once for each product: to Q8_K, int8 codes q with a float32
scale dx for each 256 numbers, if the matrix has blocks of 256 weights, else to Q8_0, with a scale of float16 for each 32 numbers. A unit is
a block of 256 weights, or the 32 weights (16 in NVFP4) that share both scales. Its weights are (d * s_j) * c_i - dmin * m_j, with codes c,
small integers s and m for each run of weights j (s is 1 where the type has none), and floats d and dmin. Unit after unit, from acc = +0:

    acc = fma(float32(sum over i of s_j * c_i * q_i), d * dx, acc)
    acc = fma(float32(sum over j of m_j * (sum over i in j of q_i)), -(dmin * dx), acc)      if the type has integer minimums
    acc = fma(m, sx, acc)                                    if it has a float minimum m: Q4_1 and Q5_1, sx is Q8_1's sum in float16

Sums in parentheses are exact in int32; a conversion, a product of scales and a fused multiply-add round to float32 once. So there is one
order, which depends on the row of weights and the row of activations alone. Types whose codes are rows of a grid (grids.py) have no
integers here: their rounded activations are multiplied as floats.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import prange
from numpy.typing import NDArray

from ..tensor_types import TensorType
from .block_bytes import CHUNKS, ROWS, close_chunks, close_unit, load_tile, open_chunks, open_unit, run_step, unpack_chunk
from .block_formats import FORMATS, RUN
from .block_plans import PLANS
from .launching import Floats, inlined, launch, parallel, read_only, serial
from .processor import instruction_path
from .simd import LANES, store_tile, tile_f32, tile_i32
from .tiles import ROW_BLOCK, STREAM, WIDE
from .workspace import empty

Bytes = NDArray[np.uint8]

_GROUPS, _TOKENS = (2, 6) if WIDE else (1, 2)  # groups of 16 weight rows, and rows of activations, of a tile
_SPAN = 1024  # weights of a row that are unpacked at a time: with 32 rows, a first-level cache


class Numbers(NamedTuple):
    """What a kernel knows of a type: block_plans.py."""

    weights: Any  # of a chunk
    blocks: Any  # of a chunk
    units: Any  # of a chunk
    registers: Any  # of a chunk's sums
    runs: Any  # of 16 weights in a unit
    share: Any  # units with a common scale of the activations
    width: Any  # activations to an element of starts
    offset: Any  # of codes


class Rows(NamedTuple):
    """Activations as a product reads them; rows are padded to whole chunks."""

    q: Any  # [R, padded] int8, in the plan's order
    starts: Any  # [R, padded / width] int32: sums times -offset
    sums: Any  # [R, padded / 16] int16
    scales: Any  # [R, padded / unit] float32
    eights: Any  # [R, padded / 32] float32, as Q8_1; one element if the type has no float minimum


class Strip(NamedTuple):
    """Unpacked weights of some groups of 16 rows: block_bytes.py's `unpack_chunk`."""

    codes: Any
    scales: Any
    pairs: Any
    floats: Any


@serial
def _arrange(r, codes, scale, order, numbers, rows):
    """Row r of the activations in the plan's order, and its sums."""
    n = codes.shape[1] // RUN
    q, starts, sums = rows.q[r], rows.starts[r], rows.sums[r]
    per_chunk = order.size
    for place in range(q.size // RUN):
        source = place - place % per_chunk + order[place % per_chunk]
        total = np.int32(0)
        for i in range(RUN):
            code = codes[r, source * RUN + i] if source < n else np.int8(0)
            q[place * RUN + i] = code
            total += np.int32(code)
        sums[place] = np.int16(total)
    if numbers.offset:
        for i in range(starts.size):
            total = np.int32(0)
            for j in range(numbers.width):
                total += np.int32(q[i * numbers.width + j])
            starts[i] = -numbers.offset * total
    for i in range(rows.scales.shape[1]):
        at = i // numbers.share
        rows.scales[r, i] = scale[r, at] if at < scale.shape[1] else np.float32(0)


@serial
def _aligned(size):
    """Memory of which no register straddles two cache lines."""
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


@serial
def _one_row(zeros, data, blocks, numbers, rows, first, end, out):
    """Rows first..end of the matrix for one row of activations: few rows at a time, so that memory is read nearly in order."""
    n, row_bytes = blocks.shape[1], data.shape[1]
    chunks, step = (n + numbers.blocks - 1) // numbers.blocks, CHUNKS * numbers.blocks * blocks.itemsize
    sums, lanes = np.empty(LANES, np.float32), _aligned(LANES * numbers.registers * LANES * 4).view(np.int32)
    for r in range(first, end, ROWS):
        valid = min(ROWS, end - r)
        tile = zeros
        ahead = r * row_bytes + STREAM
        for chunk in range(0, chunks, CHUNKS):
            for row in range(ROWS):
                start = (r + min(row, valid - 1)) * n
                open_chunks(blocks, start, n, chunk, rows.q, rows.starts, rows.sums, lanes, row, data, ahead)
                ahead += step
            tile = close_chunks(tile, blocks, r * n, n, valid, chunk, lanes, rows.scales, rows.eights)
        store_tile(tile, sums, 0, LANES)
        for i in range(valid):
            out[0, r + i] = sums[i]


@serial
def _unpack(blocks, numbers, r, groups, first, end, strip):
    """Chunks first..end of some groups of rows."""
    n, count = blocks.shape[1], end - first
    for group in range(groups):
        row = min(r + group * LANES, blocks.shape[0] - 1)
        valid = min(LANES, blocks.shape[0] - row)
        for chunk in range(first, end):
            b, i = chunk * numbers.blocks, group * count + chunk - first
            unpack_chunk(
                blocks,
                row * n + b,
                n,
                valid,
                min(1, n - 1 - b),
                strip.codes,
                i * numbers.weights * LANES,
                strip.scales,
                i * LANES * LANES,
                strip.pairs,
                i * LANES * LANES // 2,
                strip.floats,
                i * numbers.units * 2 * LANES,
            )


@inlined
def _tile(zeros, tile, blocks, numbers, rows, strip, first, end, token, valid):
    """`tile` plus the products of chunks first..end with some rows of activations."""
    count, unit_weights = end - first, numbers.runs * RUN
    q_stride, starts_stride, sums_stride, scales_stride = rows.q.shape[1], rows.starts.shape[1], rows.sums.shape[1], rows.scales.shape[1]
    units = blocks.shape[1] * numbers.units // numbers.blocks  # of a row, which may end with the first block of a chunk
    first_unit, place = first * numbers.units, first * numbers.weights
    start, per_unit = token * starts_stride + place // numbers.width, unit_weights // numbers.width
    q_at, sums_at, scales_at = token * q_stride + place, token * sums_stride + place // RUN, token * scales_stride + first_unit
    at, s_at = 0, 0
    for unit in range(min(end * numbers.units, units) - first_unit):
        totals = open_unit(zeros, blocks, rows.starts, start, starts_stride, valid)
        for run in range(numbers.runs):
            totals = run_step(
                totals,
                blocks,
                strip.codes,
                at,
                count * numbers.weights * LANES,
                strip.scales,
                s_at,
                count * LANES * LANES,
                rows.q,
                q_at,
                q_stride,
                rows.starts,
                start + run,
                starts_stride,
                valid,
            )
            at += RUN * LANES
            s_at += LANES
            q_at += RUN
        tile = close_unit(
            tile,
            totals,
            blocks,
            strip.floats,
            unit * 2 * LANES,
            count * numbers.units * 2 * LANES,
            strip.pairs,
            unit * LANES * LANES // 2,
            count * LANES * LANES // 2,
            rows.sums,
            sums_at,
            sums_stride,
            rows.scales,
            rows.eights,
            scales_at + unit,
            scales_stride,
            valid,
        )
        start += per_unit
        sums_at += numbers.runs
    return tile


@serial
def _several_rows(zeros, integers, groups, tokens, blocks, numbers, rows, r, out):
    """`groups` * 16 rows of the matrix from r on for all rows of activations."""
    n, present, width = blocks.shape[1], rows.q.shape[0], groups * LANES
    chunks, span = (n + numbers.blocks - 1) // numbers.blocks, max(1, _SPAN // numbers.weights)
    most = min(span, chunks) * groups
    strip = Strip(
        _aligned(most * numbers.weights * LANES),
        _aligned(most * LANES * LANES * 4).view(np.int32),
        _aligned(most * LANES * LANES * 2).view(np.int32),
        _aligned(most * numbers.units * 2 * LANES * 4).view(np.float32),
    )
    tiles = (present + tokens - 1) // tokens
    sums = _aligned(tiles * tokens * width * 4).view(np.float32)
    for first in range(0, chunks, span):
        end = min(first + span, chunks)
        _unpack(blocks, numbers, r, groups, first, end, strip)
        for t in range(tiles):
            valid = min(tokens, present - t * tokens)
            tile = load_tile(zeros, sums, t * tokens * width, tokens * LANES) if first else zeros
            tile = _tile(integers, tile, blocks, numbers, rows, strip, first, end, t * tokens, valid)
            store_tile(tile, sums, t * tokens * width, tokens * LANES)
    columns = min(width, out.shape[1] - r)
    for t in range(present):
        for i in range(columns):
            at = (t // tokens * groups + i // LANES) * tokens + t % tokens
            out[t, r + i] = sums[at * LANES + i % LANES]


@parallel
def _products(data, blocks, codes, scale, order, numbers, rows, out):
    for r in prange(codes.shape[0]):
        _arrange(r, codes, scale, order, numbers, rows)
    n = blocks.shape[0]
    if codes.shape[0] == 1:
        for block in prange((n + ROW_BLOCK - 1) // ROW_BLOCK):
            first = block * ROW_BLOCK
            _one_row(tile_f32(1, 1), data, blocks, numbers, rows, first, min(first + ROW_BLOCK, n), out)
    else:
        for strip in prange((n + _GROUPS * LANES - 1) // (_GROUPS * LANES)):
            zeros, integers = tile_f32(_GROUPS, _TOKENS), tile_i32(_GROUPS, _TOKENS)
            _several_rows(zeros, integers, _GROUPS, _TOKENS, blocks, numbers, rows, strip * _GROUPS * LANES, out)


@lru_cache
def _numbers(kind: TensorType, one_row: bool) -> tuple[Numbers, NDArray[np.int64]]:
    """What the kernel knows of a type, and the order of its runs. Asking for the instruction path takes longer than a small product."""
    plan = PLANS[kind.name]
    offset = np.int32(plan.offset(instruction_path()))
    numbers = Numbers(
        plan.weights, plan.blocks, plan.units, plan.registers, plan.unit // RUN, plan.activations // plan.unit, plan.width(one_row), offset
    )
    return numbers, np.array(plan.order)


def product(codes: NDArray[np.int8], scale: Floats, eights: Floats | None, data: Bytes, kind: TensorType) -> Floats:
    # [R, M] int8, [R, M/256 or M/32], [R, M/32] for Q4_1 and Q5_1, [N, bytes of a row], type -> [R, N]
    """The products that this file defines, of activations that are rounded already."""
    present, width = codes.shape
    numbers, order = _numbers(kind, present == 1)
    chunks = -(-width // numbers.weights)
    if present == 1:
        chunks += -chunks % CHUNKS
    padded = chunks * numbers.weights
    if eights is None:
        eights = np.zeros((present, 1), np.float32)
    elif eights.shape[1] < chunks * numbers.units:
        eights = np.concatenate([eights, np.zeros((present, chunks * numbers.units - eights.shape[1]), np.float32)], axis=1)
    rows = Rows(
        empty((present, padded), np.int8),
        empty((present, padded // numbers.width if numbers.offset else 1), np.int32),
        empty((present, padded // RUN), np.int16),
        empty((present, chunks * numbers.units)),
        eights,
    )
    out = empty((present, data.shape[0]))
    blocks = read_only(data.view(FORMATS[kind.name].layout))
    launch(_products, out.size * width // 64, read_only(data), blocks, codes, scale, order, numbers, rows, out)
    return out
