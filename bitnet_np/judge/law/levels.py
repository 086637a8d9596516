"""Tensors that are stored in 8 bits or fewer: their numbers are few, and each is the nearest of them to the right one.

Norms, gates and attention's outputs are written so where the next product takes 8-bit inputs. No list has the formats: what numbers a
format has is seen in the tensor, which has each of them many times.
"""

import numpy as np

from .expected import TINY, Array
from .noise import COARSEST_UNNAMED

LEVELS = "read.levels"
"""The id of what is said of such a tensor."""
_MOST = 256  # numbers that 8 bits have
_TIMES = 8  # that a tensor has each of them, on average
_SCREENED = 1 << 12  # numbers that are looked at first: few tensors have so few, and logits are large
_EQUAL = 2.0**-20  # of a number: numbers of one code times a scale, which are divided by it


def levels_of(value: Array, slack: Array, theirs: Array) -> int:
    """The count of numbers that a tensor [T, width] is made of, with one scale or one for each row, if each number is the nearest of them
    to the right one, or so within the slack [T, width]; otherwise 0."""
    if float(((theirs - value) ** 2).sum()) > COARSEST_UNNAMED**2 * float((value**2).sum()):
        return 0
    largest = np.maximum(np.abs(theirs).max(axis=1, keepdims=True), TINY)
    return _levels(value, slack, theirs) or _levels(value / largest, slack / largest, theirs / largest)


def _levels(value: Array, slack: Array, theirs: Array) -> int:
    few = _distinct(theirs.ravel()[:_SCREENED])
    if few.size > _MOST or not 2 < (levels := _distinct(theirs)).size <= min(_MOST, theirs.size // _TIMES):
        return 0
    middles = (levels[1:] + levels[:-1]) / 2
    ends = np.array([2 * levels[0] - middles[0], *middles, 2 * levels[-1] - middles[-1]])
    at = np.searchsorted(levels, theirs, side="right")
    slack = slack + _EQUAL * np.abs(theirs)
    return levels.size if ((ends[at - 1] - slack <= value) & (value <= ends[at] + slack)).all() else 0


def _distinct(x: Array) -> Array:
    """The different numbers of an array, in order; those that are nearly equal count as one."""
    every = np.unique(x)
    return every[np.diff(every, prepend=-np.inf) > _EQUAL * np.abs(every)]
