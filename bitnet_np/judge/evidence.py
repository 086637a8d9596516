"""When numbers are explained: how near computed ones must be to theirs, and what is searched for by nearness."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .law.expression import Array
from .words import Indices

_SURE = 1e-6  # NMSE left by what explains: float32 noise, squared, with room for a flipped code
_CLOSER, _CLOSER_NARROW = 0.01, 0.1  # of the error, left by what explains; the second of numbers of narrow types
_NOISY = 8  # times the noise: a mistake's own roundings are not those of the right operation
SAME = 1e-4  # relative: two numbers that are one; roundings of float32, behind a few steps, leave 1e-5
SAME_LOGARITHMS = 2e-3  # the same of factors that are known by logarithms of small numbers
WHOLE = 0.05  # from a whole number that is solved for: one number in ten is so near to one by chance, but not all of them
FEWEST = 8  # numbers, or rows of them: what fewer show may be chance
SPARE = 4  # numbers to which each one of a law is fitted: fewer are explained by chance
LITTLE = 1e-3  # relative: what is less is nothing, behind many steps or where numbers are solved for
NEAR = 1e-2  # the same of a first look, before everything is compared
SMOOTH = 0.05  # of the error, left between neighbours by a function: noise leaves all of it
_TOGETHER = 64  # rows compared at once with all
_STEPS, _FIRST_STEPS = 50, 4  # of a golden section: 1e-10 of an interval of its grid; and those that show whether it is worth it
_GOLDEN = (5**0.5 - 1) / 2


def explains(computed: NDArray, theirs: Array, right: Array, noise: float) -> bool:
    """Whether computed numbers are theirs, and far closer than the right ones, which may be close themselves."""
    if not np.isfinite(computed).all():
        return False
    left, before, size = ((x**2).sum() for x in (computed - theirs, right - theirs, theirs))
    return bool(left <= min(matched(noise) * size, (_CLOSER_NARROW if noise else _CLOSER) * before))


def matched(noise: float) -> float:
    """The NMSE up to which numbers are explained, where narrow types make `noise` by themselves."""
    return max(_SURE, _NOISY * noise)


def rough(noise: float) -> float:
    """The relative error of single numbers."""
    return max(1e-7, noise**0.5)


def nearest(candidates: Array, targets: Array) -> Indices:
    """The row of candidates [N, K] that is nearest to each of some targets [n, K]."""
    return ((candidates * candidates).sum(axis=1) - 2 * targets @ candidates.T).argmin(axis=1)


def sources(candidates: Array, targets: Array, near: float) -> Indices | None:
    """The row of candidates that each target is, up to `near` in each number; None if one is none."""
    nearest_rows = []
    for begin in range(0, len(targets), _TOGETHER):
        block = targets[begin : begin + _TOGETHER]
        nearest_rows.append(nearest(candidates, block))
        if not (np.abs(candidates[nearest_rows[-1]] - block) <= near).all():
            return None
    return np.concatenate(nearest_rows)


def nearest_number(error: Callable[[float], float], grid: Sequence[float], steps: int = _STEPS, worth: float = np.inf) -> float | None:
    """The number with the least error beside the best one of a grid, by a golden section. None if the first steps of it leave `worth`."""
    errors = [error(x) for x in grid]
    best = int(np.argmin(errors))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    of_a, of_b = error(a), error(b)
    for step in range(steps):
        if step == _FIRST_STEPS and not min(of_a, of_b, errors[best]) < worth:
            return None
        if of_a < of_b:
            high, b, of_b = b, a, of_a
            a = high - _GOLDEN * (high - low)
            of_a = error(a)
        else:
            low, a, of_a = a, b, of_b
            b = low + _GOLDEN * (high - low)
            of_b = error(b)
    middle = (low + high) / 2
    return float(grid[best]) if errors[best] <= error(middle) else middle
