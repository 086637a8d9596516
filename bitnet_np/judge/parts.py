"""Mistakes in a part of a tensor, where the rest is right: rows, heads or elements that another path of an engine computes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..model.records import Config
from ..traces.points import HEADS, Key
from .bounds import relative_error
from .mistakes.mistake import Cause
from .readings.wrong import places_of

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

_LEAST = 8  # wrong numbers: fewer are no evidence for a mistake of an operation
_NEGLIGIBLE = 1e-3  # of the largest error: as other sums leave it just beyond their bound
_MOST = 0.8  # of the heads or elements of a row: some are right by chance


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor, and some of their elements."""

    rows: Indices
    columns: Indices
    where: str  # in words

    def cut(self, x: Array) -> Array:
        """These rows and elements of a tensor [T, width]."""
        return x[np.ix_(self.rows, self.columns)]

    def named(self, cause: Cause) -> Cause:
        """The cause in this part."""
        return replace(cause, text=f"at {self.where}: {cause.text}")


def parts_of(key: Key, config: Config, places: NDArray[np.bool_]) -> Iterator[Part]:
    """Yields the parts that hold every wrong number: heads or elements of all rows, whole rows, and the elements of these rows.

    places: where numbers are wrong, [T, width]. Yields nothing if they are everywhere, or too few to tell a mistake by.
    """
    tokens, width = places.shape
    if np.count_nonzero(places) < _LEAST:
        return
    size = config.head_dim if key.name in HEADS and width % config.head_dim == 0 else 1
    count = width // size
    rows = np.flatnonzero(places.any(axis=1))
    units = np.flatnonzero(places.reshape(tokens, count, size).any(axis=(0, 2)))
    columns = (units[:, None] * size + np.arange(size)).ravel()
    in_columns = places_of(units, count, "element" if size == 1 else "head")
    in_rows = places_of(rows, tokens, "position")
    some_rows, some_columns = rows.size < tokens, units.size <= _MOST * count
    if some_columns:
        yield Part(np.arange(tokens), columns, in_columns)
    if some_rows:
        yield Part(rows, np.arange(width), in_rows)
    if some_rows and some_columns:
        yield Part(rows, columns, f"{in_rows} and {in_columns}")


class InParts:
    """The known mistake that comes closest in each part of a wrong tensor."""

    def __init__(self, key: Key, config: Config, places: NDArray[np.bool_], value: Array, theirs: Array, most: float):
        """For a tensor [T, width] that is wrong at these places. most: NMSE that a mistake may leave."""
        away = np.abs(theirs - value)
        self.parts = list(parts_of(key, config, places & (away > _NEGLIGIBLE * away.max())))
        self._theirs = [part.cut(theirs) for part in self.parts]
        # a mistake that explains little explains nothing
        self._best = [min(most, relative_error(part.cut(value), x) / 10) for part, x in zip(self.parts, self._theirs, strict=True)]
        self._causes: dict[int, Cause] = {}  # by the number of the part

    def compare(self, candidate: Cause, array: Array) -> None:
        """Compare a mistake that was made in the whole tensor. A rounding on purpose is made everywhere, or was not made."""
        for i, part in enumerate(self.parts if candidate.fault else ()):
            left = relative_error(part.cut(array), self._theirs[i])
            if left < self._best[i]:
                self._best[i], self._causes[i] = left / 4, candidate  # of two that fit alike, the first one tried stands

    def known(self) -> Cause | None:
        """The closest mistake in the largest part that one explains."""
        return next((part.named(self._causes[i]) for i, part in enumerate(self.parts) if i in self._causes), None)
