"""The definition's result for a kernel's input, and a bound on the error of float32: (expected, bound), both in float64.

The bounds count roundings: k of them, one after the other, are at most gamma(k) = k u / (1 - k u) of what an absolute-value run gives,
where u = 2^-24 is half a unit in the last place of float32. No bound is fitted to the kernels' results.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np import spec
from bitnet_np.model import widen

U = 2.0**-24
Bounded = tuple[NDArray[np.float64], NDArray[np.float64]]


def gamma(k: float) -> float:
    return k * U / (1 - k * U)


def assert_within(actual: NDArray, expected: NDArray, bound: NDArray) -> None:
    assert actual.shape == expected.shape
    excess = np.abs(actual.astype(np.float64) - expected) - bound
    assert (excess <= 0).all(), f"{(excess > 0).sum()} of {excess.size} beyond the bound, by up to {excess.max()}"


def wide(*arrays: NDArray) -> list[NDArray[np.float64]]:
    return [np.asarray(array, np.float64) for array in arrays]


def rms_norm(x: NDArray, gain: NDArray, eps: float) -> Bounded:
    """The roundings of the mean, of eps and of their sum count half, because of the root. Then come the root, 1 / root, and two products.

    Sums are in float64.
    """
    expected = spec.rms_norm(*wide(x, gain), eps)
    return expected, gamma(6) * np.abs(expected)


def quantize(x: NDArray) -> tuple[NDArray, NDArray, NDArray[np.bool_]]:
    """Codes, scale, and True for each code that float32 cannot decide: x * scale is so near k + 0.5 that roundings may cross it."""
    codes, scale = spec.quantize(*wide(x))
    position = np.abs(x * scale)
    return codes, scale, np.abs(position % 1 - 0.5) <= gamma(3) * position


def linear(x: NDArray, matrix: NDArray, w_scale: float) -> Bounded:
    """Scale, division and product are five roundings. An undecided code moves a sum by one step if its weight is not 0."""
    codes, scale, undecided = quantize(x)
    expected = spec.ternary_matmul(codes, scale, matrix, w_scale)
    steps = undecided.astype(np.float64) @ np.abs(matrix.astype(np.float64)).T
    return expected, (gamma(5) * np.abs(expected) + steps / scale * w_scale) * (1 + gamma(5))


def matmul(x: NDArray, weights: NDArray) -> Bounded:
    """A lane is a chain of ceil(M / 16) multiply-adds, each rounded once; four additions join the lanes."""
    x, weights = wide(x, weights)
    return spec.matmul(x, weights), gamma(-(-x.shape[1] // 16) + 4) * spec.matmul(np.abs(x), np.abs(weights))


def layer_norm(x: NDArray, gain: NDArray, bias: NDArray, eps: float) -> Bounded:
    """The mean comes from float64 and counts as exact. The difference is rounded once; then the roundings are those of `rms_norm`, and one
    for the bias. A rounded difference also changes the variance, by no more than twice its own part.
    """
    x, gain, bias = wide(x, gain, bias)
    expected = spec.layer_norm(x, gain, bias, eps)
    return expected, gamma(9) * np.abs(expected - bias) + gamma(1) * np.abs(expected) + np.abs(x).max() * 2.0**-50


def rope(
    x: NDArray, position: NDArray, base: float, pairs: str = "halves", width: int | None = None, factors: NDArray | float = 1.0
) -> Bounded:
    """Each term has three roundings: cosine or sine, product, multiply-add. The angle is right to 2 units of float64 in either program."""
    (x,) = wide(x)
    half = (width or x.shape[-1]) // 2
    angle = np.multiply.outer(position, base ** (-np.arange(half) / half) / factors)[:, None, :]
    c, s = np.abs(np.cos(angle)), np.abs(np.sin(angle))
    i = np.arange(half)
    first, second = (i, i + half) if pairs == "halves" else (2 * i, 2 * i + 1)
    a, b = np.abs(x[..., first]), np.abs(x[..., second])
    bound = np.zeros(x.shape)  # elements that are not rotated are exact
    for places, terms in ((first, a * c + b * s), (second, a * s + b * c)):
        bound[..., places] = gamma(3) * terms + (a + b) * (angle * 2.0**-51 + 2.0**-51)
    return spec.rope(x, position, base, pairs, width, factors), bound


def soft_cap(x: NDArray, cap: float) -> Bounded:
    """exp is right to 0.92 units (1.84 u), and to 3.5 times that after 1 is subtracted, where e^2|x| is sqrt 2 at least; nearer to 0 the
    polynomial itself is that difference. Then come that subtraction, an addition, the division, and the quotient and product with the cap.
    """
    expected = spec.soft_cap(*wide(x), cap)
    return expected, gamma(12) * np.abs(expected)


def attend(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    slot: NDArray,
    position: NDArray,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
) -> Bounded:
    """Each weight exp(s - max) is off by a factor 1 + eta at most: s by the roundings of a dot product (ceil(K / 16) + 4), of the scale (2)
    and of their product; the exponent by one more in the chunk and one in each fold, of a number no larger than the range of s; exp by
    0.92 units (1.84 u) each time. A chunk's sum is a chain of 64 at most, and each fold adds two roundings. The same is true of the sum of
    weights that divides, and the division is the last rounding. A cap adds its own roundings, and makes the others smaller.
    """
    q, k, v = wide(q, k, v)
    expected, bound = np.empty(q.shape), np.empty(q.shape)
    for r, (s, p) in enumerate(zip(slot, position, strict=True)):
        keys, values, mask = k[s, : p + 1], v[s, : p + 1], spec.causal_mask(1, p + 1, p, window)
        expected[r] = spec.attend(q[r : r + 1], keys, values, mask, scale, cap)[0]
        shared = np.repeat(keys, q.shape[1] // k.shape[2], axis=1)
        largest = np.einsum("hk,shk->hs", np.abs(q[r]), np.abs(shared)).max() * (q.shape[2] ** -0.5 if scale is None else scale)
        folds = p // 64 + 1
        exponent = gamma(-(-q.shape[2] // 16) + (7 if cap is None else 19)) * largest + (folds + 1) * (2 * largest * U + 1.84 * U)
        eta = np.expm1(exponent) + gamma(64 + 2 * folds)
        bound[r] = (2 * eta * (1 + 2 * eta) + U) * spec.attend(q[r : r + 1], keys, np.abs(values), mask, scale, cap)[0]
    return expected, bound


def attend_masked(q: NDArray, k: NDArray, v: NDArray, mask: NDArray) -> Bounded:
    """As `attend`, for one sequence and an additive mask: [T, H, K], [S, G, K] x 2, [T, S]. Adding a bias to a score is one more rounding,
    of a number no larger than both together.
    """
    q, k, v, mask = wide(q, k, v, mask)
    shared = np.repeat(np.abs(k), q.shape[1] // k.shape[1], axis=1)
    score = np.einsum("thk,shk->ths", np.abs(q), shared).max(axis=(1, 2)) / np.sqrt(q.shape[2])  # [T]
    bias = np.abs(np.where(mask > -np.inf, mask, 0)).max(axis=1)
    folds = len(k) // 64 + 1
    exponent = gamma(-(-q.shape[2] // 16) + 7) * score + (score + bias) * U + (folds + 1) * (2 * (score + bias) * U + 1.84 * U)
    eta = (np.expm1(exponent) + gamma(64 + 2 * folds))[:, None, None]
    return spec.attend(q, k, v, mask), (2 * eta * (1 + 2 * eta) + U) * spec.attend(q, k, np.abs(v), mask)


def attend_float16(q: NDArray, k: NDArray, v: NDArray, slot: NDArray, position: NDArray, *how: Any) -> Bounded:
    """As `attend`, and each probability is rounded once more, to float16: those below its normal numbers to a multiple of 2^-24."""
    expected, bound = attend(q, k, v, slot, position, *how)
    absolute, _ = attend(q, k, np.abs(wide(v)[0]), slot, position, *how)
    values = [np.abs(wide(v[s, : p + 1])[0]).sum(axis=0) for s, p in zip(slot, position, strict=True)]
    subnormal = 2.0**-25 * np.repeat(values, q.shape[1] // k.shape[2], axis=1)
    return expected, (1 + 2.0**-11) * bound + 2.0**-11 * absolute + subnormal


def relu2_gate(gate: NDArray, up: NDArray) -> Bounded:
    """Two roundings: the square and the product."""
    expected = spec.relu2_gate(*wide(gate, up))
    return expected, gamma(2) * np.abs(expected)


def silu_gate(gate: NDArray, up: NDArray) -> Bounded:
    """Five roundings: exp to 0.92 units (1.84 u), a sum, a division, a product. Below float32's normal numbers a product is a multiple of
    2^-149, and its rounding up to half of that. Below -80 exp leaves float32's range.
    """
    expected = spec.silu_gate(*wide(gate, up))
    return expected, np.where(gate < -80, np.inf, gamma(5) * np.abs(expected) + 2.0**-150)


def gelu(x: NDArray) -> Bounded:
    """The polynomials are right to 2e-8 and 2e-7 (4 u). A rounding of the exponent, which is about x^2 / 2, is a factor of the result: that
    of its square root, which counts twice, of the last step of the polynomial, and of the product.
    """
    (x,) = wide(x)
    expected = spec.gelu(x)
    tail = np.where(x < -8.48, np.abs(expected), 0)  # the kernel returns 0 or nearly 0 there
    return expected, (8 + 2 * x * x) * U * np.abs(expected) + tail


def gelu_tanh(x: NDArray) -> Bounded:
    """The roundings of exp, a sum and a division. Those of exp's argument, three, are a factor of the result where it is small.

    Below -9 exp leaves float32's range.
    """
    (x,) = wide(x)
    with np.errstate(over="ignore"):
        expected = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))  # as spec.gelu_tanh, but nothing cancels
    bound = gamma(5) * np.abs(expected) + 4 * U * np.abs(expected) * np.sqrt(8 / np.pi) * np.abs(x + 0.044715 * x**3)
    return expected, np.where(x < -9, np.inf, bound)


def gelu_gate(gate: NDArray, up: NDArray) -> Bounded:
    """One rounding more than GELU by tanh."""
    (up,) = wide(up)
    expected, bound = gelu_tanh(gate)
    return expected * up, (bound + gamma(1) * np.abs(expected)) * np.abs(up) * (1 + gamma(1))


def expert_weights(logits: NDArray, experts: NDArray, normalized: bool) -> Bounded:
    """A difference of logits is rounded once, exp to 0.92 units; sums of 128 and two divisions follow. Numbers below 1e-37 may be lost."""
    expected = spec.expert_weights(*wide(logits), experts, normalized)
    spread = np.ptp(wide(logits)[0], axis=1, keepdims=True)
    return expected, (gamma(140) + 2 * U * spread) * np.abs(expected) + 1e-37


def mix(y: NDArray, weights: NDArray) -> Bounded:
    """A chain of as many multiply-adds as there are experts."""
    y, weights = wide(y, weights)
    return spec.mix(y, weights), gamma(y.shape[1]) * spec.mix(np.abs(y), np.abs(weights)) + 2.0**-149


def sigmoid_gate(y: NDArray, gate: NDArray) -> Bounded:
    """Five roundings, as in `silu_gate`, and one for the argument's sign."""
    y, gate = wide(y, gate)
    expected = y * spec.sigmoid(gate)
    return expected, np.where(gate < -80, np.inf, gamma(6) * np.abs(expected) + 2.0**-149)


def widened(*arrays: NDArray) -> list[NDArray[np.float32]]:
    """Tables of any type, and keys and values in float16."""
    return [widen.float32(array.view(np.float16) if array.dtype == np.int16 else array) for array in arrays]


OF_OPERATIONS: dict[str, Callable[..., Bounded]] = {
    "rms_norm": rms_norm,
    "layer_norm": lambda x, gain, bias, eps: layer_norm(x, gain, 0.0 if bias is None else bias, eps),
    "matmul": lambda x, table: matmul(x, *widened(table)),
    "attend": lambda q, k, v, *rest: attend(q, *widened(k, v), *rest),
    "attend_float16": lambda q, k, v, *rest: attend_float16(q, *widened(k, v), *rest),
    "relu2_gate": relu2_gate,
    "silu_gate": silu_gate,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_gate": gelu_gate,
    "soft_cap": lambda x, cap: soft_cap(x, float(cap)),
    "top_experts": lambda logits, k: (spec.top_experts(*wide(logits), k), 0),
    "expert_weights": expert_weights,
    "mix": mix,
    "sigmoid_gate": sigmoid_gate,
}
"""The bound of an operation of a backend, by its name, for its arguments."""
