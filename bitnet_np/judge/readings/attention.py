"""Wrong attention: the heads, values and weights that its sums have."""

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...traces.points import Key
from .. import operations as op
from ..roundings import to_float16
from .search import best_number
from .wrong import ROWS, Array, Wrong, explained, rough, runs


def _read(wrong: Wrong) -> tuple[Array, Array, Array]:
    """The queries, keys and values [T, width] as the dialect reads them."""
    q, k, v = (to_float16(x) if wrong.dialect.halves else x for x in wrong.inputs)
    return q, k, v


def other_heads(wrong: Wrong) -> str | None:
    """The first query head that reads another key-value head than its own, if that explains the numbers."""
    c, (q, k, v) = wrong.config, _read(wrong)
    t = min(len(q), ROWS)
    q, out = (x[:t].reshape(t, c.heads, c.head_dim) for x in (q, wrong.theirs))
    k, v = (x[:t].reshape(t, c.kv_heads, c.head_dim) for x in (k, v))
    mask = spec.causal_mask(t, t, window=c.window_of(wrong.key.layer or 0))
    how = c.attention_scale, c.score_cap
    heads_read = []
    for h in range(c.heads):
        outputs = [spec.attend(q[:, [h]], k[:, [g]], v[:, [g]], mask, *how)[:, 0] for g in range(c.kv_heads)]
        heads_read.append(next((g for g in range(c.kv_heads) if explained(outputs[g], out[:, h], wrong.noise)), -1))
    off = np.flatnonzero(np.array(heads_read) != np.arange(c.heads) // (c.heads // c.kv_heads))
    if not off.size or min(heads_read) < 0:
        return None
    h = int(off[0])
    first = f"query head {h} reads key-value head {heads_read[h]} instead of {h // (c.heads // c.kv_heads)}"
    return first + (f", and {off.size - 1} more read wrong ones" if off.size > 1 else "")


def other_layers(wrong: Wrong) -> str | None:
    """The layer whose keys or values are read, if it is another one's."""
    (q, k, v), n = _read(wrong), wrong.key.layer
    names = [key.name for key in wrong.operation.inputs[1:]]
    for other in range(len(wrong.model.layers)):
        its_keys, its_values = (wrong.tensors.get(Key(name, other)) for name in names)
        if other == n or its_keys is None or its_values is None:
            continue
        for what, keys, values in (("keys and values", its_keys, its_values), ("keys", its_keys, v), ("values", k, its_values)):
            if wrong.accounts(op.attend(wrong.model, wrong.dialect, n or 0, q, keys, values).value):
                return f"{what} of layer {other} are read: the cache of another layer"
    return None


def score_cap(wrong: Wrong) -> str | None:
    """The soft cap of scores, if one is applied that the model does not have."""
    c = wrong.config

    def capped(some: Wrong, cap: float) -> Array:
        t = len(some.value)
        q, k, v = (x.reshape(t, -1, c.head_dim) for x in _read(some))
        mask = spec.causal_mask(t, t, window=c.window_of(some.key.layer or 0))
        return spec.attend(q, k, v, mask, c.attention_scale, cap).reshape(t, -1)

    number = best_number(wrong, capped)
    if number is None:
        return None
    return f"scores are soft-capped at {number:.4g}" + ("" if c.score_cap is None else f" instead of {c.score_cap:g}")


def moved_heads(wrong: Wrong) -> str | None:
    """The heads whose outputs stand where others' belong."""
    value, theirs = (x.reshape(len(x), -1, wrong.config.head_dim) for x in (wrong.value, wrong.theirs))
    off = np.flatnonzero(wrong.places.reshape(value.shape).any(axis=(0, 2)))
    source = []
    for h in off:
        away = ((theirs[:, [h]] - value) ** 2).sum(axis=(0, 2))
        source.append(int(away.argmin()))
    moved = value.copy()
    moved[:, off] = value[:, source]
    if not off.size or not wrong.accounts(moved.reshape(wrong.value.shape)):
        return None
    first = f"the output of head {off[0]} is that of head {source[0]}"
    return first + (f", and {off.size - 1} more are others'" if off.size > 1 else "")


def foreign_values(wrong: Wrong) -> str | None:
    """Values of elsewhere in attention's sums: the rank of what this sequence's values do not span is their number.

    Only the first tokens are looked at, fewer than a head is wide: any numbers are sums of as many values as that.
    """
    c, (q, k, v) = wrong.config, _read(wrong)
    t = min(len(v), c.head_dim - 2)
    if t < 2 or not wrong.places[:t].any():
        return None
    cut = v[:t].reshape(t, c.kv_heads, c.head_dim)
    out = wrong.theirs[:t].reshape(t, c.heads, c.head_dim)
    ranks, hidden, most_outside = [], False, 0.0
    for head in range(c.heads):
        values, sums = cut[:, head // (c.heads // c.kv_heads)], out[:, head]
        largest = np.abs(sums).max()
        least = max(1e-3, 8 * rough(wrong.noise)) * largest
        outside = _outside(values, sums)
        most_outside = max(most_outside, float(np.abs(outside).max() / max(largest, 1e-300)))
        ranks.append(int((np.linalg.svd(outside, compute_uv=False) > least).sum()))
        hidden |= any(np.abs(_outside(values[: i + 1], sums[i])).max() > least for i in range(t))
    most = max(ranks)
    if most == 0:
        return _wrong_weights(wrong, q[:t], k[:t], cut, out, hidden)
    if most_outside < _COARSE:
        return f"values, or sums of them, are rounded: a part of {most_outside:.1g} is no sum of this sequence's values"
    if t < len(v):  # these tokens may have read later ones
        return "values are summed that a token must not see, or that are not of this sequence: the mask, or a cache slot of another"
    if min(ranks) == 0 or most >= min(t, c.head_dim - t):
        return None
    return f"values that are not of this sequence are summed too, {most} of them: a cache slot that was not cleared, or another's"


_COARSE = 0.02  # of the largest number: what codes of 7 bits and more leave


def _outside(values: Array, sums: Array) -> Array:
    """The part of sums [.., K] that is outside the span of values [n, K]."""
    basis, size, _ = np.linalg.svd(values.T, full_matrices=False)
    basis = basis[:, size > 1e-9 * size[0]]
    return sums - sums @ basis @ basis.T


def _wrong_weights(wrong: Wrong, q: Array, k: Array, v: Array, out: Array, hidden: bool) -> str:
    """The fault of the weights, where outputs [t, H, K] are sums of the right values [t, G, K]."""
    c = wrong.config
    t, shared = len(v), c.heads // c.kv_heads
    scores, _ = op.scores(wrong.model, q, k)  # [H, t, t]
    mask = spec.causal_mask(t, t, window=c.window_of(wrong.key.layer or 0))
    right = np.exp(scores + mask - (scores + mask).max(axis=-1, keepdims=True))
    right /= right.sum(axis=-1, keepdims=True)
    flat = v.reshape(t, -1)
    first = (np.abs(flat[:, None] - flat).max(axis=-1) <= 1e-5 * np.abs(flat).max()).argmax(axis=1)  # repeated tokens have equal values
    distinct = np.unique(first)
    members = (first[:, None] == distinct).astype(np.float64)  # [t, u]
    v, right, visible = v[distinct], right @ members, (mask == 0) @ members
    scores = np.where(mask == 0, scores, 0) @ members  # where one of equal values is visible: its own
    weights = np.stack([np.linalg.lstsq(v[:, h // shared].T, out[:, h].T, rcond=1e-6)[0].T for h in range(c.heads)])  # [H, t, u]
    known = all(np.linalg.matrix_rank(v[:, g], 1e-4 * np.abs(v[:, g]).max()) == len(v) for g in range(c.kv_heads))
    if known:
        finding = _reads(weights, right, visible > 0, distinct)
        if finding is not None:
            return finding
    elif hidden:
        return "values are summed that a token must not see: the mask, or a cache that holds another sequence's"
    if known and (away := float(np.abs(weights - right).max())) < _COARSE:
        return f"attention's weights are right to {away:.1g}: scores or probabilities are rounded, or the exponential is coarse"
    sums = weights.sum(axis=-1)
    off = np.abs(sums - 1) > _COARSE
    if off.any():
        low, high = sums[off].min(), sums[off].max()
        why = "empty slots or a sink are counted" if high < 1 else "they are not divided by their sum, or outputs are not cleared before"
        return f"attention's weights add up to {low:.3g} to {high:.3g} instead of 1: {why}"
    if known:
        finding = _temperature(weights, scores, visible == 1)
        if finding is not None:
            return finding
    return "sums of the right values with wrong weights: scores or softmax are wrong"


def _reads(weights: Array, right: Array, visible: NDArray[np.bool_], positions: NDArray[np.int64]) -> str | None:
    """The first token that reads what it must not see, or does not read what it must.

    weights, right: [H, t, u]; visible: [t, u], True where token t sees value u; positions: [u], of the values.
    """
    some = np.abs(weights).max(axis=0) > 1e-3
    for i in range(len(visible)):
        ahead = np.flatnonzero(some[i] & ~visible[i])
        if ahead.size:
            where = f"position {i} reads {runs('position', positions[ahead])}"
            return f"values are summed that a token must not see: {where}; the mask, or a cache that holds another sequence's"
        lost = np.flatnonzero((np.abs(weights[:, i]).max(axis=0) < 1e-2 * right[:, i].max(axis=0)) & (right[:, i].max(axis=0) > 1e-2))
        if lost.size:
            where = f"position {i} does not read {runs('position', positions[lost])}"
            return f"values are not summed that a token must see: {where}; the mask, or slots of a cache that are lost"
    return None


def _temperature(weights: Array, scores: Array, visible: NDArray[np.bool_]) -> str | None:
    """The common factor of all scores, if one explains these weights."""
    usable = visible & (weights > 1e-3)
    logs = np.log(np.where(usable, weights, 1.0))
    count = np.maximum(usable.sum(axis=-1, keepdims=True), 1)
    x, y = (np.where(usable, a - np.where(usable, a, 0).sum(axis=-1, keepdims=True) / count, 0) for a in (scores, logs))
    factor = float((x * y).sum() / max((x * x).sum(), 1e-300))
    if ((y - factor * x) ** 2).sum() > 1e-4 * (y * y).sum() or abs(factor - 1) < 1e-3:
        return None
    return f"scores are {factor:.5g} times what they should be"
