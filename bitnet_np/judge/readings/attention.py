"""Wrong attention: its steps, and the weights that outputs are sums by, solved for where values are independent."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .wrong import ROWS, Array, Wrong, rough, runs

Seen = NDArray[np.bool_]


class Attention(NamedTuple):
    """The attention of the first tokens of a sequence in one layer."""

    wrong: Wrong  # of these tokens
    scores: Array  # [H, T, T], of all keys
    visible: Seen  # [T, T], True where a token sees a key
    weights: Array  # the right ones, [H, T, T]
    values: Array  # by the heads of queries, [T, H, K]

    @property
    def theirs(self) -> Array:
        """Their outputs, [T, H, K]."""
        return self.wrong.theirs.reshape(self.values.shape)

    def outputs(self, weights: Array) -> Array:
        """The sums of values by weights [H, T, T]: [T, H * K]."""
        return np.einsum("hts,shk->thk", weights, self.values).reshape(len(self.values), -1)


def attention(wrong: Wrong, most: int = ROWS) -> Attention:
    """The attention of the first tokens, `most` of them."""
    some = wrong.rows(np.arange(min(most, len(wrong.theirs))))
    masked, sums = some.step("mask"), some.step("weighted")
    assert masked is not None
    assert sums is not None
    weights, values = (some.steps[node] for node in sums.inputs)
    return Attention(some, some.steps[masked.inputs[0]], np.isfinite(some.steps[masked][0]), weights, values)


def foreign_values(wrong: Wrong) -> str | None:
    """Values of elsewhere in attention's sums: the rank of what this sequence's values do not span is their number.

    Only the first tokens are looked at, fewer than a head is wide: any numbers are sums of as many values as that.
    """
    c = wrong.model.config
    own = attention(wrong, c.head_dim - 2)
    t = len(own.values)
    if t < 2 or not own.wrong.places.any():
        return None
    sums = own.theirs.swapaxes(0, 1)  # [H, T, K]
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


_LEAST_WEIGHT = 1e-2  # that is read
_COARSE = 0.02  # of the largest number: what codes of 7 bits and more leave


def _outside(values: Array, sums: Array) -> Array:
    """The part of sums [.., K] that is outside the span of values [n, K]."""
    basis, size, _ = np.linalg.svd(values.T, full_matrices=False)
    basis = basis[:, size > 1e-9 * size[0]]
    return sums - sums @ basis @ basis.T


def _wrong_weights(own: Attention) -> str:
    """The fault of the weights, where outputs are sums of the right values. Tokens with equal values, such as repeated ones, are one."""
    flat = own.values.reshape(len(own.values), -1)
    first = (np.abs(flat[:, None] - flat).max(axis=-1) <= 1e-5 * np.abs(flat).max()).argmax(axis=1)
    distinct = np.unique(first)  # the first token of each value
    members = (first[:, None] == distinct).astype(np.float64)  # [T, U]
    values, sums = (x.swapaxes(0, 1) for x in (own.values[distinct], own.theirs))
    weights = np.stack([np.linalg.lstsq(v.T, out.T, rcond=1e-6)[0].T for v, out in zip(values, sums, strict=True)])  # [H, T, U]
    right = own.weights @ members
    if all(np.linalg.matrix_rank(v, 1e-4 * np.abs(v).max()) == len(v) for v in values):  # so that weights can be told
        ahead = (np.abs(weights).max(axis=0) > _LEAST_WEIGHT) & (own.visible @ members == 0)  # [T, U]
        if ahead.any():
            i = int(ahead.any(axis=1).argmax())
            where = f"position {i} reads {runs('position', distinct[ahead[i]])}"
            return f"values are summed that a token must not see: {where}; the mask, or a cache that holds another sequence's"
        if (away := float(np.abs(weights - right).max())) < _COARSE:
            return f"attention's weights are right to {away:.1g}: scores or probabilities are rounded, or the exponential is coarse"
    total = weights.sum(axis=-1)
    off = np.abs(total - 1) > _COARSE
    if off.any():
        low, high = total[off].min(), total[off].max()
        why = "empty slots or a sink are counted" if high < 1 else "they are not divided by their sum, or outputs are not cleared before"
        return f"attention's weights add up to {low:.3g} to {high:.3g} instead of 1: {why}"
    return "sums of the right values with wrong weights: scores or softmax are wrong"
