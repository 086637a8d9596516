"""Attention on the GPU, in the contract's order: keys in chunks of CHUNK from position 0, each with a maximum, a sum and values of its own.

A block has some queries that read the same keys and values: the heads of a group, for one row or for several rows in a run. (A run is rows
that are consecutive positions of one slot.) It goes from chunk to chunk (`attend`); or, where each run is a single row, as in decoding,
there is a block for each chunk (`attend_chunk`), and the chunks' results are folded in order afterwards (`fold_chunks`).

A thread sums a whole dot product, in 16 numbers for the 16 lanes: no thread waits for another, and 2 x 2 of them share what they read.
Keys past the last or outside of the window have weight 0, as on the CPU.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ..scalar import CHUNK, exp
from ..simd import LANES
from .target import SIMULATED, instructions, kernel

device, fma, half_warp_max, half_warp_sum, load4, plus, times = (
    instructions.device,
    instructions.fma,
    instructions.half_warp_max,
    instructions.half_warp_sum,
    instructions.load4,
    instructions.plus,
    instructions.times,
)

_f = np.float32
_PART = 32  # keys in shared memory at a time
_UNSEEN = _f(-1.0)  # marks a query that sees no key of a chunk, where a weight cannot be negative
_LARGEST, _WEIGHT, _OLD, _NEW = 0, 1, 2, 3  # of a query, in `state`
_STATE = 4
WIDEST = 256  # head width
_WIDTHS = (16, 64, 128, WIDEST) if SIMULATED else (64, 128, WIDEST)


class Shape(NamedTuple):
    """What a kernel is compiled for: heads up to `width` wide, and queries of a block; a thread takes `tile` x `tile` dot products."""

    width: int
    queries: int
    tile: int


def shape_for(width: int, queries: int) -> Shape:
    """The kernel for heads of a width up to WIDEST, in blocks of as many queries as share keys, or some of them."""
    rounded = next(size for size in _WIDTHS if width <= size)
    if queries <= 4:
        return Shape(rounded, 4, 1)
    return Shape(rounded, 8 if rounded == WIDEST else 16, 2)


@device
def _dots(queries, keys, stride, blocks, q, k, q_step, k_step, tile, sums):
    """sums[(a * tile + b) * 16 + lane]: query q + a * q_step times key k + b * k_step, unfinished."""
    for i in range(tile * tile * LANES):
        sums[i] = _f(0.0)
    for block in range(blocks):
        for quarter in range(4):
            at = block * LANES + quarter * 4
            for b in range(tile):
                key = load4(keys, (k + b * k_step) * stride + at)
                for a in range(tile):
                    query = load4(queries, (q + a * q_step) * stride + at)
                    for i in range(4):
                        lane = (a * tile + b) * LANES + quarter * 4 + i
                        sums[lane] = fma(key[i], query[i], sums[lane])


@device
def _fold_lanes(sums, first):
    """The sum of 16 lanes by halving."""
    for half in (8, 4, 2, 1):
        for i in range(half):
            sums[first + i] = sums[first + i] + sums[first + i + half]
    return sums[first]


class Body(NamedTuple):
    """Steps that both kernels are made of."""

    load_queries: Any
    score: Any
    weigh: Any
    values: Any


@cache
def _body(shape: Shape) -> Body:
    width_, n_queries, tile = shape
    stride = width_ + 4  # a row ahead is another set of banks, and still 16 bytes aligned
    q_step, k_step = n_queries // tile, _PART // tile

    @device
    def load_queries(q, row, head, group, n, queries):
        """Query i is head `head` + i % group of row `row` + i // group; what is missing of the last numbers and queries is zeros."""
        width = q.shape[2]
        for item in range(cuda.threadIdx.x, n_queries * stride, cuda.blockDim.x):
            i, d = item // stride, item % stride
            queries[item] = q[row + i // group, head + i % group, d] if i < n and d < width else _f(0.0)

    @device
    def score(queries, keys, scores, sums, k, base, k_stride, key, n_keys, width, scale):
        """scores[i * CHUNK + j] = query i . key j of the chunk * scale."""
        blocks = (width + LANES - 1) // LANES
        for part in range(0, CHUNK, _PART):
            cuda.syncthreads()
            for item in range(cuda.threadIdx.x, _PART * stride, cuda.blockDim.x):
                j, d = part + item // stride, item % stride
                keys[item] = k[base + (key + j) * k_stride + d] if j < n_keys and d < width else _f(0.0)
            cuda.syncthreads()
            for item in range(cuda.threadIdx.x, q_step * k_step, cuda.blockDim.x):
                i, j = item % q_step, item // q_step
                _dots(queries, keys, stride, blocks, i, j, q_step, k_step, tile, sums)
                for a in range(tile):
                    for b in range(tile):
                        total = _fold_lanes(sums, (a * tile + b) * LANES)
                        scores[(i + a * q_step) * CHUNK + part + j + b * k_step] = times(total, scale)
        cuda.syncthreads()

    @device
    def weigh(scores, state, position, group, window, key):
        """scores -> exp(score - largest of the chunk); what the chunk does to the running maximum and sum, into `state`."""
        lane, half, halves = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES, cuda.blockDim.x // LANES
        for first in range(0, n_queries, halves):
            i = min(first + half, n_queries - 1)  # all threads of a warp take part in its sums
            here = position + i // group - key
            mine = -np.inf
            largest = _f(mine)
            for part in range(0, CHUNK, LANES):
                j = part + lane
                s = scores[i * CHUNK + j] if here - window < j and j <= here else _f(mine)
                largest = s if s > largest else largest
            largest = half_warp_max(largest)
            seen = max(0, here - window + 1) < min(CHUNK, here + 1)
            total = _f(0.0)
            for part in range(0, CHUNK, LANES):
                j = part + lane
                e = _f(0.0)
                if here - window < j and j <= here:
                    e = exp(plus(scores[i * CHUNK + j], -largest))
                if first + half < n_queries:
                    scores[i * CHUNK + j] = e
                total = plus(total, e)
            total = half_warp_sum(total)
            if lane == 0 and first + half < n_queries:
                state[i * _STATE + _NEW] = _UNSEEN
                if seen:
                    before = state[i * _STATE + _LARGEST]
                    after = before if before > largest else largest
                    old, new = exp(plus(before, -after)), exp(plus(largest, -after))
                    state[i * _STATE + _WEIGHT] = fma(state[i * _STATE + _WEIGHT], old, times(total, new))
                    state[i * _STATE + _LARGEST] = after
                    state[i * _STATE + _OLD], state[i * _STATE + _NEW] = old, new
        cuda.syncthreads()

    @device
    def values(scores, v, base, k_stride, key, n_keys, d, sums):
        """sums[i] = sum over the chunk's keys of weight i * value, number d, one chain in key order."""
        for i in range(n_queries):
            sums[i] = _f(0.0)
        last = base + (key + n_keys - 1) * k_stride + d
        for j in range(0, n_keys, 4):
            start = base + (key + j) * k_stride + d
            v0, v1 = v[start], v[min(start + k_stride, last)]
            v2, v3 = v[min(start + 2 * k_stride, last)], v[min(start + 3 * k_stride, last)]
            for i in range(n_queries):
                p = load4(scores, i * CHUNK + j)
                total = fma(p[0], v0, sums[i])
                total = fma(p[1], v1, total)
                total = fma(p[2], v2, total)
                sums[i] = fma(p[3], v3, total)

    return Body(load_queries, score, weigh, values)


@device
def _begin(state, n):
    for i in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        state[i * _STATE + _LARGEST], state[i * _STATE + _WEIGHT] = _f(-np.inf), _f(0.0)


@device
def _run_end(slot, position, first, limit):
    """Where the run that begins at row `first` ends, or `limit`."""
    end = first + 1
    while end < limit and slot[end] == slot[first] and position[end] == position[first] + (end - first):
        end += 1
    return end


def _sizes(shape: Shape) -> tuple[int, int, int, int, int]:
    """How many numbers the arrays of a block hold: sums of a thread, queries, keys, scores, state."""
    stride = shape.width + 4
    return shape.tile * shape.tile * LANES, shape.queries * stride, _PART * stride, shape.queries * CHUNK, shape.queries * _STATE


@cache
def attend(shape: Shape) -> Any:
    """Blocks: tiles of rows, the last first, because they see most; key-value heads; parts of a group larger than a block."""
    load_queries, score, weigh, values = _body(shape)
    n_queries = shape.queries
    n_sums, n_query_words, n_key_words, n_scores, n_state = _sizes(shape)

    @kernel
    def attend(q, k, v, slot, position, capacity, kv_heads, scale, window, out):  # [R, H, K], [B * S * G * K] x 2, [R] x 2
        queries = cuda.shared.array(n_query_words, np.float32)
        keys = cuda.shared.array(n_key_words, np.float32)
        scores = cuda.shared.array(n_scores, np.float32)
        state = cuda.shared.array(n_state, np.float32)
        sums = cuda.local.array(n_sums, np.float32)
        part = cuda.local.array(n_queries, np.float32)
        total = cuda.local.array(n_queries, np.float32)
        width, d = q.shape[2], cuda.threadIdx.x
        all_heads = q.shape[1] // kv_heads
        group = min(all_heads, n_queries)
        head = cuda.blockIdx.y * all_heads + cuda.blockIdx.z * n_queries
        group_here = min(group, all_heads - cuda.blockIdx.z * n_queries)
        rows = max(1, n_queries // group)
        first = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows
        limit = min(first + rows, q.shape[0])
        while first < limit:
            end = _run_end(slot, position, first, limit)
            n, start, last = (end - first) * group_here, position[first], position[end - 1]
            k_stride = kv_heads * width
            base = slot[first] * capacity * k_stride + cuda.blockIdx.y * width
            cuda.syncthreads()
            load_queries(q, first, head, group_here, n, queries)
            _begin(state, n_queries)
            for i in range(n_queries):
                total[i] = _f(0.0)
            for chunk in range(max(0, start - window + 1) // CHUNK, last // CHUNK + 1):
                key = chunk * CHUNK
                n_keys = min(CHUNK, last + 1 - key)
                score(queries, keys, scores, sums, k, base, k_stride, key, n_keys, width, scale)
                weigh(scores, state, start, group_here, window, key)
                if d < width:
                    values(scores, v, base, k_stride, key, n_keys, d, part)
                    for i in range(n_queries):
                        new = state[i * _STATE + _NEW]
                        if new != _UNSEEN:  # adding +0 instead would turn a -0 around
                            total[i] = fma(total[i], state[i * _STATE + _OLD], times(part[i], new))
            if d < width:
                for i in range(n_queries):
                    if i < n:
                        out[first + i // group_here, head + i % group_here, d] = total[i] / state[i * _STATE + _WEIGHT]
            first = end

    return attend


@cache
def attend_chunk(shape: Shape) -> Any:
    """Blocks: rows, key-value heads with the parts of a group larger than a block, chunks. A block past a row's last chunk ends at once."""
    load_queries, score, weigh, values = _body(shape)
    n_queries = shape.queries
    n_sums, n_query_words, n_key_words, n_scores, n_state = _sizes(shape)

    @kernel
    def attend_chunk(q, k, v, slot, position, capacity, kv_heads, scale, window, parts, largest, weight):
        # ..., [R, H, C, K], [R, H, C] x 2
        r, chunk = cuda.blockIdx.x, cuda.blockIdx.z
        here, key, width, d = position[r], chunk * CHUNK, q.shape[2], cuda.threadIdx.x
        all_heads = q.shape[1] // kv_heads
        pieces = (all_heads + n_queries - 1) // n_queries
        g, piece = cuda.blockIdx.y // pieces, cuda.blockIdx.y % pieces
        head = g * all_heads + piece * n_queries
        n = min(n_queries, all_heads - piece * n_queries)
        if key <= here and key + CHUNK > here - window + 1:
            queries = cuda.shared.array(n_query_words, np.float32)
            keys = cuda.shared.array(n_key_words, np.float32)
            scores = cuda.shared.array(n_scores, np.float32)
            state = cuda.shared.array(n_state, np.float32)
            sums = cuda.local.array(n_sums, np.float32)
            part = cuda.local.array(n_queries, np.float32)
            n_keys, k_stride = min(CHUNK, here + 1 - key), kv_heads * width
            base = slot[r] * capacity * k_stride + g * width
            load_queries(q, r, head, n, n, queries)
            _begin(state, n_queries)
            score(queries, keys, scores, sums, k, base, k_stride, key, n_keys, width, scale)
            weigh(scores, state, here, n_queries, window, key)
            if d < width:
                values(scores, v, base, k_stride, key, n_keys, d, part)
                for i in range(n_queries):
                    if i < n:
                        parts[r, head + i, chunk, d] = part[i]
            if d < n:
                largest[r, head + d, chunk] = state[d * _STATE + _LARGEST]
                weight[r, head + d, chunk] = state[d * _STATE + _WEIGHT]

    return attend_chunk


@kernel
def fold_chunks(parts, largest, weight, position, window, out):  # [R, H, C, K], [R, H, C] x 2, [R] -> [R, H, K]
    """A block for each row and head."""
    r, h = cuda.blockIdx.x, cuda.blockIdx.y
    here = position[r]
    for d in range(cuda.threadIdx.x, out.shape[2], cuda.blockDim.x):
        m, total_weight, total = _f(-np.inf), _f(0.0), _f(0.0)
        for chunk in range(max(0, here - window + 1) // CHUNK, here // CHUNK + 1):
            m_here = largest[r, h, chunk]
            after = m if m > m_here else m_here
            old, new = exp(plus(m, -after)), exp(plus(m_here, -after))
            total_weight = fma(total_weight, old, times(weight[r, h, chunk], new))
            total = fma(total, old, times(parts[r, h, chunk, d], new))
            m = after
        out[r, h, d] = total / total_weight
