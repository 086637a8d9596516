"""What the HTML report and the plot show of a tensor: its worst numbers, and its error by position.

A Report holds a few numbers for each tensor and no arrays. The judge passes the arrays to a `Details`, if the caller gives it one, and
that keeps a few hundred numbers of each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray

from ..traces.points import Key

Array = NDArray[np.float64]

MOST_WORST = 8
MOST_POSITIONS = 256

FAR = 1e4
"""From so many limits on, errors are told apart by their size alone: where a limit is nearly 0, any error is many of it."""

_FIRM = 1e-3  # of a position's largest limit: how often an error is a smaller one says little
BLOCK = 1 << 20  # numbers at a time: a bound of all logits of a large model would be gigabytes


@dataclass(frozen=True)
class Element:
    """One number of a tensor."""

    position: int
    element: int
    ours: float
    theirs: float
    limit: float  # of |theirs - ours|, or of the RMS error at this position


@dataclass(frozen=True)
class Detail:
    """What is shown of one tensor. An error counts in units of its limit: above 1 it is outside."""

    each: bool  # whether every number has a limit of its own; otherwise the RMS error of a position has one
    shape: tuple[int, int]  # positions, numbers of each
    worst: tuple[Element, ...]  # at most 8, those with the largest error in units of the limit first
    positions: tuple[int, ...]  # at most 256: the first position of each group of equally many
    errors: tuple[float, ...]  # the largest error of each group, in units of the limit


@dataclass
class Details:
    """Collects a Detail of each tensor that a judge compares. Without one, the judge keeps nothing of this.

    `logits` are the logits as such; result_output among `tensors` is the head's operation on the dump's own result_norm.
    """

    tensors: dict[Key, Detail] = field(default_factory=dict)
    logits: Detail | None = None

    def numbers(self, key: Key, value: Array, theirs: Array, bound: Callable[[slice], Array]) -> None:
        """Collect a tensor of which every number has a bound. value, theirs: [T, width]. bound: that of some rows, [rows, width]."""
        self.tensors[key] = _detail(value, theirs, bound, each=True)

    def rows(self, key: Key, value: Array, theirs: Array, nmse: Array | float, least: float = 0.0) -> None:
        """Collect a tensor [T, width] whose positions have a largest NMSE, [T] or one for all: squared error by squared numbers.

        least: sums of squares count as this at least, as in bounds.close.
        """
        size = np.sqrt(nmse * np.maximum((value**2).sum(axis=1), least) / value.shape[1])
        self.tensors[key] = _detail(value, theirs, lambda rows: size[rows, None], each=False)

    def of_logits(self, ours: NDArray, theirs: NDArray, nmse: Array, numbers: NDArray[np.int64] | None = None) -> None:
        """Collect logits [..., V] whose positions have a largest NMSE [P]: squared error by variance. numbers: see measures.judge."""
        a, b = (x.reshape(-1, x.shape[-1]) for x in (ours, theirs))
        size = np.sqrt(nmse * np.array([row.var(dtype=np.float64) for row in a]))
        self.logits = _detail(a, b, lambda rows: size[rows, None], each=False, numbers=numbers)


def _detail(
    ours: NDArray, theirs: NDArray, limit: Callable[[slice], Array], each: bool, numbers: NDArray[np.int64] | None = None
) -> Detail:
    """The Detail of [T, width], a block of rows at a time. numbers: [T], the positions that the rows are of; None: 0, 1, ..."""
    length, width = ours.shape
    rows_of_block = max(1, BLOCK // width)
    errors = np.empty(length)
    worst: list[tuple[float, Element]] = []
    for begin in range(0, length, rows_of_block):
        rows = slice(begin, begin + rows_of_block)
        a, b = ours[rows].astype(np.float64), theirs[rows].astype(np.float64)
        most = np.broadcast_to(limit(rows), a.shape)
        error = np.abs(b - a)
        share = error / np.maximum(most, np.finfo(np.float64).tiny)
        firm = np.where(most >= _FIRM * most.max(axis=1, keepdims=True), share, 0).max(axis=1)
        farthest = np.where(firm > 1, firm, share.max(axis=1))
        errors[rows] = farthest if each else np.sqrt((share**2).mean(axis=1))
        rank = np.minimum(share, FAR) + np.where(share > FAR, error, 0)  # where the limit is nearly 0, the largest error is the worst
        for i in np.argpartition(-rank, min(MOST_WORST, rank.size) - 1, axis=None)[:MOST_WORST]:
            t, n = divmod(int(i), width)
            position = begin + t if numbers is None else int(numbers[begin + t])
            worst.append((float(rank[t, n]), Element(position, n, float(a[t, n]), float(b[t, n]), float(most[t, n]))))
    worst = sorted((item for item in worst if item[0] > 0), key=lambda item: -item[0])[:MOST_WORST]
    group = ceil(length / MOST_POSITIONS)
    starts = range(0, length, group)
    return Detail(
        each=each,
        shape=(length, width),
        worst=tuple(element for _, element in worst),
        positions=tuple(i if numbers is None else int(numbers[i]) for i in starts),
        errors=tuple(float(errors[i : i + group].max()) for i in starts),
    )
