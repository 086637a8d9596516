"""Experts: which a token takes, with what weights, and the sum of their results."""

import numpy as np
from numpy.typing import NDArray

from .numbers import Floats, exp, f32


def top_experts(logits: Floats, k: int) -> NDArray[np.int32]:  # [R, E] -> int32 [R, k]
    """The experts with the k largest logits, largest first, lower numbers first among equal ones.

    A logit that is NaN is larger than none. The first expert that is left is taken where no other is larger,
    so k experts are taken.
    """
    count, experts = logits.shape
    rows = np.arange(count)
    chosen = np.empty((count, k), np.int32)
    taken = np.zeros(logits.shape, bool)
    for slot in range(k):
        best = taken.argmin(axis=1)  # the first that is left
        for e in range(experts):
            is_larger = logits[:, e] > logits[rows, best]
            best = np.where(~taken[:, e] & is_larger, e, best)
        chosen[:, slot] = best
        taken[rows, best] = True
    return chosen


@np.errstate(all="ignore")
def expert_weights(logits: Floats, experts: NDArray[np.int32], normalized: bool) -> Floats:
    # [R, E], int32 [R, k] -> [R, k]
    """The softmax of all logits at these experts, divided by the sum of these k if `normalized`."""
    largest = logits.max(axis=1, keepdims=True)
    p = exp(logits - largest)
    weights = np.take_along_axis(p, experts, axis=1)
    weights = weights / _sum_in_order(p)
    if normalized:
        weights = weights / _sum_in_order(weights)
    return weights


def _sum_in_order(x: Floats) -> Floats:  # [R, n] -> [R, 1]
    total = np.zeros(len(x), f32)
    for i in range(x.shape[1]):
        total = total + x[:, i]
    return total[:, None]


@np.errstate(all="ignore")
def mix(y: Floats, weights: Floats) -> Floats:  # [R, k, D], [R, k] -> [R, D]
    products = y * weights[..., None]
    total = products[:, 0]
    for slot in range(1, y.shape[1]):
        total = total + products[:, slot]
    return total


@np.errstate(all="ignore")
def sigmoid_gate(x: Floats, gate: Floats) -> Floats:  # [R, D], [R, 1] -> [R, D]
    return x * (f32(1) / (f32(1) + exp(-gate)))
