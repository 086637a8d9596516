"""Weights of attention: the scores of a chunk become exponentials, which update the running maxima and sums of the queries.

Four threads of a quad share a query: thread `quarter` has keys 16 * part + 4 * quarter + c. A key after the query's own position or before
its window has weight 0, as on the CPU. All threads of a block call these functions together.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..fast.emit import LANES
from ..scalar import CHUNK, exp
from .attention_shape import LARGEST, NEW, OLD, SPAN, STATE, UNSEEN, WEIGHT, Shape
from .ptx import fma, fold_quad, load4, plus, quad_max, syncthreads, thread_again, times
from .target import device

_f = np.float32
_LOWEST = -np.inf


class Biases(NamedTuple):
    """Rows of a mask array, for the keys of one chunk."""

    mask: Any  # flat
    start: Any  # the first row of the run
    stride: Any  # numbers from one row to the next


@device
def begin(room, n, group):
    """Set the state before the first key. rows[i] = i // group is divided once, and not for each of a query's numbers."""
    i = thread_again()
    if i < n:
        room.state[i * STATE + LARGEST], room.state[i * STATE + WEIGHT] = _f(-np.inf), _f(0.0)
        room.rows[i] = np.int32(i // group)


@device
def _fold_chunk(state, n):
    """Updates the running maxima and sums of n queries by a chunk.

    OLD and NEW hold the chunk's maximum and sum; they are left with the factors of the values before and of the chunk's values.
    """
    syncthreads()
    i = thread_again()
    if i < n:
        largest, total = state[i * STATE + OLD], state[i * STATE + NEW]
        if total != UNSEEN:
            before = state[i * STATE + LARGEST]
            after = before if before > largest else largest
            old, new = exp(plus(before, -after)), exp(plus(largest, -after))
            state[i * STATE + WEIGHT] = fma(state[i * STATE + WEIGHT], old, times(total, new))
            state[i * STATE + LARGEST] = after
            state[i * STATE + OLD], state[i * STATE + NEW] = old, new
    syncthreads()


@device
def _exponentials(room, i, is_first):
    """dots -> exp(dots - the largest of the query's chunk), which makes 0 of -infinity.

    dots[part * 4 + c] belongs to query i. The chunk's maximum and sum go into the state, by the thread that `is_first` of its quad.
    """
    largest = _f(_LOWEST)
    for item in range(LANES):
        largest = room.dots[item] if room.dots[item] > largest else largest
    largest = quad_max(largest)
    for item in range(LANES):
        room.dots[item] = exp(plus(room.dots[item], -largest))
    total = fold_quad(room.dots)
    if is_first:
        room.state[i * STATE + OLD], room.state[i * STATE + NEW] = largest, total


@cache
def weigh(shape: Shape) -> Any:
    """A function (room, position, window): scores -> exp(score - largest of the chunk), for causal attention.

    `position` is that of the run's first row, counted from the chunk's first key.
    """
    n_queries, threads = shape.queries, shape.threads
    n_items = max(32, n_queries * 4)

    @device
    def weigh_chunk(room, position, window):
        for turn in range((n_items + threads - 1) // threads):
            item = thread_again() + turn * threads
            if item < n_items:  # the same for all lanes of a warp
                i, quarter, is_query = min(item // 4, n_queries - 1), item % 4, item // 4 < n_queries
                here = np.int32(position + room.rows[i])
                low = np.int32(here - window + 1)
                for part in range(4):
                    four = load4(room.scores, i * SPAN + (part * LANES + quarter * 4 if is_query else CHUNK))
                    for c in range(4):
                        j = np.int32(part * LANES + quarter * 4 + c)
                        room.dots[part * 4 + c] = four[c] if low <= j and j <= here else _f(_LOWEST)
                _exponentials(room, i, is_query and quarter == 0)
                if is_query and quarter == 0 and (low >= CHUNK or here < 0):
                    room.state[i * STATE + NEW] = UNSEEN
                if is_query:
                    for part in range(4):
                        for c in range(4):
                            room.scores[i * SPAN + part * LANES + quarter * 4 + c] = room.dots[part * 4 + c]
        _fold_chunk(room.state, n_queries)

    return weigh_chunk


@cache
def weigh_masked(shape: Shape) -> Any:
    """A function (room, biases, n, n_keys): like that of `weigh`, for n queries, with the biases of a mask. Hidden keys are UNSEEN."""
    n_queries, threads = shape.queries, shape.threads
    n_items = max(32, n_queries * 4)

    @device
    def weigh_chunk(room, biases, n, n_keys):
        for turn in range((n_items + threads - 1) // threads):
            item = thread_again() + turn * threads
            if item < n_items:  # the same for all lanes of a warp
                i, quarter, is_query = min(item // 4, n_queries - 1), item % 4, item // 4 < n_queries
                row, seen = biases.start + room.rows[min(i, n - 1)] * biases.stride, 0
                for part in range(4):
                    for c in range(4):
                        j = part * LANES + quarter * 4 + c
                        bias = biases.mask[row + j] if j < n_keys else _f(_LOWEST)
                        room.dots[part * 4 + c] = _f(_LOWEST)
                        if is_query and bias > _LOWEST:
                            room.dots[part * 4 + c], seen = plus(room.scores[i * SPAN + j], bias), seen | 1 << part * 4 + c
                _exponentials(room, i, is_query and quarter == 0)
                sees_any = quad_max(_f(1.0) if seen else _f(0.0))
                if is_query and quarter == 0 and sees_any == _f(0.0):
                    room.state[i * STATE + NEW] = UNSEEN
                if is_query:
                    for part in range(4):
                        for c in range(4):
                            is_seen = seen >> part * 4 + c & 1
                            room.scores[i * SPAN + part * LANES + quarter * 4 + c] = room.dots[part * 4 + c] if is_seen else UNSEEN
        _fold_chunk(room.state, n_queries)

    return weigh_chunk
