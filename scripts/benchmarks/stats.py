"""Numbers about samples: medians and their spread, ratios of paired rounds, and the fit a*T + b*T^2."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Summary(NamedTuple):
    """A summary of samples."""

    median: float
    low: float
    high: float
    p95: float


def summary(values: Sequence[float]) -> Summary:
    """The median, the extremes, and the 95th percentile (linear between the two nearest)."""
    if not values:
        raise ValueError("no samples to sum up")
    return Summary(float(np.median(values)), min(values), max(values), float(np.percentile(values, 95)))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios round by round. A slow minute slows both sides of a round, so their median is steadier than a ratio of medians."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


class Fit(NamedTuple):
    """seconds = a * T + b * T^2."""

    a: float
    b: float
    r2: float  # share of the seconds' variance that the fit explains

    @property
    def equal(self) -> float:
        """The T at which both terms are the same; infinite when one of them is not positive."""
        return self.a / self.b if self.a > 0 and self.b > 0 else math.inf


def fit(lengths: Sequence[int], seconds: Sequence[float]) -> Fit:
    """Least squares of relative errors, without a constant: the short lengths, which say what a is, count as much. Two lengths at least."""
    if len(set(lengths)) < 2:
        raise ValueError(f"lengths are {list(lengths)}, expected at least two different ones: a fit has two numbers to find")
    t, s = np.array(lengths, np.float64), np.array(seconds, np.float64)
    scale = t.max()  # T and T^2 of the same size: the solver's rounding does not matter then
    columns = np.stack([t / scale, (t / scale) ** 2], axis=1)
    solution = np.linalg.lstsq(columns / s[:, None], np.ones_like(s), rcond=None)[0]
    left, total = float(((s - columns @ solution) ** 2).sum()), float(((s - s.mean()) ** 2).sum())
    return Fit(float(solution[0] / scale), float(solution[1] / scale**2), 1 - left / total if total else 1.0)
