"""Attention of single rows on the GPU, as in decoding: a block for each chunk of keys, so that one row keeps many blocks busy.

The last of a row's blocks to finish folds the results of all, in the contract's order. A row's own key and value may come with it.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ..scalar import CHUNK, exp
from .attention_scores import bring_keys, load_queries, score
from .attention_shape import LARGEST, SPAN, STATE, WEIGHT, Cached, Run, Scoring, Shape, named, room_for
from .attention_weights import begin, weigh
from .ptx import (
    await_previous,
    chain_column,
    fma,
    fold_columns,
    let_next_begin,
    load_column,
    load_columns,
    plus,
    prefetch,
    this_thread,
    times,
)
from .rows import Heads, as_kept, rotated
from .target import device, inlined, kernel

_f = np.float32
_AT_ONCE = 32  # numbers of chunks that a thread asks for at a time when it folds, of all its queries


class Parts(NamedTuple):
    """Results of chunks, which the last block of a row folds."""

    values: Any  # flat: [R, H, C, K]
    largest: Any  # [R, H, C]
    weight: Any  # [R, H, C]


class Chunk(NamedTuple):
    """The keys and values that a block of `attend_chunk` works on."""

    place: Any  # offset of the first key
    n_keys: Any
    position: Any  # of the block's row, counted from the first key


@cache
def _factors(shape: Shape) -> Any:
    """A function (parts, run, chunk, count, room) that computes the factors by which chunks chunk..chunk + count are folded.

    It leaves four tables in `room.keys`, with query i and chunk c at i * CHUNK + c: the chunk's maximum; its sum of weights (at
    `of_weights`); the factor of the sum before it (at `of_old`); its own factor (at `of_new`).
    """
    of_weights, of_old, of_new = (n * shape.queries * CHUNK for n in (1, 2, 3))

    @device
    def factors(parts, run, chunk, count, room):
        shared = room.keys
        for item in range(this_thread(), run.n * CHUNK, cuda.blockDim.x):
            i, c = item // CHUNK, item % CHUNK
            if c < count:
                shared[item] = parts.largest[run.row, run.head + i, chunk + c]
                shared[of_weights + item] = parts.weight[run.row, run.head + i, chunk + c]
        cuda.syncthreads()
        for item in range(this_thread(), run.n * CHUNK, cuda.blockDim.x):
            i, c = item // CHUNK, item % CHUNK
            if c < count:
                before = room.state[i * STATE + LARGEST]
                for other in range(c):
                    before = max(before, shared[i * CHUNK + other])
                after = max(before, shared[item])
                shared[of_old + item], shared[of_new + item] = exp(plus(before, -after)), exp(plus(shared[item], -after))
        cuda.syncthreads()

    return factors


@cache
def _fold_row(shape: Shape) -> Any:
    """A function (parts, run, seen, width, room, total, out) that folds a row's `seen` chunks in order and writes the result.

    A thread has one number of all heads. It asks for those of some chunks at once, for all its queries, before it waits for anything else.
    """
    n_queries, factors, at_once = shape.queries, _factors(shape), _AT_ONCE // shape.queries
    load_parts, fold = load_columns(n_queries, at_once), fold_columns(n_queries, at_once)
    of_weights, of_old, of_new = (n * shape.queries * CHUNK for n in (1, 2, 3))

    @device
    def fold_weights(count, room):
        """Folds weights: thread i has query i."""
        i, shared = this_thread(), room.keys
        largest, weight = room.state[i * STATE + LARGEST], room.state[i * STATE + WEIGHT]
        for c in range(count):
            at = i * CHUNK + c
            weight = fma(weight, shared[of_old + at], times(shared[of_weights + at], shared[of_new + at]))
            largest = max(largest, shared[at])
        room.state[i * STATE + LARGEST], room.state[i * STATE + WEIGHT] = largest, weight

    @device
    def fold_row(parts, run, seen, width, room, total, out):
        n_heads, all_chunks = parts.largest.shape[1], parts.largest.shape[2]
        d = this_thread()
        far, first = all_chunks * width, (run.row * n_heads + run.head) * all_chunks * width + min(d, width - 1)
        last = first + (seen - 1) * width
        values = load_parts(parts.values, first, far, run.n, width, last)
        begin(room, n_queries, n_queries)
        cuda.syncthreads()
        for i in range(n_queries):
            total[i] = _f(0.0)
        for chunk in range(0, seen, CHUNK):
            count = min(CHUNK, seen - chunk)
            factors(parts, run, chunk, count, room)
            for c in range(0, count, at_once):
                fold(total, room.keys, of_old + c, of_new + c, CHUNK, values, count - c)
                values = load_parts(parts.values, first + (chunk + c + at_once) * width, far, run.n, width, last)
            if d < run.n:
                fold_weights(count, room)
            cuda.syncthreads()
        if d < width:
            for i in range(n_queries):
                if i < run.n:
                    out[run.row, run.head + i, d] = total[i] / room.state[i * STATE + WEIGHT]

    return fold_row


@cache
def _leave_chunk(shape: Shape) -> Any:
    """A function (total, room, run, chunk, width, parts) that writes the results of a chunk for the block that folds them."""
    n_queries = shape.queries

    @device
    def leave(total, room, run, chunk, width, parts):
        d, n_heads, all_chunks = this_thread(), parts.largest.shape[1], parts.largest.shape[2]
        if d < width:
            for i in range(n_queries):
                if i < run.n:
                    parts.values[((run.row * n_heads + run.head + i) * all_chunks + chunk) * width + d] = total[i]
        if d < run.n:
            parts.largest[run.row, run.head + d, chunk] = room.state[d * STATE + LARGEST]
            parts.weight[run.row, run.head + d, chunk] = room.state[d * STATE + WEIGHT]

    return leave


@device
def _is_last(arrived, counter, seen):
    """Counts this block among the `seen` ones of its row. Returns whether it is the last, which may read the others' results.

    The last block sets the counter back to 0.
    """
    before_me = cuda.shared.array(1, np.int32)
    cuda.threadfence()
    cuda.syncthreads()
    if this_thread() == 0:
        before_me[0] = cuda.atomic.add(arrived, counter, 1)
    cuda.syncthreads()
    if before_me[0] != seen - 1:
        return False
    if this_thread() == 0:
        arrived[counter] = 0
    cuda.threadfence()
    return True


@cache
def _prefetch_chunk(shape: Shape) -> Any:
    """A function (cached, chunk) that prefetches the keys and values of a chunk, 128 bytes at a time."""
    line, threads = 64 if shape.halves else 32, shape.threads

    @inlined  # or LLVM would unroll its loop
    def prefetch_chunk(cached, chunk):
        lines = (cached.width + line - 1) // line
        for item in range(this_thread(), chunk.n_keys * lines, threads):
            at = chunk.place + item // lines * cached.stride + item % lines * line
            prefetch(cached.k, at)
            prefetch(cached.v, at)

    return prefetch_chunk


@cache
def _keep_own(shape: Shape) -> Any:
    """A function (new, new_v, cached, r, g, place) that puts a row's key, rotated, and value to their place."""
    to_kept = as_kept(shape.halves)

    @device
    def keep(new, new_v, cached, r, g, place):
        d = this_thread()
        if d < cached.width:
            cached.k[place + d] = to_kept(rotated(new, r, g, d))
            cached.v[place + d] = to_kept(new_v[r, g, d])
        cuda.syncthreads()

    return keep


@cache
def _attend_alone(shape: Shape) -> Any:
    """A function (room, heads, run, cached, chunk, window, scoring, total) that leaves the values of a chunk, and its maxima and sums."""
    n_queries, load, bring, score_chunk, weigh_chunk = shape.queries, load_queries(shape), bring_keys(shape), score(shape), weigh(shape)
    load_values, chain = load_column(CHUNK), chain_column(CHUNK)

    @device
    def attend(room, heads, run, cached, chunk, window, scoring, total):
        bring(room, 0, cached, chunk.place, chunk.n_keys)
        # values are asked for before anything waits; a thread past the width asks for the last number of each
        column = chunk.place + min(this_thread(), cached.width - 1)
        values = load_values(cached.v, column, cached.stride, column + (chunk.n_keys - 1) * cached.stride)
        begin(room, n_queries, n_queries)
        load(room, heads, run)
        score_chunk(room, cached, chunk.place, chunk.n_keys, scoring)
        weigh_chunk(room, chunk.position, window)
        for i in range(n_queries):
            total[i] = chain(_f(0.0), room.scores, i * SPAN, values)

    return attend


@cache
def attend_chunk(shape: Shape, keeps: bool) -> Any:
    """Attention of single rows.

    Blocks: rows; key-value heads, with the parts of a group larger than a block; chunks, from the first one that the row sees.

    A block past a row's last chunk ends at once. Each of the others counts itself in `arrived`, which is zeros before and afterwards; the
    last one folds the results of the row's heads.

    If the kernel `keeps`, the block of the row's own chunk first writes the row's key, rotated, and value to their places, as `rows.keep`
    does; where a group has several blocks, each of them writes the same bytes. No other block reads there. Otherwise the arguments new_*
    are not read.
    """
    n_queries, new_room = shape.queries, room_for(shape, 4 * shape.queries * CHUNK)  # with room for the factors of folding
    prefetch_chunk, keep_own, attend_alone = _prefetch_chunk(shape), _keep_own(shape), _attend_alone(shape)
    leave, fold_row = _leave_chunk(shape), _fold_row(shape)

    def attend_chunk(
        new_k, new_cos, new_sin, new_pairs, new_distance, new_step, new_v,  # [R, G, K], as of q, [R, G, K]
        q, cos, sin, pairs, distance, step, k, v, slot, position, capacity, kv_heads, scale, cap, window,  # as `attend`
        parts_values, parts_largest, parts_weight, arrived,  # [R * H * C * K], [R, H, C] x 2, [R * blocks of a row and chunk]
        out,  # [R, H, K]
    ):  # fmt: skip
        let_next_begin()
        r, width, d = cuda.blockIdx.x, q.shape[2], this_thread()
        here, chunk = position[r], cuda.blockIdx.z
        first = max(0, here - window + 1) // CHUNK
        key, seen = (first + chunk) * CHUNK, here // CHUNK + 1 - first
        all_heads = q.shape[1] // kv_heads
        pieces = (all_heads + n_queries - 1) // n_queries
        g, piece = cuda.blockIdx.y // pieces, cuda.blockIdx.y % pieces
        run = Run(r, 1, g * all_heads + piece * n_queries, n_queries, min(n_queries, all_heads - piece * n_queries))
        cached = Cached(k, v, kv_heads * width, width)
        place = (slot[r] * capacity + key % capacity) * cached.stride + g * width
        mine = Chunk(place, min(CHUNK, here + 1 - key), here - key)
        if chunk < seen:  # the kernel before changes no position, and only the row's own key and value
            prefetch_chunk(cached, mine)
        await_previous()
        if chunk < seen:
            room = new_room()
            total = cuda.local.array(n_queries, np.float32)
            if keeps and here < key + CHUNK:
                new = Heads(new_k, new_cos, new_sin, new_pairs, new_distance, new_step)
                keep_own(new, new_v, cached, r, g, place + (here - key) * cached.stride)
            heads, parts = Heads(q, cos, sin, pairs, distance, step), Parts(parts_values, parts_largest, parts_weight)
            attend_alone(room, heads, run, cached, mine, window, Scoring(scale, cap), total)
            if seen == 1:
                if d < width:
                    for i in range(n_queries):
                        if i < run.n:
                            out[r, run.head + i, d] = (
                                plus(total[i], _f(0.0)) / room.state[i * STATE + WEIGHT]
                            )  # + 0 as when folded: it makes 0 of -0
            else:
                leave(total, room, run, chunk, width, parts)
                if _is_last(arrived, r * cuda.gridDim.y + cuda.blockIdx.y, seen):
                    fold_row(parts, run, seen, width, room, total, out)

    return kernel(named(attend_chunk, shape))
