"""Kernels whose own arrays end where a protected page begins: a read or write past the end is a crash. A program, for Linux.

    NUMBA_CACHE_DIR=(an empty folder) python tests/support/guarded_inside.py

`workspace.aligned` gives these arrays, so it is replaced before any kernel is compiled. That memory is never given back.
"""

import ctypes
import mmap
import sys

import numpy as np
from numba import carray, types

from bitnet_np.kernels import workspace
from bitnet_np.kernels.fast import amx
from bitnet_np.kernels.launching import serial

_libc = ctypes.CDLL(None)
_map, _protect = _libc.mmap, _libc.mprotect
_map.restype, _map.argtypes = ctypes.c_ssize_t, [ctypes.c_ssize_t, ctypes.c_ssize_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
_protect.argtypes = [ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_int]
_pointer = amx._pointer(types.uint8)
_PAGE, _USE, _KIND = mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@serial
def aligned(size):
    whole = -(-size // _PAGE) * _PAGE
    place = _map(0, whole + _PAGE, _USE, _KIND, -1, 0)
    _protect(place + whole, _PAGE, 0)
    return carray(_pointer(place + whole - size), size)


@serial
def aligned_floats(rows, columns):
    return aligned(rows * columns * 4).view(np.float32).reshape(rows, columns)


for name, ours in (("aligned", aligned), ("aligned_floats", aligned_floats)):
    theirs = getattr(workspace, name)
    for module in [module for module in sys.modules.values() if getattr(module, name, None) is theirs]:
        setattr(module, name, ours)

if __name__ == "__main__":
    from unittest import mock

    from bitnet_np.testing import selftest

    cases, known = selftest.cases(), selftest.known_bits()
    for unit, name in (
        *((unit, "parts, ternary, 600 columns") for unit in (None, amx.PLAIN)),
        *((None, name) for name in ("blocks Q4_1", "matmul float16, 131 rows", "attend, window")),
    ):
        with mock.patch.multiple(amx, unit=lambda unit=unit: unit):
            assert selftest.digest(*cases[name]()) == known[name], name
