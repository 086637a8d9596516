"""A second implementation of the arithmetic contract of kernels/scalar.py, literal and slow, in NumPy: every rounding in its place.

The kernels must agree with it bit for bit. It shares no code with them, only the numbers of the exponential's polynomial.
"""

import numpy as np
from numpy.typing import NDArray

from bitnet_np.kernels import scalar

Floats = NDArray[np.float32]
f32 = np.float32


def fma(a, b, c) -> Floats:
    """a * b + c in float32, rounded once.

    The product of two float32 is exact in float64. The sum is rounded to odd there (to the neighbour whose last bit is 1, unless it is
    exact), after which rounding to float32 cannot meet a false tie.
    """
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (a, b, c)))
    with np.errstate(all="ignore"):
        product = a * b
        total = product + c
        back = total - product
        error = (product - (total - back)) + (c - back)
        even = total.view(np.int64) % 2 == 0
        total = np.where(np.isfinite(error) & (error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total)
        return total.astype(f32)


def halve(lanes: NDArray) -> NDArray:  # [..., 2^n] -> [...]
    """The sum of lanes by halving: i with i + 8, i + 4, i + 2, i + 1 for 16 of them."""
    while (half := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def in_lanes(x: NDArray, n: int = 16) -> NDArray:  # [..., m] -> [..., ceil(m / n), n]; lane = index mod n, zeros after the end
    x = np.concatenate([x, np.zeros((*x.shape[:-1], -x.shape[-1] % n), x.dtype)], axis=-1)
    return x.reshape(*x.shape[:-1], -1, n)


def dot(a: Floats, b: Floats) -> Floats:  # [..., n], [..., n] -> [...]
    """Dot products in 16 lanes, each a chain of fused multiply-adds from +0."""
    a, b = np.broadcast_arrays(in_lanes(a), in_lanes(b))
    lanes = np.zeros((*a.shape[:-2], 16), f32)
    for i in range(a.shape[-2]):
        lanes = fma(a[..., i, :], b[..., i, :], lanes)
    return halve(lanes)


def matmul(x: Floats, weights: Floats) -> Floats:  # [R, M], [N, M] -> [R, N]
    return dot(x[:, None], weights)


def wide_sum(x: NDArray[np.float64]) -> NDArray[np.float64]:  # [R, D] -> [R]
    """The sum in 128 lanes of float64. Numbers and squares of float32 are exact there, so a plain addition equals a fused one."""
    numbers = in_lanes(x, 128)
    lanes = np.zeros((len(x), 128))
    for i in range(numbers.shape[1]):
        lanes = numbers[:, i] + lanes
    return halve(lanes)


def rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:  # [R, D], [D] -> [R, D]
    mean = f32(wide_sum(x.astype(np.float64) ** 2) / x.shape[1])
    factor = f32(1) / np.sqrt(mean + f32(eps))
    return x * factor[:, None] * gain


def layer_norm(x: Floats, gain: Floats, bias: Floats, eps: float) -> Floats:  # [R, D], [D], [D] -> [R, D]
    centred = (x - (wide_sum(x.astype(np.float64)) / x.shape[1])[:, None]).astype(f32)
    return rms_norm(centred, gain, eps) + bias


def ternary_matmul(
    q: NDArray[np.int8], scale: Floats, matrix: NDArray[np.int8], w_scale: np.float32
) -> Floats:  # [R, M], [R], [N, M] -> [R, N]
    total = q.astype(np.int64) @ matrix.T.astype(np.int64)
    return total.astype(f32) / scale[:, None] * w_scale


def exp(x) -> Floats:
    x = np.clip(f32(x), scalar._EXP_LOWEST, scalar._EXP_HIGHEST)
    n = fma(x, scalar._LOG2_E, scalar.MAGIC) - scalar.MAGIC
    r = fma(n, -scalar._LN2_LOW, fma(n, -scalar._LN2_HIGH, x))
    p = fma(scalar._C6, r, scalar._C5)
    for c in (scalar._C4, scalar._C3, scalar._C2, f32(1), f32(1)):
        p = fma(p, r, c)
    with np.errstate(over="ignore", under="ignore"):
        return np.ldexp(p.astype(np.float64), n.astype(np.int64)).astype(f32)  # exact in float64: rounded once


def rope(x: Floats, cos: Floats, sin: Floats, adjacent: bool = False) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    pairs, out = cos.shape[1], x.copy()
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if adjacent else (slice(0, pairs), slice(pairs, 2 * pairs))
    a, b = x[..., first], x[..., second]
    cos, sin = cos[:, None], sin[:, None]
    out[..., first], out[..., second] = fma(a, cos, -(b * sin)), fma(a, sin, b * cos)
    return out


def tanh(x: Floats) -> Floats:
    a = np.minimum(np.abs(x), f32(10))
    y = a + a
    p = fma(scalar._C6, y, scalar._C5)
    for c in (scalar._C4, scalar._C3, scalar._C2):
        p = fma(p, y, c)
    m = np.where(a < f32(0.17), fma(y * y, p, y), exp(y) - f32(1))
    return np.where(x < 0, -1, 1).astype(f32) * (m / (m + f32(2)))


def soft_cap(x: Floats, cap: np.float32 | None) -> Floats:
    return x if cap is None else cap * tanh(x / cap)


def scores(q: Floats, k: Floats, scale: np.float32 | None = None, cap: np.float32 | None = None) -> Floats:  # [H, K], [S, G, K] -> [H, S]
    k = np.repeat(k, q.shape[0] // k.shape[1], axis=1)
    return soft_cap(dot(q[:, None], k.swapaxes(0, 1)) * (f32(1) / np.sqrt(f32(q.shape[1])) if scale is None else scale), cap)


def attend_row(
    q: Floats,
    k: Floats,
    v: Floats,
    position: int,
    window: int | None = None,
    scale: np.float32 | None = None,
    cap: np.float32 | None = None,
) -> Floats:  # [H, K], [S, G, K] x 2 -> [H, K]
    """One query per head against keys 0..position, or the last `window` of them: in chunks of 64 keys, folded in order."""
    heads = q.shape[0]
    v = np.repeat(v, heads // v.shape[1], axis=1)
    s = scores(q, k[: position + 1], scale, cap)
    first = 0 if window is None else max(0, position - window + 1)
    largest, weight, total = np.full(heads, -np.inf, f32), np.zeros(heads, f32), np.zeros(q.shape, f32)
    for chunk in range(first // 64 * 64, position + 1, 64):
        keys = np.arange(max(chunk, first), min(chunk + 64, position + 1))
        m = s[:, keys].max(axis=1)
        p = np.zeros((heads, 64), f32)  # by place in the chunk, which is what says the lane
        p[:, keys - chunk] = exp(s[:, keys] - m[:, None])
        part = np.zeros(q.shape, f32)
        for j in keys:
            part = fma(p[:, j - chunk, None], v[j], part)
        lanes = np.zeros((heads, 16), f32)
        for i in range(4):
            lanes = lanes + p[:, i * 16 : i * 16 + 16]
        after = np.maximum(largest, m)
        a, b = exp(largest - after), exp(m - after)
        weight = fma(weight, a, halve(lanes) * b)
        total = fma(total, a[:, None], part * b[:, None])
        largest = after
    return total / weight[:, None]


def attend_halves_row(
    q: Floats,
    k: Floats,
    v: Floats,
    position: int,
    window: int | None = None,
    scale: np.float32 | None = None,
    cap: np.float32 | None = None,
) -> Floats:
    # [H, K], [S, G, K] x 2 -> [H, K]
    """Probabilities normalised and rounded to float16; their sum, and the sum over values, in float64 in key order."""
    if window is not None:
        first = max(0, position - window + 1)
        return attend_halves_row(q, k[first:], v[first:], position - first, None, scale, cap)
    k, v = k[: position + 1], np.repeat(v, q.shape[0] // v.shape[1], axis=1)
    s = scores(q, k, scale, cap)
    p = exp(s - s.max(axis=1, keepdims=True))
    weight, total = np.zeros(q.shape[0]), np.zeros(q.shape)
    for j in range(position + 1):
        weight = weight + p[:, j]
    factor = f32(1) / weight.astype(f32)
    for j in range(position + 1):
        total = total + (p[:, j] * factor).astype(np.float16).astype(np.float64)[:, None] * v[j]
    return total.astype(f32)


def top_experts(logits: Floats, k: int) -> NDArray[np.int32]:  # [R, E] -> [R, k]
    return np.array([sorted(range(row.size), key=lambda e: (-row[e], e))[:k] for row in logits], np.int32)


def expert_weights(logits: Floats, experts: NDArray[np.int32], normalized: bool) -> Floats:  # [R, E], [R, k] -> [R, k]
    p = exp(logits - logits.max(axis=1, keepdims=True))
    total = np.zeros(len(p), f32)
    for e in range(p.shape[1]):
        total = total + p[:, e]
    out = np.take_along_axis(p, experts, axis=1) / total[:, None]
    chosen = np.zeros(len(p), f32)
    for slot in range(out.shape[1]):
        chosen = chosen + out[:, slot]
    return out / chosen[:, None] if normalized else out


def mix(y: Floats, weights: Floats) -> Floats:  # [R, k, D], [R, k] -> [R, D]
    total = y[:, 0] * weights[:, 0, None]
    for slot in range(1, y.shape[1]):
        total = total + y[:, slot] * weights[:, slot, None]
    return total


def sigmoid_gate(x: Floats, gate: Floats) -> Floats:  # [R, D], [R, 1] -> [R, D]
    with np.errstate(over="ignore"):
        return x * (f32(1) / (f32(1) + exp(-gate)))


def relu2_gate(gate: Floats, up: Floats) -> Floats:  # [R, F], [R, F] -> [R, F]
    positive = np.maximum(gate, f32(0))
    return positive * positive * up


def silu_gate(gate: Floats, up: Floats) -> Floats:  # [R, F], [R, F] -> [R, F]
    with np.errstate(over="ignore"):
        return gate / (f32(1) + exp(-gate)) * up


def gelu_tanh(x: Floats) -> Floats:  # [R, F] -> [R, F]
    with np.errstate(over="ignore"):
        return x / (f32(1) + exp(-(x * fma(x * x, scalar._GELU_CUBIC, scalar._GELU_LINEAR))))


def gelu(x: Floats) -> Floats:  # [R, F] -> [R, F]
    """x times half of erfc(-x / sqrt 2), by one polynomial near 0 and another elsewhere."""
    t = np.abs(x) * scalar._ROOT_HALF
    s = t * t
    p = scalar._P5
    for c in (scalar._P4, scalar._P3, scalar._P2, scalar._P1, scalar._P0):
        p = fma(p, s, c)
    q = scalar._Q9
    for c in (scalar._Q8, scalar._Q7, scalar._Q6, scalar._Q5, scalar._Q4, scalar._Q3, scalar._Q2, scalar._Q1, scalar._Q0):
        q = fma(q, t, c)
    beyond = np.where(t <= scalar._ERF_LIMIT, f32(1) - fma(p, t, t), np.where(t > scalar._ERFC_LIMIT, f32(0), exp(q * t)))
    tail = f32(0.5) * beyond
    return x * np.where(x < 0, tail, f32(1) - tail)


def gelu_gate(gate: Floats, up: Floats) -> Floats:  # [R, F], [R, F] -> [R, F]
    return gelu_tanh(gate) * up
