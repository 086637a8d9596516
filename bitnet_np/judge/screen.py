"""Mistakes in a large product are tried at some of its outputs first: most are refused there, for a hundredth of the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..traces.points import Key
from .mistakes.mistake import Edited

Array = NDArray[np.float64]

_LARGE = 1 << 20  # weights
_COLUMNS = 32  # all over the result, and as many where it is most wrong
_LEFT = 0.2  # of the error: a mistake that leaves more there leaves too much everywhere, which is a tenth


@dataclass(frozen=True)
class Screen:
    """Some outputs of a wrong product."""

    columns: NDArray[np.intp]
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
        own = square[:, columns]
        is_wrong, is_worst = own > own.mean() / 100, np.isin(columns, worst)
        rows = is_wrong.any(axis=1)[:, None]
        every = np.ones_like(is_wrong)
        groups = (every, every & rows, every & is_worst, rows & is_worst)
        return cls(columns, theirs[:, columns], groups, np.array([own[group].sum() for group in groups]))

    def left(self, compute: Any, values: Mapping[Key, Array]) -> float | None:
        """The part of the error that an edit leaves where it leaves least; None of what is not an edit."""
        if not isinstance(compute, Edited):
            return None
        y = compute.at(self.columns, values)
        if y.shape != self.theirs.shape:
            return np.inf
        square = np.where(np.isfinite(y), (y - self.theirs) ** 2, np.inf)
        return min(float(square[group].sum()) / error for group, error in zip(self.groups, self.errors, strict=True) if error > 0)

    def refuses(self, compute: Any, values: Mapping[Key, Array]) -> bool:
        """Whether a mistake explains none of the parts that are wrong."""
        left = self.left(compute, values)
        return left is not None and left > _LEFT
