"""What any tensor shows by the places of its wrong numbers: zeros, sums that run on, and few wrong numbers."""

import numpy as np

from ..evidence import LITTLE
from ..law.expected import TINY
from ..words import FEW, runs
from .structure import beyond
from .wrong import Wrong


def running_sums(wrong: Wrong) -> str | None:
    """The elements that add each position's numbers to those of the position before."""
    rows, columns = wrong.wrong_rows, wrong.wrong_columns
    first = max(int(rows[0]) - 1, 0)
    computed = wrong.value.copy()
    computed[first:, columns] = computed[first:, columns].cumsum(axis=0)
    if len(wrong.theirs) - first < 3 or not wrong.accounts(computed):
        return None
    return f"{runs('element', columns)}: sums run on from position {first}, and are not cleared between positions"


def one_number(wrong: Wrong) -> str | None:
    """The one number that is wrong, if all others are right."""
    if wrong.places.sum() != 1 or not wrong.is_right_outside(wrong.places):
        return None
    (row,), (column,) = np.nonzero(wrong.places)
    return f"one number alone is wrong: position {row}, element {column}"


def never_written(wrong: Wrong) -> str | None:
    """The elements that are 0 wherever numbers are wrong, if all others are right."""
    rows, columns = wrong.wrong_rows, wrong.wrong_columns
    if wrong.theirs[wrong.places].any() or not (np.abs(wrong.value[wrong.places]) >= TINY).any():  # which may be flushed
        return None
    if wrong.theirs[np.ix_(rows, columns)].any():
        others = ~wrong.places & (np.abs(wrong.value) > LITTLE * np.abs(wrong.value).max())
        for key, x in zip(wrong.operation.inputs, wrong.inputs, strict=True):
            if x.shape == wrong.theirs.shape and (border := beyond(x, wrong.places, others)) is not None:
                return f"numbers are 0 where {key.name} is {border}"
        at = f", {wrong.in_units(columns)}" * (2 * columns.size <= wrong.places.shape[1])
        return f"all wrong numbers are 0, at {runs('position', rows)}{at}: never written"
    of = "each position" if rows.size == len(wrong.places) else runs("position", rows)
    return f"{wrong.in_units(columns)} of {of} {'are' if columns.size > 1 else 'is'} 0: never written"


def few_places(wrong: Wrong) -> str | None:
    """The elements or positions that are wrong, if they are few."""
    rows, columns, (length, width) = wrong.wrong_rows, wrong.wrong_columns, wrong.places.shape
    marked, few_columns = np.zeros(wrong.places.shape, bool), columns.size <= FEW < width
    marked[(slice(None), columns) if few_columns else rows] = True
    if (not few_columns and rows.size > min(max(1, length // 4), length - 1)) or not wrong.is_right_outside(marked):
        return None
    if few_columns:
        return f"only {runs('element', columns)} of each position: the rest of the tensor is right"
    return f"only {runs('position', rows)}: the other {length - rows.size} are right"
