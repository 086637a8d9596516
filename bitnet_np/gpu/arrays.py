"""Arrays on the device, from memory that is used again as soon as nothing holds it.

All work goes through one stream, in order: memory that Python lets go may be written by what is launched next, because that runs after
what was launched before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.cudadrv import devicearray, driver
from numpy.typing import DTypeLike, NDArray

from ..errors import CapacityError

DeviceArray = Any  # numba.cuda's, which is not typed

_STEP, _LARGEST_STEP = 512, 1 << 24
"""Bytes. Sizes are rounded up to a quarter of their power of two, within these: a cache of 20 GB is to take 20 GB."""


def _rounded(size: int) -> int:
    step = min(max(_STEP, 1 << max(0, size.bit_length() - 3)), _LARGEST_STEP)
    return -(-size // step) * step


@dataclass
class Arena:
    """Device memory by size. A captured graph owns one, so that nothing else writes to the memory it works in."""

    free: dict[int, list[DeviceArray]] = field(default_factory=dict)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """An array with anything in it. Raises CapacityError, with the bytes wanted, when there is no memory."""
        dtype = np.dtype(dtype)
        size = _rounded(prod(shape) * dtype.itemsize)
        blocks = self.free.setdefault(size, [])
        block = blocks.pop() if blocks else _allocated(size)
        context = cuda.current_context()
        memory = driver.MemoryPointer(context, block.gpu_data.device_pointer, size, finalizer=lambda: blocks.append(block))
        strides = tuple(dtype.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return devicearray.DeviceNDArray(shape, strides, dtype, gpu_data=memory)


def _allocated(size: int) -> DeviceArray:
    try:
        return cuda.device_array(size, np.uint8)
    except driver.CudaAPIError as error:
        raise CapacityError(f"the device has no {size:,} bytes left: {error}") from error


def view(array: DeviceArray, dtype: DTypeLike) -> DeviceArray:
    """The same memory, one axis, as numbers of another type."""
    return array.reshape(array.size).view(dtype)


class Deferred:
    """A result that nobody has needed yet. What reads it first may work it out on its way: one launch, and one way through memory, less."""

    def __init__(self, source: str, inputs: tuple, shape: tuple[int, ...], launch: Callable[[Deferred], DeviceArray]) -> None:
        """`source` and `inputs` say what it is to those who know; `launch` works it out, from this, for all others."""
        self.source, self.inputs, self.shape = source, inputs, shape
        self._launch: Callable[[Deferred], DeviceArray] | None = launch  # does not know this: memory is free when nobody asks any more
        self._array: DeviceArray = None
        self.quantized: tuple[Any, Any] | None = None  # of a norm: codes and scale

    def __len__(self) -> int:
        return self.shape[0]

    def array(self) -> DeviceArray:
        if self._launch is not None:
            self.found(self._launch(self))
        return self._array

    def reshape(self, *shape: int) -> DeviceArray:
        return self.array().reshape(*shape)

    def is_open(self) -> bool:
        return self._launch is not None

    def found(self, array: DeviceArray) -> None:
        """It is, or will be, in this array; inputs are let go."""
        self._array, self._launch, self.inputs = array, None, ()


def now(array: Any) -> Any:
    """An array that can be read."""
    return array.array() if isinstance(array, Deferred) else array


@dataclass(frozen=True, eq=False)
class Codes:
    """int8 activations as the kernels of ternary.py read them."""

    words: DeviceArray  # uint32 [rows up to a multiple of 16 * row_words]
    bytes: DeviceArray  # int8, the same memory
    rows: int  # R
    width: int  # M
    row_words: int


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """A matrix of numbers, laid out as floats.py says."""

    words: DeviceArray  # uint32 [N, words of a row]
    kind: str
    shape: tuple[int, int]  # (N, M)


def host(array: DeviceArray | Deferred | Codes, stream: Any) -> NDArray:
    """A copy of it as NumPy's; of codes, what they stand for."""
    array = now(array)
    if isinstance(array, Codes):
        codes = host(array.bytes, stream)[: array.rows * array.row_words * 4]
        return np.ascontiguousarray(codes.reshape(array.rows, -1)[:, : array.width])
    out = array.copy_to_host(stream=stream)
    stream.synchronize()
    return out
