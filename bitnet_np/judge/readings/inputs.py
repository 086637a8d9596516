"""How often each input of a product is summed: solved for, as inputs and weights are known.

y = sum_j c_j x_j w_j, where c is 1 for an input that is summed once, and 0 for one that is left out. There is one equation for each output
of each token, so these determine c where they are more than inputs. Tails, blocks and halves that are left out, overlaps that are summed
twice and scales of blocks that are not applied are all numbers c.
"""

import numpy as np
from numpy.typing import NDArray

from ...base.errors import listed
from .wrong import Array, matched, places_of

_LARGEST = 4096  # inputs: the equations of more take seconds
_FACTORS = {0.0: "not summed", 2.0: "summed twice", -1.0: "subtracted"}
_NEAR = 1e-3  # of a factor
_FEW = 3  # factors that are said one by one
_LEFT = 1e-3  # of the error


def summed(x: Array, weights: Array, y: Array, noise: float) -> str | None:
    """What the sums of inputs x [T, M] by weights [N, M] do otherwise, if that gives y [T, N]."""
    if x.shape[1] > _LARGEST or 2 * x.shape[1] > y.size:
        return None
    error = y - x @ weights.T
    normal, along = (x.T @ x) * (weights.T @ weights), ((x.T @ error) * weights.T).sum(axis=1)
    size = np.diagonal(normal)
    ridge = max(1e-10 * float(size.max()), 1e-200)  # inputs that are always 0 stay as they are
    away = np.linalg.solve(normal + ridge * np.eye(len(size)), along)
    left = error - (x * away) @ weights.T
    if (left**2).sum() > min(_LEFT * (error**2).sum(), matched(noise) * (y**2).sum()):
        return None
    factor = np.where(size > 1e-6 * size.max(), 1 + away, 1)
    near = _NEAR + 10 * noise**0.5
    off = np.flatnonzero(np.abs(factor - 1) > near)
    factors = np.unique(np.round(factor[off] / near) * near)
    if not off.size:
        return None

    def of(some: NDArray) -> str:
        return places_of(some, len(factor), "input").removesuffix(f" of {len(factor)}")

    if factors.size > _FEW:
        return f"{of(off)} are multiplied by other numbers, {factor[off].min():.4g} to {factor[off].max():.4g}"
    said = []
    for number in factors:
        some = off[np.abs(factor[off] - number) <= near]
        mean = float(np.mean(factor[some]))
        words = next((words for f, words in _FACTORS.items() if abs(mean - f) <= near), f"multiplied by {mean:.4g}")
        said.append(f"{of(some)} {'are' if some.size > 1 else 'is'} {words}")
    return listed(said)
