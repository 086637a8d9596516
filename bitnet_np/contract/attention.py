"""Attention of rows over the keys and values of a cache, in chunks of keys by absolute position."""

from collections.abc import Callable

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
    bias, counted = _causal(position, window), _causal(position, None) == 0
    return _by_rows(_attended, q, k, v, slot, bias, counted, scale, cap)


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
    return _by_rows(_attended_in_float16, q, k, v, slot, bias, bias == 0, scale, cap)


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
    bias = mask[np.minimum(slot, len(mask) - 1), position]
    return _by_rows(_attended, q, k, v, slot, bias, bias > -np.inf, scale, cap)


def _causal(position: Places, window: int | None) -> Floats:  # [R] -> [R, n]
    """What is added to the scores of keys 0..n: 0 where a row sees the key, -infinity where not."""
    keys, position = np.arange(position.max() + 1), position[:, None]
    seen = (keys <= position) & (keys > (-1 if window is None else position - window))
    return np.where(seen, f32(0), f32(-np.inf))


def _by_rows(
    attention: Callable[..., Floats],
    q: Floats,
    k: NDArray,
    v: NDArray,
    slot: Places,
    bias: Floats,
    counted: Flags,
    scale: Scalar,
    cap: Scalar,
) -> Floats:
    """Attention of some rows at a time: no row depends on another. bias, counted: [R, n]."""
    scale = f32(1) / np.sqrt(f32(q.shape[2])) if scale is None else scale
    rows = parts(len(q), CHUNK * q.shape[1])
    return np.concatenate([attention(q[r], k, v, slot[r], bias[r], counted[r], scale, cap) for r in rows])


def _kept(array: NDArray, slot: Places, keys: Places, heads: int) -> Floats:
    # [B, S, G, K], [R], [n], H -> [R, n, H, K]
    """Keys or values of some positions, in float32 and for each head. int16 stands for float16's bits."""
    rows = array[slot[:, None], keys]
    rows = (rows.view(np.float16) if rows.dtype == np.int16 else rows).astype(f32)
    return np.repeat(rows, heads // array.shape[2], axis=2)


@np.errstate(all="ignore")
def _scores(
    q: Floats, k: NDArray, slot: Places, keys: Places, bias: Floats, scale: f32, cap: Scalar
) -> Floats:  # [R, H, K], [B, S, G, K], [R], [n], [R, n] -> [R, n, H], -infinity where a key is not seen
    s = dot(q[:, None], _kept(k, slot, keys, q.shape[1])) * scale
    s = soft_cap(s, cap) if cap else s
    return np.where(bias[..., None] > -np.inf, s + bias[..., None], f32(-np.inf))


@np.errstate(all="ignore")
def _attended(
    q: Floats,
    k: NDArray,
    v: NDArray,
    slot: Places,
    bias: Floats,
    counted: Flags,
    scale: f32,
    cap: Scalar,
) -> Floats:
    """Chunk after chunk of keys, folded in order. counted: whose values are multiplied by their weights,
    which are 0 if not seen."""
    rows, heads, _ = q.shape
    largest, weight = np.full((rows, heads), -np.inf, f32), np.zeros((rows, heads), f32)
    total = np.zeros(q.shape, f32)
    for chunk in slices(bias.shape[1], CHUNK):
        keys, seen = np.arange(bias.shape[1])[chunk], bias[:, chunk] > -np.inf
        if not seen.any():
            continue
        s = _scores(q, k, slot, keys, bias[:, chunk], scale, cap)
        values = _kept(v, slot, keys, heads)
        m = s.max(axis=1)
        p = np.where(seen[..., None], exp(s - m[:, None]), f32(0))
        part = np.zeros(q.shape, f32)
        for j in range(len(keys)):
            part = np.where(counted[:, keys[j], None, None], fma(p[:, j, :, None], values[:, j], part), part)
        after = np.maximum(largest, m)
        a, b, sees = exp(largest - after), exp(m - after), np.asarray(seen.any(axis=1))[:, None]
        weight = np.where(sees, fma(weight, a, lane_sum(np.moveaxis(p, 1, 2)) * b), weight)
        total = np.where(sees[..., None], fma(total, a[..., None], part * b[..., None]), total)
        largest = np.where(sees, after, largest)
    return np.where(weight[..., None] != 0, total / weight[..., None], f32(0))


@np.errstate(all="ignore")
def _attended_in_float16(
    q: Floats,
    k: NDArray,
    v: NDArray,
    slot: Places,
    bias: Floats,
    counted: Flags,
    scale: f32,
    cap: Scalar,
) -> Floats:
    keys, heads = np.arange(bias.shape[1]), q.shape[1]
    chunks = slices(len(keys), CHUNK)
    s = np.concatenate([_scores(q, k, slot, keys[c], bias[:, c], scale, cap) for c in chunks], axis=1)
    p = exp(s - s.max(axis=1, keepdims=True))
    weight, total = np.zeros((len(q), heads)), np.zeros(q.shape)
    for j in keys:
        weight = weight + p[:, j]
    rounded = (p * (f32(1) / weight.astype(f32))[:, None]).astype(np.float16).astype(np.float64)
    for j in keys:
        products = rounded[:, j, :, None] * _kept(v, slot, keys[j : j + 1], heads)[:, 0]
        total = np.where(counted[:, j, None, None], total + products, total)
    return total.astype(f32)
