"""Attention without a [T, T] array: keys in chunks of CHUNK from position 0, in the contract's order.

Queries that read the same keys and values are computed together: the heads of a GQA group, for a run of rows. Each chunk of keys gives
them a maximum, a sum of weights and weighted values, which are folded into those of the earlier chunks.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .attention_chunk import chunk_scores, exponentials, hide_unseen, leave_out_hidden, maxima, sees_any, visible, weighted_values
from .fast.emit import LANES
from .fast.simd import fma, store_sums, tile_f32
from .launching import Floats, Ints, inlined, launch, parallel, read_only, serial, shared
from .numba_threads import get_num_threads
from .scalar import CHUNK, exp, first_chunk, round_to_half, soft_cap
from .tiles import SPAN, TOKENS, dot_tile
from .workspace import aligned_floats, empty

Factor = np.float32 | None

NO_WINDOW = 1 << 62
_MOST, _LEAST = 128, 32  # queries that share one reading of the keys and values they see
_SHARES = 4  # runs of rows for each thread, or their queries are fewer


# Functions that are called for each chunk and take these records are inlined: a call counts a reference to every array of a record.


class Inputs(NamedTuple):
    """What attention is computed from."""

    q: Any  # [R, H, K]
    k: Any  # [B, S, G, K]
    v: Any  # [B, S, G, K]
    slot: Any  # [R] the sequence of a row
    position: Any  # [R]
    scale: Any  # of q . k
    cap: Any  # of scores, 0 for none


class Run(NamedTuple):
    """Rows that are consecutive positions of one sequence, and the heads of them that read one key-value head.

    Query i of a run is head g * group + i % group of row first + i // group.
    """

    first: Any  # row
    end: Any  # the row after the last
    g: Any  # key-value head
    group: Any  # heads that read it


class Room(NamedTuple):
    """The memory that a run is computed in. n is its number of queries, and N is n rounded up to whole tiles."""

    queries: Any  # [N, K]; those that only fill a tile are 0
    ends: Any  # [tiles] of one chunk: how many of its keys any query of the tile sees
    seen: Any  # [n] 1 if a query sees a key of the chunk, else 0
    scores: Any  # [N, CHUNK] of the chunk; then the weights
    top: Any  # [N] the largest score of the chunk
    sums: Any  # [N] of exp(score - top)
    part: Any  # [N, whole tiles of K]: the sums of the chunk's values, each times its exp(score - top)
    largest: Any  # [n] score of all chunks so far
    weight: Any  # [n] sum of exp(score - largest)
    values: Any  # [n, K]


@inlined
def _new_room(q, run):
    n, width = (run.end - run.first) * run.group, q.shape[2]
    padded = -(-n // TOKENS) * TOKENS
    queries, scores = aligned_floats(padded, width), aligned_floats(padded, CHUNK)
    for i in range(padded):
        for d in range(width):
            queries[i, d] = q[run.first + i // run.group, run.g * run.group + i % run.group, d] if i < n else np.float32(0.0)
        for j in range(CHUNK):
            scores[i, j] = 0
    ends, (seen, top, sums) = np.empty(padded // TOKENS, np.int64), np.empty((3, padded), np.float32)
    part, largest = aligned_floats(padded, -(-width // SPAN) * SPAN), np.full(n, -np.inf, np.float32)
    weight, values = np.zeros(n, np.float32), np.zeros((n, width), np.float32)
    return Room(queries, ends, seen, scores, top, sums, part, largest, weight, values)


# `mask` is rows of biases [T, S], by the position of a query, or None: then a query sees the last `window` keys. Numba compiles either.


@inlined
def _attend_chunk(inputs, window, mask, run, key, end, room):
    """Work out what the queries of a run get from the chunk that begins with number `key` of their keys, which end at `end`."""
    n, width, scores, ends = room.weight.size, room.queries.shape[1], room.scores, room.ends
    position, (_, places, heads, _) = inputs.position, inputs.k.shape
    start, stride = ((inputs.slot[run.first] * places + key) * heads + run.g) * width, heads * width
    end = min(key + CHUNK, end)
    ends[:] = end - key
    if mask is None:
        for tile in range(ends.size):
            last = min(n, (tile + 1) * TOKENS) - 1  # the query that sees the latest keys
            ends[tile] = max(0, visible(position[run.first + last // run.group], window, key)[1])
    chunk_scores(room.queries, width, inputs.k, inputs.v, start, stride, ends, inputs.scale, scores)
    if inputs.cap > 0:
        for i in range(scores.shape[0]):
            for j in range(CHUNK):
                scores[i, j] = soft_cap(scores[i, j], inputs.cap)
    for i in range(n):
        room.seen[i] = hide_unseen(scores, i, position[run.first + i // run.group], window, mask, key, end)
    maxima(scores, room.top)
    exponentials(scores, room.top[:n], room.sums)  # the scores are weights from here on
    weighted_values(scores, scores.shape[0], CHUNK, 1, ends, inputs.v, start, stride, width, room.part)
    if mask is not None:
        leave_out_hidden(scores[:n], mask, position[run.first], inputs.v[inputs.slot[run.first]], key, end, run, room.part)


@inlined
def _fold(room):
    """Fold one more chunk into the results so far. Afterwards `top` and `sums` hold the factors of the old and the new values."""
    seen, top, sums, largest, weight, values = room.seen, room.top, room.sums, room.largest, room.weight, room.values
    for i in range(weight.size):
        after = max(largest[i], top[i])
        old, new = exp(np.float32(largest[i] - after)), exp(np.float32(top[i] - after))
        weight[i] = fma(weight[i], old, np.float32(sums[i] * new)) if seen[i] else weight[i]
        largest[i] = after
        top[i], sums[i] = old, new
    for i in range(weight.size):
        if seen[i]:  # adding +0 instead would turn a -0 around
            old, new = top[i], sums[i]
            for d in range(values.shape[1]):
                values[i, d] = fma(values[i, d], old, np.float32(room.part[i, d] * new))


@serial
def _attend_together(inputs, window, mask, run, out):
    """Attention of a run.

    Returns whether there is NaN in the result: by the rule a later position's values, times the 0 of a row that does not see them, are in
    it too. A query that sees nothing gets 0; every other one has a weight of at least 1.
    """
    first, end = inputs.position[run.first], inputs.position[run.end - 1] + 1
    if mask is not None:
        end = mask.shape[1]
    room, nan = _new_room(inputs.q, run), np.int32(0)
    for key in range(first_chunk(first, window) * CHUNK, end, CHUNK):
        if mask is None or sees_any(mask, first, run.end - run.first, key, min(key + CHUNK, end)):
            _attend_chunk(inputs, window, mask, run, key, end, room)
            _fold(room)
    for i in range(room.values.shape[0]):
        for d in range(room.values.shape[1]):
            attended = room.values[i, d] / room.weight[i] if room.weight[i] != 0 else np.float32(0.0)
            out[run.first + i // run.group, run.g * run.group + i % run.group, d] = attended
            nan |= np.int32(attended != attended)
    return nan != 0


@serial
def tiles_of(slot, position, most):
    """The first row of each tile, and the end. Each tile is at most `most` rows, of consecutive positions of one sequence."""
    cuts = np.empty(slot.size + 1, np.int64)
    n = 0
    for r in range(slot.size):
        if r == 0 or slot[r] != slot[r - 1] or position[r] != position[r - 1] + 1 or r - cuts[n - 1] == most:
            cuts[n] = r
            n += 1
    cuts[n] = slot.size
    return cuts[: n + 1].copy()


@parallel
def _attend(team, q, k, v, slot, position, per_tile, scale, cap, window, mask, out):
    """By the rule, but without a mask a later position's NaN or infinity reaches no row: if there is any, rows are taken one by one."""
    group, tiles = q.shape[1] // k.shape[2], tiles_of(slot, position, per_tile)
    n = tiles.size - 1
    inputs = Inputs(q, k, v, slot, position, scale, cap)
    for item in shared(team, n * k.shape[2]):  # head by head: the keys of one may fit a cache that those of all do not
        g, i = item // n, item % n
        t = n - 1 - i // 2 if i % 2 else i // 2  # late rows see more keys: give each thread early and late ones
        run = Run(tiles[t], tiles[t + 1], g, group)
        if mask is not None:
            _attend_together(inputs, window, mask[min(slot[run.first], mask.shape[0] - 1)], run, out)
        elif _attend_together(inputs, window, None, run, out):
            for r in range(run.first, run.end):
                _attend_together(inputs, window, None, Run(r, r + 1, g, group), out)


def chunks_touched(keys: int) -> int:
    """The largest number of chunks that `keys` consecutive keys can touch."""
    return -(-(keys - 1) // CHUNK) + 1


def rows_of_tile(rows: int, heads: int, group: int, most: int = _LEAST) -> int:
    """The rows that a tile has at most. Their queries, `group` of each, share one reading of keys and values.

    These are `most` at most, or fewer, so that threads have tiles of `heads` heads to share.
    """
    queries = rows * group * heads // _SHARES
    if queries > _LEAST:  # asking for the number of threads takes as long as a small kernel
        queries = min(most, queries // get_num_threads())
    return max(1, max(_LEAST, queries) // group)


def attend(
    q: Floats, k: Floats, v: Floats, slot: Ints, position: Ints, window: int | None = None, scale: Factor = None, cap: Factor = None
) -> Floats:  # [R, H, K], [B, S, G, K] x 2, [R], [R] -> [R, H, K]
    """Row r attends to keys 0..position[r] of sequence slot[r], or to the last `window` of them.

    scale: multiplies q . k; None: 1 / sqrt(K). cap: scores s become cap * tanh(s / cap).

    There is no mask array and no [T, S] buffer.
    """
    out = empty(q.shape)
    heads, group = k.shape[2], q.shape[1] // k.shape[2]
    per_tile = rows_of_tile(len(q), heads, group, _MOST)
    window = window or NO_WINDOW
    scores = scale_and_cap(q.shape[2], scale, cap)
    work = q.size * most_keys(position, window) // 8
    launch(_attend, work, q, k, v, slot, position, per_tile, *scores, window, None, out)
    return out


def attend_masked(
    q: Floats, k: Floats, v: Floats, slot: Ints, position: Ints, mask: Floats, scale: Factor = None, cap: Factor = None
) -> Floats:  # [R, H, K], [B, S, G, K] x 2, [R], [R], [1 or B, T, S'] -> [R, H, K]
    """Attention by an additive mask: row r adds mask[slot[r] or 0, position[r]] to its scores of keys 0..S' of sequence slot[r].

    The order is the contract's, by absolute position. Keys hidden by -infinity are passed over, and a row that sees none gives zeros. With
    a causal mask these are the bits of `attend`, which explains `scale` and `cap`.
    """
    out, scores = empty(q.shape), scale_and_cap(q.shape[2], scale, cap)
    per_tile = rows_of_tile(len(q), k.shape[2], q.shape[1] // k.shape[2])
    mask = read_only(np.ascontiguousarray(mask))
    launch(_attend, q.size * mask.shape[2] // 8, q, k, v, slot, position, per_tile, *scores, NO_WINDOW, mask, out)
    return out


def most_keys(position: Ints, window: int = NO_WINDOW) -> int:
    """A number of keys that no row exceeds: `window`, or a power of two, which stays the same for many consecutive tokens."""
    return min(1 << int(position.max()).bit_length(), window)


@lru_cache
def inverse_root(width: int) -> np.float32:
    """1 / sqrt(K), the scale of scores where a model does not state another."""
    return np.float32(1.0) / np.sqrt(np.float32(width))


def scale_and_cap(width: int, scale: Factor, cap: Factor) -> tuple[np.float32, np.float32]:
    """The scale and the cap of scores as kernels take them: by default 1 / sqrt(K), and 0 for no cap."""
    return inverse_root(width) if scale is None else scale, cap or np.float32(0)


@parallel
def _attend_float16(team, q, k, v, slot, position, scale, cap, window, out):
    heads, width, places = q.shape[1], q.shape[2], k.shape[1]
    for item in shared(team, q.shape[0] * heads):
        r, h = item // heads, item % heads
        g, first = h // (heads // k.shape[2]), max(0, position[r] - window + 1)
        n, largest = position[r] + 1 - first, np.float32(-np.inf)
        p, sums, total = np.empty(n, np.float32), np.empty(LANES, np.float32), np.zeros(width, np.float64)
        for j in range(n):
            key = ((slot[r] * places + first + j) * k.shape[2] + g) * width
            store_sums(dot_tile(tile_f32(1, 1), k, key, 0, 1, q, item * width, 0, 1, width), sums)
            p[j] = soft_cap(np.float32(sums[0] * scale), cap) if cap > 0 else sums[0] * scale
            largest = max(largest, p[j])
        weight = 0.0
        for j in range(n):
            p[j] = exp(np.float32(p[j] - largest))
            weight += p[j]
        factor = np.float32(1.0) / np.float32(weight)
        for j in range(n):
            half = np.float64(round_to_half(np.float32(p[j] * factor)))
            row = v[slot[r], first + j, g]
            for d in range(width):
                total[d] += half * row[d]
        for d in range(width):
            out[r, h, d] = total[d]


def attend_float16(
    q: Floats, k: Floats, v: Floats, slot: Ints, position: Ints, window: int | None = None, scale: Factor = None, cap: Factor = None
) -> Floats:  # [R, H, K], [B, S, G, K] x 2, [R], [R] -> [R, H, K]
    """`attend` for an engine that rounds probabilities to float16 before it sums the values: plain loops, and sums in float64.

    With q, k and v rounded too, no rounding but float16's shows in the result, whatever order the engine sums in. Keys and values may be
    bits of float16 (int16), which are widened first.
    """
    if k.dtype == np.int16:
        end = int(position.max()) + 1
        k, v = (array[:, :end].view(np.float16).astype(np.float32) for array in (k, v))
    out = empty(q.shape)
    window = window or NO_WINDOW
    scores = scale_and_cap(q.shape[2], scale, cap)
    launch(_attend_float16, q.size * most_keys(position, window) // 8, q, k, v, slot, position, *scores, window, out)
    return out
