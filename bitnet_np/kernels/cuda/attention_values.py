"""Values of attention: a chunk's values times its weights, the running sums over chunks, and the results.

A thread has 4 numbers of a head, for some of the queries; threads i and i ^ 1 have different queries. A thread may call `place`,
`load_four`, `weigh_values` and `fold_values` alone; all threads of a block call `write` together.
"""

from functools import cache
from typing import Any

import numpy as np

from .attention_scores import number_of
from .attention_shape import FOUR, NEW, OLD, SPAN, STATE, UNSEEN, WEIGHT, Shape
from .ptx import fma, load4, load_fragments, load_halves, syncthreads, thread_again, times
from .target import device

_f = np.float32


@cache
def _place(shape: Shape) -> Any:
    """A function that gives the first query of this thread and the first of its numbers: no query from `apart` on."""
    pair, fours = min(2, shape.apart), shape.width // FOUR

    @device
    def place():
        thread = thread_again()
        item = thread // pair
        return thread % pair + item // fours * pair, item % fours * FOUR

    return place


@cache
def _load_four(shape: Shape) -> Any:
    """A function (v, start, left) that gives four values from offset `start`. Past the `left` values that a head has, they are not used."""
    number, load_global, load_4_halves = number_of(shape.halves), load_fragments(1, in_global=True), load_halves(FOUR)

    @device
    def halves(v, start, left):
        return load_4_halves(v, start)

    @device
    def floats(v, start, left):
        return load_global(v, start, 0)

    @device
    def numbers(v, start, left):
        last = start + left - 1
        return (
            number(v, start),
            number(v, min(start + 1, last)),
            number(v, min(start + 2, last)),
            number(v, min(start + 3, last)),
        )

    if not shape.vectors:
        return numbers
    return halves if shape.halves else floats


@cache
def weigh_values(shape: Shape) -> Any:
    """A function (room, cached, start, n_keys, sums): the sums over a chunk's keys of weight times value, each one chain in key order.

    sums[i * 4 + c] belongs to query first + i * apart and number d + c.
    """
    apart, own, place, load_four = shape.apart, shape.own, _place(shape), _load_four(shape)

    @device
    def load_keys(v, start, stride, left):
        return (
            load_four(v, start, left),
            load_four(v, start + stride, left),
            load_four(v, start + 2 * stride, left),
            load_four(v, start + 3 * stride, left),
        )

    @device
    def add_keys(scores, first, j, v, sums):
        """Adds four keys, from number j of the chunk on."""
        for i in range(own):
            p = load4(scores, (first + i * apart) * SPAN + j)
            for c in range(FOUR):
                total = fma(p[0], v[0][c], sums[i * FOUR + c])
                total = fma(p[1], v[1][c], total)
                total = fma(p[2], v[2][c], total)
                sums[i * FOUR + c] = fma(p[3], v[3][c], total)

    @device
    def weigh(room, cached, start, n_keys, sums):
        first, d = place()
        for i in range(own * FOUR):
            sums[i] = _f(0.0)
        if first >= apart or d >= cached.width:
            return
        start += d
        stride, left = cached.stride, cached.width - d
        whole = n_keys - n_keys % 8
        if whole:
            these = load_keys(cached.v, start, stride, left)
            for j in range(0, whole, 8):
                others = load_keys(cached.v, start + (j + 4) * stride, stride, left)  # loaded while these are used
                add_keys(room.scores, first, j, these, sums)
                these = load_keys(cached.v, start + min(j + 8, whole - 8) * stride, stride, left)
                add_keys(room.scores, first, j + 4, others, sums)
        for j in range(whole, n_keys):
            value = load_four(cached.v, start + j * stride, left)
            for i in range(own):
                p = room.scores[(first + i * apart) * SPAN + j]
                for c in range(FOUR):
                    sums[i * FOUR + c] = fma(p, value[c], sums[i * FOUR + c])

    return weigh


@cache
def weigh_masked_values(shape: Shape) -> Any:
    """A function (room, cached, start, n_keys, finite, sums): like that of `weigh_values`, but UNSEEN keys count nothing.

    Unless all values are `finite`, those of unseen keys are not read, as on the CPU.
    """
    apart, own, place, load_four = shape.apart, shape.own, _place(shape), _load_four(shape)

    @device
    def weigh(room, cached, start, n_keys, finite, sums):
        first, d = place()
        for i in range(own * FOUR):
            sums[i] = _f(0.0)
        if first >= apart or d >= cached.width:
            return
        for j in range(n_keys):
            value = load_four(cached.v, start + j * cached.stride + d, cached.width - d)
            for i in range(own):
                p = room.scores[(first + i * apart) * SPAN + j]
                if finite or p != UNSEEN:
                    p = _f(0.0) if p == UNSEEN else p
                    for c in range(FOUR):
                        sums[i * FOUR + c] = fma(p, value[c], sums[i * FOUR + c])

    return weigh


@cache
def fold_values(shape: Shape) -> Any:
    """A function (total, state, part) that takes the sums of one more chunk into the running sums of a thread's numbers."""
    apart, own, place = shape.apart, shape.own, _place(shape)

    @device
    def fold(total, state, part):
        first = place()[0] % apart
        for i in range(own):
            query = first + i * apart
            new = state[query * STATE + NEW]
            if new != UNSEEN:  # adding +0 instead would make a -0 +0
                old = state[query * STATE + OLD]
                for c in range(FOUR):
                    total[i * FOUR + c] = fma(total[i * FOUR + c], old, times(part[i * FOUR + c], new))

    return fold


@cache
def write(shape: Shape) -> Any:
    """A function (total, room, run, out) that writes the results of a run, divided by the sums of weights: zeros where no key was seen.

    On the way they overwrite the queries.
    """
    padded_width, stride, threads, apart, own, place = shape.width, shape.stride, shape.threads, shape.apart, shape.own, _place(shape)

    @device
    def write_run(total, room, run, out):
        width = out.shape[2]
        first, d = place()
        if first < apart and d < width:
            for i in range(own):
                for c in range(FOUR):
                    room.queries[(first + i * apart) * stride + d + c] = total[i * FOUR + c]
        syncthreads()
        for item in range(thread_again(), run.n * padded_width, threads):
            i, c = item // padded_width, item % padded_width
            if c < width:
                weight = room.state[i * STATE + WEIGHT]
                value = room.queries[i * stride + c] / weight if weight != _f(0.0) else _f(0.0)
                out[run.row + room.rows[i], run.head + i - room.rows[i] * run.group, c] = value

    return write_run
