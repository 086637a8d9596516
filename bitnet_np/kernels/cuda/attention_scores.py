"""Scores of attention: the queries and keys of a block in shared memory, and their dot products. The order is the contract's.

Four threads of a warp share a tile of 4 x `columns` dot products, each with 4 of the 16 lanes, so that a number read from shared memory is
used several times. They fold their lanes, and each is left with one query of the tile. Threads are numbered so that threads i and i ^ 1
read the same queries, and threads i and i ^ 2 the same keys: shared memory serves such pairs, 16 bytes each, in half the time.

All threads of a block call these functions together. Queries are rotated (RoPE) where they are loaded.
"""

from functools import cache
from typing import Any

import numpy as np

from ..fast.emit import LANES
from ..scalar import soft_cap
from .attention_shape import FOUR, SPAN, Shape
from .ptx import (
    commit_copies,
    copy_async,
    fma,
    fold_quarters,
    half_value,
    load4,
    load_halves,
    syncthreads,
    thread_again,
    times,
    wait_copies,
)
from .rows import rotated
from .target import device

_f = np.float32


@cache
def number_of(halves: bool) -> Any:
    """A function (array, i) that gives number i of keys or values as a float32."""

    @device
    def half(array, i):
        return half_value(np.uint32(array[i]))

    @device
    def whole(array, i):
        return array[i]

    return half if halves else whole


@cache
def load_queries(shape: Shape) -> Any:
    """A function (room, heads, run) that loads and rotates the queries of a run: zeros for missing queries and after the width."""
    n_queries, stride, threads = shape.queries, shape.stride, shape.threads

    @device
    def load(room, heads, run):
        syncthreads()
        width = heads.x.shape[2]
        for item in range(thread_again(), n_queries * stride, threads):
            i, d = item // stride, item % stride
            value = _f(0.0)
            if i < run.n and d < width:
                value = rotated(heads, run.row + room.rows[i], run.head + i - room.rows[i] * run.group, d)
            room.queries[item] = value

    return load


@cache
def bring_keys(shape: Shape) -> Any:
    """A function (room, to, cached, start, n) that brings a part of the keys: up to n keys from offset `start`, then zeros.

    They go to `room.keys` from number `to` on, and are there when this thread's copies have arrived and a barrier has been passed.
    """
    if not shape.vectors:
        return _bring_numbers(shape)
    return _bring_halves(shape) if shape.halves else _bring_copies(shape)


def _bring_copies(shape: Shape) -> Any:
    """`bring_keys` for float32: asynchronous copies of 16 bytes."""
    stride, threads, quads = shape.stride, shape.threads, shape.width // 4
    n_copies = shape.part * quads
    is_exact = n_copies % threads == 0

    @device
    def bring(room, to, cached, start, n):
        for turn in range((n_copies + threads - 1) // threads):  # a constant, so that the loop is unrolled and addresses are computed once
            item = thread_again() + turn * threads
            if is_exact or item < n_copies:
                j, d = item // quads, item % quads * 4
                is_there = j < n and d < cached.width
                source, size = start + j * cached.stride + d if is_there else start, np.int32(16 if is_there else 0)
                copy_async(room.keys, to + j * stride + d, cached.k, source, size)
        commit_copies()

    return bring


def _bring_halves(shape: Shape) -> Any:
    """`bring_keys` for float16: loads of 16 bytes."""
    part, stride, threads, eights = shape.part, shape.stride, shape.threads, shape.width // 8
    load_eight = load_halves(8)

    @device
    def bring(room, to, cached, start, n):
        for item in range(thread_again(), part * eights, threads):
            j, d = item // eights, item % eights * 8
            is_there = j < n and d < cached.width
            eight = load_eight(cached.k, start + j * cached.stride + d if is_there else start)
            for i in range(8):
                room.keys[to + j * stride + d + i] = eight[i] if is_there else _f(0.0)

    return bring


def _bring_numbers(shape: Shape) -> Any:
    """`bring_keys` for heads that are not aligned to 16 bytes: one number at a time."""
    part, stride, threads, number = shape.part, shape.stride, shape.threads, number_of(shape.halves)

    @device
    def bring(room, to, cached, start, n):
        for item in range(thread_again(), part * stride, threads):
            j, d = item // stride, item % stride
            is_there = j < n and d < cached.width
            room.keys[to + item] = number(cached.k, start + j * cached.stride + d) if is_there else _f(0.0)

    return bring


@cache
def _multiply_tile(shape: Shape) -> Any:
    """A function (room, q, k, quarter) that adds the products of whole heads to the lanes of a thread's tile, `room.dots`."""
    columns, stride, q_step, k_step = shape.columns, shape.stride, shape.queries // FOUR, shape.part // shape.columns

    @device
    def multiply(room, q, k, at, quarter):
        """dots[(a * columns + b) * 4 + i] += number at + i of query q + (a ^ quarter) * q_step, times that of key k + b * k_step."""
        for b in range(columns):
            key = load4(room.keys, k + b * (k_step * stride) + at)
            for a in range(FOUR):
                query = load4(room.queries, (q + (a ^ quarter) * q_step) * stride + at)
                for i in range(4):
                    lane = (a * columns + b) * 4 + i
                    room.dots[lane] = fma(key[i], query[i], room.dots[lane])

    return _unrolled(multiply, shape.width // LANES)


def _unrolled(step: Any, count: int) -> Any:
    """`step` for `count` blocks of 16 numbers, one after the other in the code: their addresses are constants there."""
    if count == 1:
        return step
    half = count // 2
    first, second = _unrolled(step, half), _unrolled(step, count - half)

    @device
    def both(room, q, k, at, quarter):
        first(room, q, k, at, quarter)
        second(room, q, k, at + half * LANES, quarter)

    return both


@cache
def score(shape: Shape) -> Any:
    """A function (room, cached, start, n_keys, scoring): scores[i * SPAN + j] = scale * (query i . key j of the chunk at `start`), capped.

    The first part of the chunk's keys is in shared memory already.
    """
    columns, part_keys, stride, threads, buffers = shape.columns, shape.part, shape.stride, shape.threads, shape.buffers
    capped = shape.capped
    q_step, k_step = shape.queries // FOUR, part_keys // columns
    n_items, n_lanes = q_step * k_step * FOUR, FOUR * columns * FOUR
    is_exact = n_items % threads == 0
    bring, multiply, fold, wait = bring_keys(shape), _multiply_tile(shape), fold_quarters(columns), wait_copies(0)

    @device
    def score_part(room, part, here, scoring):
        for turn in range((n_items + threads - 1) // threads):
            item = thread_again() + turn * threads
            if is_exact or item < n_items:  # the same for all lanes of a warp
                tile, quarter = item // 32 * 8 + item % 8, item % 32 // 8
                i, j = tile // 2 % q_step, tile // (2 * q_step) * 2 + tile % 2
                for lane in range(n_lanes):
                    room.dots[lane] = _f(0.0)
                multiply(room, i, here + j * stride, quarter * 4, quarter)
                totals = fold(room.dots)
                for b in range(columns):
                    s = times(totals[b], scoring.scale)
                    room.scores[(i + quarter * q_step) * SPAN + part + j + b * k_step] = soft_cap(s, scoring.cap) if capped else s

    @device
    def score_chunk(room, cached, start, n_keys, scoring):
        for turn in range(np.int32((n_keys + part_keys - 1) // part_keys)):
            part = np.int32(turn * part_keys)
            wait()
            syncthreads()  # the whole part has arrived, and no thread reads the one before it any more
            here = part // part_keys % buffers * (part_keys * stride)
            if part + part_keys < n_keys:
                after = part + part_keys
                bring(room, part_keys * stride - here, cached, start + after * cached.stride, n_keys - after)
            score_part(room, part, here, scoring)
        syncthreads()

    return score_chunk
