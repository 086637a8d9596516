"""What any tensor shows: right numbers in other places, zeros, and few wrong ones."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...traces.points import Key
from .wrong import FEW, Array, Indices, Wrong, numbered, runs, said

_FEW_ROWS = 4  # a source found for each column of fewer explains too much
_NARROW = 8  # columns; the same for rows
_TOGETHER = 64  # rows compared at once with all


def rows_of_others(wrong: Wrong) -> str | None:
    """The wrong positions that have the right numbers of another position, or of another tensor, where all others are right."""
    if wrong.theirs.shape[1] < _NARROW or len(wrong.theirs) < 2:
        return None
    source = _sources(wrong, wrong.theirs, wrong.value)
    if source is not None:
        return moved_said(source, "position")
    rows = wrong.wrong_rows
    for key, other in wrong.beside() if not wrong.is_nearly_right else ():
        computed = wrong.value.copy()
        computed[rows] = other[rows]
        if wrong.accounts(computed):
            which = "it has" if rows.size == len(wrong.theirs) else said("position", rows, "has")
            return f"{which} the numbers of {key.place}"
    return None


def columns_of_others(wrong: Wrong) -> str | None:
    """The wrong elements that have the right numbers of another element at every wrong position, are 0, or are left of another tensor,
    where all others are right."""
    rows = wrong.wrong_rows
    where = f"at {runs('position', rows)}: " if rows.size < len(wrong.theirs) else ""
    if rows.size < _FEW_ROWS:
        return None
    left, value = _left_of_others(wrong, rows), wrong.value[rows].T
    count = len(value)
    source = _sources(wrong.rows(rows), wrong.theirs[rows].T, np.concatenate([value, np.zeros((1, rows.size)), *(x.T for _, _, x in left)]))
    if source is None:
        return None
    texts = [f"{said('element', columns, 'has')} the numbers of {key.place}" for key, columns, _ in left]
    zero = np.flatnonzero(source == count)
    for columns in (zero, *(columns for _, columns, _ in left)):
        source[columns] = columns
    if source.max() >= count:
        return None
    if (source != np.arange(count)).any():
        texts.insert(0, moved_said(source, "element"))
    if zero.size:
        texts.append(f"{said('element', zero, 'is')} 0")
    return where + ", and ".join(texts) if texts else None


def _left_of_others(wrong: Wrong, rows: Indices) -> list[tuple[Key, Indices, Array]]:
    """The elements that have, at these rows, the numbers of another tensor: its key, the elements, and the numbers."""
    found, open_columns = [], wrong.places.any(axis=0) & (wrong.theirs[rows] != 0).any(axis=0)
    for key, other in wrong.beside() if not wrong.is_nearly_right else ():
        near = np.abs(wrong.theirs[rows] - other[rows]) <= 1e-5 * np.abs(other).max()
        columns = np.flatnonzero(near.all(axis=0) & open_columns)
        if columns.size:
            open_columns[columns] = False
            found.append((key, columns, other[np.ix_(rows, columns)]))
    return found


def running_sums(wrong: Wrong) -> str | None:
    """The elements that add each position's numbers to those of the position before."""
    rows, columns = wrong.wrong_rows, wrong.wrong_columns
    first = max(int(rows[0]) - 1, 0)
    computed = wrong.value.copy()
    computed[first:, columns] = computed[first:, columns].cumsum(axis=0)
    if len(wrong.theirs) - first < 3 or not wrong.accounts(computed):
        return None
    return f"{runs('element', columns)}: sums run on from position {first}, and are not cleared between positions"


def _sources(wrong: Wrong, theirs: Array, value: Array) -> Indices | None:
    """The row of `value` that each row of `theirs` is, if each is one; rows that are right are their own."""
    places = wrong.places if theirs is wrong.theirs else wrong.places.T
    off = np.flatnonzero(places.any(axis=1))
    source, squares = np.arange(len(theirs)), (value * value).sum(axis=1)
    for begin in range(0, off.size, _TOGETHER):
        some = off[begin : begin + _TOGETHER]
        source[some] = (squares - 2 * theirs[some] @ value.T).argmin(axis=1)
        if not np.allclose(value[source[some]], theirs[some], rtol=1e-2, atol=1e-2 * np.abs(value).max()):
            return None
    computed = value[source]
    if not wrong.accounts(computed if theirs is wrong.theirs else computed.T):
        return None
    return None if (source == np.arange(len(source))).all() else source


def moved_said(source: Indices, what: str) -> str:
    """Which rows or columns are another one, in words."""
    count, index = len(source), np.arange(len(source))
    off = np.flatnonzero(source != index)
    shift = source[off] - off
    if off.size == count and source.max() < count and np.unique(shift % count).size == 1:
        by = (int(shift[0]) + count // 2) % count - count // 2
        return f"{what}s are shifted by {abs(by)}: {what} {max(0, -by)} has the numbers of {what} {max(0, by)}"
    if np.unique(shift).size == 1:
        return f"{said(what, off, 'has')} the numbers of {runs(what, source[off])}"
    if np.unique(source[off]).size == 1:
        return f"{runs(what, off)} have the numbers of {what} {source[off[0]]}"
    if off.size == 2 and (np.sort(source) == index).all():
        return f"{numbered(what, off)} are exchanged"
    first = ", ".join(f"{what} {i} has those of {source[i]}" for i in off[:3])
    return f"the right numbers in other places: {first}" + (f", and {off.size - 3} more" if off.size > 3 else "")


def overwritten(key: Key, raw: Mapping[Key, NDArray], order: list[Key]) -> str | None:
    """The tensor, if the tensor has the numbers of a later one of the dump: its buffer was written to again before it was dumped."""
    numbers = raw[key]
    for other in order[order.index(key) + 1 :]:
        if other in raw and raw[other].size == numbers.size and not other.name.endswith(("_codes", "_scale")):
            theirs = raw[other]
            if np.array_equal(numbers[:1].ravel(), theirs[:1].ravel()) and np.array_equal(numbers.ravel(), theirs.ravel()):
                return f"it has the numbers of {other.place}: its buffer was written to again before it was dumped"
    return None


def one_number(wrong: Wrong) -> str | None:
    """The one number that is wrong, if all others are right."""
    if wrong.places.sum() != 1 or not wrong.is_right_outside(wrong.places):
        return None
    (row,), (column,) = np.nonzero(wrong.places)
    return f"one number alone is wrong: position {row}, element {column}"


def never_written(wrong: Wrong) -> str | None:
    """The elements that are 0 wherever numbers are wrong, if all others are right."""
    rows, columns = wrong.wrong_rows, wrong.wrong_columns
    if wrong.theirs[wrong.places].any():
        return None
    if wrong.theirs[np.ix_(rows, columns)].any():
        return f"all wrong numbers are 0, at {runs('position', rows)}: never written"
    of = "each position" if rows.size == len(wrong.places) else runs("position", rows)
    return f"{runs('element', columns)} of {of} {'are' if columns.size > 1 else 'is'} 0: never written"


def few_places(wrong: Wrong) -> str | None:
    """The elements or positions that are wrong, if they are few."""
    rows, columns, (length, width) = wrong.wrong_rows, wrong.wrong_columns, wrong.places.shape
    marked, few_columns = np.zeros(wrong.places.shape, bool), columns.size <= FEW < width
    marked[(slice(None), columns) if few_columns else rows] = True
    if (not few_columns and rows.size > max(1, length // 4)) or not wrong.is_right_outside(marked):
        return None
    if few_columns:
        return f"only {numbered('element', columns)} of each position: the rest of the tensor is right"
    return f"only {numbered('position', rows)}: the other {length - rows.size} are right"
