"""Helpers of the checks: their list, the device, arrays, and comparisons with the CPU's bits."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from models import assert_same_bits
from numpy.typing import NDArray

from bitnet_np.gpu import backend
from bitnet_np.gpu.backend import Cuda
from bitnet_np.gpu.device import open_cuda

GPU = "ptx.driver" not in sys.modules  # else the device is the interpreter: shapes must be small
CHECKS: dict[str, Callable[[], None]] = {}
GROUPS: dict[str, list[str]] = {}  # names of checks, by their module's name


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Decorates a check, a function that raises if something is wrong."""
    CHECKS[function.__name__] = function
    GROUPS.setdefault(function.__module__.rpartition(".")[2], []).append(function.__name__)
    return function


def device(processors: int | None = None) -> Cuda:
    """The device. `processors` changes the number that kernels are chosen for: few of them are busy with few rows."""
    on = open_cuda()
    on.processors = processors or on.processors
    return on


@contextmanager
def few_threads() -> Iterator[None]:
    """Kernels over single numbers get 32 threads for all numbers."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend, "GRID", 1)
        patched.setattr(backend, "BLOCK", 32)
        yield


# --- arrays ---------------------------------------------------------------------------------------------------------------------------


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


# --- comparisons ----------------------------------------------------------------------------------------------------------------------


def same(on: Cuda, theirs: object, ours: NDArray) -> None:
    """Assert that an array of the device has the bits of one of the CPU."""
    assert_same_bits(on.to_host(theirs), ours)


def equal_where_finite(on: Cuda, theirs: object, ours: NDArray) -> None:
    """Like `same`, but with any bits of a NaN, which IEEE leaves open."""
    copied = on.to_host(theirs)
    np.testing.assert_array_equal(np.isnan(copied), np.isnan(ours))
    numbers = np.where(np.isnan(ours), np.float32(0), ours)
    assert_same_bits(np.where(np.isnan(copied), np.float32(0), copied), numbers)
