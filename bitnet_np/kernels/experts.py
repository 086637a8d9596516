"""The router of a layer with experts: which of them a token takes, their weights, and the sum of their results."""

import numpy as np
from numpy.typing import NDArray

from .launching import Floats, launch, parallel, shared
from .scalar import exp
from .workspace import empty


@parallel
def _top_experts(team, logits, out):
    for r in shared(team, logits.shape[0]):
        row = logits[r]
        for slot in range(out.shape[1]):
            best = -1
            for e in range(row.size):
                taken = False
                for earlier in range(slot):
                    taken |= out[r, earlier] == e
                if not taken and (best < 0 or row[e] > row[best]):  # NaN beats nothing, so every number names an expert
                    best = e
            out[r, slot] = best


def top_experts(logits: Floats, k: int) -> NDArray[np.int32]:  # [R, E] -> [R, k]
    """The experts with the k largest logits, largest first; of equal logits the lower number comes first."""
    out = empty((len(logits), k), np.int32)
    launch(_top_experts, logits.size * k, logits, out)
    return out


@parallel
def _expert_weights(team, logits, experts, normalized, out):
    for r in shared(team, logits.shape[0]):
        row = logits[r]
        largest = row[0]
        for e in range(1, row.size):
            largest = row[e] if row[e] > largest else largest
        total = np.float32(0.0)
        for e in range(row.size):
            total += exp(np.float32(row[e] - largest))
        chosen = np.float32(0.0)
        for slot in range(experts.shape[1]):
            p = np.float32(exp(np.float32(row[experts[r, slot]] - largest)) / total)
            out[r, slot] = p
            chosen += p
        if normalized:
            for slot in range(experts.shape[1]):
                out[r, slot] /= chosen


def expert_weights(logits: Floats, experts: NDArray[np.int32], normalized: bool) -> Floats:  # [R, E], [R, k] -> [R, k]
    """The softmax of all logits at these experts, divided by the sum of these k if `normalized`.

    All in float32: e^(logit - largest) is summed over experts in the order of their numbers, the k weights in the order of slots.
    """
    out = empty(experts.shape)
    launch(_expert_weights, 16 * logits.size, logits, experts, normalized, out)
    return out


@parallel
def _mix(team, y, weights, out):
    for r in shared(team, y.shape[0]):
        for i in range(y.shape[2]):
            out[r, i] = np.float32(y[r, 0, i] * weights[r, 0])
        for slot in range(1, y.shape[1]):
            for i in range(y.shape[2]):
                out[r, i] += np.float32(y[r, slot, i] * weights[r, slot])


def mix(y: Floats, weights: Floats) -> Floats:  # [R, k, D], [R, k] -> [R, D]
    """The sum of weights times results, slot by slot: each product is rounded, then added."""
    out = empty((y.shape[0], y.shape[2]))
    launch(_mix, y.size, y, weights, out)
    return out


@parallel
def _mix_in(team, y, weights, slot, out):
    for r in shared(team, y.shape[0]):
        for i in range(y.shape[1]):
            product = np.float32(y[r, i] * weights[r, slot])
            out[r, i] = product if slot == 0 else np.float32(out[r, i] + product)


def mix_in(y: Floats, weights: Floats, slot: int, out: Floats) -> None:  # [R, D], [R, k], [R, D]
    """`mix` slot by slot: add the results of one slot, times their weights, to those of the slots before."""
    launch(_mix_in, y.size, y, weights, slot, out)


@parallel
def _sigmoid_gate(team, x, gate, out):
    for r in shared(team, x.shape[0]):
        factor = np.float32(np.float32(1.0) / np.float32(np.float32(1.0) + exp(-gate[r, 0])))
        for i in range(x.shape[1]):
            out[r, i] = x[r, i] * factor


def sigmoid_gate(x: Floats, gate: Floats) -> Floats:  # [R, D], [R, 1] -> [R, D]
    """x / (1 + e^-gate): the quotient of 1 first, then the product."""
    out = empty(x.shape)
    launch(_sigmoid_gate, x.size + 16 * len(x), x, gate, out)
    return out
