"""What kernels are compiled for: a GPU, or Numba's simulator where NUMBA_ENABLE_CUDASIM=1 was set before Numba was imported."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda
from numba.cuda import config

SIMULATED = bool(config.ENABLE_CUDASIM)

_LOST = "row_stack"  # NumPy 2.5 took it away, numba-cuda 0.30.4 does not load without it
if not SIMULATED and not hasattr(np, _LOST):
    setattr(np, _LOST, lambda rows: np.vstack(rows))
    import_module("numba.cuda.cudaimpl")
    delattr(np, _LOST)

if TYPE_CHECKING or not SIMULATED:
    from . import ptx as instructions
else:
    from . import simulated as instructions

kernel: Any = cuda.jit if SIMULATED else partial(cuda.jit, lto=False)
"""Kernels are linked as the PTX that they compile to, so that what is seen in it is what runs."""


def kernel_of(function: Callable, threads: int) -> Any:
    """A kernel for blocks of so many threads, which have no more registers than there are."""
    return kernel(function) if SIMULATED else kernel(function, launch_bounds=threads)


ALIGNED = None if SIMULATED else 16  # bytes, of shared arrays that are read or filled as many at a time: Numba aligns them to one number
BLOCK = 16 if SIMULATED else 256  # threads of a block that works on one row, at least 16
LARGE_BLOCK = 16 if SIMULATED else 1024  # the same, where there are too few rows to keep the device busy
AHEAD = 2 if SIMULATED else 8  # numbers of a lane that are read at a time
PIECE = 512 if SIMULATED else 8192  # numbers of a row in shared memory at a time, a multiple of AHEAD times the lanes of a sum in float64
WARP = 32
GRID = 2 if SIMULATED else 4096  # blocks at most, of those that work on single numbers

__all__ = ["AHEAD", "ALIGNED", "BLOCK", "GRID", "LARGE_BLOCK", "PIECE", "SIMULATED", "WARP", "instructions", "kernel", "kernel_of"]
