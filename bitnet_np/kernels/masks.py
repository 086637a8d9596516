"""Kernels for mask arrays: filling them, and attention by one.

The rule for one query is `visible_keys`; whatever fills a mask, on whatever device, asks it.
"""

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from .cpu import Floats, _dot_tile, _launch, _parallel, _scale, _weights
from .scalar import CHUNK, exp
from .simd import LANES, fma, store_sums, tile_f32
from .workspace import empty


@njit(cache=True, inline="always")
def visible_keys(position, window, prefix, block, sinks):
    """Which keys a query at `position` sees: 0..head and low..high. 0 stands for no window, no prefix, no blocks, no sinks."""
    high = position + 1
    low = max(0, high - window) if window else 0
    if block:
        low = max(low, position // block * block)
    return max(prefix, min(sinks, high)), low, high


@_parallel
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
    _launch(_fill_mask, out.size // 8, first, queries, past, keys, *pattern, integer(seen), integer(hidden), out.view(integer))


@_parallel
def _attend_masked(q, k, v, slot, position, mask, scale, out):
    heads, width = q.shape[1], q.shape[2]
    group, stride = heads // k.shape[2], k.shape[2] * width
    for item in prange(q.shape[0] * heads):
        r, h = item // heads, item % heads
        base = slot[r] * k.shape[1] * stride + h // group * width
        biases = mask[min(slot[r], mask.shape[0] - 1), position[r]]
        p, sums, lanes = np.empty(CHUNK, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
        part, total = np.empty(width, np.float32), np.zeros(width, np.float32)
        largest, weight, seen = np.float32(-np.inf), np.float32(0.0), False
        for chunk in range((biases.size + CHUNK - 1) // CHUNK):
            first = chunk * CHUNK
            n_keys, any_here, m = min(CHUNK, biases.size - first), False, np.float32(-np.inf)
            for j in range(n_keys):
                if biases[first + j] > -np.inf:
                    any_here = True
                    store_sums(
                        _dot_tile(tile_f32(1, 1), k, base + (first + j) * stride, 0, 1, q, (r * heads + h) * width, 0, 1, width), sums
                    )
                    p[j] = np.float32(sums[0] * scale) + biases[first + j]
                    m = max(m, p[j])
            if any_here:
                seen = True
                for i in range(LANES):
                    lanes[i] = 0
                for d in range(width):
                    part[d] = 0
                for j in range(n_keys):
                    if biases[first + j] > -np.inf:
                        e = exp(np.float32(p[j] - m))
                        lanes[j % LANES] += e
                        row = v[slot[r], first + j, h // group]
                        for d in range(width):
                            part[d] = fma(e, row[d], part[d])
                half = LANES // 2
                while half:
                    for i in range(half):
                        lanes[i] += lanes[i + half]
                    half //= 2
                after = max(largest, m)
                old, new = exp(np.float32(largest - after)), exp(np.float32(m - after))
                weight = fma(weight, old, np.float32(lanes[0] * new))
                for d in range(width):
                    total[d] = fma(total[d], old, np.float32(part[d] * new))
                largest = after
        for d in range(width):
            out[r, h, d] = total[d] / weight if seen else np.float32(0.0)


def attend_masked(q: Floats, k: Floats, v: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], mask: Floats) -> Floats:
    # [R, H, K], [B, S, G, K] x 2, [R], [R], [1 or B, T, S'] -> [R, H, K]
    """Attention by an additive mask: row r adds mask[slot[r] or 0, position[r]] to its scores of keys 0..S' of sequence slot[r].

    In the contract's order, by absolute position; keys hidden by -infinity are passed over, a row that sees none gives zeros. With a
    causal mask these are the bits of `cpu.attend`, one query at a time.
    """
    out = empty(q.shape)
    work = q.size * mask.shape[2] // 8
    _launch(_attend_masked, work, q, k, v, slot, position, _weights(np.ascontiguousarray(mask)), _scale(q), out)
    return out
