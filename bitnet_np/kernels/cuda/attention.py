"""Attention on the GPU, in the contract's order: keys in chunks of CHUNK from position 0, each with a maximum, a sum and values of its own.

A block has some queries that read the same keys and values: the heads of a group, for one row or for several rows in a run. (A run is rows
that are consecutive positions of one slot.) It goes from chunk to chunk (`attend`, and `attend_masked` by a mask array); or, where each run
is a single row, as in decoding, there is a block for each chunk (`attend_chunk`), and the last of a row's blocks to finish folds their
results, in order.

A thread sums a whole dot product, in 16 numbers for the 16 lanes: no thread waits for another, and 2 x 2 of them share what they read.
Keys past the last or outside of the window have weight 0, as on the CPU. Queries are rotated (RoPE) where they are loaded.

Position p is in place p % S of keys and values, S a multiple of CHUNK or more than every position: no chunk is torn apart.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ..scalar import CHUNK, exp
from ..simd import LANES
from .rows import as_kept, fold_lanes, rotated
from .target import ALIGNED, SIMULATED, instructions, kernel

(
    chain_column,
    commit_copies,
    copy_async,
    device,
    fma,
    fold_column,
    half_value,
    half_warp_max,
    half_warp_sum,
    in_turn,
    load4,
    load_column,
    plus,
    times,
    wait_copies,
) = (
    instructions.chain_column,
    instructions.commit_copies,
    instructions.copy_async,
    instructions.device,
    instructions.fma,
    instructions.fold_column,
    instructions.half_value,
    instructions.half_warp_max,
    instructions.half_warp_sum,
    instructions.in_turn,
    instructions.load4,
    instructions.load_column,
    instructions.plus,
    instructions.times,
    instructions.wait_copies,
)

_f = np.float32
_UNSEEN = _f(-1.0)  # marks a query that sees no key of a chunk, and a key that a query does not see: weights cannot be negative
_LARGEST, _WEIGHT, _OLD, _NEW = 0, 1, 2, 3  # of a query, in `state`
_STATE = 4
_FOLDED = 8  # chunks that a thread asks for at a time when it folds
WIDEST = 256  # head width
_WIDTHS = (16, 64, 128, WIDEST) if SIMULATED else (64, 128, WIDEST)


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    width: int  # of a head, at most
    queries: int  # of a block
    tile: int  # a thread takes `tile` x `tile` dot products
    part: int  # keys in shared memory at a time
    halves: bool  # keys and values are float16, as bits
    vectors: bool  # keys are copied 16 bytes at a time

    @property
    def threads(self) -> int:
        """At least one for each number of a head."""
        return self.width if SIMULATED else max(128, self.width)


def shape_for(width: int, queries: int, halves: bool = False) -> Shape:
    """The kernel for heads of a width up to WIDEST, in blocks of as many queries as share keys, or some of them."""
    rounded = next(size for size in _WIDTHS if width <= size)
    few, vectors = queries <= 4, width % 4 == 0 and not halves
    if few:
        return Shape(rounded, 4, 1, 32 if rounded == WIDEST else CHUNK, halves, vectors)
    return Shape(rounded, 8 if rounded == WIDEST else 16, 2, 32, halves, vectors)


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


class Body(NamedTuple):
    """Steps that the kernels are made of."""

    load_queries: Any
    score: Any
    weigh: Any
    weigh_masked: Any
    values: Any


@cache
def _body(shape: Shape) -> Body:
    width_, n_queries, tile, part_keys = shape.width, shape.queries, shape.tile, shape.part
    stride = width_ + 4  # a row ahead is another set of banks, and still 16 bytes aligned
    q_step, k_step = n_queries // tile, part_keys // tile
    none_pending = wait_copies(0)

    if shape.halves:

        @device
        def number(array, i):
            return half_value(np.uint32(array[i]))

    else:

        @device
        def number(array, i):
            return array[i]

    @device
    def load_queries(q, cos, sin, pairs, distance, step, row, head, group, n, queries):
        """Query i is head `head` + i % group of row `row` + i // group; what is missing of the last numbers and queries is zeros."""
        width = q.shape[2]
        for item in range(cuda.threadIdx.x, n_queries * stride, cuda.blockDim.x):
            i, d = item // stride, item % stride
            value = _f(0.0)
            if i < n and d < width:
                value = rotated(q, cos, sin, pairs, distance, step, row + i // group, head + i % group, d)
            queries[item] = value

    if shape.vectors:

        @device
        def bring_keys(keys, k, start, k_stride, n, width):
            """Keys 0..n from `start`, and zeros up to a whole part."""
            for item in range(cuda.threadIdx.x, part_keys * (width_ // 4), cuda.blockDim.x):
                j, d = item // (width_ // 4), item % (width_ // 4) * 4
                there = j < n and d < width
                copy_async(keys, j * stride + d, k, start + j * k_stride + d if there else start, np.int32(16 if there else 0))
            commit_copies()
            none_pending()

    else:

        @device
        def bring_keys(keys, k, start, k_stride, n, width):
            for item in range(cuda.threadIdx.x, part_keys * stride, cuda.blockDim.x):
                j, d = item // stride, item % stride
                keys[item] = number(k, start + j * k_stride + d) if j < n and d < width else _f(0.0)

    @device
    def score(queries, keys, scores, sums, k, start, k_stride, n_keys, width, scale):
        """scores[i * CHUNK + j] = query i . key j of the chunk that begins at `start` * scale."""
        blocks = (width + LANES - 1) // LANES
        for part in range(0, CHUNK, part_keys):
            cuda.syncthreads()
            bring_keys(keys, k, start + min(part, n_keys - 1) * k_stride, k_stride, n_keys - part, width)
            cuda.syncthreads()
            for item in range(cuda.threadIdx.x, q_step * k_step, cuda.blockDim.x):
                i, j = item % q_step, item // q_step
                _dots(queries, keys, stride, blocks, i, j, q_step, k_step, tile, sums)
                for a in range(tile):
                    for b in range(tile):
                        total = fold_lanes(sums, (a * tile + b) * LANES)
                        scores[(i + a * q_step) * CHUNK + part + j + b * k_step] = times(total, scale)
        cuda.syncthreads()

    @device
    def fold_chunk(state, i, largest, total):
        """What a chunk with this largest score and sum of weights does to a query's running ones."""
        before = state[i * _STATE + _LARGEST]
        after = before if before > largest else largest
        old, new = exp(plus(before, -after)), exp(plus(largest, -after))
        state[i * _STATE + _WEIGHT] = fma(state[i * _STATE + _WEIGHT], old, times(total, new))
        state[i * _STATE + _LARGEST] = after
        state[i * _STATE + _OLD], state[i * _STATE + _NEW] = old, new

    @device
    def weigh(scores, state, position, group, window, key):
        """scores -> exp(score - largest of the chunk); what the chunk does to the running maximum and sum, into `state`."""
        lane, half, at_once = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES, cuda.blockDim.x // LANES
        for first in range(0, n_queries, at_once):
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
                    fold_chunk(state, i, largest, total)
        cuda.syncthreads()

    @device
    def weigh_masked(scores, state, mask, start, mask_stride, group, n, n_keys):
        """As `weigh`, with biases of a mask, which for query i begin at start + i // group * mask_stride. Hidden keys are _UNSEEN."""
        lane, half, at_once = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES, cuda.blockDim.x // LANES
        for first in range(0, n_queries, at_once):
            i = min(first + half, n_queries - 1)
            biases = start + min(i, n - 1) // group * mask_stride
            mine = -np.inf
            largest, found = _f(mine), _f(0.0)
            for part in range(0, CHUNK, LANES):
                j = part + lane
                bias = mask[biases + j] if j < n_keys else _f(mine)
                if bias > mine:
                    s, found = plus(scores[i * CHUNK + j], bias), _f(1.0)
                    largest = s if s > largest else largest
            largest, found = half_warp_max(largest), half_warp_max(found)
            total = _f(0.0)
            for part in range(0, CHUNK, LANES):
                j = part + lane
                bias = mask[biases + j] if j < n_keys else _f(mine)
                e = _f(0.0)
                if bias > mine:
                    e = exp(plus(plus(scores[i * CHUNK + j], bias), -largest))
                if first + half < n_queries:
                    scores[i * CHUNK + j] = e if bias > mine else _UNSEEN
                total = plus(total, e)
            total = half_warp_sum(total)
            if lane == 0 and first + half < n_queries:
                state[i * _STATE + _NEW] = _UNSEEN
                if found > _f(0.0):
                    fold_chunk(state, i, largest, total)
        cuda.syncthreads()

    @device
    def values(scores, v, start, k_stride, n_keys, sums):
        """sums[i] = sum over the chunk's keys of weight i * value, one chain in key order. `start`: of the first key's value."""
        for i in range(n_queries):
            sums[i] = _f(0.0)
        last = start + (n_keys - 1) * k_stride
        for j in range(0, n_keys, 4):
            place = start + j * k_stride
            v0, v1 = number(v, place), number(v, min(place + k_stride, last))
            v2, v3 = number(v, min(place + 2 * k_stride, last)), number(v, min(place + 3 * k_stride, last))
            for i in range(n_queries):
                p = load4(scores, i * CHUNK + j)
                total = fma(p[0], v0, sums[i])
                total = fma(p[1], v1, total)
                total = fma(p[2], v2, total)
                sums[i] = fma(p[3], v3, total)

    return Body(load_queries, score, weigh, weigh_masked, values)


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
    stride, n = shape.width + 4, shape.queries
    # keys make room for what the last block of a row folds
    return shape.tile * shape.tile * LANES, n * stride, max(shape.part * stride, 4 * n * CHUNK), n * CHUNK, n * _STATE


@device
def _tile(n_rows, n_heads, kv_heads, n_queries):
    """Blocks: tiles of rows, the last first, because they see most; key-value heads; parts of a group larger than a block.

    Returns the first head, how many of its group are here, and the rows first..limit.
    """
    heads = n_heads // kv_heads
    group = min(heads, n_queries)
    head = cuda.blockIdx.y * heads + cuda.blockIdx.z * n_queries
    here = min(group, heads - cuda.blockIdx.z * n_queries)
    rows = max(1, n_queries // group)
    first = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows
    return head, here, first, min(first + rows, n_rows)


@device
def _fold_values(total, state, part, n):
    """One more chunk, into the running sums of a number."""
    for i in range(n):
        new = state[i * _STATE + _NEW]
        if new != _UNSEEN:  # adding +0 instead would turn a -0 around
            total[i] = fma(total[i], state[i * _STATE + _OLD], times(part[i], new))


@cache
def attend(shape: Shape) -> Any:
    """Causal, with or without a window: a block goes through all chunks that its rows see."""
    load_queries, score, weigh, _, values = _body(shape)
    n_queries = shape.queries
    n_sums, n_query_words, n_key_words, n_scores, n_state = _sizes(shape)

    @kernel
    def attend(q, cos, sin, pairs, distance, step, k, v, slot, position, capacity, kv_heads, scale, window, out):
        # [R, H, K], [R, J] x 2, ..., [B * S * G * K] x 2, [R] x 2, ... -> [R, H, K]
        in_turn()
        queries = cuda.shared.array(n_query_words, np.float32, ALIGNED)
        keys = cuda.shared.array(n_key_words, np.float32, ALIGNED)
        scores = cuda.shared.array(n_scores, np.float32, ALIGNED)
        state = cuda.shared.array(n_state, np.float32, ALIGNED)
        sums = cuda.local.array(n_sums, np.float32)
        part = cuda.local.array(n_queries, np.float32)
        total = cuda.local.array(n_queries, np.float32)
        width, d = q.shape[2], cuda.threadIdx.x
        head, group, first, limit = _tile(q.shape[0], q.shape[1], kv_heads, n_queries)
        while first < limit:
            end = _run_end(slot, position, first, limit)
            n, start, last = (end - first) * group, position[first], position[end - 1]
            k_stride = kv_heads * width
            base = slot[first] * capacity * k_stride + cuda.blockIdx.y * width
            cuda.syncthreads()
            load_queries(q, cos, sin, pairs, distance, step, first, head, group, n, queries)
            _begin(state, n_queries)
            for i in range(n_queries):
                total[i] = _f(0.0)
            for chunk in range(max(0, start - window + 1) // CHUNK, last // CHUNK + 1):
                key = chunk * CHUNK
                n_keys, place = min(CHUNK, last + 1 - key), base + key % capacity * k_stride
                score(queries, keys, scores, sums, k, place, k_stride, n_keys, width, scale)
                weigh(scores, state, start, group, window, key)
                if d < width:
                    values(scores, v, place + d, k_stride, n_keys, part)
                    _fold_values(total, state, part, n_queries)
            if d < width:
                for i in range(n_queries):
                    if i < n:
                        out[first + i // group, head + i % group, d] = total[i] / state[i * _STATE + _WEIGHT]
            first = end

    return attend


@cache
def attend_masked(shape: Shape) -> Any:
    """By a mask array: the blocks of `attend`."""
    load_queries, score, _, weigh_masked, _ = _body(shape)
    n_queries = shape.queries
    n_sums, n_query_words, n_key_words, n_scores, n_state = _sizes(shape)

    @device
    def values(scores, v, start, k_stride, n_keys, finite, sums):
        """As `values` of the body. What is hidden counts nothing, and is not touched where not all values are finite, as on the CPU."""
        for i in range(n_queries):
            sums[i] = _f(0.0)
        for j in range(n_keys):
            value = v[start + j * k_stride]
            for i in range(n_queries):
                p = scores[i * CHUNK + j]
                if finite or p != _UNSEEN:
                    sums[i] = fma(_f(0.0) if p == _UNSEEN else p, value, sums[i])

    @kernel
    def attend_masked(
        q, cos, sin, pairs, distance, step, k, v, slot, position, capacity, kv_heads, scale, mask, masks, mask_rows, all_keys, out
    ):
        # ..., [1 or B * T * S'], 1 or B, T, S', -> [R, H, K]
        in_turn()
        queries = cuda.shared.array(n_query_words, np.float32, ALIGNED)
        keys = cuda.shared.array(n_key_words, np.float32, ALIGNED)
        scores = cuda.shared.array(n_scores, np.float32, ALIGNED)
        state = cuda.shared.array(n_state, np.float32, ALIGNED)
        sums = cuda.local.array(n_sums, np.float32)
        part = cuda.local.array(n_queries, np.float32)
        total = cuda.local.array(n_queries, np.float32)
        width, d = q.shape[2], cuda.threadIdx.x
        head, group, first, limit = _tile(q.shape[0], q.shape[1], kv_heads, n_queries)
        while first < limit:
            end = _run_end(slot, position, first, limit)
            n, k_stride = (end - first) * group, kv_heads * width
            base = slot[first] * capacity * k_stride + cuda.blockIdx.y * width
            mine = (min(slot[first], masks - 1) * mask_rows + position[first]) * all_keys
            cuda.syncthreads()
            load_queries(q, cos, sin, pairs, distance, step, first, head, group, n, queries)
            _begin(state, n_queries)
            for i in range(n_queries):
                total[i] = _f(0.0)
            for key in range(0, all_keys, CHUNK):
                n_keys, place = min(CHUNK, all_keys - key), base + key * k_stride
                seen, infinite = 0, 0
                for item in range(cuda.threadIdx.x, (end - first) * n_keys, cuda.blockDim.x):
                    if mask[mine + item // n_keys * all_keys + key + item % n_keys] > -np.inf:
                        seen = 1
                if cuda.syncthreads_or(seen):
                    for j in range(n_keys):
                        if d < width and not abs(v[place + j * k_stride + d]) < np.inf:
                            infinite = 1
                    finite = not cuda.syncthreads_or(infinite)
                    score(queries, keys, scores, sums, k, place, k_stride, n_keys, width, scale)
                    weigh_masked(scores, state, mask, mine + key, all_keys, group, n, n_keys)
                    if d < width:
                        values(scores, v, place + d, k_stride, n_keys, finite, part)
                        _fold_values(total, state, part, n_queries)
            if d < width:
                for i in range(n_queries):
                    if i < n:
                        weight = state[i * _STATE + _WEIGHT]
                        out[first + i // group, head + i % group, d] = total[i] / weight if weight != _f(0.0) else _f(0.0)
            first = end

    return attend_masked


@cache
def attend_chunk(shape: Shape, keeps: bool) -> Any:
    """Rows that stand alone. Blocks: rows, key-value heads with the parts of a group larger than a block, chunks.

    A block past a row's last chunk ends at once. Of the others each counts itself in `arrived`, which is zeros before and afterwards; the
    last one has all results of the row's heads to fold.

    One that `keeps` puts the row's own key, rotated, and value to their places first, as `rows.keep` does: the block of that chunk, or
    each of the several that a group has, the same bytes. No other block reads there. One that does not reads nothing of what is new.
    """
    load_queries, score, weigh, _, _ = _body(shape)
    n_queries = shape.queries
    n_sums, n_query_words, n_key_words, n_scores, n_state = _sizes(shape)
    load_values, chain, load_parts, fold = load_column(CHUNK), chain_column(CHUNK), load_column(_FOLDED), fold_column(_FOLDED)
    of_weights, of_old, of_new = n_queries * CHUNK, 2 * n_queries * CHUNK, 3 * n_queries * CHUNK
    kept = as_kept(shape.halves)

    @device
    def factors(largest, weight, r, head, n, chunk, count, carried, shared):
        """Of chunks chunk..chunk + count: their sums of weights, and by what each and what is before it is multiplied, into `shared`."""
        for item in range(cuda.threadIdx.x, n * CHUNK, cuda.blockDim.x):
            i, c = item // CHUNK, item % CHUNK
            if c < count:
                shared[item] = largest[r, head + i, chunk + c]
                shared[of_weights + item] = weight[r, head + i, chunk + c]
        cuda.syncthreads()
        for item in range(cuda.threadIdx.x, n * CHUNK, cuda.blockDim.x):
            i, c = item // CHUNK, item % CHUNK
            if c < count:
                before = carried[i * _STATE + _LARGEST]
                for other in range(c):
                    before = max(before, shared[i * CHUNK + other])
                after = max(before, shared[item])
                shared[of_old + item], shared[of_new + item] = exp(plus(before, -after)), exp(plus(shared[item], -after))
        cuda.syncthreads()

    @device
    def fold_row(parts, largest, weight, r, head, n, first, end, width, state, shared, total, out):
        """Chunks first..end of the row's heads head..head + n, in order."""
        d, all_chunks = cuda.threadIdx.x, largest.shape[2]
        _begin(state, n_queries)
        cuda.syncthreads()
        for i in range(n_queries):
            total[i] = _f(0.0)
        for chunk in range(first, end, CHUNK):
            count = min(CHUNK, end - chunk)
            factors(largest, weight, r, head, n, chunk, count, state, shared)
            if d < width:
                for i in range(n_queries):
                    if i < n:
                        base = ((r * largest.shape[1] + head + i) * all_chunks + chunk) * width + d
                        for c in range(0, count, _FOLDED):
                            found = load_parts(parts, base + c * width, width, base + (count - 1) * width)
                            at = i * CHUNK + c
                            total[i] = fold(total[i], shared, of_old + at, of_new + at, found, count - c)
            if d < n:
                largest_here, sum_here = state[d * _STATE + _LARGEST], state[d * _STATE + _WEIGHT]
                for c in range(count):
                    at = d * CHUNK + c
                    sum_here = fma(sum_here, shared[of_old + at], times(shared[of_weights + at], shared[of_new + at]))
                    largest_here = max(largest_here, shared[at])
                state[d * _STATE + _LARGEST], state[d * _STATE + _WEIGHT] = largest_here, sum_here
            cuda.syncthreads()
        if d < width:
            for i in range(n_queries):
                if i < n:
                    out[r, head + i, d] = total[i] / state[i * _STATE + _WEIGHT]

    @kernel
    def attend_chunk(
        new_k,
        new_cos,
        new_sin,
        new_pairs,
        new_distance,
        new_step,
        new_v,
        q,
        cos,
        sin,
        pairs,
        distance,
        step,
        k,
        v,
        slot,
        position,
        capacity,
        kv_heads,
        scale,
        window,
        parts,
        largest,
        weight,
        arrived,
        out,
    ):  # [R, G, K] and as q's, [R, G, K]; as `attend`; [R * H * C * K], [R, H, C] x 2, [R * blocks of a row and chunk] -> [R, H, K]
        in_turn()
        r, width, d = cuda.blockIdx.x, q.shape[2], cuda.threadIdx.x
        here, key = position[r], cuda.blockIdx.z * CHUNK
        heads = q.shape[1] // kv_heads
        pieces = (heads + n_queries - 1) // n_queries
        g, piece = cuda.blockIdx.y // pieces, cuda.blockIdx.y % pieces
        head = g * heads + piece * n_queries
        n = min(n_queries, heads - piece * n_queries)
        if key <= here and key + CHUNK > here - window + 1:
            queries = cuda.shared.array(n_query_words, np.float32, ALIGNED)
            keys = cuda.shared.array(n_key_words, np.float32, ALIGNED)
            scores = cuda.shared.array(n_scores, np.float32, ALIGNED)
            state = cuda.shared.array(n_state, np.float32, ALIGNED)
            before_me = cuda.shared.array(1, np.int32)
            sums = cuda.local.array(n_sums, np.float32)
            total = cuda.local.array(n_queries, np.float32)
            n_keys, k_stride = min(CHUNK, here + 1 - key), kv_heads * width
            place = (slot[r] * capacity + key % capacity) * k_stride + g * width
            if keeps and here < key + CHUNK and d < width:
                mine_at = place + (here - key) * k_stride + d
                k[mine_at] = kept(rotated(new_k, new_cos, new_sin, new_pairs, new_distance, new_step, r, g, d))
                v[mine_at] = kept(new_v[r, g, d])
            # before anything waits; a thread reads the value that it wrote, and past the width what another one does
            column = place + min(d, width - 1)
            mine = load_values(v, column, k_stride, column + (n_keys - 1) * k_stride)
            load_queries(q, cos, sin, pairs, distance, step, r, head, n, n, queries)
            _begin(state, n_queries)
            score(queries, keys, scores, sums, k, place, k_stride, n_keys, width, scale)
            weigh(scores, state, here, n_queries, window, key)
            first, end = max(0, here - window + 1) // CHUNK, here // CHUNK + 1
            for i in range(n_queries):
                total[i] = chain(_f(0.0), scores, i * CHUNK, mine)
            if end - first == 1:
                if d < width:
                    for i in range(n_queries):
                        if i < n:
                            out[r, head + i, d] = plus(total[i], _f(0.0)) / state[i * _STATE + _WEIGHT]  # as folded: -0 turns around
            else:
                chunk, all_chunks = cuda.blockIdx.z, largest.shape[2]
                if d < width:
                    for i in range(n_queries):
                        if i < n:
                            parts[((r * q.shape[1] + head + i) * all_chunks + chunk) * width + d] = total[i]
                if d < n:
                    largest[r, head + d, chunk] = state[d * _STATE + _LARGEST]
                    weight[r, head + d, chunk] = state[d * _STATE + _WEIGHT]
                cuda.threadfence()
                cuda.syncthreads()
                counter = r * cuda.gridDim.y + cuda.blockIdx.y
                if d == 0:
                    before_me[0] = cuda.atomic.add(arrived, counter, 1)
                cuda.syncthreads()
                if before_me[0] == end - first - 1:
                    cuda.threadfence()
                    fold_row(parts, largest, weight, r, head, n, first, end, width, state, keys, total, out)
                    if d == 0:
                        arrived[counter] = 0

    return attend_chunk
