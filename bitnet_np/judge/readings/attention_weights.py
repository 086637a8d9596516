"""The weights that attention's outputs are sums by: solved for where values are independent, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...base.errors import listed
from .. import operations as op
from .attention import Attention
from .wrong import FEW, Array, Wrong, rough, runs


def coarse_weights(wrong: Wrong) -> str | None:
    """How far the weights are right, where outputs are sums of the right values by weights of few bits."""
    own = Attention.of(wrong, wrong.config.head_dim - 2)
    if len(own.q) < 2 or not own.wrong.places.any() or max(_spans(own)[0]):
        return None
    solved = _Solved.of(own)
    away = float(np.abs(solved.weights - solved.right).max())
    if not solved.known or away >= _COARSE_WEIGHTS:
        return None
    return f"attention's weights are right to {away:.1g}: scores or probabilities are rounded, or the exponential is coarse"


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
        return f"values, or sums of them, are rounded: a part of {most_outside:.1g} is no sum of this sequence's values"
    if t < len(wrong.theirs):  # these tokens may have read later ones
        return "values are summed that a token must not see, or that are not of this sequence: the mask, or a cache slot of another"
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


_LEFT = 1e-4  # of the squares, by a rule that is read off logarithms of weights
_LEAST = 16  # numbers
_LEAST_LOG = 1e-3  # a difference of logarithms that is none of roundings
_COARSE = 0.02  # of the largest number: what codes of 7 bits and more leave
_COARSE_WEIGHTS = 2.0**-8  # of a weight: what bfloat16 leaves


def _outside(values: Array, sums: Array) -> Array:
    """The part of sums [.., K] that is outside the span of values [n, K]."""
    basis, size, _ = np.linalg.svd(values.T, full_matrices=False)
    basis = basis[:, size > 1e-9 * size[0]]
    return sums - sums @ basis @ basis.T


@dataclass(frozen=True)
class _Solved:
    """The weights by which theirs are sums of values. Tokens with equal values, such as repeated ones, are one value."""

    scores: Array  # [H, t, u], those of the one visible token
    products: Array  # [K, H, t, u], the terms of these scores
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
        products = np.einsum("thk,shk->khts", own.q, spec.by_query_head(own.k, heads)) * op.score_scale(own.wrong.config)
        scores, products = (np.where(own.visible, x, 0) @ members for x in (own.scores, products))
        return cls(scores, products, weights, own.weights @ members, own.visible @ members, distinct, known)

    @cached_property
    def logs(self) -> Array:
        """The logarithms of their weights, less the mean of each row [H, t, u]: scores but for a constant of each row."""
        return self.centred(np.log(np.where(self.usable, self.weights, 1)))

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """Where a weight is large enough to have a logarithm, and is that of one token, [H, t, u]."""
        return (self.count == 1) & (self.weights > 1e-3)

    def centred(self, x: Array) -> Array:
        """x [.., H, t, u] less the mean of each row, 0 where no weight is usable."""
        count = np.maximum(self.usable.sum(axis=-1, keepdims=True), 1)
        return np.where(self.usable, x - np.where(self.usable, x, 0).sum(axis=-1, keepdims=True) / count, 0)

    def fitted(self, features: Array, target: Array) -> Array | None:
        """The factors [F] by which features [F, H, t, u] give the target [H, t, u], if they leave next to nothing of it."""
        design = np.stack([self.centred(x)[self.usable] for x in features], axis=1)
        y = target[self.usable]
        if len(y) < 3 * len(features) + 8 or np.abs(y).max() < _LEAST_LOG:
            return None
        factors = np.linalg.lstsq(design, y, rcond=1e-9)[0].astype(np.float64)
        return factors if ((y - design @ factors) ** 2).sum() <= _LEFT * (y * y).sum() else None


def _wrong_weights(own: Attention) -> str:
    """The fault of the weights, where outputs are sums of the right values."""
    solved = _Solved.of(own)
    if solved.known:
        text = _reads(solved)
        if text is not None:
            return text
    if solved.known and (away := float(np.abs(solved.weights - solved.right).max())) < _COARSE:
        return f"attention's weights are right to {away:.1g}: scores or probabilities are rounded, or the exponential is coarse"
    if solved.known:
        text = _by_distance(solved) or _by_element(solved) or _by_position(solved)
        if text is not None:
            return text
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
    some = np.abs(weights).max(axis=0) > 1e-3
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


def _by_position(solved: _Solved) -> str | None:
    """The factor of each position's scores, if they have one of their own."""
    rows = solved.usable.sum(axis=(0, 2)) >= _LEAST
    x, y = solved.centred(solved.scores), solved.logs
    factors = (x * y).sum(axis=(0, 2)) / np.maximum((x * x).sum(axis=(0, 2)), 1e-300)
    left = ((y - factors[:, None] * x) ** 2).sum(axis=(0, 2))[rows].sum()
    off = np.flatnonzero(rows & (np.abs(factors - 1) > 1e-3))
    if not off.size or left > _LEFT * (y**2).sum(axis=(0, 2))[rows].sum():
        return None
    first, last = (f"{factors[t]:.4g} at position {t}" for t in off[[0, -1]])
    return f"scores have a factor of their own at each position: {first}, {last}"


def _by_distance(solved: _Solved) -> str | None:
    """The slope of each head, if scores have a bias that grows with the distance of query and key, as ALiBi has."""
    distance = np.arange(len(solved.count))[:, None] - solved.positions
    heads = len(solved.weights)
    features = np.eye(heads)[:, :, None, None] * -distance.astype(np.float64)  # [H, H, t, u]
    slopes = solved.fitted(features, solved.logs - solved.centred(solved.scores))
    if slopes is None:
        return None
    said = ", ".join(f"{slope:.4g}" for slope in slopes[:FEW]) + (", ..." if heads > FEW else "")
    return f"scores have a bias that grows with distance, as ALiBi: slopes of heads are {said}"


def _by_element(solved: _Solved) -> str | None:
    """The elements of a head that q . k leaves out, or multiplies by a factor."""
    factors = solved.fitted(solved.products, solved.logs)
    if factors is None:
        return None
    off = np.abs(factors - 1) > _COARSE
    if not off.any() or off.all():
        return None
    elements = runs("element", np.flatnonzero(off))
    verb = "are" if off.sum() > 1 else "is"
    if np.abs(factors[off]).max() < _COARSE:
        return f"{elements} of {len(factors)} {verb} left out of q . k"
    return f"{elements} of {len(factors)} {verb} multiplied by {listed([f'{x:.3g}' for x in factors[off]], FEW)} in q . k"
