"""Kernels for mask arrays: filling them, and attention by one.

The rule for one query is `visible_keys`; whatever fills a mask, on whatever device, asks it.
"""

from typing import Any

import numpy as np
from numba import prange
from numpy.typing import NDArray

from .attention import (
    UNSEEN,
    chunk_scores,
    chunk_values,
    exponentials,
    fold,
    part_like,
    query_tiles,
    scale_of,
    store_attended,
    tile_queries,
)
from .launching import Floats, launch, parallel, read_only, rule, serial
from .scalar import CHUNK
from .simd import LANES, float_bits, fma
from .workspace import empty


@rule
def visible_keys(position, window, prefix, block, sinks):
    """Which keys a query at `position` sees: 0..head and low..high. 0 stands for no window, no prefix, no blocks, no sinks."""
    high = position + 1
    low = max(0, high - window) if window else 0
    if block:
        low = max(low, position // block * block)
    return max(prefix, min(sinks, high)), low, high


@parallel
def _fill_mask(first, queries, past, keys, window, prefix, block, sinks, seen, hidden, out):
    n = out.shape[1]
    for item in prange(out.shape[0] * n):
        b, r = item // n, item % n
        row = out[b, r]
        a, low, c = 0, 0, 0
        if first + r < queries[b]:
            a, low, c = visible_keys(past[b] + first + r, window, prefix, block, sinks)
        a = min(a, keys[b])  # a prefix may be longer than the sequence; nothing else reaches past its keys
        low = max(low, a)
        c = max(c, low)
        for i in range(row.size):  # one plain loop over everything stays in vector registers
            row[i] = hidden if (i >= c) | ((i >= a) & (i < low)) else seen


# dtype -> the integers of its size, and the bits of "seen" and "hidden": Numba has no float16 on the CPU
_BITS: dict[np.dtype, tuple[Any, int, int]] = {
    np.dtype(np.bool_): (np.uint8, 1, 0),
    np.dtype(np.float16): (np.int16, 0, int(np.float16(-np.inf).view(np.int16))),
    np.dtype(np.float32): (np.int32, 0, int(np.float32(-np.inf).view(np.int32))),
    np.dtype(np.float64): (np.int64, 0, int(np.float64(-np.inf).view(np.int64))),
}


def fill_mask(
    out: NDArray,
    first: int,
    queries: NDArray[np.int64],
    past: NDArray[np.int64],
    keys: NDArray[np.int64],
    window: int,
    prefix: int,
    block: int,
    sinks: int,
) -> None:  # [B, Q, K], [B] x 3
    """Fill rows `first` and on of the masks of B sequences: True and False, or 0 and -infinity.

    Sequence b has queries[b] queries at positions past[b] and on, and keys[b] keys. Rows and columns beyond those see nothing and are
    seen by nothing.
    """
    integer, seen, hidden = _BITS[out.dtype]
    pattern = window, prefix, block, sinks
    launch(_fill_mask, out.size // 8, first, queries, past, keys, *pattern, integer(seen), integer(hidden), out.view(integer))


@serial
def _sees_any(mask, start, rows, first, end):
    """Whether one of some rows of a mask shows one of its keys first..end."""
    found = np.int32(0)
    for r in range(rows):
        biases = mask[start + r, first:end]
        for j in range(biases.size):
            found |= np.int32(biases[j] > -np.inf)
    return found != 0


@serial
def _add_biases(scores, biases, lanes):
    """scores[j] + biases[j], and -infinity where that hides the key or there is none; the largest of them, and whether a key is seen."""
    for i in range(LANES):
        lanes[i] = -np.inf
    n, found = biases.size, np.int32(0)
    for j in range(0, CHUNK, LANES):
        for i in range(LANES):
            bias = biases[j + i] if j + i < n else np.float32(-np.inf)
            found |= np.int32(bias > -np.inf)
            score = np.float32(scores[j + i] + bias) if bias > -np.inf else np.float32(-np.inf)
            scores[j + i] = score
            lanes[i] = score if score > lanes[i] else lanes[i]
    largest = lanes[0]
    for i in range(LANES):
        largest = lanes[i] if lanes[i] > largest else largest
    return largest, found != 0


@serial
def _all_finite(values, first, n_keys, g):
    """Whether a probability of 0 makes 0 of each value of some keys."""
    largest = np.int32(0)
    for j in range(n_keys):
        row = values[first + j, g]
        for d in range(row.size):
            largest = max(largest, np.int32(float_bits(row[d]) & 0x7F800000))
    return largest < 0x7F800000


@serial
def _seen_values(p, mask, start, group, values, first, n_keys, g, part):
    """As `chunk_values`, key by key, so that what is hidden is not touched: the same bits where values are finite."""
    for i in range(p.shape[0]):
        biases = mask[start + i // group, first : first + n_keys]
        for d in range(values.shape[2]):
            part[i, d] = 0
        for j in range(n_keys):
            if biases[j] > -np.inf:
                row = values[first + j, g]
                for d in range(row.size):
                    part[i, d] = fma(p[i, j], row[d], part[i, d])


@serial
def _masked_tile(q, k, v, slot, position, first, end, g, mask, scale, out):
    """As `attention._attend_together`, with rows of a mask instead of the rule."""
    width, keys = q.shape[2], mask.shape[1]
    group, stride = q.shape[1] // k.shape[2], k.shape[2] * width
    base, start = slot[first] * k.shape[1] * stride + g * width, position[first]
    n, queries = (end - first) * group, tile_queries(q, first, end, g, group)
    part = part_like(queries)
    scores, lanes = np.zeros((queries.shape[0], CHUNK), np.float32), np.empty(LANES, np.float32)
    largest_here, weight_here = np.empty(n, np.float32), np.empty(n, np.float32)
    largest, weight, total = np.full(n, -np.inf, np.float32), np.zeros(n, np.float32), np.zeros((n, width), np.float32)
    for chunk in range((keys + CHUNK - 1) // CHUNK):
        key = chunk * CHUNK
        n_keys = min(CHUNK, keys - key)
        if _sees_any(mask, start, end - first, key, key + n_keys):
            chunk_scores(queries, width, k, v, base + key * stride, stride, n_keys, scale, scores)
            for i in range(n):
                largest_here[i], seen = _add_biases(scores[i], mask[start + i // group, key : key + n_keys], lanes)
                here = exponentials(scores[i], largest_here[i], lanes)
                weight_here[i] = here if seen else UNSEEN
            if _all_finite(v[slot[first]], key, n_keys, g):
                chunk_values(scores, n_keys, v, base + key * stride, stride, width, part)
            else:
                _seen_values(scores[:n], mask, start, group, v[slot[first]], key, n_keys, g, part)
            fold(largest_here, weight_here, part, largest, weight, total)
    store_attended(total, weight, first, g, group, out)


@parallel
def _attend_masked(q, k, v, slot, position, tiles, mask, scale, out):
    heads = k.shape[2]
    for item in prange((tiles.size - 1) * heads):
        first, end = tiles[item // heads], tiles[item // heads + 1]
        biases = mask[min(slot[first], mask.shape[0] - 1)]
        _masked_tile(q, k, v, slot, position, first, end, item % heads, biases, scale, out)


def attend_masked(q: Floats, k: Floats, v: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], mask: Floats) -> Floats:
    # [R, H, K], [B, S, G, K] x 2, [R], [R], [1 or B, T, S'] -> [R, H, K]
    """Attention by an additive mask: row r adds mask[slot[r] or 0, position[r]] to its scores of keys 0..S' of sequence slot[r].

    In the contract's order, by absolute position; keys hidden by -infinity are passed over, a row that sees none gives zeros. With a
    causal mask these are the bits of `cpu.attend`.
    """
    out = empty(q.shape)
    tiles = query_tiles(slot, position, q.shape[1] // k.shape[2])
    work = q.size * mask.shape[2] // 8
    launch(_attend_masked, work, q, k, v, slot, position, tiles, read_only(np.ascontiguousarray(mask)), scale_of(q), out)
    return out
