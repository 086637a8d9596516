"""The compilation of kernels and their functions, and the sizes that all of them share.

A kernel takes arrays and numbers one by one, however many there are, and makes records of them on its first lines: inside a kernel a record
costs nothing, and `gpu.launch` knows arrays, numbers and tuples of them.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numba import cuda, njit

WARP = 32  # threads that take an instruction together
ALIGNED = 16  # bytes, of shared arrays that are read or filled 16 bytes at a time: Numba would align them to a single number
AHEAD = 8  # numbers of a lane that are read before the first of them is needed
PIECE = 8192  # numbers of a row in shared memory at a time, a multiple of AHEAD times the lanes of a sum in float64

_REMOVED = "row_stack"  # by NumPy 2.5; numba-cuda 0.30.4 does not load without it
if not hasattr(np, _REMOVED):
    setattr(np, _REMOVED, lambda rows: np.vstack(rows))
    import_module("numba.cuda.cudaimpl")
    delattr(np, _REMOVED)

kernel: Any = partial(cuda.jit, lto=False)
"""Decorates a kernel. It is linked as the PTX that it compiles to, so that what is seen in the PTX is what runs."""

device: Any = cuda.jit(device=True, forceinline=True)
"""Decorates a function that kernels call."""

inlined = njit(inline="always")
"""Decorates a function that takes strings or returns new arrays. Numba copies its body into the caller, which takes Numba's time."""


def kernel_of(function: Callable, threads: int, at_once: int = 1) -> Any:
    """A kernel for blocks of `threads` threads: it takes no more registers than such a block has, or so many blocks on one processor."""
    return kernel(function, launch_bounds=threads if at_once == 1 else (threads, at_once))
