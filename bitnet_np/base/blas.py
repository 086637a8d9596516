"""The number of threads of NumPy's matrix products. In small products, threads wait for each other longer than they multiply.

While other processes were busy, the judge of a small model took 10 to 25 times as long with two threads as with one.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np


class _Threads(NamedTuple):
    """OpenBLAS's own functions."""

    in_use: Callable[[], int]
    set: Callable[[int], object]


@cache
def openblas() -> _Threads | None:
    """The functions of the OpenBLAS that NumPy's wheels bring along; None where NumPy multiplies by another library."""
    package = Path(np.__file__).parent
    for path in (*package.glob(".dylibs/*openblas*"), *package.with_name("numpy.libs").glob("*openblas*")):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))  # which is loaded already
            return _Threads(library.scipy_openblas_get_num_threads64_, library.scipy_openblas_set_num_threads64_)
    return None


_turn = threading.Lock()
_users = 0
_before = 1  # threads, to be given back by the last user


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which NumPy's products take one thread, in the whole process; afterwards they take as many as before."""
    global _users, _before
    blas = openblas()
    if blas is None:
        yield
        return
    with _turn:
        if _users == 0:
            _before = blas.in_use()
            blas.set(1)
        _users += 1
    try:
        yield
    finally:
        with _turn:
            _users -= 1
            if _users == 0:
                blas.set(_before)
