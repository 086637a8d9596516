"""The cells of a KV cache that each token's attention reads, and how often: solved for, as scores and values are known.

An output is the mean of values by weights m e, where e are exponentials of the right scores, and m counts how often a cell is read: 1
where a token sees it, 0 where not. So m solves sum_s m_s e_s (v_s - output) = 0, one equation for each element of each head. These are
more than there are tokens in most dumps, and m is the one null vector. Masks, lost cells, cells written over and cells counted twice are
all numbers m.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import spec
from .attention import Attention, Seen
from .wrong import FEW, Array, Indices, Wrong, places_of, rough, runs

Counts = NDArray[np.int64]

_WHOLE = 0.05  # from a whole number
_UNIQUE = 20  # times the least singular value: a null vector that is not alone says nothing
_LEAST_WEIGHT = 1e-4  # a cell that counts less cannot be told


def cells(wrong: Wrong) -> str | None:
    """The cells that are read and must not be, or not read, or read several times, if these alone are wrong in attention."""
    own = Attention.of(wrong)
    t, heads = own.q.shape[:2]
    places = own.wrong.places.reshape(own.q.shape)
    some, tokens = np.flatnonzero(places.any(axis=(0, 2))), np.flatnonzero(places.any(axis=(1, 2)))
    weights = np.exp(own.scores - own.scores.max(axis=-1, keepdims=True))  # [H, T, T], of all cells, visible or not
    values, theirs = spec.by_query_head(own.v, heads), own.wrong.theirs.reshape(own.q.shape)
    least = max(_LEAST_WEIGHT, 64 * rough(wrong.noise))
    zero = np.exp(-own.scores.max(axis=-1))  # [H, T], of a key of zeros
    empty, counts = np.zeros(t, np.int64), own.visible.astype(np.int64)
    known = np.ones((t, t), bool)  # of tokens that are right too
    for i in tokens:
        solved = _solve(weights[some, i], values[:, some], theirs[i, some], own.visible[i], least)
        if solved is None:
            more = np.append(weights[some, i], zero[some, i, None], axis=1), np.append(values[:, some], 0 * values[:1, some], axis=0)
            solved = _solve(*more, theirs[i, some], np.append(own.visible[i], False), least)
            if solved is None:
                return None
            empty[i], solved = solved.counts[-1] * solved.known[-1], _Solved(solved.counts[:-1], solved.known[:-1])
        known[i] = solved.known
        counts[i, known[i]] = solved.counts[known[i]]
    is_some = np.isin(np.arange(heads), some)
    by = np.where(is_some[:, None, None], counts, own.visible) * weights
    total = by.sum(axis=-1) + np.where(is_some[:, None], empty * zero, 0)
    if not own.wrong.accounts(own.outputs(by / np.maximum(total, 1e-300)[:, :, None])):
        return None
    text = None if (counts == own.visible).all() else _by_distance(counts, known, own.visible, np.arange(t))
    if text is None and (text := _by_distance(counts, known, own.visible, tokens)):
        text = f"at {_runs(tokens.tolist())}: {text}"
    text = text or _by_cell(counts, own.visible)
    if empty.any():
        slots = (
            f"empty slots, whose keys and values are 0, are read by {_runs(np.flatnonzero(empty).tolist())}, up to {empty.max()} of them"
        )
        text = f"{slots}; {text}" if text else slots
    return text if some.size == heads else f"at {places_of(some, heads, 'head')}: {text}"


class _Solved(NamedTuple):
    """How often a token reads each cell [T], and where that can be told."""

    counts: Counts
    known: Seen


def _solve(weights: Array, values: Array, output: Array, visible: Seen, least: float) -> _Solved | None:
    """The cells that a token reads; None if no whole numbers give its output.

    weights: [H, T]. values: [T, H, K]. output: [H, K].
    """
    equations = (weights.T[:, :, None] * (values - output)).reshape(len(visible), -1).T  # [H K, T]
    shares = (weights / weights[:, visible].sum(axis=1, keepdims=True)).max(axis=0)
    known = shares > least
    equations = equations[:, known]
    if len(equations) < known.sum():
        return None
    _, sizes, vectors = np.linalg.svd(equations, full_matrices=False)
    if sizes.size > 1 and sizes[-2] < _UNIQUE * sizes[-1]:
        return None
    solved = np.zeros(len(visible))
    solved[known] = vectors[-1]
    large = solved[np.abs(solved) > 0.1 * np.abs(solved).max()]
    solved /= large[np.abs(large).argmin()]  # most cells are read once
    counts = np.rint(solved)
    if np.abs(solved - counts).max() > _WHOLE or counts.min() < 0:
        return None
    return _Solved(counts.astype(np.int64), known)


def _by_distance(counts: Counts, known: Seen, visible: Seen, tokens: Indices) -> str | None:
    """The distances that these tokens see, if they are more than one and a rule for all of them."""
    t = len(counts)
    if len(tokens) < 2:
        return None
    distance = tokens[:, None] - np.arange(t)
    some, sure, right = counts[tokens], known[tokens], visible[tokens]
    seen = []
    for d in range(-t + 1, t):
        read = some[(distance == d) & sure]
        if read.size and (read.max() > 1 or read.min() < read.max()):
            return None
        if read.any():
            seen.append(d)
    expected = [d for d in range(t) if right[distance == d].any()]
    if seen == expected or not seen:
        return None
    return f"the mask: a token sees {_distances(seen, t)}, not {_distances(expected, t)}"


def _distances(distances: list[int], tokens: int) -> str:
    """What a token sees, by how far it is behind the token, in words."""
    said = ["itself"] if 0 in distances else []
    for which, numbers in (("before it", [d for d in distances if d > 0]), ("ahead of it", sorted(-d for d in distances if d < 0))):
        if numbers == list(range(1, tokens)):
            said.append(f"all {which}")
        elif numbers:
            said.append(f"{runs('position', np.array(numbers))} {which}")
    return " and ".join(said)


def _by_cell(counts: Counts, visible: Seen) -> str:
    """The cells that are read too often or not at all, and by which tokens."""
    said = list(_cells_said(counts - visible, visible))
    return "; ".join(said[:FEW]) + (f"; and {len(said) - FEW} more" if len(said) > FEW else "")


def _cells_said(off: Counts, visible: Seen) -> Iterator[str]:
    """What is wrong with cells, and for which tokens. off: how much too often each token reads each cell, [T, T]."""
    lost, extra, unseen = _readers(off < 0), _readers((off > 0) & visible), _readers((off > 0) & ~visible)
    for s, by in list(lost.items()):
        instead = [r for r, others in (extra | unseen).items() if others == by]
        if instead:
            r = min(instead, key=lambda r: abs(r - s))
            del lost[s]
            (extra if r in extra else unseen).pop(r)
            yield f"the cell of position {s} holds position {r} where {_runs(by)} read it: it was written over, or its page is another's"
    for cells, by in _alike(lost):
        yield f"{_runs(cells)} {_is(cells)} not read by {_runs(by)}: the mask, or slots of the cache that are lost"
    for cells, by in _alike(unseen):
        yield f"{_runs(cells)} {_is(cells)} read by {_runs(by)}, which must not see {'them' if len(cells) > 1 else 'it'}: the mask"
    for cells, by in _alike(extra):
        yield f"{_runs(cells)} {_is(cells)} read {int(off[list(by)][:, cells].max()) + 1} times by {_runs(by)}"


def _readers(marked: Seen) -> dict[int, tuple[int, ...]]:
    """The tokens that are marked for each cell, where some are."""
    return {int(s): tuple(map(int, np.flatnonzero(marked[:, s]))) for s in np.flatnonzero(marked.any(axis=0))}


def _alike(readers: dict[int, tuple[int, ...]]) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Yields the cells that have the same tokens, with these."""
    for by in dict.fromkeys(readers.values()):
        yield [s for s, others in readers.items() if others == by], by


def _runs(numbers: Sequence[int]) -> str:
    return runs("position", np.array(numbers))


def _is(cells: Sequence[int]) -> str:
    return "are" if len(cells) > 1 else "is"
