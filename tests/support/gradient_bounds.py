"""The result of training/spec.py for a backward kernel's input, and a bound on the error of float32: (expected, bound), both in float64.

The bounds count roundings: k of them, one after the other, are at most gamma(k) = k u / (1 - k u) of what an absolute-value run gives,
where u = 2^-24 is half a unit in the last place of float32. No bound is fitted to the kernels' results.
"""

import numpy as np
from numpy.typing import NDArray

from bitnet_np.training import spec as spec_grad
from bitnet_np.training.spec import attend, rms_norm

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


def rms_norm_back(x: NDArray, gain: NDArray, eps: float, dy: NDArray, cuts: NDArray) -> tuple[Bounded, Bounded]:
    """f = 1 / root has 4 roundings. g = dy gain has one; f^2 mean(g x) has 12, of the mean of |g x|; the difference and the product
    with f make it 18 for the sum of both terms. dgain has 5 in x f, and those of its chains.
    """
    x, gain, dy = wide(x, gain, dy)
    f = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps)
    dx, dgain = rms_norm(x, gain, eps)[1](dy)
    g = np.abs(dy * gain)
    both = f * (g + np.abs(x) * f**2 * np.mean(g * np.abs(x), axis=1, keepdims=True))
    steps = int(np.diff(cuts).max()) + len(cuts) + 5
    return (dx, gamma(18) * both), (dgain, gamma(steps) * np.sum(np.abs(dy * x) * f, axis=0))


def relu2_gate_back(gate: NDArray, up: NDArray, dy: NDArray) -> tuple[Bounded, Bounded]:
    """Two products for each gradient; doubling a number is exact."""
    dgate, dup = spec_grad.relu2_gate(*wide(gate, up))[1](*wide(dy))
    return (dgate, gamma(2) * np.abs(dgate)), (dup, gamma(2) * np.abs(dup))


def silu_gate_back(gate: NDArray, up: NDArray, dy: NDArray) -> tuple[Bounded, Bounded]:
    """exp has 1.84 u, s = 1 / (1 + e) so less than 4 roundings, 1 - s at most 7, s (1 + gate (1 - s)) 13 of its absolute value."""
    gate, up, dy = wide(gate, up, dy)
    dgate, dup = spec_grad.silu_gate(gate, up)[1](dy)
    s = 1 / (1 + np.exp(-gate))
    return (dgate, gamma(16) * np.abs(dy * up) * s * (1 + np.abs(gate) * (1 - s))), (dup, gamma(6) * np.abs(dup))


def cross_entropy(logits: NDArray, targets: NDArray, factor: float) -> tuple[Bounded, Bounded]:
    """Losses and their gradient. An exponential's argument is rounded once; so are the sum's share, and product and difference with it.
    Numbers below float32's normal range, an exponential and a product, are rounded to multiples of 2^-149.
    """
    (logits,) = wide(logits)
    losses = np.array([spec_grad.cross_entropy(row[None], [target], 1)[0] for row, target in zip(logits, targets, strict=True)])
    _, gradient = spec_grad.cross_entropy(logits, targets, 1 / factor)
    eta = np.expm1(U * np.ptp(logits, axis=1) + 1.84 * U)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    bound = (2 * eta[:, None] + gamma(4)) * p * factor + U * np.abs(gradient) + U * factor * (gradient < 0) + 2.0**-149
    return (losses, eta + 2.0**-48 * (1 + np.abs(losses))), (gradient, bound)


def attend_back(
    q: NDArray, k: NDArray, v: NDArray, dy: NDArray, mask: NDArray
) -> tuple[Bounded, Bounded, Bounded]:  # one sequence, [T, H, K], [T, G, K] x 2, [T, H, K], [T, T]
    """Probabilities have the relative error `rho`, as in bounds.attend, and so has the result of attention, an input of the kernel.

    With DP = |dy| . |v| and AD its mean by the probabilities, ds = p (dp - dy . attended) scale has an error of at most
    p (DP + AD) scale times 2 rho and the roundings of the dot product and of six steps. Its sums add those of their chains.
    """
    q, k, v, dy = wide(q, k, v, dy)
    t, heads, width = q.shape
    group = heads // k.shape[1]
    expected = attend(q, k, v, mask)[1](dy)
    keys, values = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("thk,shk->hts", q, keys) / np.sqrt(width) + mask
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    largest = np.einsum("thk,shk->hts", np.abs(q), np.abs(keys)).max() / np.sqrt(width)
    chunks, dot = -(-t // 64), -(-width // 16) + 4
    eta = np.expm1(gamma(dot + 3) * largest + (chunks + 2) * (2 * largest * U + 1.84 * U)) + gamma(64 + 2 * chunks)
    rho = 2 * eta * (1 + 2 * eta) + 2 * U
    dp = np.einsum("thk,shk->hts", np.abs(dy), np.abs(values))
    size = p * (dp + np.sum(p * dp, axis=-1, keepdims=True)) / np.sqrt(width)
    wrong = 1.01 * (2 * rho + gamma(dot + 6) + gamma(64 + chunks * group))

    def shared(x: NDArray) -> NDArray:
        return x.reshape(t, k.shape[1], group, width).sum(axis=2)

    bounds = (
        wrong * np.einsum("hts,shk->thk", size, np.abs(keys)),
        wrong * shared(np.einsum("hts,thk->shk", size, np.abs(q))),
        wrong * shared(np.einsum("hts,thk->shk", p, np.abs(dy))),
    )
    first, second, third = zip(expected, bounds, strict=True)
    return first, second, third
