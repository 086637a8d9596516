"""Tensors that are stored in 8 bits or fewer: their numbers are few, and each is the nearest of them to the right one.

Norms, gates and attention's outputs are written so where the next product takes 8-bit inputs. No list has the formats: what numbers a
format has is seen in the tensor, which has each of them many times. Numbers of blocks that share an exponent are multiples of a power of 2.
"""

from functools import partial

import numpy as np

from .expected import TINY, Array
from .noise import COARSEST_UNNAMED

LEVELS = "read.levels"
"""The id of what is said of such a tensor."""
_MOST = 256  # numbers that 8 bits have
_TIMES = 8  # that a tensor has each of them, on average
_SCREENED = 1 << 12  # numbers that are looked at first: few tensors have so few, and logits are large
_BLOCKS = (128, 64, 32, 16, 8)  # numbers that share an exponent
_DIGITS = 8  # of their codes at most
_EQUAL = 2.0**-20  # of a number: numbers of one code times a scale, which are divided by it


def stored_as(value: Array, slack: Array, theirs: Array) -> str:
    """How a tensor [T, width] is stored, in words, if each number is the nearest one of 8 bits or fewer to the right one, or so within the
    slack [T, width]; "" if not. The tensor, or each row, has one scale, or each block an exponent."""
    if float(((theirs - value) ** 2).sum()) > COARSEST_UNNAMED**2 * float((value**2).sum()):
        return ""
    largest = np.maximum(np.abs(theirs).max(axis=1, keepdims=True), TINY)
    if count := _levels(value, slack, theirs) or _levels(value / largest, slack / largest, theirs / largest):
        return f"numbers are stored in 8 bits or fewer: each is the nearest of {count}"
    is_short = not (np.ldexp(np.frexp(theirs.ravel()[:_SCREENED])[0], _DIGITS) % 1).any()
    for size in (n for n in _BLOCKS if is_short and theirs.shape[1] % n == 0):
        of_blocks = partial(_is_of_blocks, value.reshape(-1, size), slack.reshape(-1, size), theirs.reshape(-1, size))
        if digits := next(filter(of_blocks, range(_DIGITS, 1, -1)), 0):
            return f"numbers are stored in blocks of {size} that share an exponent, with {digits} bits and a sign"
    return ""


def _levels(value: Array, slack: Array, theirs: Array) -> int:
    few = _distinct(theirs.ravel()[:_SCREENED])
    if few.size > _MOST or not 2 < (levels := _distinct(theirs)).size <= min(_MOST, theirs.size // _TIMES):
        return 0
    middles = (levels[1:] + levels[:-1]) / 2
    ends = np.array([2 * levels[0] - middles[0], *middles, 2 * levels[-1] - middles[-1]])
    at = np.searchsorted(levels, theirs, side="right")
    slack = slack + _EQUAL * np.abs(theirs)
    return levels.size if ((ends[at - 1] - slack <= value) & (value <= ends[at] + slack)).all() else 0


def _is_of_blocks(value: Array, slack: Array, theirs: Array, digits: int) -> bool:
    """Whether blocks [n, size] are multiples of a power of 2, of so many digits in the largest, and the nearest to the right numbers."""
    step = np.ldexp(1.0, np.frexp(np.abs(theirs).max(axis=1, keepdims=True))[1] - digits)
    codes = theirs / step
    is_last = np.abs(codes) == 2**digits - 1  # which a larger one is cut to
    return bool((codes == np.rint(codes)).all() and (np.abs(theirs - value) <= step * np.where(is_last, 1, 0.5) + slack).all())


def _distinct(x: Array) -> Array:
    """The different numbers of an array, in order; those that are nearly equal count as one."""
    every = np.unique(x)
    return every[np.diff(every, prepend=-np.inf) > _EQUAL * np.abs(every)]
