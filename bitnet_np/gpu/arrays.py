"""Arrays on the device, whose memory is used again as soon as nothing refers to it.

All work goes through one stream, in order. So the next launch may write to memory that Python has freed: it runs after every launch that
used the memory before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.cudadrv.devicearray import DeviceNDArray
from numba.cuda.cudadrv.driver import CudaAPIError, MemoryPointer
from numpy.typing import DTypeLike

from ..base.errors import CapacityError

DeviceArray = Any  # Numba's DeviceNDArray; the records of a model type their arrays as NumPy's


def allocated(size: int) -> Any:
    """New memory of at least one byte. Raises CapacityError if the device has none left."""
    try:
        return cuda.current_context().memalloc(max(1, size))
    except CudaAPIError as error:
        raise CapacityError(f"the device has no {size:,} bytes left: {error}") from error


def array_in(memory: Any, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
    """A contiguous array at the start of some memory."""
    strides = [dtype.itemsize]
    for n in shape[:0:-1]:
        strides.append(strides[-1] * n)
    return DeviceNDArray(shape, tuple(strides[::-1]) if shape else (), dtype, gpu_data=memory)


@dataclass
class Arena:
    """Free device memory, by size. A captured graph owns an arena, so that nothing else writes to the memory it works in."""

    free: dict[int, list[Any]] = field(default_factory=dict)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> DeviceArray:
        """A new array with arbitrary numbers. Raises CapacityError, with the bytes requested, if the device has no memory left."""
        dtype = np.dtype(dtype)
        size = rounded(prod(shape) * dtype.itemsize)
        blocks = self.free.setdefault(size, [])
        block = blocks.pop() if blocks else allocated(size)
        lent = MemoryPointer(block.context, block.device_pointer, size, finalizer=lambda: blocks.append(block))
        return array_in(lent, shape, dtype)


def rounded(size: int) -> int:
    """Sizes are rounded up to a quarter of their power of two, between 512 bytes and 16 MB: a cache of 20 GB is to take 20 GB."""
    step = min(max(512, 1 << max(0, size.bit_length() - 3)), 1 << 24)
    return max(512, -(-size // step) * step)


@dataclass(frozen=True, eq=False)
class Codes:
    """int8 activations [R, M], as quantize leaves them for ternary products."""

    words: DeviceArray  # uint32 [R, words of a row], four codes each
    row_sums: DeviceArray  # int32 [R]
    width: int  # M


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """A table of numbers."""

    numbers: DeviceArray  # float32 [N, M], or int16: the bits of float16 and bfloat16
    kind: str  # of floats.py

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape
