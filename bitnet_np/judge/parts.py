"""Parts of a wrong tensor: those that a mistake alone explains, where the rest is right, and outputs of a product that are looked at first.

Rows, heads or elements may be computed by a path of an engine of their own. In a large product mistakes are tried at some outputs first:
most are refused there, for a hundredth of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.records import Config
from ..traces.points import HEADS, Key
from .bounds import relative_error
from .edits.edited import Edited
from .evidence import FEWEST, LITTLE
from .hypothesis import Hypothesis
from .law.expression import Array
from .words import Indices, places_of

_MOST = 0.8  # of the heads or elements of a row: some are right by chance
_LARGE = 1 << 20  # weights
_COLUMNS = 32  # all over the result, and as many where it is most wrong
SCREENED = 0.2
"""What a mistake may leave of the error at the outputs that are looked at first: more is too much everywhere, which is a tenth."""


@dataclass
class Part:
    """Some rows of a wrong tensor, and some of their elements; and the known mistake that comes closest there."""

    rows: Indices
    columns: Indices
    where: str  # in words, to be put in front of what is there
    most: float  # NMSE that a mistake may leave
    cause: Hypothesis | None = None

    def cut(self, x: Array) -> Array:
        """These rows and elements of a tensor [T, width]."""
        return x[np.ix_(self.rows, self.columns)]

    def compare(self, candidate: Hypothesis, array: Array, theirs: Array, in_rows: bool) -> None:
        """Compare a mistake that was made in the whole tensor. in_rows: whether it is in whole rows alone. Zeros are what many make."""
        if (in_rows and self.columns.size < array.shape[1]) or not self.cut(theirs).any():
            return
        left = relative_error(self.cut(array), self.cut(theirs))
        if left < self.most:
            self.most, self.cause = left / 4, candidate.at(self.where)  # of two that fit alike, the first one tried stands


def wrong_parts(key: Key, config: Config, places: NDArray[np.bool_], value: Array, theirs: Array, most: float) -> Iterator[Part]:
    """Yields the parts that hold every wrong number: heads or elements of all rows, whole rows, and the elements of these rows.

    places: where numbers are wrong, [T, width]. most: NMSE that a mistake may leave. Yields nothing if they are everywhere, or too few to
    tell a mistake by.
    """
    away = np.abs(theirs - value)
    places = places & (away > LITTLE * away.max())
    tokens, width = places.shape
    if np.count_nonzero(places) < FEWEST:
        return
    size = config.head_dim if key.name in HEADS and width % config.head_dim == 0 else 1
    count = width // size
    rows = np.flatnonzero(places.any(axis=1))
    units = np.flatnonzero(places.reshape(tokens, count, size).any(axis=(0, 2)))
    columns = (units[:, None] * size + np.arange(size)).ravel()
    in_columns, in_rows = places_of(units, count, "element" if size == 1 else "head"), places_of(rows, tokens, "position")
    are_few = rows.size < tokens, units.size <= _MOST * count
    for which, inside, where, is_one in (
        (np.arange(tokens), columns, in_columns, are_few[1]),
        (rows, np.arange(width), in_rows, are_few[0]),
        (rows, columns, f"{in_rows} and {in_columns}", all(are_few)),
    ):
        if is_one:
            part = Part(which, inside, f"at {where}: ", most)
            part.most = min(most, relative_error(part.cut(value), part.cut(theirs)) / 10)  # what explains little explains nothing
            yield part


@dataclass(frozen=True)
class Screen:
    """Some outputs of a wrong product."""

    columns: Indices
    theirs: Array  # [T, n]
    groups: tuple[NDArray[np.bool_], ...]  # all of them, and those parts that are wrong, [T, n] each
    errors: Array  # the squared error of each group

    @classmethod
    def of(cls, weights: int, value: Array, theirs: Array) -> Screen | None:
        """The outputs to look at of a product [T, N] with so many weights; None where all are as quickly computed."""
        if weights < _LARGE or theirs.shape[1] <= 2 * _COLUMNS:
            return None
        square = (theirs - value) ** 2
        spread = np.linspace(0, theirs.shape[1] - 1, _COLUMNS).astype(np.intp)
        worst = np.argsort(-square.sum(axis=0))[:_COLUMNS]
        columns = np.unique(np.concatenate([spread, worst]))
        shown = square[:, columns]
        is_wrong, is_worst = shown > shown.mean() / 100, np.isin(columns, worst)
        rows = is_wrong.any(axis=1)[:, None]
        everywhere = np.ones_like(is_wrong)
        groups = (everywhere, everywhere & rows, everywhere & is_worst, rows & is_worst)
        return cls(columns, theirs[:, columns], groups, np.array([shown[group].sum() for group in groups]))

    def left(self, compute: Any, values: Mapping[Key, Array]) -> float | None:
        """The part of the error that an edit leaves where it leaves least; None of what is not an edit."""
        if not isinstance(compute, Edited):
            return None
        y = compute.at(self.columns, values)
        if y.shape != self.theirs.shape:
            return np.inf
        square = np.where(np.isfinite(y), (y - self.theirs) ** 2, np.inf)
        return min(float(square[group].sum()) / error for group, error in zip(self.groups, self.errors, strict=True) if error > 0)
