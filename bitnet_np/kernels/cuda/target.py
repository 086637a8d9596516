"""The compilation of kernels and their functions, and the numbers of threads."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numba import cuda

from ..launching import renamed

WARP = 32  # threads that take an instruction together

_REMOVED = "row_stack"  # by NumPy 2.5; numba-cuda 0.30.4 does not load without it
if not hasattr(np, _REMOVED):
    setattr(np, _REMOVED, lambda rows: np.vstack(rows))
    import_module("numba.cuda.cudaimpl")
    delattr(np, _REMOVED)

kernel: Any = partial(cuda.jit, lto=False)
"""Decorates a kernel. It is linked as the PTX that it compiles to, so the PTX that tests see is what runs."""

device: Any = cuda.jit(device=True, forceinline=True)
"""Decorates a function that kernels call."""


@device
def place():
    """The number of this thread in the whole grid, of one axis."""
    return np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x


def variant(function: Callable, name: str, **names: Any) -> Any:
    """The kernel of this name that a function becomes where some of its global names stand for something else."""
    return kernel(renamed(function, name, names))
