"""Attention of rows over the keys and values of a cache, in chunks of keys by absolute position."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .arrays import Places, parts, slices
from .numbers import Floats, dot, exp, f32, fma, lane_sum
from .rows import soft_cap

Flags = NDArray[np.bool_]
Scalar = np.float32 | None

CHUNK = 64


def attend(
    q: Floats,
    k: NDArray,
    v: NDArray,
    slot: Places,
    position: Places,
    window: int | None = None,
    scale: Scalar = None,
    cap: Scalar = None,
) -> Floats:  # [R, H, K], [B, S, G, K] x 2, [R] x 2 -> [R, H, K]
    """Values of a chunk's keys before the window are multiplied by 0, which makes NaN of infinity there;
    later ones do not count."""
    bias = _causal(position, window)
    counted = _causal(position, None) == 0
    rows = _Rows(q, k, v, slot, bias, counted, _scale(q, scale), cap)
    return _by_parts(_attended, rows)


def attend_float16(
    q: Floats,
    k: NDArray,
    v: NDArray,
    slot: Places,
    position: Places,
    window: int | None = None,
    scale: Scalar = None,
    cap: Scalar = None,
) -> Floats:  # [R, H, K], [B, S, G, K] x 2, [R] x 2 -> [R, H, K]
    """Probabilities normalised and rounded to float16; their sum before, and the sum over values,
    in float64 and in key order."""
    bias = _causal(position, window)
    rows = _Rows(q, k, v, slot, bias, bias == 0, _scale(q, scale), cap)
    return _by_parts(_attended_in_float16, rows)


def attend_masked(
    q: Floats,
    k: NDArray,
    v: NDArray,
    slot: Places,
    position: Places,
    mask: Floats,
    scale: Scalar = None,
    cap: Scalar = None,
) -> Floats:  # [R, H, K], [B, S, G, K] x 2, [R] x 2, [1 or B, T, n] -> [R, H, K]
    """Row r adds mask[slot[r] or 0, position[r]] to its scores. A row that sees no key gives zeros."""
    last = len(mask) - 1
    bias = mask[np.minimum(slot, last), position]
    rows = _Rows(q, k, v, slot, bias, bias > -np.inf, _scale(q, scale), cap)
    return _by_parts(_attended, rows)


def _causal(position: Places, window: int | None) -> Floats:  # [R] -> [R, n]
    """What is added to the scores of keys 0..n: 0 where a row sees the key, -infinity where not."""
    keys = np.arange(position.max() + 1)
    position = position[:, None]
    seen = keys <= position
    if window is not None:
        seen = seen & (keys > position - window)
    return np.where(seen, f32(0), f32(-np.inf))


def _scale(q: Floats, scale: Scalar) -> f32:
    """What multiplies q . k: 1 / sqrt(K), if it is not given."""
    if scale is not None:
        return scale
    width = f32(q.shape[2])
    return f32(1) / np.sqrt(width)


class _Rows(NamedTuple):
    """Some queries, the keys and values of all slots, and which of these each query sees."""

    q: Floats  # [R, H, K]
    k: NDArray  # [B, S, G, K]
    v: NDArray  # [B, S, G, K]
    slot: Places  # [R]
    bias: Floats  # [R, n]; added to the scores of keys 0..n, -infinity where a key is not seen
    counted: Flags  # [R, n]; whose values are multiplied by their weights, which are 0 if a key is not seen
    scale: f32
    cap: Scalar

    def of(self, rows: slice) -> "_Rows":
        q = self.q[rows]
        slot = self.slot[rows]
        bias = self.bias[rows]
        counted = self.counted[rows]
        return self._replace(q=q, slot=slot, bias=bias, counted=counted)

    def kept(self, array: NDArray, keys: Places) -> Floats:  # [B, S, G, K], [n] -> [R, n, H, K]
        """Keys or values of some positions, in float32 and for each head. int16 stands for float16's bits."""
        rows = array[self.slot[:, None], keys]
        if rows.dtype == np.int16:
            rows = rows.view(np.float16)
        group = self.q.shape[1] // array.shape[2]
        return np.repeat(rows.astype(f32), group, axis=2)


def _by_parts(attention: Callable[[_Rows], Floats], rows: _Rows) -> Floats:
    """Attention of some rows at a time: no row depends on another."""
    pieces = parts(len(rows.q), CHUNK * rows.q.shape[1])
    results = [attention(rows.of(piece)) for piece in pieces]
    return np.concatenate(results)


@np.errstate(all="ignore")
def _scores(rows: _Rows, keys: Places) -> Floats:  # [n] -> [R, n, H], -infinity where a key is not seen
    products = dot(rows.q[:, None], rows.kept(rows.k, keys))
    s = products * rows.scale
    if rows.cap:
        s = soft_cap(s, rows.cap)
    bias = rows.bias[:, keys, None]
    return np.where(bias > -np.inf, s + bias, f32(-np.inf))


@np.errstate(all="ignore")
def _attended(rows: _Rows) -> Floats:  # [R, H, K]
    """Chunk after chunk of keys, folded in order."""
    count, heads, _ = rows.q.shape
    largest = np.full((count, heads), -np.inf, f32)
    weight = np.zeros((count, heads, 1), f32)
    total = np.zeros(rows.q.shape, f32)
    for chunk in slices(rows.bias.shape[1], CHUNK):
        keys = np.arange(chunk.start, chunk.stop)
        seen = rows.bias[:, chunk] > -np.inf
        if not seen.any():
            continue
        s = _scores(rows, keys)
        m = s.max(axis=1)
        p = np.where(seen[..., None], exp(s - m[:, None]), f32(0))
        chunk_weight = lane_sum(np.moveaxis(p, 1, 2))[..., None]
        chunk_total = _weighted_values(rows, keys, p)
        after = np.maximum(largest, m)
        a = exp(largest - after)[..., None]
        b = exp(m - after)[..., None]
        folded_weight = fma(weight, a, chunk_weight * b)
        folded_total = fma(total, a, chunk_total * b)
        sees = np.asarray(seen.any(axis=1))[:, None, None]
        weight = np.where(sees, folded_weight, weight)
        total = np.where(sees, folded_total, total)
        largest = np.where(sees[..., 0], after, largest)
    return np.where(weight != 0, total / weight, f32(0))


def _weighted_values(rows: _Rows, keys: Places, p: Floats) -> Floats:  # [n], [R, n, H] -> [R, H, K]
    """The values of a chunk times their weights, added up in the order of keys."""
    values = rows.kept(rows.v, keys)
    total = np.zeros(rows.q.shape, f32)
    for j, key in enumerate(keys):
        counted = rows.counted[:, key, None, None]
        summed = fma(p[:, j, :, None], values[:, j], total)
        total = np.where(counted, summed, total)
    return total


@np.errstate(all="ignore")
def _attended_in_float16(rows: _Rows) -> Floats:  # [R, H, K]
    keys = np.arange(rows.bias.shape[1])
    chunks = [_scores(rows, keys[chunk]) for chunk in slices(len(keys), CHUNK)]
    s = np.concatenate(chunks, axis=1)
    p = exp(s - s.max(axis=1, keepdims=True))
    weight = np.zeros(rows.q.shape[:2])
    total = np.zeros(rows.q.shape)
    for j in keys:
        weight = weight + p[:, j]
    factor = f32(1) / weight.astype(f32)
    normalised = p * factor[:, None]
    rounded = normalised.astype(np.float16).astype(np.float64)
    for j in keys:
        values = rows.kept(rows.v, keys[j : j + 1])[:, 0]
        products = rounded[:, j, :, None] * values
        counted = rows.counted[:, j, None, None]
        total = np.where(counted, total + products, total)
    return total.astype(f32)
