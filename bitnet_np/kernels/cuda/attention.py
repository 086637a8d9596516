"""Attention on the GPU, in the contract's order: keys in chunks of CHUNK from position 0, each with a maximum, a sum and values of its own.

A block has some queries that read the same keys and values: the heads of a group, for one row or for several rows in a run. (A run is rows
that are consecutive positions of one slot.) It goes from chunk to chunk (`attend`, and `attend_masked` by a mask array). Where each run is
a single row, as in decoding, there is a block for each chunk instead (attention_split.py).

Position p is in place p % S of keys and values, S a multiple of CHUNK or more than every position: no chunk is torn apart.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ..scalar import CHUNK
from .attention_scores import bring_keys, load_queries, score
from .attention_shape import Cached, Run, Scoring, Shape, named, room_for
from .attention_values import fold_values, weigh_masked_values, weigh_values, write
from .attention_weights import Biases, begin, weigh, weigh_masked
from .ptx import in_turn, this_thread
from .rows import Heads
from .target import device, kernel

_f = np.float32


class Tile(NamedTuple):
    """The queries of a block, which it computes one run after another."""

    head: Any  # the first head
    group: Any  # heads of a row
    first: Any  # the first row
    limit: Any  # the row after the last


@device
def _tile(n_rows, n_heads, kv_heads, n_queries):
    """Blocks: tiles of rows, the last first, because they see most; key-value heads; parts of a group larger than a block."""
    heads = n_heads // kv_heads
    group = min(heads, n_queries)
    head = cuda.blockIdx.y * heads + cuda.blockIdx.z * n_queries
    here = min(group, heads - cuda.blockIdx.z * n_queries)
    rows = max(1, n_queries // group)
    first = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * rows
    return Tile(np.int32(head), np.int32(here), np.int32(first), np.int32(min(first + rows, n_rows)))


@device
def _run_from(first, tile, slot, position):
    """The run that begins at row `first`, as far as the tile goes."""
    end = first + 1
    while end < tile.limit and slot[end] == slot[first] and position[end] == position[first] + (end - first):
        end += 1
    rows = np.int32(end) - first
    return Run(first, rows, tile.head, tile.group, np.int32(rows * tile.group))


class Places(NamedTuple):
    """The places of rows in the cache."""

    slot: Any  # [R]
    position: Any  # [R]
    capacity: Any  # positions of a slot


@cache
def _start_run(shape: Shape) -> Any:
    """A function (room, heads, run, total) that readies a block for a run: no key seen, queries loaded, sums of values 0."""
    n_queries, n_values, load = shape.queries, 4 * shape.own, load_queries(shape)

    @device
    def start(room, heads, run, total):
        cuda.syncthreads()  # no thread reads the results of the run before any more
        begin(room, n_queries, run.group)
        load(room, heads, run)
        for i in range(n_values):
            total[i] = _f(0.0)

    return start


def _each_run(shape: Shape, go_through: Any) -> Any:
    """A function (heads, kv_heads, cached, places, how, out) that computes the runs of a block, one after another.

    go_through(room, heads, run, cached, base, places, how, total) leaves a run's sums in `room` and `total`; `base` is the offset of the
    slot's first position, for the block's head.
    """
    n_queries, n_values, new_room, write_run = shape.queries, 4 * shape.own, room_for(shape), write(shape)

    @device
    def each_run(heads, kv_heads, cached, places, how, out):
        room = new_room()
        total = cuda.local.array(n_values, np.float32)
        tile = _tile(heads.x.shape[0], heads.x.shape[1], kv_heads, n_queries)
        first = tile.first
        while first < tile.limit:
            run = _run_from(first, tile, places.slot, places.position)
            base = places.slot[first] * places.capacity * cached.stride + cuda.blockIdx.y * cached.width
            go_through(room, heads, run, cached, base, places, how, total)
            write_run(total, room, run, out)
            first = np.int32(first + run.rows)

    return each_run


class Causal(NamedTuple):
    """How scores come about, and the window of `attend`."""

    scoring: Scoring
    window: Any


@cache
def _go_through_causal(shape: Shape) -> Any:
    """The `go_through` of `_each_run` for causal attention: `how` is a Causal."""
    n_values, start_run, bring, score_chunk = 4 * shape.own, _start_run(shape), bring_keys(shape), score(shape)
    weigh_chunk, weigh_v, fold = weigh(shape), weigh_values(shape), fold_values(shape)

    @device
    def go_through(room, heads, run, cached, base, places, how, total):
        part = cuda.local.array(n_values, np.float32)
        first_key = max(0, places.position[run.row] - how.window + 1) // CHUNK * CHUNK
        place = np.int32(first_key % places.capacity)
        left = np.int32(places.position[run.row + run.rows - 1] + 1 - first_key)  # keys of the chunk and of all later ones
        bring(room, 0, cached, base + place * cached.stride, left)
        start_run(room, heads, run, total)
        while left > 0:
            n_keys, here = left if left < CHUNK else np.int32(CHUNK), base + place * cached.stride
            score_chunk(room, cached, here, n_keys, how.scoring)
            place = np.int32(place + CHUNK if place + CHUNK < places.capacity else 0)
            if left > CHUNK:
                bring(room, 0, cached, base + place * cached.stride, left - CHUNK)
            weigh_chunk(room, left - run.rows, how.window)  # the last row's own key is the last one
            weigh_v(room, cached, here, n_keys, part)
            fold(total, room.state, part)
            left = np.int32(left - CHUNK)

    return go_through


@cache
def attend(shape: Shape) -> Any:
    """Causal attention, with or without a window: a block goes through all chunks that its rows see."""
    each_run = _each_run(shape, _go_through_causal(shape))

    def attend(q, cos, sin, pairs, distance, step, k, v, slot, position, capacity, kv_heads, scale, cap, window, out):
        # [R, H, K], [R, J] x 2, ..., [B * S * G * K] x 2, [R] x 2, ... -> [R, H, K]
        in_turn()
        heads, cached = Heads(q, cos, sin, pairs, distance, step), Cached(k, v, np.int32(kv_heads * q.shape[2]), q.shape[2])
        each_run(heads, kv_heads, cached, Places(slot, position, capacity), Causal(Scoring(scale, cap), window), out)

    return kernel(named(attend, shape))


class Masked(NamedTuple):
    """How scores come about, and the mask of `attend_masked`."""

    scoring: Scoring
    mask: Any  # [masks * rows * keys]
    masks: Any  # one for each slot, or 1 for all
    rows: Any
    keys: Any


@device
def _sees_any(biases, n_rows, n_keys, threads):
    """Whether any of n_rows rows sees any of n_keys keys: for all threads of a block, which come here together."""
    seen = 0
    for item in range(this_thread(), n_rows * n_keys, threads):
        if biases.mask[biases.start + item // n_keys * biases.stride + item % n_keys] > -np.inf:
            seen = 1
    return cuda.syncthreads_or(seen)


@device
def _all_finite(cached, start, n_keys):
    """Whether the values of n_keys keys from offset `start` are finite: for all threads of a block, which come here together."""
    infinite = 0
    for j in range(n_keys):
        if this_thread() < cached.width and not abs(cached.v[start + j * cached.stride + this_thread()]) < np.inf:
            infinite = 1
    return not cuda.syncthreads_or(infinite)


@cache
def _go_through_masked(shape: Shape) -> Any:
    """The `go_through` of `_each_run` for attention by a mask array: `how` is a Masked."""
    n_values, threads, start_run, bring, score_chunk = 4 * shape.own, shape.threads, _start_run(shape), bring_keys(shape), score(shape)
    weigh_chunk, weigh_v, fold = weigh_masked(shape), weigh_masked_values(shape), fold_values(shape)

    @device
    def go_through(room, heads, run, cached, base, places, how, total):
        part = cuda.local.array(n_values, np.float32)
        first_bias = (min(places.slot[run.row], how.masks - 1) * how.rows + places.position[run.row]) * how.keys
        start_run(room, heads, run, total)
        for key in range(0, how.keys, CHUNK):
            n_keys, here, biases = min(CHUNK, how.keys - key), base + key * cached.stride, Biases(how.mask, first_bias + key, how.keys)
            if _sees_any(biases, run.rows, n_keys, threads):
                bring(room, 0, cached, here, n_keys)
                finite = _all_finite(cached, here, n_keys)
                score_chunk(room, cached, here, n_keys, how.scoring)
                weigh_chunk(room, biases, run.n, n_keys)
                weigh_v(room, cached, here, n_keys, finite, part)
                fold(total, room.state, part)

    return go_through


@cache
def attend_masked(shape: Shape) -> Any:
    """Attention by a mask array: the blocks of `attend`."""
    each_run = _each_run(shape, _go_through_masked(shape))

    def attend_masked(
        q, cos, sin, pairs, distance, step, k, v, slot, position, capacity, kv_heads, scale, cap,  # as `attend`
        mask, masks, mask_rows, all_keys,  # [1 or B * T * S'], 1 or B, T, S'
        out,  # [R, H, K]
    ):  # fmt: skip
        in_turn()
        heads, cached = Heads(q, cos, sin, pairs, distance, step), Cached(k, v, np.int32(kv_heads * q.shape[2]), q.shape[2])
        how = Masked(Scoring(scale, cap), mask, masks, mask_rows, all_keys)
        each_run(heads, kv_heads, cached, Places(slot, position, capacity), how, out)

    return kernel(named(attend_masked, shape))
