"""Numbers that look random and are the same everywhere: they come from integer arithmetic alone, so no library's generator is involved."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

_EDGES = [0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1e-39, -1e-39, 3e38, -3e38, 0.5, -1.5, 2.5, 1e19, 88.73, -103.97, -104]
EDGES = np.array(_EDGES, np.float32)
"""Numbers at which functions and roundings change what they do."""


def noise(seed: int, *shape: int) -> NDArray[np.float32]:
    """Numbers in [-1, 1) with 24 bits each: splitmix64 of the index."""
    with np.errstate(over="ignore"):
        x = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return ((x >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1).astype(np.float32).reshape(shape)


class Noise:
    """In place of numpy.random.Generator: the methods that a random model is drawn by. Normal numbers are sums of three even ones."""

    def __init__(self, seed: int) -> None:
        self.seed = seed << 20  # and one more after each call

    def random(self, *shape: int) -> NDArray[np.float64]:  # in [0, 1)
        self.seed += 1
        return (noise(self.seed, *shape).astype(np.float64) + 1) / 2

    def uniform(self, low: float, high: float, size: Any = ()) -> NDArray[np.float64]:
        return low + (high - low) * self.random(*np.atleast_1d(size).astype(int))

    def standard_normal(self, size: Any) -> NDArray[np.float64]:
        return 2 * self.random(3, *np.atleast_1d(size)).sum(axis=0) - 3

    def normal(self, mean: float, deviation: float, size: Any) -> NDArray[np.float64]:
        return mean + deviation * self.standard_normal(size)

    def integers(self, low: int, high: int, size: Any, dtype: DTypeLike = np.int64) -> NDArray:
        return np.floor(self.uniform(low, high, size)).astype(dtype)

    def choice(self, values: ArrayLike, size: Any, p: ArrayLike | None = None) -> NDArray:
        values = np.asarray(values)
        shares = np.full(len(values), 1 / len(values)) if p is None else p
        return values[np.minimum(np.searchsorted(np.cumsum(shares), self.uniform(0, 1, size), "right"), len(values) - 1)]
