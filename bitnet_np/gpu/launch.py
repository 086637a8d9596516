"""Launches of kernels, with as little work for the host as Python allows.

numba-cuda spends 20 to 250 microseconds of the host on a launch: it types and converts each argument anew. Here a launch finds the compiled
kernel by the types of its arguments, writes them into a buffer whose layout the first such launch has worked out, and calls the driver.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from struct import Struct
from threading import Lock
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import types
from numba.np.numpy_support import from_dtype

from .arrays import StoredArray, attach, checked

_NUMBERS = {
    int: (types.int64, "q"),
    np.int64: (types.int64, "q"),
    np.int32: (types.int32, "i4x"),
    np.int16: (types.int16, "h6x"),
    np.float32: (types.float32, "f4x"),
}
"""The types of numbers that kernels take: Numba's, and the code of `struct` for one in a slot of 8 bytes."""


@dataclass(frozen=True, eq=False)
class _Compiled:
    """A kernel compiled for arguments of some types, and the memory from which the driver copies them."""

    function: Any  # driver.CUfunction
    layout: Struct
    slots: Any  # ctypes array of bytes: 8 for each parameter
    pointers: Any  # ctypes array: the address of each slot
    lock: Lock  # held while the arguments of one launch lie in the slots: threads may share a kernel


class Launcher:
    """Launches kernels on one stream of one device."""

    def __init__(self, stream: Any) -> None:
        self._stream = driver.CUstream(int(stream.handle))
        self._compiled: dict[tuple, _Compiled] = {}

    def __call__(self, kernel: Any, grid: int | tuple[int, ...], threads: int, *arguments: Any) -> None:
        """Launches a kernel on a grid of blocks of so many threads. Arguments are arrays on the device, numbers, and tuples of both.

        The first launch with arguments of some types compiles the kernel. Raises RuntimeError with the driver's error, TypeError for an
        argument that no kernel takes.
        """
        key: list[Any] = [kernel]
        values: list[Any] = []
        _spread(arguments, key, values)
        compiled = self._compiled.get(tuple(key)) or self._compile(tuple(key), kernel, arguments)
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1)[:3]
        attach()
        with compiled.lock:
            compiled.layout.pack_into(compiled.slots, 0, *values)
            pointers = ctypes.addressof(compiled.pointers)
            result = driver.cuLaunchKernel(compiled.function, x, y, z, threads, 1, 1, 0, self._stream, pointers, 0)
        checked(result, kernel)

    def _compile(self, key: tuple, kernel: Any, arguments: tuple) -> _Compiled:
        compiled = kernel.compile(tuple(map(_numba_type, arguments)))
        function = driver.CUfunction(int(compiled.library.get_cufunc().handle))
        layout = Struct("=" + "".join(map(_layout, arguments)))
        slots = ctypes.create_string_buffer(layout.size)
        pointers = (ctypes.c_void_p * (layout.size // 8))(*range(ctypes.addressof(slots), ctypes.addressof(slots) + layout.size, 8))
        self._compiled[key] = _Compiled(function, layout, slots, pointers, Lock())
        return self._compiled[key]


def _spread(arguments: tuple, key: list, values: list) -> None:
    """Appends the types of arguments to `key`, and the parameters that Numba makes of them to `values`."""
    for argument in arguments:
        if type(argument) is StoredArray:
            key.append(argument.kind)
            values += argument.parameters
        elif type(argument) is tuple:
            key.append(len(argument))
            _spread(argument, key, values)
        else:
            key.append(type(argument))
            values.append(argument)


def _numba_type(argument: Any) -> Any:
    if isinstance(argument, StoredArray):
        return types.Array(from_dtype(argument.dtype), len(argument.shape), "C")
    if isinstance(argument, tuple):
        return types.BaseTuple.from_types(tuple(map(_numba_type, argument)))
    if type(argument) not in _NUMBERS:
        raise TypeError(
            f"an argument of a kernel is {argument!r}, expected an array on the device or one of {[kind.__name__ for kind in _NUMBERS]}"
        )
    return _NUMBERS[type(argument)][0]


def _layout(argument: Any) -> str:
    """The codes of `struct` for an argument's parameters, each in a slot of 8 bytes."""
    if isinstance(argument, StoredArray):
        return "q" * len(argument.parameters)
    return "".join(map(_layout, argument)) if isinstance(argument, tuple) else _NUMBERS[type(argument)][1]
