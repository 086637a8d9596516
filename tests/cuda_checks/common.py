"""Helpers of the checks: their list, arrays, and comparisons with the CPU's bits."""

import sys
from collections.abc import Callable

import numpy as np
from models import assert_same_bits
from numpy.typing import NDArray

from bitnet_np.gpu.backend import Cuda

GPU = "ptx.gpu" not in sys.modules  # else the device is the interpreter: shapes must be small
CHECKS: dict[str, Callable[[], None]] = {}
GROUPS: dict[str, list[str]] = {}  # names of checks, by their module's name


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Decorates a check, a function that raises if something is wrong."""
    CHECKS[function.__name__] = function
    GROUPS.setdefault(function.__module__.rpartition(".")[2], []).append(function.__name__)
    return function


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return rng(seed).standard_normal(shape).astype(np.float32)


def odd_rows(width: int) -> NDArray[np.float32]:
    """Rows with everything that has a rule: ties of the quantiser, zeros, tiny and huge numbers, infinity, NaN."""
    x = normal(6, width)
    x[1] = 0
    x[2] = np.arange(width) % 255 - 127 + 0.5
    x[2, 0] = 127
    x[3] *= np.float32(1e-30)
    x[4, width // 2] = np.inf
    x[5, -1] = np.nan
    return x


def same(on: Cuda, theirs: object, ours: NDArray) -> None:
    """Assert that an array of the device has the bits of one of the CPU; of a NaN any bits, which IEEE leaves open."""
    copied = on.to_host(theirs)
    np.testing.assert_array_equal(np.isnan(copied), np.isnan(ours))
    assert_same_bits(*(np.where(np.isnan(array), np.float32(0), array) for array in (copied, ours)))
