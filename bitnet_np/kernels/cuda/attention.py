"""Attention on the GPU, in the contract's order: keys in chunks of CHUNK from position 0, each with a maximum, a sum and values of its own.

A block has some queries that read the same keys and values: the heads of a group, for one row or for several rows in a run. (A run is rows
that are consecutive positions of one slot.) It goes from chunk to chunk (`attend`, and `attend_masked` by a mask array), by the steps of
attention_steps.py. Where each run is a single row, as in decoding, there is a block for each chunk instead (attention_split.py).

Position p is in place p % S of keys and values, S a multiple of CHUNK or more than every position: no chunk is torn apart.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from ..scalar import CHUNK
from .attention_steps import FOUR, SPAN, UNSEEN, Shape, begin, sizes, steps
from .target import ALIGNED, instructions, kernel

device, fma, in_turn, this_thread = instructions.device, instructions.fma, instructions.in_turn, instructions.this_thread

_f = np.float32


@device
def _run_end(slot, position, first, limit):
    """Where the run that begins at row `first` ends, or `limit`."""
    end = first + 1
    while end < limit and slot[end] == slot[first] and position[end] == position[first] + (end - first):
        end += 1
    return np.int32(end)


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
    return np.int32(head), np.int32(here), np.int32(first), np.int32(min(first + rows, n_rows))


@cache
def attend(shape: Shape) -> Any:
    """Causal, with or without a window: a block goes through all chunks that its rows see."""
    do, n_queries = steps(shape), shape.queries
    load_queries, bring_keys, score, weigh, values = do.load_queries, do.bring_keys, do.score, do.weigh, do.values
    fold_values, write = do.fold_values, do.write
    n_query_words, n_key_words, n_scores, n_state, n_dots, n_values = sizes(shape)

    @kernel
    def attend(q, cos, sin, pairs, distance, step, k, v, slot, position, capacity, kv_heads, scale, window, out):
        # [R, H, K], [R, J] x 2, ..., [B * S * G * K] x 2, [R] x 2, ... -> [R, H, K]
        in_turn()
        queries = cuda.shared.array(n_query_words, np.float32, ALIGNED)
        keys = cuda.shared.array(n_key_words, np.float32, ALIGNED)
        scores = cuda.shared.array(n_scores, np.float32, ALIGNED)
        state = cuda.shared.array(n_state, np.float32, ALIGNED)
        rows = cuda.shared.array(n_queries, np.int32, ALIGNED)
        dots = cuda.local.array(n_dots, np.float32)
        part = cuda.local.array(n_values, np.float32)
        total = cuda.local.array(n_values, np.float32)
        width = q.shape[2]
        head, group, first, limit = _tile(q.shape[0], q.shape[1], kv_heads, n_queries)
        while first < limit:
            end = _run_end(slot, position, first, limit)
            n, k_stride = np.int32((end - first) * group), np.int32(kv_heads * width)
            base = slot[first] * capacity * k_stride + cuda.blockIdx.y * width
            first_key = max(0, position[first] - window + 1) // CHUNK * CHUNK
            place, left = np.int32(first_key % capacity), np.int32(position[end - 1] + 1 - first_key)  # of keys, the chunk's and all later
            bring_keys(keys, 0, k, base + place * k_stride, k_stride, left, width)
            cuda.syncthreads()
            begin(state, rows, n_queries, group)
            load_queries(q, cos, sin, pairs, distance, step, first, head, group, n, rows, queries)
            for i in range(n_values):
                total[i] = _f(0.0)
            while left > 0:
                n_keys, here = left if left < CHUNK else np.int32(CHUNK), base + place * k_stride
                score(queries, keys, scores, dots, k, here, k_stride, n_keys, width, scale)
                place = np.int32(place + CHUNK if place + CHUNK < capacity else 0)
                if left > CHUNK:
                    bring_keys(keys, 0, k, base + place * k_stride, k_stride, left - CHUNK, width)
                weigh(scores, state, rows, dots, left - (end - first), window)  # the last row's own key is the last one
                values(scores, v, here, k_stride, n_keys, width, part)
                fold_values(total, state, part)
                left = np.int32(left - CHUNK)
            write(total, state, rows, first, head, group, n, queries, out)
            first = end

    return attend


@cache
def attend_masked(shape: Shape) -> Any:
    """By a mask array: the blocks of `attend`."""
    do, n_queries, apart, threads = steps(shape), shape.queries, shape.apart, shape.threads
    load_queries, bring_keys, score, weigh, four = do.load_queries, do.bring_keys, do.score, do.weigh_masked, do.four
    place_of_thread, fold_values, write = do.place, do.fold_values, do.write
    n_query_words, n_key_words, n_scores, n_state, n_dots, n_values = sizes(shape)

    @device
    def values(scores, v, start, k_stride, n_keys, finite, width, sums):
        """As `values` of the steps. What is hidden counts nothing, and is not touched where not all values are finite, as on the CPU."""
        first, d = place_of_thread()
        for i in range(n_values):
            sums[i] = _f(0.0)
        if first >= apart or d >= width:
            return
        for j in range(n_keys):
            value = four(v, start + j * k_stride + d, width - d)
            for i in range(n_values // FOUR):
                p = scores[(first + i * apart) * SPAN + j]
                if finite or p != UNSEEN:
                    p = _f(0.0) if p == UNSEEN else p
                    for c in range(FOUR):
                        sums[i * FOUR + c] = fma(p, value[c], sums[i * FOUR + c])

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
        rows = cuda.shared.array(n_queries, np.int32, ALIGNED)
        dots = cuda.local.array(n_dots, np.float32)
        part = cuda.local.array(n_values, np.float32)
        total = cuda.local.array(n_values, np.float32)
        width = q.shape[2]
        head, group, first, limit = _tile(q.shape[0], q.shape[1], kv_heads, n_queries)
        while first < limit:
            end = _run_end(slot, position, first, limit)
            n, k_stride = np.int32((end - first) * group), np.int32(kv_heads * width)
            base = slot[first] * capacity * k_stride + cuda.blockIdx.y * width
            mine = (min(slot[first], masks - 1) * mask_rows + position[first]) * all_keys
            cuda.syncthreads()
            begin(state, rows, n_queries, group)
            load_queries(q, cos, sin, pairs, distance, step, first, head, group, n, rows, queries)
            for i in range(n_values):
                total[i] = _f(0.0)
            for key in range(0, all_keys, CHUNK):
                n_keys, place = min(CHUNK, all_keys - key), base + key * k_stride
                seen, infinite = 0, 0
                for item in range(this_thread(), (end - first) * n_keys, threads):
                    if mask[mine + item // n_keys * all_keys + key + item % n_keys] > -np.inf:
                        seen = 1
                if cuda.syncthreads_or(seen):
                    bring_keys(keys, 0, k, place, k_stride, n_keys, width)
                    for j in range(n_keys):
                        if this_thread() < width and not abs(v[place + j * k_stride + this_thread()]) < np.inf:
                            infinite = 1
                    finite = not cuda.syncthreads_or(infinite)
                    score(queries, keys, scores, dots, k, place, k_stride, n_keys, width, scale)
                    weigh(scores, state, rows, dots, mask, mine + key, all_keys, n, n_keys)
                    values(scores, v, place, k_stride, n_keys, finite, width, part)
                    fold_values(total, state, part)
            write(total, state, rows, first, head, group, n, queries, out)
            first = end

    return attend_masked
