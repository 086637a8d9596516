"""Attention without a [T, T] array: keys in chunks of CHUNK from position 0, in the contract's order."""

from functools import lru_cache

import numpy as np
from numba import get_num_threads, prange
from numpy.typing import NDArray

from .launching import Floats, launch, parallel, serial
from .scalar import CHUNK, exp, round_to_half
from .simd import LANES, axpy_step, axpy_tail, fma, prefetch, store_products, store_sums, store_tile, tile_f32
from .sums import fold_lanes
from .tiles import ROWS, SPAN, TOKENS, VALUE_COLUMNS, dot_tile
from .workspace import empty

NO_WINDOW = 1 << 62
_AHEAD = 12  # keys that are asked for ahead of time
_QUERIES = 32  # that share one reading of the keys and values they see
_LONG = 256  # keys, from which on a row's are shared out when threads have fewer than two heads each
UNSEEN = np.float32(-1.0)  # marks a query that sees no key of a chunk, where a weight cannot be negative


@serial
def ask_for(rows, start, stride, width, count):
    """Prefetch the first `width` elements of `count` rows: pieces that lie apart, of which the processor foresees no more than one."""
    for row in range(count):
        for i in range(0, width, LANES):
            prefetch(rows, start + row * stride + i)


@serial
def chunk_scores(queries, width, keys, values, key_start, key_stride, n_keys, scale, scores):
    """scores[i, j] = query i . key j * scale, for the keys of one chunk. Queries, and keys past the last, are padded to whole tiles.

    Few queries wait for memory: keys are asked for ahead of time, and values, which come next.
    """
    few = queries.shape[0] <= TOKENS
    for j in range(0, n_keys, ROWS):
        n_j, start = min(ROWS, n_keys - j), key_start + j * key_stride
        if few:
            ask_for(keys, start + _AHEAD * key_stride, key_stride, width, n_j)
            ask_for(values, start, key_stride, width, n_j)
        for i in range(0, queries.shape[0], TOKENS):
            tile = dot_tile(tile_f32(ROWS, TOKENS), keys, start, key_stride, n_j, queries, i * width, width, TOKENS, width)
            store_products(tile, scale, scores, i * CHUNK + j, CHUNK)


@serial
def _largest_score(scores, low, high, lanes):
    """The largest of scores[low:high], and -infinity elsewhere. Its order is free; sixteen at a time keeps it in vector registers."""
    for i in range(LANES):
        lanes[i] = -np.inf
    for j in range(0, CHUNK, LANES):
        for i in range(LANES):
            score = scores[j + i] if low <= j + i < high else np.float32(-np.inf)
            scores[j + i] = score
            lanes[i] = score if score > lanes[i] else lanes[i]
    largest = lanes[0]
    for i in range(LANES):
        largest = lanes[i] if lanes[i] > largest else largest
    return largest


@serial
def exponentials(scores, largest, lanes):
    """scores -> exp(score - largest), which makes 0 of -infinity; their sum by the lane rule."""
    for i in range(LANES):
        lanes[i] = 0
    for j in range(0, CHUNK, LANES):
        for i in range(LANES):
            e = exp(np.float32(scores[j + i] - largest))
            scores[j + i] = e
            lanes[i] += e
    return fold_lanes(lanes, LANES)


@serial
def chunk_values(p, n_keys, values, value_start, value_stride, width, out):
    """out[i] = sum over keys of p[i, j] * value j, one chain per element in key order. Rows of `out` are padded to whole tiles."""
    for i in range(0, p.shape[0], TOKENS):
        n_i = min(TOKENS, p.shape[0] - i)
        for d in range(0, width, SPAN):
            tile = tile_f32(TOKENS, VALUE_COLUMNS)
            start = value_start + d
            if width - d >= SPAN:
                for j in range(n_keys):
                    tile = axpy_step(tile, p, i * CHUNK + j, CHUNK, n_i, values, start + j * value_stride, SPAN)
            else:
                for j in range(n_keys):
                    tile = axpy_tail(tile, p, i * CHUNK + j, CHUNK, n_i, values, start + j * value_stride, width - d)
            store_tile(tile, out, i * out.shape[1] + d, out.shape[1])


@serial
def visible(position, window, first_key):
    """Which keys of the chunk that begins at first_key a query at `position` sees: low..high. A window counts the query itself."""
    low = max(0, position - window + 1 - first_key)
    high = min(CHUNK, position + 1 - first_key)
    return low, high


@serial
def first_chunk(position, window):
    """The first of which a query at `position` sees a key."""
    return max(0, position - window + 1) // CHUNK


@serial
def tile_queries(q, first, end, g, group):
    """The queries of rows first..end that read key-value head g, padded to whole tiles: number i is head g * group + i % group of row
    first + i // group."""
    width = q.shape[2]
    n = (end - first) * group
    queries = np.zeros((-(-n // TOKENS) * TOKENS, width), np.float32)
    for i in range(n):
        for d in range(width):
            queries[i, d] = q[first + i // group, g * group + i % group, d]
    return queries


@serial
def part_like(queries):
    """For `chunk_values`: its rows are padded to whole tiles."""
    return np.empty((queries.shape[0], -(-queries.shape[1] // SPAN) * SPAN), np.float32)


@serial
def _attend_chunk(queries, k, v, start, stride, n_keys, position, first, group, key, window, scale, scores, lanes, largest, weight, part):
    """What queries get from the chunk of keys that begins with number `key`, at `start` of k and v: the largest score of those they see,
    their weight or UNSEEN, and their part of the values."""
    width = queries.shape[1]
    chunk_scores(queries, width, k, v, start, stride, n_keys, scale, scores)
    for i in range(weight.size):
        low, high = visible(position[first + i // group], window, key)
        largest[i] = _largest_score(scores[i], low, high, lanes)
        here = exponentials(scores[i], largest[i], lanes)
        weight[i] = here if high > low else UNSEEN
    chunk_values(scores, n_keys, v, start, stride, width, part)


@serial
def fold(largest_here, weight_here, part, largest, weight, total):
    """Fold what queries get from one more chunk into what they have."""
    for i in range(weight.size):
        if weight_here[i] != UNSEEN:  # adding +0 instead would turn a -0 around
            after = max(largest[i], largest_here[i])
            old, new = exp(np.float32(largest[i] - after)), exp(np.float32(largest_here[i] - after))
            weight[i] = fma(weight[i], old, np.float32(weight_here[i] * new))
            largest[i] = after
            for d in range(total.shape[1]):
                total[i, d] = fma(total[i, d], old, np.float32(part[i, d] * new))


@serial
def store_attended(total, weight, first, g, group, out):
    """What has been folded, divided by its weight. A query that saw nothing has none: its weights' largest is 1 otherwise.

    Returns whether there is NaN in it.
    """
    nan = np.int32(0)
    for i in range(total.shape[0]):
        for d in range(total.shape[1]):
            attended = total[i, d] / weight[i] if weight[i] != 0 else np.float32(0.0)
            out[first + i // group, g * group + i % group, d] = attended
            nan |= np.int32(attended != attended)
    return nan != 0


@serial
def _attend_together(q, k, v, slot, position, first, end, g, scale, window, out):
    """Rows first..end, which are consecutive positions of one sequence, against key-value head g of that sequence.

    Position p is in place p % S of k and v. S is more than every position, or a multiple of CHUNK (a ring): no chunk is torn apart.
    Returns whether there is NaN in the result: a later position's values, times the 0 of a row that does not see them, are in it too.
    """
    width = q.shape[2]
    group = q.shape[1] // k.shape[2]
    stride = k.shape[2] * width
    base = slot[first] * k.shape[1] * stride + g * width

    n, queries = (end - first) * group, tile_queries(q, first, end, g, group)
    part = part_like(queries)
    scores, lanes = np.zeros((queries.shape[0], CHUNK), np.float32), np.empty(LANES, np.float32)
    largest_here, weight_here = np.empty(n, np.float32), np.empty(n, np.float32)
    largest, weight, total = np.full(n, -np.inf, np.float32), np.zeros(n, np.float32), np.zeros((n, width), np.float32)
    for chunk in range(first_chunk(position[first], window), position[end - 1] // CHUNK + 1):
        key = chunk * CHUNK
        n_keys = min(CHUNK, position[end - 1] + 1 - key)
        start = base + key % k.shape[1] * stride
        here = largest_here, weight_here, part
        _attend_chunk(queries, k, v, start, stride, n_keys, position, first, group, key, window, scale, scores, lanes, *here)
        fold(largest_here, weight_here, part, largest, weight, total)
    return store_attended(total, weight, first, g, group, out)


@serial
def _attend_tile(q, k, v, slot, position, first, end, g, scale, window, out):
    """As `_attend_together`, but a later position's NaN or infinity reaches no row: if there is any, each row is taken by itself."""
    if _attend_together(q, k, v, slot, position, first, end, g, scale, window, out):
        for r in range(end - first):
            _attend_together(q, k, v, slot, position, first + r, first + r + 1, g, scale, window, out)


@parallel
def _attend(q, k, v, slot, position, tiles, scale, window, out):
    n = (tiles.size - 1) * k.shape[2]
    for item in prange(n):
        mirrored = n - 1 - item // 2 if item % 2 else item // 2  # late rows see more keys: give each thread early and late ones
        t, g = mirrored // k.shape[2], mirrored % k.shape[2]
        _attend_tile(q, k, v, slot, position, tiles[t], tiles[t + 1], g, scale, window, out)


@parallel
def _attend_split(q, k, v, slot, position, scale, window, largest, weight, part, out):
    """As `_attend`, for rows that stand alone: cut between chunks of keys, so that threads share out a single row."""
    rows, heads, group = q.shape[0], k.shape[2], q.shape[1] // k.shape[2]
    width, chunks = q.shape[2], largest.shape[1]
    for item in prange(rows * chunks * heads):
        r, chunk, g = item // (chunks * heads), item // heads % chunks, item % heads
        key = (first_chunk(position[r], window) + np.int64(chunk)) * CHUNK
        n_keys = min(CHUNK, position[r] + 1 - key)
        if n_keys > 0:
            queries = tile_queries(q, r, r + 1, g, group)
            scores, lanes = np.zeros((queries.shape[0], CHUNK), np.float32), np.empty(LANES, np.float32)
            start = ((slot[r] * k.shape[1] + key % k.shape[1]) * heads + g) * width
            here = largest[r, chunk, g], weight[r, chunk, g], part[r, chunk, g]
            _attend_chunk(queries, k, v, start, heads * width, n_keys, position, r, group, key, window, scale, scores, lanes, *here)
    for item in prange(rows * heads):
        r, g = item // heads, item % heads
        folded = np.full(group, -np.inf, np.float32), np.zeros(group, np.float32), np.zeros((group, width), np.float32)
        for chunk in range(position[r] // CHUNK - first_chunk(position[r], window) + 1):
            fold(largest[r, chunk, g], weight[r, chunk, g], part[r, chunk, g], *folded)
        store_attended(folded[2], folded[1], r, g, group, out)


@serial
def _query_tiles(slot, position, limit):
    """Where to cut the rows so that each piece is at most `limit` consecutive positions of one sequence: first rows, and the end."""
    cuts = np.empty(slot.size + 1, np.int64)
    n = 0
    for r in range(slot.size):
        if r == 0 or slot[r] != slot[r - 1] or position[r] != position[r - 1] + 1 or r - cuts[n - 1] == limit:
            cuts[n] = r
            n += 1
    cuts[n] = slot.size
    return cuts[: n + 1].copy()


def chunks_touched(keys: int) -> int:
    """Chunks that so many consecutive keys lie in, at most."""
    return -(-(keys - 1) // CHUNK) + 1


def query_tiles(slot: NDArray[np.int64], position: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    """Rows whose queries, `group` of each, share one reading of their keys and values: the first of each tile, and the end."""
    return _query_tiles(slot, position, max(1, _QUERIES // group))


def attend(q: Floats, k: Floats, v: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], window: int | None = None) -> Floats:
    # [R, H, K], [B, S, G, K] x 2, [R], [R] -> [R, H, K]
    """Row r attends to keys 0..position[r] of sequence slot[r], or to the last `window` of them; scale 1/sqrt(K).

    There is no mask array and no [T, S] buffer. Position p is in place p % S: with a window k and v may be rings of S positions, S a
    multiple of CHUNK, which hold all chunks that a call's rows see.
    """
    out = empty(q.shape)
    heads, group = k.shape[2], q.shape[1] // k.shape[2]
    tiles = query_tiles(slot, position, group)
    window = window or NO_WINDOW
    longest = _longest(position, window)
    work = q.size * longest // 8
    alone = tiles.size == len(q) + 1 and len(q) * heads < 2 * get_num_threads()
    if alone and longest >= _LONG:
        chunks = chunks_touched(longest)
        part = empty((len(q), chunks, heads, -(-group // TOKENS) * TOKENS, -(-q.shape[2] // SPAN) * SPAN))
        sums = empty((2, len(q), chunks, heads, group))
        launch(_attend_split, work, q, k, v, slot, position, scale_of(q), window, *sums, part, out)
    else:
        launch(_attend, work, q, k, v, slot, position, tiles, scale_of(q), window, out)
    return out


def _longest(position: NDArray[np.int64], window: int) -> int:
    """How many keys the row sees that sees most."""
    return min(int(position.max()) + 1, window)


def scale_of(q: Floats) -> np.float32:
    return _inverse_root(q.shape[2])


@lru_cache
def _inverse_root(width: int) -> np.float32:
    return np.float32(1.0) / np.sqrt(np.float32(width))


@parallel
def _attend_halves(q, k, v, slot, position, scale, window, out):
    heads, width, places = q.shape[1], q.shape[2], k.shape[1]
    stride = k.shape[2] * width
    for item in prange(q.shape[0] * heads):
        r, h = item // heads, item % heads
        g = h // (heads // k.shape[2])
        first = max(0, position[r] - window + 1)
        n = position[r] + 1 - first
        p, sums, total = np.empty(n, np.float32), np.empty(LANES, np.float32), np.empty(width, np.float64)
        largest = np.float32(-np.inf)
        for j in range(n):
            key = (slot[r] * places + (first + j) % places) * stride + g * width
            store_sums(dot_tile(tile_f32(1, 1), k, key, 0, 1, q, (r * heads + h) * width, 0, 1, width), sums)
            p[j] = sums[0] * scale
            largest = max(largest, p[j])
        weight = 0.0
        for j in range(n):
            p[j] = exp(np.float32(p[j] - largest))
            weight += p[j]
        factor = np.float32(1.0) / np.float32(weight)
        for d in range(width):
            total[d] = 0
        for j in range(n):
            half = np.float64(round_to_half(np.float32(p[j] * factor)))
            row = v[slot[r], (first + j) % places, g]
            for d in range(width):
                total[d] += half * row[d]
        for d in range(width):
            out[r, h, d] = total[d]


def attend_halves(
    q: Floats, k: Floats, v: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], window: int | None = None
) -> Floats:
    # [R, H, K], [B, S, G, K] x 2, [R], [R] -> [R, H, K]
    """`attend` for an engine that rounds probabilities to float16 before it sums the values: plain loops, and sums in float64.

    With q, k and v rounded too, no rounding but float16's shows in the result, whatever order the engine sums in. Keys and values that are
    float16's bits are widened first.
    """
    if k.dtype == np.int16:
        end = int(position.max()) + 1
        k, v = (array[:, :end].view(np.float16).astype(np.float32) for array in (k, v))
    out = empty(q.shape)
    window = window or NO_WINDOW
    launch(_attend_halves, q.size * _longest(position, window) // 8, q, k, v, slot, position, scale_of(q), window, out)
    return out
