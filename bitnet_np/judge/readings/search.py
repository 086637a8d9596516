"""The search for the one number with which a computation gives a wrong tensor."""

from collections.abc import Callable

import numpy as np

from .wrong import Array, Wrong

_GRID = np.geomspace(1e-3, 1e3, 73)
_ENOUGH = 10_000  # elements
_STEPS = 44  # of a golden section: 1e-9 of an interval of the grid
_GOLDEN = (5**0.5 - 1) / 2


def best_number(wrong: Wrong, compute: Callable[[Wrong, float], Array]) -> float | None:
    """The positive number with which compute(wrong, number) is theirs; None if there is none. It is sought in the first rows."""
    some = wrong.first(max(1, _ENOUGH // wrong.theirs.shape[1]))

    def error(logarithm: float) -> float:
        left = float(((compute(some, float(np.exp(logarithm))) - some.theirs) ** 2).sum())
        return left if np.isfinite(left) else np.inf

    grid = np.log(_GRID)
    with np.errstate(all="ignore"):
        errors = [error(x) for x in grid]
        best = int(np.argmin(errors))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        for _ in range(_STEPS):
            a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            low, high = (low, b) if error(a) < error(b) else (a, high)
        number = float(np.exp((low + high) / 2))
        return number if wrong.accounts(compute(wrong, number)) else None
