"""Attention as a mix of numbers that are known: of parts of the softmax, or of what any cell of the cache may hold.

Both are linear in how much of each is mixed in, so that is solved for, where the outputs are more than these unknowns.
"""

import numpy as np

from ..law.definition import score_scale
from .attention import Attention, attention
from .wrong import Array, Indices, Wrong, explains, plain, runs

_SPARE = 2  # outputs for each unknown
_COUNTS = 0.05  # a weight that is less tells nothing
_SAME = 2e-3  # of a factor of logarithms
_WHOLE = 0.05  # from a whole number
_CONDITION = 1e6  # of the equations of cells


def joined_parts(wrong: Wrong) -> str | None:
    """The parts of the keys whose softmaxes are right, and are joined by wrong weights; and the law of these weights."""
    attended = attention(wrong)
    (_, t, _), width = attended.scores.shape, attended.values.shape[2]
    for size in range(t - 1, 1, -1):
        count = -(-t // size)
        if _SPARE * count > width:
            return None
        part = (np.arange(t) // size)[:, None] == np.arange(count)  # [T, P]
        seen = np.where(attended.visible[:, None] & part.T, attended.scores[:, :, None], -np.inf)  # [H, T, P, T]
        largest = np.nan_to_num(seen.max(axis=-1, keepdims=True), neginf=0.0)
        e = np.exp(seen - largest)
        sums = e.sum(axis=-1, keepdims=True)  # 0 where a token sees nothing of a part
        outputs = np.einsum("htps,shk->htpk", e / np.maximum(sums, 1e-300), attended.values)
        theirs = attended.theirs.swapaxes(0, 1)[..., None]  # [H, T, K, 1]
        weights = np.linalg.pinv(outputs.swapaxes(2, 3)) @ theirs  # [H, T, P, 1]
        mixed = (outputs * weights).sum(axis=2).swapaxes(0, 1)  # [T, H, K]
        if explains(mixed.reshape(attended.wrong.theirs.shape), attended.wrong.theirs, attended.wrong.value, wrong.noise):
            right = np.exp(largest - largest.max(axis=2, keepdims=True)) * sums
            off = np.abs(weights - right / right.sum(axis=2, keepdims=True)).max()
            if off < _COUNTS or np.abs(weights.sum(axis=2) - 1).max() > _COUNTS:
                return None  # values, or the sums of weights, are wrong, whatever parts there are
            law = _law_of_weights(*(x[..., 0] for x in (weights, largest, sums)))
            return f"the softmax is computed in parts of {size} keys, and these are joined by wrong weights{law}"
    return None


def _law_of_weights(weights: Array, largest: Array, sums: Array) -> str:
    """What the weights [H, T, P] of parts have from their largest scores and their sums, in words, if that is all of them."""
    known = (sums > 0) & (weights > _COUNTS)
    known &= known.sum(axis=-1, keepdims=True) > 1
    mean = lambda x: np.where(known, x, 0).sum(axis=-1, keepdims=True) / np.maximum(known.sum(axis=-1, keepdims=True), 1)  # noqa: E731
    target, *features = (
        (x - mean(x))[known] for x in (np.log(weights, where=known, out=0 * weights), largest, np.log(np.maximum(sums, 1e-300)))
    )
    if target.size < _SPARE**3:
        return ""
    design = np.stack(features, axis=1)
    factors = np.linalg.lstsq(design, target, rcond=None)[0]
    if ((design @ factors - target) ** 2).sum() > _SAME**2 * max((target**2).sum(), (design**2).sum()):
        return ""
    names = ("the largest score of each part", "the logarithm of its sum of exponentials")
    said = [
        f"{name} is {'left out' if abs(x) < _SAME else f'multiplied by {plain(float(x), _SAME)}'}"
        for name, x in zip(names, factors, strict=True)
        if abs(x - 1) > _SAME
    ]
    return f": {', and '.join(said)}" if said else ""


# --- what cells hold --------------------------------------------------------------------------------------------------------------------


def held_cells(wrong: Wrong) -> str | None:
    """The keys and values of other heads, or none, that cells hold for all tokens behind them: solved for, head by head."""
    attended, texts = attention(wrong), []
    t, count, width = attended.values.shape
    off = np.flatnonzero(attended.wrong.places.reshape(t, count, width).any(axis=(0, 2)))
    if not off.size:  # it is wrong behind the tokens that are looked at
        return None
    first = int(attended.wrong.wrong_rows[0])
    for head in np.unique(off // attended.shared) if wrong.model.config.score_cap is None else ():
        tried = (_held(attended, int(head), border) for border in dict.fromkeys((first, t // 2, t // 4)) if 0 < border < t)
        source = next((x for x in tried if x is not None), None)
        if source is None:
            return None
        texts += _in_words(source, int(head))
    return f"{'; '.join(texts)}{f', for tokens from position {first} on' * (first > 0)}" if texts else None


def _held(attended: Attention, head: int, border: int) -> Indices | None:
    """The key-value head [border] whose key and value each cell before a border holds for a key-value head, -1 for none: those of its
    position. None if that does not give the outputs of all tokens."""
    own = np.arange(head * attended.shared, (head + 1) * attended.shared)
    keys, values = (x[:, :: attended.shared] for x in (attended.keys, attended.values))  # [T, G, K]
    t, groups, _ = keys.shape
    scores = np.einsum("thk,sgk->htgs", attended.queries[:, own], keys) * score_scale(attended.wrong.model.config)
    scores = np.where(attended.visible[:, None], scores, -np.inf)  # [h, T, G, T]
    largest = np.maximum(scores.max(axis=(2, 3)), 0)  # [h, T], of an empty cell too
    e, empty = np.exp(scores - largest[..., None, None]), np.exp(-largest)
    theirs = attended.theirs[:, own].swapaxes(0, 1)  # [h, T, K]
    each = e[:, border:, :, :border, None] * (values[:border].swapaxes(0, 1) - theirs[:, border:, None, None])  # [h, t, G, S, K]
    nothing = -empty[:, border:, None] * theirs[:, border:]  # [h, t, K]
    later = np.einsum("hts,htsk->htk", e[:, border:, head, border:], values[border:, head] - theirs[:, border:, None])
    design = np.concatenate([each.reshape(*each.shape[:2], -1, each.shape[-1]), nothing[:, :, None]], axis=2).swapaxes(2, 3)
    design = design.reshape(-1, groups * border + 1)
    if len(design) < _SPARE * design.shape[1] or np.linalg.cond(design) > _CONDITION:
        return None
    counts = np.linalg.lstsq(design, -later.ravel(), rcond=None)[0][:-1].reshape(groups, border)
    if np.abs(counts - np.rint(counts)).max() > _WHOLE or not np.isin(np.rint(counts).sum(axis=0), (0, 1)).all() or counts.min() < -_WHOLE:
        return None
    counts = np.rint(counts)
    source = np.where(counts.any(axis=0), counts.argmax(axis=0), -1)
    if (source == head).all():
        return None
    is_empty = (source < 0) & attended.visible[:, :border]  # [T, S]
    at = np.arange(border)
    weights = np.concatenate([np.where(is_empty, empty[..., None], e[:, :, source, at]), e[:, :, head, border:]], axis=2)  # [h, T, T]
    held = np.concatenate([np.where(source[:, None] < 0, 0, values[at, source]), values[border:, head]])
    computed = weights @ held / weights.sum(axis=-1, keepdims=True)
    right = attended.wrong.value.reshape(attended.values.shape)[:, own].swapaxes(0, 1)
    rows = np.union1d(attended.wrong.wrong_rows, np.arange(border, t))  # earlier ones may have been right before
    return source if explains(computed[:, rows], theirs[:, rows], right[:, rows], attended.wrong.noise) else None


def _in_words(source: Indices, head: int) -> list[str]:
    """What the cells of a key-value head hold, in words."""
    texts = []
    for other in np.unique(source[source != head]):
        cells = runs("position", np.flatnonzero(source == other))
        what = f"hold those of head {other}" if other >= 0 else "hold keys and values of 0: never written"
        texts.append(f"the cells of {cells} of key-value head {head} {what}")
    return texts
