"""The weights that attention's outputs are sums by: solved for where values are independent, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .attention import Attention
from .wrong import Array, Wrong, rough, runs


def foreign_values(wrong: Wrong) -> str | None:
    """Values of elsewhere in attention's sums: the rank of what this sequence's values do not span is their number.

    Only the first tokens are looked at, fewer than a head is wide: any numbers are sums of as many values as that.
    """
    c = wrong.config
    own = Attention.of(wrong, c.head_dim - 2)
    t = len(own.q)
    if t < 2 or not own.wrong.places.any():
        return None
    ranks, most_outside = _spans(own)
    most = max(ranks)
    if most == 0:
        return _wrong_weights(own)
    if most_outside < _COARSE:
        more = "" if own.wrong.is_nearly_right else "; that is not all: weights, or the scale of values, are wrong, too"
        return f"values, or sums of them, are rounded: a part of {most_outside:.1g} is no sum of this sequence's values{more}"
    if t < len(wrong.theirs):  # these tokens may have read later ones
        return "outputs are no sums of the values that tokens see: the mask lets others in, or values are changed or another sequence's"
    if min(ranks) == 0 or most >= min(t, c.head_dim - t):
        return None
    return f"values that are not of this sequence are summed too, {most} of them: a cache slot that was not cleared, or another's"


def _spans(own: Attention) -> tuple[list[int], float]:
    """The number of values of elsewhere in the sums of each head, and the largest part of a sum that is none of this sequence's values."""
    c, out = own.wrong.config, own.wrong.theirs.reshape(own.q.shape)
    ranks, most_outside = [], 0.0
    for head in range(c.heads):
        values, sums = own.v[:, head // (c.heads // c.kv_heads)], out[:, head]
        largest = np.abs(sums).max()
        least = max(1e-3, 8 * rough(own.wrong.noise)) * largest
        outside = _outside(values, sums)
        most_outside = max(most_outside, float(np.abs(outside).max() / max(largest, 1e-300)))
        ranks.append(int((np.linalg.svd(outside, compute_uv=False) > least).sum()))
    return ranks, most_outside


_COARSE = 0.02  # of the largest number: what codes of 7 bits and more leave


def _outside(values: Array, sums: Array) -> Array:
    """The part of sums [.., K] that is outside the span of values [n, K]."""
    basis, size, _ = np.linalg.svd(values.T, full_matrices=False)
    basis = basis[:, size > 1e-9 * size[0]]
    return sums - sums @ basis @ basis.T


@dataclass(frozen=True)
class _Solved:
    """The weights by which theirs are sums of values. Tokens with equal values, such as repeated ones, are one value."""

    weights: Array  # [H, t, u], theirs
    right: Array  # [H, t, u]
    count: Array  # [t, u], the visible tokens that have the value
    positions: NDArray[np.int64]  # [u], of each value's first token
    known: bool  # whether values are independent, so that weights can be told

    @classmethod
    def of(cls, own: Attention) -> _Solved:
        """own: as many tokens as a head is wide, or fewer."""
        t, heads = own.q.shape[:2]
        flat, shared = own.v.reshape(t, -1), heads // own.v.shape[1]
        first = (np.abs(flat[:, None] - flat).max(axis=-1) <= 1e-5 * np.abs(flat).max()).argmax(axis=1)
        distinct = np.unique(first)
        members = (first[:, None] == distinct).astype(np.float64)  # [t, u]
        v, out = own.v[distinct], own.wrong.theirs.reshape(own.q.shape)
        weights = np.stack([np.linalg.lstsq(v[:, h // shared].T, out[:, h].T, rcond=1e-6)[0].T for h in range(heads)])
        known = all(np.linalg.matrix_rank(x, 1e-4 * np.abs(x).max()) == len(x) for x in v.swapaxes(0, 1))
        return cls(weights, own.weights @ members, own.visible @ members, distinct, known)


def _wrong_weights(own: Attention) -> str:
    """The fault of the weights, where outputs are sums of the right values."""
    solved = _Solved.of(own)
    text = _reads(solved) if solved.known else None
    if text is not None:
        return text
    if solved.known and (away := float(np.abs(solved.weights - solved.right).max())) < _COARSE:
        return f"attention's weights are right to {away:.1g}: scores or probabilities are rounded, or the exponential is coarse"
    sums = solved.weights.sum(axis=-1)
    off = np.abs(sums - 1) > _COARSE
    if off.any():
        low, high = sums[off].min(), sums[off].max()
        why = "empty slots or a sink are counted" if high < 1 else "they are not divided by their sum, or outputs are not cleared before"
        return f"attention's weights add up to {low:.3g} to {high:.3g} instead of 1: {why}"
    return "sums of the right values with wrong weights: scores or softmax are wrong"


def _reads(solved: _Solved) -> str | None:
    """The first token that reads what it must not see, or does not read what it must."""
    weights, right, positions = solved.weights, solved.right, solved.positions
    some = np.abs(weights).max(axis=0) > 1e-2
    for i in range(len(some)):
        ahead = np.flatnonzero(some[i] & (solved.count[i] == 0))
        if ahead.size:
            where = f"position {i} reads {runs('position', positions[ahead])}"
            return f"values are summed that a token must not see: {where}; the mask, or a cache that holds another sequence's"
        lost = np.flatnonzero((np.abs(weights[:, i]).max(axis=0) < 1e-2 * right[:, i].max(axis=0)) & (right[:, i].max(axis=0) > 1e-2))
        if lost.size:
            where = f"position {i} does not read {runs('position', positions[lost])}"
            return f"values are not summed that a token must see: {where}; the mask, or slots of a cache that are lost"
    return None
