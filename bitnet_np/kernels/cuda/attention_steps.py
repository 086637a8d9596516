"""Steps of attention on the GPU, for the queries of a block and one chunk of keys: scores, weights, values. The order is the contract's.

Four threads of a warp share a tile of 4 x `columns` dot products, each with 4 of the 16 lanes, so that a number read from shared memory is
used several times. Then they fold their lanes, and each is left with one query of the tile. Threads are numbered so that of threads i and
i ^ 1 both read the same queries, and of i and i ^ 2 the same keys: shared memory gives such pairs 16 bytes each in half the time. Rows of
queries and keys are 8 numbers longer than a head, and rows of scores 4 longer than a chunk, so that those that are read or written together
are in different banks.

For values, a thread has 4 numbers of a head and some of the queries, of which i and i ^ 1 have different ones.

Keys past the last or outside of the window have weight 0, as on the CPU. Queries are rotated (RoPE) where they are loaded.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..scalar import CHUNK, exp
from ..simd import LANES
from .rows import rotated
from .target import SIMULATED, instructions

(
    commit_copies,
    copy_async,
    device,
    fma,
    fold_quad,
    fold_quarters,
    half_value,
    load4,
    plus,
    quad_max,
    syncthreads,
    thread_again,
    times,
    wait_copies,
) = (
    instructions.commit_copies,
    instructions.copy_async,
    instructions.device,
    instructions.fma,
    instructions.fold_quad,
    instructions.fold_quarters,
    instructions.half_value,
    instructions.load4,
    instructions.plus,
    instructions.quad_max,
    instructions.syncthreads,
    instructions.thread_again,
    instructions.times,
    instructions.wait_copies,
)

_f = np.float32
UNSEEN = _f(-1.0)  # marks a query that sees no key of a chunk, and a key that a query does not see: weights cannot be negative
LARGEST, WEIGHT, OLD, NEW = 0, 1, 2, 3  # of a query, in `state`
STATE = 4
SPAN = CHUNK + 4  # numbers of a row of scores
WIDEST = 256  # head width
FOUR = 4  # queries of a tile, threads that share it, lanes of each; numbers of a head that a thread weighs
EIGHT = 8  # queries of a block at most whose values a thread has in registers, all of one number of a head (attention_split.py)
_WIDTHS = (16, 48, 128, WIDEST) if SIMULATED else (64, 96, 128, WIDEST)


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    width: int  # of a head, at most
    queries: int  # of a block
    columns: int  # keys of a tile
    part: int  # keys in shared memory at a time: a chunk, or some of it while the next ones are on their way
    halves: bool  # keys and values are float16, as bits
    vectors: bool  # keys and values are read 16 bytes at a time

    @property
    def threads(self) -> int:
        """At least one for each number of a head, in whole warps."""
        return max(32 if SIMULATED else 128, -(-self.width // 32) * 32)

    @property
    def stride(self) -> int:
        """From one query or key to the next in shared memory."""
        return self.width + 8

    @property
    def buffers(self) -> int:
        """Of keys."""
        return 1 if self.part == CHUNK else 2

    @property
    def apart(self) -> int:
        """The queries of a thread are so far from each other, where it weighs values."""
        return min(1 << (self.threads // (self.width // FOUR)).bit_length() - 1, self.queries)


def shape_for(width: int, queries: int, halves: bool = False, many: bool = False) -> Shape:
    """The kernel for heads of a width up to WIDEST, in blocks of as many queries as share keys, or some of them; larger ones if `many`."""
    rounded = next(size for size in _WIDTHS if width <= size)
    vectors = width % (8 if halves else 4) == 0
    few = FOUR if queries <= FOUR else EIGHT
    if rounded == WIDEST:
        return Shape(rounded, few, 1, 16, halves, vectors)
    if queries <= few:
        return Shape(rounded, few, 2, CHUNK, halves, vectors)
    return Shape(rounded, 32 if many else 16, 4, 16, halves, vectors)


class Steps(NamedTuple):
    """What the kernels are made of."""

    load_queries: Any
    bring_keys: Any
    score: Any
    weigh: Any
    weigh_masked: Any
    place: Any
    four: Any
    values: Any
    fold_values: Any
    write: Any


@device
def begin(state, rows, n, group):
    """Nothing was seen yet. rows[i] = i // group, which row of the run query i belongs to: divided once, not for each of its numbers."""
    i = thread_again()
    if i < n:
        state[i * STATE + LARGEST], state[i * STATE + WEIGHT] = _f(-np.inf), _f(0.0)
        rows[i] = np.int32(i // group)


@device
def _fold_chunks(state, n):
    """What a chunk does to the queries' running maxima and sums. Its own are in OLD and NEW, where its factors go."""
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


def _unrolled(step, count):
    """`step` for `count` blocks of 16 numbers, one after the other in the code: addresses are constants there."""
    if count == 1:
        return step
    half = count // 2
    first, second = _unrolled(step, half), _unrolled(step, count - half)

    @device
    def both(queries, keys, q, k, at, quarter, sums):
        first(queries, keys, q, k, at, quarter, sums)
        second(queries, keys, q, k, at + half * LANES, quarter, sums)

    return both


@cache
def steps(shape: Shape) -> Steps:
    """All threads of a block take them together, but for `place`, `four`, `values` and `fold_values`, which a thread may take alone."""
    width_, n_queries, columns, part_keys, stride, threads = (
        shape.width,
        shape.queries,
        shape.columns,
        shape.part,
        shape.stride,
        shape.threads,
    )
    q_step, k_step, buffers = n_queries // FOUR, part_keys // columns, shape.buffers
    apart, own, n_items = shape.apart, n_queries // shape.apart, q_step * k_step * FOUR
    pair = min(2, apart)
    is_whole, n_weighed = n_items % threads == 0, max(32, n_queries * 4)
    none_pending, fold, load_halves = wait_copies(0), fold_quarters(columns), instructions.load_halves(FOUR)
    load_eight, load_global = instructions.load_halves(8), instructions.load_fragments(1, in_global=True)

    if shape.halves:

        @device
        def number(array, i):
            return half_value(np.uint32(array[i]))

    else:

        @device
        def number(array, i):
            return array[i]

    @device
    def load_queries(q, cos, sin, pairs, distance, step, row, head, group, n, rows, queries):
        """Query i is head `head` + i % group of row `row` + i // group; what is missing of the last numbers and queries is zeros."""
        syncthreads()
        width = q.shape[2]
        for item in range(thread_again(), n_queries * stride, threads):
            i, d = item // stride, item % stride
            value = _f(0.0)
            if i < n and d < width:
                value = rotated(q, cos, sin, pairs, distance, step, row + rows[i], head + i - rows[i] * group, d)
            queries[item] = value

    if shape.vectors and not shape.halves:
        n_copies = part_keys * (width_ // 4)
        is_exact = n_copies % threads == 0

        @device
        def bring_keys(keys, to, k, start, k_stride, n, width):
            """A part, into `keys` from number `to`: up to n keys from `start`, and zeros. It is there when the copies have arrived."""
            for go in range((n_copies + threads - 1) // threads):  # so many that the loop is unrolled, and addresses are worked out once
                item = thread_again() + go * threads
                if is_exact or item < n_copies:
                    j, d = item // (width_ // 4), item % (width_ // 4) * 4
                    there = j < n and d < width
                    copy_async(keys, to + j * stride + d, k, start + j * k_stride + d if there else start, np.int32(16 if there else 0))
            commit_copies()

    elif shape.vectors:

        @device
        def bring_keys(keys, to, k, start, k_stride, n, width):
            for item in range(thread_again(), part_keys * (width_ // 8), threads):
                j, d = item // (width_ // 8), item % (width_ // 8) * 8
                there = j < n and d < width
                eight = load_eight(k, start + j * k_stride + d if there else start)
                for i in range(8):
                    keys[to + j * stride + d + i] = eight[i] if there else _f(0.0)

    else:

        @device
        def bring_keys(keys, to, k, start, k_stride, n, width):
            for item in range(thread_again(), part_keys * stride, threads):
                j, d = item // stride, item % stride
                keys[to + item] = number(k, start + j * k_stride + d) if j < n and d < width else _f(0.0)

    @device
    def multiply(queries, keys, q, k, at, quarter, sums):
        """sums[(a * columns + b) * 4 + i] += of query q + (a ^ quarter) * q_step and key k + b * k_step, number at + i."""
        for b in range(columns):
            key = load4(keys, k + b * (k_step * stride) + at)
            for a in range(FOUR):
                query = load4(queries, (q + (a ^ quarter) * q_step) * stride + at)
                for i in range(4):
                    lane = (a * columns + b) * 4 + i
                    sums[lane] = fma(key[i], query[i], sums[lane])

    dots = _unrolled(multiply, width_ // LANES)

    @device
    def score(queries, keys, scores, sums, k, start, k_stride, n_keys, width, scale):
        """scores[i * SPAN + j] = query i . key j of the chunk that begins at `start` * scale. Its first part was brought before."""
        for turn in range(np.int32((n_keys + part_keys - 1) // part_keys)):
            part = np.int32(turn * part_keys)
            none_pending()
            syncthreads()  # all of the part is here, and nobody reads the one before it any more
            here = part // part_keys % buffers * (part_keys * stride)
            if part + part_keys < n_keys:
                after = part + part_keys
                bring_keys(keys, part_keys * stride - here, k, start + after * k_stride, k_stride, n_keys - after, width)
            for go in range((n_items + threads - 1) // threads):
                item = thread_again() + go * threads
                if is_whole or item < n_items:  # so are the others of a warp
                    tile, quarter = item // 32 * 8 + item % 8, item % 32 // 8
                    i, j = tile // 2 % q_step, tile // (2 * q_step) * 2 + tile % 2
                    for lane in range(FOUR * columns * FOUR):
                        sums[lane] = _f(0.0)
                    dots(queries, keys, i, here + j * stride, quarter * 4, quarter, sums)
                    totals = fold(sums)
                    for b in range(columns):
                        scores[(i + quarter * q_step) * SPAN + part + j + b * k_step] = times(totals[b], scale)
        syncthreads()

    @device
    def exponentials(state, i, tells, s):
        """s -> exp(s - largest of the chunk), which makes 0 of -infinity; what the chunk has, into `state` by the thread that tells.

        s[part * 4 + c]: of query i, key part * 16 + quarter * 4 + c. Four threads in a row, of four quarters, have all of a query.
        """
        lowest = -np.inf
        largest = _f(lowest)
        for item in range(LANES):
            largest = s[item] if s[item] > largest else largest
        largest = quad_max(largest)
        for item in range(LANES):
            s[item] = exp(plus(s[item], -largest))
        total = fold_quad(s)
        if tells:
            state[i * STATE + OLD], state[i * STATE + NEW] = largest, total

    @device
    def weigh(scores, state, rows, s, position, window):
        """scores -> exp(score - largest of the chunk); what the chunk does to the running maximum and sum, into `state`.

        `position`: of the run's first row, from the chunk's first key on.
        """
        lowest = -np.inf
        for go in range((n_weighed + threads - 1) // threads):
            item = thread_again() + go * threads
            if item < n_weighed:  # so are the others of a warp
                i, quarter, own = min(item // 4, n_queries - 1), item % 4, item // 4 < n_queries
                here = np.int32(position + rows[i])
                low = np.int32(here - window + 1)
                for part in range(4):
                    four = load4(scores, i * SPAN + (part * LANES + quarter * 4 if own else CHUNK))
                    for c in range(4):
                        j = np.int32(part * LANES + quarter * 4 + c)
                        s[part * 4 + c] = four[c] if low <= j and j <= here else _f(lowest)
                exponentials(state, i, own and quarter == 0, s)
                if own and quarter == 0 and (low >= CHUNK or here < 0):
                    state[i * STATE + NEW] = UNSEEN
                if own:
                    for part in range(4):
                        for c in range(4):
                            scores[i * SPAN + part * LANES + quarter * 4 + c] = s[part * 4 + c]
        _fold_chunks(state, n_queries)

    @device
    def weigh_masked(scores, state, rows, s, mask, start, mask_stride, n, n_keys):
        """As `weigh`, with biases of a mask, which for a row of the run begin at start + row * mask_stride. Hidden keys are UNSEEN."""
        lowest = -np.inf
        for go in range((n_weighed + threads - 1) // threads):
            item = thread_again() + go * threads
            if item < n_weighed:
                i, quarter, own = min(item // 4, n_queries - 1), item % 4, item // 4 < n_queries
                biases, seen = start + rows[min(i, n - 1)] * mask_stride, 0
                for part in range(4):
                    for c in range(4):
                        j = part * LANES + quarter * 4 + c
                        bias = mask[biases + j] if j < n_keys else _f(lowest)
                        s[part * 4 + c] = _f(lowest)
                        if own and bias > lowest:
                            s[part * 4 + c], seen = plus(scores[i * SPAN + j], bias), seen | 1 << part * 4 + c
                exponentials(state, i, own and quarter == 0, s)
                found = quad_max(_f(1.0) if seen else _f(0.0))
                if own and quarter == 0 and found == _f(0.0):
                    state[i * STATE + NEW] = UNSEEN
                if own:
                    for part in range(4):
                        for c in range(4):
                            is_seen = seen >> part * 4 + c & 1
                            scores[i * SPAN + part * LANES + quarter * 4 + c] = s[part * 4 + c] if is_seen else UNSEEN
        _fold_chunks(state, n_queries)

    @device
    def place():
        """The first query of this thread, where it weighs values, and the first of its numbers: none from `apart` or the width on."""
        thread = thread_again()
        item = thread // pair
        return thread % pair + item // (width_ // FOUR) * pair, item % (width_ // FOUR) * FOUR

    if shape.vectors and shape.halves:

        @device
        def four(v, start, left):
            """Four numbers from `start`. Of those past the `left` ones nothing is used."""
            return load_halves(v, start)

    elif shape.vectors:

        @device
        def four(v, start, left):
            return load_global(v, start, 0)

    else:

        @device
        def four(v, start, left):
            last = start + left - 1
            return (
                number(v, start),
                number(v, min(start + 1, last)),
                number(v, min(start + 2, last)),
                number(v, min(start + 3, last)),
            )

    @device
    def four_keys(v, start, k_stride, left):
        return (
            four(v, start, left),
            four(v, start + k_stride, left),
            four(v, start + 2 * k_stride, left),
            four(v, start + 3 * k_stride, left),
        )

    @device
    def add_keys(scores, first, j, v, sums):
        """Of four keys from number j of the chunk."""
        for i in range(own):
            p = load4(scores, (first + i * apart) * SPAN + j)
            for c in range(FOUR):
                total = fma(p[0], v[0][c], sums[i * FOUR + c])
                total = fma(p[1], v[1][c], total)
                total = fma(p[2], v[2][c], total)
                sums[i * FOUR + c] = fma(p[3], v[3][c], total)

    @device
    def values(scores, v, start, k_stride, n_keys, width, sums):
        """sums[i * 4 + c] = sum over the chunk's keys of weight of query first + i * apart times number d + c, one chain in key order."""
        first, d = place()
        for i in range(own * FOUR):
            sums[i] = _f(0.0)
        if first >= apart or d >= width:
            return
        start += d
        whole = n_keys - n_keys % 8
        if whole:
            these = four_keys(v, start, k_stride, width - d)
            for j in range(0, whole, 8):
                others = four_keys(v, start + (j + 4) * k_stride, k_stride, width - d)  # while these are used
                add_keys(scores, first, j, these, sums)
                these = four_keys(v, start + min(j + 8, whole - 8) * k_stride, k_stride, width - d)
                add_keys(scores, first, j + 4, others, sums)
        for j in range(whole, n_keys):
            value = four(v, start + j * k_stride, width - d)
            for i in range(own):
                p = scores[(first + i * apart) * SPAN + j]
                for c in range(FOUR):
                    sums[i * FOUR + c] = fma(p, value[c], sums[i * FOUR + c])

    @device
    def fold_values(total, state, part):
        """One more chunk, into the running sums of a thread's numbers."""
        first = place()[0] % apart
        for i in range(own):
            query = first + i * apart
            new = state[query * STATE + NEW]
            if new != UNSEEN:  # adding +0 instead would turn a -0 around
                old = state[query * STATE + OLD]
                for c in range(FOUR):
                    total[i * FOUR + c] = fma(total[i * FOUR + c], old, times(part[i * FOUR + c], new))

    @device
    def write(total, state, rows, row, head, group, n, queries, out):
        """All values of a run, divided by the sums of weights: zeros where no key was seen. On their way they take the place of queries."""
        width = out.shape[2]
        first, d = place()
        if first < apart and d < width:
            for i in range(own):
                for c in range(FOUR):
                    queries[(first + i * apart) * stride + d + c] = total[i * FOUR + c]
        syncthreads()
        for item in range(thread_again(), n * width_, threads):
            i, c = item // width_, item % width_
            if c < width:
                weight = state[i * STATE + WEIGHT]
                value = queries[i * stride + c] / weight if weight != _f(0.0) else _f(0.0)
                out[row + rows[i], head + i - rows[i] * group, c] = value

    return Steps(load_queries, bring_keys, score, weigh, weigh_masked, place, four, values, fold_values, write)


def sizes(shape: Shape) -> tuple[int, int, int, int, int, int]:
    """How many numbers there are: queries, keys, scores and state of a block, dot products and values of a thread."""
    n, keys = shape.queries, shape.buffers * shape.part
    return n * shape.stride, keys * shape.stride, n * SPAN, n * STATE, FOUR * shape.columns * FOUR, n // shape.apart * FOUR
