"""Attention on the GPU where each row stands alone, as in decoding: a block for each chunk of keys, so that one row keeps many busy.

The last of a row's blocks to finish folds their results, in the contract's order. A row's own key and value may come with it.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from ..scalar import CHUNK, exp
from .attention_steps import LARGEST, SPAN, STATE, WEIGHT, Shape, begin, sizes, steps
from .rows import as_kept, rotated
from .target import ALIGNED, instructions, kernel

await_previous, chain_column, device, fma, fold_column, let_next_begin, load_column, plus, prefetch, this_thread, times = (
    instructions.await_previous,
    instructions.chain_column,
    instructions.device,
    instructions.fma,
    instructions.fold_column,
    instructions.let_next_begin,
    instructions.load_column,
    instructions.plus,
    instructions.prefetch,
    instructions.this_thread,
    instructions.times,
)

_f = np.float32
_FOLDED = 8  # chunks that a thread asks for at a time when it folds


@cache
def attend_chunk(shape: Shape, keeps: bool) -> Any:
    """Rows that stand alone. Blocks: rows, key-value heads with the parts of a group larger than a block, chunks from the first one seen.

    A block past a row's last chunk ends at once. Of the others each counts itself in `arrived`, which is zeros before and afterwards; the
    last one has all results of the row's heads to fold.

    One that `keeps` puts the row's own key, rotated, and value to their places first, as `rows.keep` does: the block of that chunk, or
    each of the several that a group has, the same bytes. No other block reads there. One that does not reads nothing of what is new.
    """
    do, n_queries = steps(shape), shape.queries
    load_queries, bring_keys, score, weigh = do.load_queries, do.bring_keys, do.score, do.weigh
    n_query_words, n_key_words, n_scores, n_state, n_dots, _ = sizes(shape)
    n_key_words = max(n_key_words, 4 * n_queries * CHUNK)  # there is room for what is folded
    load_values, chain, load_parts, fold = load_column(CHUNK), chain_column(CHUNK), load_column(_FOLDED), fold_column(_FOLDED)
    of_weights, of_old, of_new = n_queries * CHUNK, 2 * n_queries * CHUNK, 3 * n_queries * CHUNK
    kept, line, threads = as_kept(shape.halves), 64 if shape.halves else 32, shape.threads  # `line` numbers are 128 bytes

    @device
    def factors(largest, weight, r, head, n, chunk, count, carried, shared):
        """Of chunks chunk..chunk + count: their sums of weights, and by what each and what is before it is multiplied, into `shared`."""
        for item in range(this_thread(), n * CHUNK, cuda.blockDim.x):
            i, c = item // CHUNK, item % CHUNK
            if c < count:
                shared[item] = largest[r, head + i, chunk + c]
                shared[of_weights + item] = weight[r, head + i, chunk + c]
        cuda.syncthreads()
        for item in range(this_thread(), n * CHUNK, cuda.blockDim.x):
            i, c = item // CHUNK, item % CHUNK
            if c < count:
                before = carried[i * STATE + LARGEST]
                for other in range(c):
                    before = max(before, shared[i * CHUNK + other])
                after = max(before, shared[item])
                shared[of_old + item], shared[of_new + item] = exp(plus(before, -after)), exp(plus(shared[item], -after))
        cuda.syncthreads()

    @device
    def fold_row(parts, largest, weight, r, head, n, seen, width, state, rows, shared, total, out):
        """The chunks that are seen, of the row's heads head..head + n, in order."""
        d, all_chunks = this_thread(), largest.shape[2]
        begin(state, rows, n_queries, n_queries)
        cuda.syncthreads()
        for i in range(n_queries):
            total[i] = _f(0.0)
        for chunk in range(0, seen, CHUNK):
            count = min(CHUNK, seen - chunk)
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
                largest_here, sum_here = state[d * STATE + LARGEST], state[d * STATE + WEIGHT]
                for c in range(count):
                    at = d * CHUNK + c
                    sum_here = fma(sum_here, shared[of_old + at], times(shared[of_weights + at], shared[of_new + at]))
                    largest_here = max(largest_here, shared[at])
                state[d * STATE + LARGEST], state[d * STATE + WEIGHT] = largest_here, sum_here
            cuda.syncthreads()
        if d < width:
            for i in range(n_queries):
                if i < n:
                    out[r, head + i, d] = total[i] / state[i * STATE + WEIGHT]

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
        let_next_begin()
        r, width, d = cuda.blockIdx.x, q.shape[2], this_thread()
        here, chunk = position[r], cuda.blockIdx.z
        first = max(0, here - window + 1) // CHUNK
        key, seen = (first + chunk) * CHUNK, here // CHUNK + 1 - first
        heads = q.shape[1] // kv_heads
        pieces = (heads + n_queries - 1) // n_queries
        g, piece = cuda.blockIdx.y // pieces, cuda.blockIdx.y % pieces
        head = g * heads + piece * n_queries
        n = min(n_queries, heads - piece * n_queries)
        n_keys, k_stride = min(CHUNK, here + 1 - key), kv_heads * width
        place = (slot[r] * capacity + key % capacity) * k_stride + g * width
        if chunk < seen:  # positions are what they were when the graph began, and so are all keys and values but the row's own
            lines = (width + line - 1) // line
            for item in range(d, n_keys * lines, threads):
                at = place + item // lines * k_stride + item % lines * line
                prefetch(k, at)
                prefetch(v, at)
        await_previous()
        if chunk < seen:
            queries = cuda.shared.array(n_query_words, np.float32, ALIGNED)
            keys = cuda.shared.array(n_key_words, np.float32, ALIGNED)
            scores = cuda.shared.array(n_scores, np.float32, ALIGNED)
            state = cuda.shared.array(n_state, np.float32, ALIGNED)
            rows = cuda.shared.array(n_queries, np.int32, ALIGNED)
            before_me = cuda.shared.array(1, np.int32)
            dots = cuda.local.array(n_dots, np.float32)
            total = cuda.local.array(n_queries, np.float32)
            if keeps and here < key + CHUNK:
                if d < width:
                    mine_at = place + (here - key) * k_stride + d
                    k[mine_at] = kept(rotated(new_k, new_cos, new_sin, new_pairs, new_distance, new_step, r, g, d))
                    v[mine_at] = kept(new_v[r, g, d])
                cuda.syncthreads()
            bring_keys(keys, 0, k, place, k_stride, n_keys, width)
            # before anything waits; a thread reads the value that it wrote, and past the width what another one does
            column = place + min(d, width - 1)
            mine = load_values(v, column, k_stride, column + (n_keys - 1) * k_stride)
            begin(state, rows, n_queries, n_queries)
            load_queries(q, cos, sin, pairs, distance, step, r, head, n_queries, n, rows, queries)
            score(queries, keys, scores, dots, k, place, k_stride, n_keys, width, scale)
            weigh(scores, state, rows, dots, here - key, window)
            for i in range(n_queries):
                total[i] = chain(_f(0.0), scores, i * SPAN, mine)
            if seen == 1:
                if d < width:
                    for i in range(n_queries):
                        if i < n:
                            out[r, head + i, d] = plus(total[i], _f(0.0)) / state[i * STATE + WEIGHT]  # as folded: -0 turns around
            else:
                all_chunks = largest.shape[2]
                if d < width:
                    for i in range(n_queries):
                        if i < n:
                            parts[((r * q.shape[1] + head + i) * all_chunks + chunk) * width + d] = total[i]
                if d < n:
                    largest[r, head + d, chunk] = state[d * STATE + LARGEST]
                    weight[r, head + d, chunk] = state[d * STATE + WEIGHT]
                cuda.threadfence()
                cuda.syncthreads()
                counter = r * cuda.gridDim.y + cuda.blockIdx.y
                if d == 0:
                    before_me[0] = cuda.atomic.add(arrived, counter, 1)
                cuda.syncthreads()
                if before_me[0] == seen - 1:
                    cuda.threadfence()
                    fold_row(parts, largest, weight, r, head, n, seen, width, state, rows, keys, total, out)
                    if d == 0:
                        arrived[counter] = 0

    return attend_chunk
