"""Wrong attention: its record, and the weights that outputs are sums by, solved for where values are independent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ..edits.definition import score_scale
from ..roundings import to_float16
from .wrong import ROWS, Array, Wrong, rough, runs

Seen = NDArray[np.bool_]


@dataclass(frozen=True)
class Attention:
    """The attention of the first tokens of a sequence in one layer."""

    wrong: Wrong
    q: Array  # [T, H, K]
    k: Array  # [T, G, K]
    v: Array  # [T, G, K]

    @classmethod
    def of(cls, wrong: Wrong, most: int = ROWS) -> Attention:
        """The attention of the first tokens, `most` of them."""
        some = wrong.rows(np.arange(min(most, len(wrong.theirs))))
        q, k, v = (to_float16(x) if wrong.dialect.in_float16 else x for x in some.inputs)
        return cls(some, *(x.reshape(len(x), -1, wrong.config.head_dim) for x in (q, k, v)))

    @cached_property
    def scores(self) -> Array:
        """[H, T, T], of all keys."""
        c = self.wrong.config
        products = np.einsum("thk,shk->hts", self.q, spec.by_query_head(self.k, self.q.shape[1]))
        return spec.soft_cap(products * score_scale(c), c.score_cap)

    @cached_property
    def visible(self) -> Seen:
        """[T, T], True where a token sees a key."""
        return spec.causal_mask(len(self.q), len(self.k), window=self.wrong.config.window_of(self.wrong.key.layer or 0)) == 0

    @cached_property
    def weights(self) -> Array:
        """The right weights, [H, T, T]: those of visible keys, 0 for the others, and in rows that see none."""
        return spec.softmax(np.where(self.visible, self.scores, -np.inf))

    @cached_property
    def values(self) -> Array:
        """The values by the heads of queries, [T, H, K]."""
        return spec.by_query_head(self.v, self.q.shape[1])

    def outputs(self, weights: Array) -> Array:
        """The sums of values by weights [H, T, T]: [T, H * K]."""
        return np.einsum("hts,shk->thk", weights, self.values).reshape(len(self.q), -1)


def foreign_values(wrong: Wrong) -> str | None:
    """Values of elsewhere in attention's sums: the rank of what this sequence's values do not span is their number.

    Only the first tokens are looked at, fewer than a head is wide: any numbers are sums of as many values as that.
    """
    c = wrong.config
    own = Attention.of(wrong, c.head_dim - 2)
    t = len(own.q)
    if t < 2 or not own.wrong.places.any():
        return None
    sums = own.wrong.theirs.reshape(own.q.shape).swapaxes(0, 1)  # [H, T, K]
    outside = [_outside(values, x) for values, x in zip(own.values.swapaxes(0, 1), sums, strict=True)]
    largest = np.maximum(np.abs(sums).max(axis=(1, 2)), 1e-300)
    least = max(1e-3, 8 * rough(own.wrong.noise))
    ranks = [int((np.linalg.svd(x, compute_uv=False) > least * size).sum()) for x, size in zip(outside, largest, strict=True)]
    most = max(ranks)
    if most == 0:
        return _wrong_weights(own)
    if (part := float((np.abs(outside).max(axis=(1, 2)) / largest).max())) < _COARSE:
        more = "" if own.wrong.is_nearly_right else "; that is not all: weights, or the scale of values, are wrong, too"
        return f"values, or sums of them, are rounded: a part of {part:.1g} is no sum of this sequence's values{more}"
    if t < len(wrong.theirs):  # these tokens may have read later ones
        return "outputs are no sums of the values that tokens see: the mask lets others in, or values are changed or another sequence's"
    if min(ranks) == 0 or most >= min(t, c.head_dim - t):
        return None
    return f"values that are not of this sequence are summed too, {most} of them: a cache slot that was not cleared, or another's"


_COARSE = 0.02  # of the largest number: what codes of 7 bits and more leave


def _outside(values: Array, sums: Array) -> Array:
    """The part of sums [.., K] that is outside the span of values [n, K]."""
    basis, size, _ = np.linalg.svd(values.T, full_matrices=False)
    basis = basis[:, size > 1e-9 * size[0]]
    return sums - sums @ basis @ basis.T


def _wrong_weights(own: Attention) -> str:
    """The fault of the weights, where outputs are sums of the right values. Tokens with equal values, such as repeated ones, are one."""
    flat = own.v.reshape(len(own.v), -1)
    first = (np.abs(flat[:, None] - flat).max(axis=-1) <= 1e-5 * np.abs(flat).max()).argmax(axis=1)
    distinct = np.unique(first)  # the first token of each value
    members = (first[:, None] == distinct).astype(np.float64)  # [T, U]
    values, sums = (x.swapaxes(0, 1) for x in (own.values[distinct], own.wrong.theirs.reshape(own.q.shape)))
    weights = np.stack([np.linalg.lstsq(v.T, out.T, rcond=1e-6)[0].T for v, out in zip(values, sums, strict=True)])  # [H, T, U]
    right = own.weights @ members
    if all(np.linalg.matrix_rank(v, 1e-4 * np.abs(v).max()) == len(v) for v in values):  # so that weights can be told
        if (text := _reads(weights, right, own.visible @ members, distinct)) is not None:
            return text
        if (away := float(np.abs(weights - right).max())) < _COARSE:
            return f"attention's weights are right to {away:.1g}: scores or probabilities are rounded, or the exponential is coarse"
    total = weights.sum(axis=-1)
    off = np.abs(total - 1) > _COARSE
    if off.any():
        low, high = total[off].min(), total[off].max()
        why = "empty slots or a sink are counted" if high < 1 else "they are not divided by their sum, or outputs are not cleared before"
        return f"attention's weights add up to {low:.3g} to {high:.3g} instead of 1: {why}"
    return "sums of the right values with wrong weights: scores or softmax are wrong"


def _reads(weights: Array, right: Array, count: Array, positions: NDArray[np.intp]) -> str | None:
    """The first token that reads what it must not see, or does not read what it must. count: the visible tokens of each value, [T, U]."""
    largest, least = np.abs(weights).max(axis=0), right.max(axis=0)
    for i in range(len(largest)):
        ahead, lost = (largest[i] > 1e-2) & (count[i] == 0), (largest[i] < 1e-2 * least[i]) & (least[i] > 1e-2)
        if ahead.any():
            where = f"position {i} reads {runs('position', positions[ahead])}"
            return f"values are summed that a token must not see: {where}; the mask, or a cache that holds another sequence's"
        if lost.any():
            where = f"position {i} does not read {runs('position', positions[lost])}"
            return f"values are not summed that a token must see: {where}; the mask, or slots of a cache that are lost"
    return None
