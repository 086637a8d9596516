"""The search for the one number with which a computation gives a wrong tensor."""

from collections.abc import Callable

import numpy as np

from ..mistakes.search import nearest_number
from .wrong import Array, Wrong

_GRID = np.geomspace(1e-3, 1e3, 73)
_ENOUGH = 10_000  # elements
_STEPS = 44  # of a golden section: 1e-9 of an interval of the grid


def best_number(wrong: Wrong, compute: Callable[[Wrong, float], Array]) -> float | None:
    """The positive number with which compute(wrong, number) is theirs; None if there is none. It is sought in the first rows."""
    some = wrong.first(max(1, _ENOUGH // wrong.theirs.shape[1]))

    def error(logarithm: float) -> float:
        left = float(((compute(some, float(np.exp(logarithm))) - some.theirs) ** 2).sum())
        return left if np.isfinite(left) else np.inf

    logarithm = nearest_number(error, np.log(_GRID).tolist(), _STEPS)
    number = None if logarithm is None else float(np.exp(logarithm))
    with np.errstate(all="ignore"):
        return number if number is not None and wrong.accounts(compute(wrong, number)) else None
