"""Attention of some queries to one chunk of keys: scores, weights, and weighted sums of values, in the contract's order.

Queries come in tiles of TOKENS. `ends` has, for each tile, how many of the chunk's keys any of its queries sees: the others cost nothing.
"""

import numpy as np

from .fast.emit import LANES
from .fast.simd import (
    address_of,
    axpy_step,
    axpy_tail,
    float_bits,
    fma,
    load_tile,
    pointer_to,
    prefetch,
    store_products,
    store_row_maxima,
    store_row_sums,
    store_tile,
    tile_f32,
)
from .launching import inlined, serial
from .scalar import CHUNK, exp
from .tiles import ROWS, SPAN, TOKENS, VALUE_COLUMNS, dot_tile

_AHEAD = 12  # keys by which prefetches run ahead
_TOGETHER = 32  # queries that one tile of keys after another is multiplied by: they stay in the first cache
_REGISTERS = CHUNK // LANES


@serial
def ask_for(rows, start, stride, width, count):
    """Prefetch the first `width` elements of `count` rows. They lie apart, and the processor foresees no more than one such piece."""
    for row in range(count):
        for i in range(0, width, LANES):
            prefetch(rows, start + row * stride + i)


@serial
def chunk_scores(queries, width, keys, values, key_start, key_stride, ends, scale, scores):
    """scores[i, j] = query i . key j * scale, for the keys of one chunk; those that no query of a tile sees keep what was there.

    Keys are prefetched, and so are the values, which come next.
    """
    n = queries.shape[0]
    query, key, value, score = pointer_to(queries), pointer_to(keys), pointer_to(values), pointer_to(scores)
    for first in range(0, n, _TOGETHER):
        end = min(n, first + _TOGETHER)
        n_keys = ends[first // TOKENS]
        for i in range(first, end, TOKENS):
            n_keys = max(n_keys, ends[i // TOKENS])
        for j in range(0, n_keys, ROWS):
            n_j, start = min(ROWS, n_keys - j), key_start + j * key_stride
            if first == 0:
                ask_for(key, start + _AHEAD * key_stride, key_stride, width, n_j)
                ask_for(value, start, key_stride, width, n_j)
            for i in range(first, end, TOKENS):
                if j < ends[i // TOKENS]:
                    tile = dot_tile(tile_f32(ROWS, TOKENS), key, start, key_stride, n_j, query, i * width, width, TOKENS, width)
                    store_products(tile, scale, score, i * CHUNK + j, CHUNK)


@serial
def visible(position, window, first_key):
    """The keys low..high that a query at `position` sees of the chunk that begins at first_key. A window counts the query itself."""
    low = max(0, position - window + 1 - first_key)
    high = min(CHUNK, position + 1 - first_key)
    return low, high


@serial
def hide(scores, i, low, high):
    """The scores of query i become -infinity but for keys low..high."""
    if low > 0 or high < CHUNK:
        for j in range(CHUNK):
            scores[i, j] = scores[i, j] if low <= j < high else np.float32(-np.inf)


@serial
def maxima(scores, out):
    """out[i] = the largest of scores[i], -infinity if there is none; whole tiles."""
    data = address_of(scores)
    for i in range(0, scores.shape[0], TOKENS):
        store_row_maxima(load_tile(tile_f32(TOKENS, _REGISTERS), data + i * CHUNK * 4, CHUNK * 4, LANES * 4), out, i)


@serial
def exponentials(scores, largest, out):
    """Replace scores by exp(score - largest), which is 0 for -infinity: those of a query for each of `largest`.

    out[i] = their sum by the lane rule; whole tiles.
    """
    for i in range(largest.size):
        for j in range(CHUNK):
            scores[i, j] = exp(np.float32(scores[i, j] - largest[i]))
    data = address_of(scores)
    for i in range(0, scores.shape[0], TOKENS):
        store_row_sums(load_tile(tile_f32(TOKENS, _REGISTERS), data + i * CHUNK * 4, CHUNK * 4, LANES * 4), out, i)


@serial
def weighted_values(p, n, across, along, ends, values, value_start, value_stride, width, out):
    """out[i] = sum over j of p[i * across + j * along] * value j, for i < n, one chain per element in order of j.

    `ends` has the number of values for each tile. Rows of `out` are padded to whole tiles.
    """
    for i in range(0, n, TOKENS):
        n_i, count, first = min(TOKENS, n - i), ends[i // TOKENS], i * across
        for d in range(0, width, SPAN):
            tile = tile_f32(TOKENS, VALUE_COLUMNS)
            start = value_start + d
            if width - d >= SPAN:
                for j in range(count):
                    tile = axpy_step(tile, p, first + j * along, across, n_i, values, start + j * value_stride, SPAN)
            else:
                for j in range(count):
                    tile = axpy_tail(tile, p, first + j * along, across, n_i, values, start + j * value_stride, width - d)
            store_tile(tile, out, i * out.shape[1] + d, out.shape[1])


# --- masks: rows of biases, in which -infinity hides a key ------------------------------------------------------------------------------


@serial
def sees_any(mask, position, rows, key, end):
    """Whether any of `rows` rows of a mask shows any of the keys key..end."""
    seen = np.int32(0)
    for r in range(rows):
        biases = mask[position + r, key:end]
        for j in range(biases.size):
            seen |= np.int32(biases[j] > -np.inf)
    return seen != 0


@serial
def _add_biases(scores, biases):
    """Add biases to scores, which become -infinity where the key is hidden or there is none. Returns whether a key is seen."""
    n, seen = biases.size, np.int32(0)
    for j in range(CHUNK):
        bias = biases[j] if j < n else np.float32(-np.inf)
        seen |= np.int32(bias > -np.inf)
        scores[j] = np.float32(scores[j] + bias) if bias > -np.inf else np.float32(-np.inf)
    return seen != 0


@inlined
def hide_unseen(scores, i, position, window, mask, key, end):
    """The scores of query i become -infinity but for keys that it sees, by a window or by row `position` of a mask, if there is one.

    The chunk has keys key..end. Returns whether the query sees any.
    """
    if mask is None:
        low, high = visible(position, window, key)
        hide(scores, i, low, high)
        return high > low
    return _add_biases(scores[i], mask[position, key:end])


@serial
def leave_out_hidden(p, mask, position, values, key, end, run, out):
    """Compute weighted values again without those of hidden keys if any is not finite; otherwise a probability of 0 has made them 0."""
    largest = np.int32(0)
    for j in range(key, end):
        row = values[j, run.g]
        for d in range(row.size):
            largest = max(largest, np.int32(float_bits(row[d]) & 0x7F800000))
    for i in range(p.shape[0] if largest >= 0x7F800000 else 0):
        biases = mask[position + i // run.group, key:end]
        for d in range(values.shape[2]):
            out[i, d] = 0
        for j in range(biases.size):
            if biases[j] > -np.inf:
                row = values[key + j, run.g]
                for d in range(row.size):
                    out[i, d] = fma(p[i, j], row[d], out[i, d])
