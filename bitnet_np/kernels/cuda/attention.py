"""Attention in the contract's order: keys in chunks of CHUNK from position 0, each with its own maximum, sum and values.

One kernel computes the chunks, one block each, and another folds the chunks of a row in order.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from ..fast.emit import LANES
from ..scalar import CHUNK, exp, first_chunk, soft_cap
from .ptx import fma, half_warp_sum, number, plus, times
from .target import device, kernel

THREADS = 128
_KEYS = THREADS // LANES  # whose products a block works out at a time
_UNSEEN = np.float32(-1.0)
"""In place of a weight, which is never negative: the row sees no key of the chunk."""
_f = np.float32


@device
def _largest(scores):
    """The largest score of a chunk, for each thread."""
    largest = _f(-np.inf)
    for j in range(CHUNK):
        largest = max(largest, scores[j])
    return largest


@device
def _sum_of_weights(weights):
    """The sum of a chunk's weights by lanes, for each thread."""
    lane, total = cuda.threadIdx.x % LANES, _f(0.0)
    for part in range(0, CHUNK, LANES):
        total = plus(total, weights[part + lane])
    return half_warp_sum(total)


@device
def _score(q, r, h, k, slot, at, g, scale, cap):
    """q . k by lanes, for all threads that share the key, scaled and capped."""
    total = _f(0.0)
    for i in range(cuda.threadIdx.x % LANES, q.shape[2], LANES):
        total = fma(number(k[slot, at, g, i]), q[r, h, i], total)
    s = times(half_warp_sum(total), scale)
    return soft_cap(s, cap) if cap > _f(0.0) else s


@cache
def attend_chunk(masked: bool) -> Any:
    """One chunk of keys of one row and head: its values, times exp(score - largest), its largest score and its sum of weights.

    Blocks: rows, heads, chunks from the first one that the row sees. A block past a row's last chunk ends at once. With a
    mask, [1 or B, T, S'], `position` is the row of the mask, and each row has the mask's keys.
    """

    @kernel
    def attend_chunk(q, k, v, slot, position, mask, scale, cap, window, first_row, values, largest, weight):
        # [R, H, K], [B, S, G, K] x 2, [R] x 2, [1 or B, T, S'], ... -> [R', H, C, K], [R', H, C] x 2
        here, h, c, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z, cuda.threadIdx.x
        r = here + first_row
        width, g, b, p = q.shape[2], h // (q.shape[1] // k.shape[2]), slot[r], position[r]
        first, end = (0, mask.shape[2]) if masked else (first_chunk(p, window), p + 1)
        key = (first + c) * CHUNK
        n_keys, m = min(CHUNK, end - key), min(b, mask.shape[0] - 1)
        scores = cuda.shared.array(CHUNK, np.float32)
        if n_keys > 0:
            for j in range(thread // LANES, CHUNK, _KEYS):  # all threads of a warp, whatever keys there are
                s = _score(q, r, h, k, b, key + min(j, n_keys - 1), g, scale, cap)
                if j >= n_keys or (not masked and key + j <= p - window):
                    s = _f(-np.inf)
                elif masked:
                    bias = mask[m, p, key + j]
                    s = plus(s, bias) if bias > _f(-np.inf) else _f(-np.inf)
                if thread % LANES == 0:
                    scores[j] = s
            seen = 0 if masked else 1
            if masked and thread < n_keys and mask[m, p, key + thread] > _f(-np.inf):
                seen = 1
            if cuda.syncthreads_or(seen):
                top = _largest(scores)
                cuda.syncthreads()
                if thread < CHUNK:
                    scores[thread] = exp(plus(scores[thread], -top))
                cuda.syncthreads()
                total = _sum_of_weights(scores)
                for d in range(thread, width, THREADS):
                    value = _f(0.0)
                    for j in range(n_keys):
                        factor = number(v[b, key + j, g, d])
                        # a hidden key counts 0 times, as on the CPU, or not at all if that would be NaN
                        if not masked or mask[m, p, key + j] > _f(-np.inf) or abs(factor) < _f(np.inf):
                            value = fma(scores[j], factor, value)
                    values[here, h, c, d] = value
                if thread == 0:
                    largest[here, h, c], weight[here, h, c] = top, total
            elif thread == 0:
                weight[here, h, c] = _UNSEEN

    return attend_chunk


@kernel
def fold_chunks(position, window, keys, first_row, values, largest, weight, out):  # as of attend_chunk; -> [R, H, K]
    """The chunks of each row and head in order: blocks are rows and heads. keys: the mask's, or 0 without one.

    A row that sees no key gets zeros.
    """
    here, h = cuda.blockIdx.x, cuda.blockIdx.y
    r = here + first_row
    p = position[r]
    chunks = (keys + CHUNK - 1) // CHUNK if keys else p // CHUNK + 1 - first_chunk(p, window)
    for d in range(cuda.threadIdx.x, out.shape[2], THREADS):
        top, total, value = _f(-np.inf), _f(0.0), _f(0.0)
        for c in range(chunks):
            if weight[here, h, c] != _UNSEEN:  # adding +0 instead would make a -0 +0
                after = max(top, largest[here, h, c])
                old, new = exp(plus(top, -after)), exp(plus(largest[here, h, c], -after))
                total = fma(total, old, times(weight[here, h, c], new))
                value = fma(value, old, times(values[here, h, c, d], new))
                top = after
        out[r, h, d] = value / total if total != _f(0.0) else _f(0.0)
