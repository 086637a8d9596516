"""Wrong numbers in a few places, or of another tensor."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...traces.points import Key
from .wrong import FEW, Wrong, numbered, runs


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
    everywhere = rows.size == len(wrong.places)
    if wrong.theirs[np.ix_(rows, columns)].any():
        return f"all wrong numbers are 0, at {runs('position', rows)}: never written"
    of = "each position" if everywhere else runs("position", rows)
    return f"{runs('element', columns)} of {of} {'are' if columns.size > 1 else 'is'} 0: never written"


def few_places(wrong: Wrong) -> str | None:
    """The elements or positions that are wrong, if they are few."""
    rows, columns = wrong.wrong_rows, wrong.wrong_columns
    marked = np.zeros(wrong.places.shape, bool)
    if columns.size <= FEW < wrong.places.shape[1]:
        marked[:, columns] = True
        if not wrong.is_right_outside(marked):
            return None
        return f"only {numbered('element', columns)} of each position: the rest of the tensor is right"
    marked[rows] = True
    if rows.size <= max(1, len(wrong.places) // 4) and wrong.is_right_outside(marked):
        return f"only {numbered('position', rows)}: the other {len(wrong.places) - rows.size} are right"
    return None
