"""Attention whose queries, keys or values are rows of heads from other places, as of a cache that is read in another layout."""

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ..evidence import SAME, SPARE
from ..law.definition import score_scale
from ..law.expression import Array
from ..words import FEW, Indices, runs
from .attention import WORK, Attention, attention
from .structure import Numbers, structure
from .wrong import Wrong


def moved_cells(wrong: Wrong) -> str | None:
    """The rows of keys and values, or of values alone, that are read in the place of others, if all else is right.

    A token reads one cell that those before it did not, its own. So its output tells what that cell holds, of all that the numbers of keys
    and values in their order can be cut into, or zeros from behind their end.
    """
    attended = attention(wrong)
    (t, heads, size), shared = attended.values.shape, attended.shared
    is_off = attended.wrong.places.reshape(t, heads, -1).any(axis=(0, 2))
    rows, right = t * heads // shared, attended.wrong.value.reshape(t, heads, size)
    for noun, step in (("values", size), ("keys and values", size), ("keys and values", 1)):
        per = size // step  # windows begin at each so many-th of a row
        if t < 2 or rows * per * t * heads * size > WORK:
            return None
        keys, values = (_windows(x[:, ::shared], step) for x in (attended.keys, attended.values))
        own = (np.arange(t)[:, None] * (heads // shared) + np.arange(heads) // shared) * per
        source, computed = own.copy(), right.copy()
        for h in np.flatnonzero(is_off):
            source[:, h], computed[:, h] = _cells_read(attended, int(h), own[:, h], values, keys if noun != "values" else None)
        if (source != own).any() and attended.wrong.accounts(computed.reshape(t, -1)):
            break
    else:
        return None
    what = "query head"
    if (source == np.repeat(source[:, ::shared], shared, axis=1)).all():
        what, source, own = "head", source[:, ::shared], own[:, ::shared]
    law = _strides(source, own, what, per, len(values) - 1)
    if law is None and noun != "values":  # others say which cells hold what, and why
        return None
    if law is None and what == "head" and np.count_nonzero(source != own) > FEW:
        axes = ("position", "head", "element")
        law = structure(Numbers(values[source], attended.values[:, ::shared], axes, wrong.noise))
    return f"{noun}: {law or _rows_in_words(source, own, heads // shared, noun)}{'; weights are right' * (noun == 'values')}"


def _windows(x: Array, step: int) -> NDArray[np.float64]:
    """What rows of heads [T, G, K] may be, read from each `step`-th number on, of zeros behind the end at last: [n, K]."""
    flat = np.append(x.ravel(), np.zeros(x.shape[2]))
    return np.lib.stride_tricks.sliding_window_view(flat, x.shape[2])[::step]


def _cells_read(attended: Attention, h: int, own: Indices, values: Array, keys: Array | None) -> tuple[Indices, Array]:
    """The windows [T] that a query head reads as the cells of the tokens, and its outputs [T, K] if it does.

    own: those that it should read. keys: the windows of keys [n, K] that are read together with values; None if scores are right.
    """
    c, held, outputs = attended.wrong.model.config, own.copy(), np.empty((len(own), values.shape[1]))
    theirs, score = attended.theirs[:, h], attended.scores[h]
    attended.wrong.go_on()
    for i, query in enumerate(attended.queries[:, h]):
        before = np.flatnonzero(attended.visible[i, :i])
        if keys is None:
            each, earlier = np.full(len(values), score[i, i]), score[i, before]
        else:
            each = spec.soft_cap(keys @ query * score_scale(c), c.score_cap)
            earlier = each[held[before]]
        largest = max(each.max(), earlier.max(initial=-np.inf))
        each, earlier = np.exp(each - largest)[:, None], np.exp(earlier - largest)
        made = (each * values + earlier @ values[held[before]]) / (each + earlier.sum())
        away = np.square(made - theirs[i]).sum(axis=1)
        near = np.flatnonzero(away <= SPARE * away.min() + SAME**2 * (theirs**2).mean())  # tokens that come twice have equal values
        held[i] = near[np.abs(near - own[i]).argmin()]
        outputs[i] = made[held[i]]
    return held, outputs


def moved_queries(wrong: Wrong) -> str | None:
    """The rows of queries, of any head and position, that stand in the place of others, if keys and values are right."""
    attended, c = attention(wrong), wrong.model.config
    t, heads, size = attended.values.shape
    is_off = np.asarray(attended.wrong.places.reshape(t, heads, -1).any(axis=2))
    own = np.arange(t * heads).reshape(t, heads)
    source = own.copy()
    if heads * t**3 * heads * size > WORK:
        return None
    every, computed = attended.queries.reshape(-1, attended.queries.shape[2]), attended.wrong.value.copy()
    for h in np.flatnonzero(is_off.any(axis=0)):
        scores = spec.soft_cap(every @ attended.keys[:, h].T * score_scale(c), c.score_cap)
        for i in np.flatnonzero(is_off[:, h]):
            made = spec.softmax(np.where(attended.visible[i], scores, -np.inf)) @ attended.values[:, h]
            source[i, h] = np.square(made - attended.theirs[i, h]).sum(axis=1).argmin()
            computed[i, h * size : (h + 1) * size] = made[source[i, h]]
    if not attended.wrong.accounts(computed):
        return None
    words = _strides(source, own, "head", 1, source.size) or _rows_in_words(source, own, heads, "queries")
    return f"queries: {words}; keys and values are right"


def _strides(source: Indices, own: Indices, what: str, per: int, end: int) -> str | None:
    """Where rows of heads [T, H] begin, and the stride by which they are read, if they are read by one.

    source, own: what is read, and should be, counted in rows, or in `per` elements of each. end: what is read from there on is 0.
    """
    off = np.flatnonzero((source != own).any(axis=0))
    first, strides = source[0, off], np.unique(source[1, off] - source[0, off])
    ruled = np.minimum(first + strides[0] * np.arange(len(source))[:, None], end)
    if strides.size > 1 or (source[:, off] != ruled).any():
        return None
    unit, right = "row" if per == 1 else "element", own[1, 0] - own[0, 0]
    begins = (", ".join(map(str, x)) for x in (first, own[0, off]))
    begin = "" if (first == own[0, off]).all() else f" from {unit} {' on instead of '.join(begins)}"
    by = "" if strides[0] == right else f" by a stride of {strides[0]}{' elements' * (per > 1)} a position instead of {right}"
    return f"rows of {runs(what, off)} are read{begin}{by}"


def _rows_in_words(source: Indices, own: Indices, heads: int, what: str) -> str:
    """Which rows of heads [T, H] are read, by the first of them. heads: how many rows a position has."""
    i, h = np.argwhere(source != own)[0].tolist()
    position, head = divmod(int(source[i, h]), heads)
    of = f"head {head} of position {position}" if position < len(source) else "zeros"
    return f"{np.count_nonzero(source != own)} rows are others: head {own[i, h] % heads} of position {i} has the {what} of {of}"
