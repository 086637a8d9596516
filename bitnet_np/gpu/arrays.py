"""Arrays on the device, whose memory is used again as soon as nothing refers to it, and results that are computed at first use.

All work goes through one stream, in order. So the next launch may write to memory that Python has freed: it runs after every launch that
used the memory before.
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

DeviceArray = Any  # that of numba.cuda, which has no types

_STEP, _LARGEST_STEP = 512, 1 << 24
"""Bytes. Sizes are rounded up to a quarter of their power of two, within these bounds: a cache of 20 GB is to take 20 GB."""


def _rounded(size: int) -> int:
    step = min(max(_STEP, 1 << max(0, size.bit_length() - 3)), _LARGEST_STEP)
    return -(-size // step) * step


@dataclass
class Arena:
    """Free device memory, by size. A captured graph owns an arena, so that nothing else writes to the memory it works in."""

    free: dict[int, list[DeviceArray]] = field(default_factory=dict)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """A new array with arbitrary numbers. Raises CapacityError, with the bytes requested, if the device has no memory left."""
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
    """The same memory as a flat array of another type."""
    return array.reshape(array.size).view(dtype)


class Deferred:
    """A result that nothing has read yet. Its first reader may compute it on the way, which saves a launch and a pass through memory."""

    def __init__(self, source: str, inputs: tuple, shape: tuple[int, ...], launch: Callable[[Deferred], DeviceArray]) -> None:
        """`source` and `inputs` define the result for kernels that can compute it themselves; `launch` computes it for all others."""
        self.source, self.inputs, self.shape = source, inputs, shape
        self._launch: Callable[[Deferred], DeviceArray] | None = launch  # no reference to self: unread results are freed at once
        self._array: DeviceArray = None
        self.quantized: tuple[Any, Any] | None = None  # codes and scale, of a norm

    def __len__(self) -> int:
        return self.shape[0]

    def array(self) -> DeviceArray:
        if self._launch is not None:
            self.settle(self._launch(self))
        return self._array

    def reshape(self, *shape: int) -> DeviceArray:
        return self.array().reshape(*shape)

    def is_open(self) -> bool:
        return self._launch is not None

    def settle(self, array: DeviceArray) -> None:
        """Set the array that holds the result, or will hold it, and free the inputs."""
        self._array, self._launch, self.inputs = array, None, ()


def now(array: Any) -> Any:
    """The array of a Deferred, computed if it was not yet; anything else as it is."""
    return array.array() if isinstance(array, Deferred) else array


@dataclass(frozen=True, eq=False)
class Codes:
    """int8 activations in the layout of layout.py."""

    words: DeviceArray  # uint32 [rows up to a multiple of 16 * row_words]
    bytes: DeviceArray  # int8, the same memory
    rows: int  # R
    width: int  # M
    row_words: int


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """A matrix of numbers in the layout of floats.py."""

    words: DeviceArray  # uint32 [N, words of a row]
    kind: str
    shape: tuple[int, int]  # (N, M)


def host(array: DeviceArray | Deferred | Codes, stream: Any) -> NDArray:
    """A copy as a NumPy array; codes as int8 [R, M]."""
    array = now(array)
    if isinstance(array, Codes):
        codes = host(array.bytes, stream)[: array.rows * array.row_words * 4]
        return np.ascontiguousarray(codes.reshape(array.rows, -1)[:, : array.width])
    out = array.copy_to_host(stream=stream)
    stream.synchronize()
    return out
