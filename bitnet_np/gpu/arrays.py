"""Arrays on the device, whose memory is used again as soon as nothing refers to it, and results that are computed at first use.

All work goes through one stream, in order. So the next launch may write to memory that Python has freed: it runs after every launch that
used the memory before.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
from cuda.bindings import driver
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError
from numpy.typing import DTypeLike, NDArray

from ..errors import CapacityError

DeviceArray = Any  # a StoredArray, or a Deferred that becomes one; the records of a model type their arrays as NumPy's

_STEP, _LARGEST_STEP = 512, 1 << 24
"""Bytes. Sizes are rounded up to a quarter of their power of two, within these bounds: a cache of 20 GB is to take 20 GB."""


class StoredArray:
    """An array in the device's memory, its last axis contiguous and the others without gaps.

    memory: what keeps the memory allocated
    address: of the first number
    kind: the dtype and the number of axes, for `launch`
    parameters: what Numba's kernels take for an array: two null pointers, size, itemsize, address, shape, strides
    chunks: of positions, the number of chunks of keys of the longest sequence, if no slot has several rows (`Cuda.resident`)
    """

    __slots__ = ("__weakref__", "address", "chunks", "dtype", "kind", "memory", "parameters", "shape", "size")

    def __init__(self, memory: Any, address: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.memory, self.address, self.shape, self.dtype = memory, address, shape, dtype
        self.kind, self.size, before, after = _described(shape, dtype)
        self.parameters = (*before, address, *after)
        self.chunks: int | None = None

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: Any) -> StoredArray:
        """The same memory with other axes, as numbers or as a tuple; one may be -1."""
        if isinstance(shape[0], tuple):
            (shape,) = shape
        if -1 in shape:
            shape = tuple(self.size // -prod(shape) if n == -1 else n for n in shape)
        assert prod(shape) == self.size, f"{self.shape} cannot become {shape}"
        return StoredArray(self.memory, self.address, shape, self.dtype)

    def __getitem__(self, index: int | slice) -> StoredArray:
        """The same memory: one entry of the first axis, or entries that follow each other."""
        shape = self.shape[1:]
        start = index.indices(len(self))[0] if isinstance(index, slice) else range(len(self))[index]
        return self.part(start * prod(shape), (len(range(len(self))[index]), *shape) if isinstance(index, slice) else shape)

    def part(self, start: int, shape: tuple[int, ...]) -> StoredArray:
        """The same memory: an array of that shape from number `start` on."""
        return StoredArray(self.memory, self.address + start * self.dtype.itemsize, shape, self.dtype)


@lru_cache(4096)
def _described(shape: tuple[int, ...], dtype: np.dtype) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    """The kind and size of an array, and its parameters before and after the address. A pass has few shapes, and thousands of arrays."""
    strides = [dtype.itemsize]
    for n in shape[:0:-1]:
        strides.append(strides[-1] * n)
    return dtype.char + str(len(shape)), prod(shape), (0, 0, prod(shape), dtype.itemsize), (*shape, *strides[::-1])


_of_thread = threading.local()


def attach() -> None:
    """Makes the device's context this thread's, unless an earlier call has: the driver refuses threads without one."""
    if not hasattr(_of_thread, "attached"):
        cuda.current_context()
        _of_thread.attached = True


def checked(result: tuple, what: Any = "") -> Any:
    """The values that a function of the driver returns after its error. Raises RuntimeError with the error's name."""
    error, *values = result
    if error:
        raise RuntimeError(f"CUDA, {what}: {error.name}")
    return values[0] if len(values) == 1 else values


class Memory(NamedTuple):
    owner: Any  # frees the memory when nothing refers to it
    address: int


def allocated(size: int) -> Memory:
    """New memory of at least one byte. Raises CapacityError if the device has none left."""
    try:
        owner = cuda.current_context().memalloc(max(1, size))
        return Memory(owner, int(owner.device_pointer))
    except CudaAPIError as error:
        raise CapacityError(f"the device has no {size:,} bytes left: {error}") from error


class _Block:
    """Memory of an arena, which goes back there when nothing refers to it."""

    __slots__ = ("_free", "_memory")

    def __init__(self, memory: Memory, free: list[Memory]) -> None:
        self._memory, self._free = memory, free

    def __del__(self) -> None:
        self._free.append(self._memory)


def _rounded(size: int) -> int:
    step = min(max(_STEP, 1 << max(0, size.bit_length() - 3)), _LARGEST_STEP)
    return max(_STEP, -(-size // step) * step)


@dataclass
class Arena:
    """Free device memory, by size. A captured graph owns an arena, so that nothing else writes to the memory it works in.

    The arena refers to all its memory, free or not: Python's garbage collector would free memory that only garbage refers to before the
    block's `__del__` brings it back.
    """

    free: dict[int, list[Memory]] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> StoredArray:
        """A new array with arbitrary numbers. Raises CapacityError, with the bytes requested, if the device has no memory left."""
        dtype = np.dtype(dtype)
        size = _rounded(prod(shape) * dtype.itemsize)
        blocks = self.free.setdefault(size, [])
        if blocks:
            memory = blocks.pop()
        else:
            memory = allocated(size)
            self.memory.append(memory)
        return StoredArray(_Block(memory, blocks), memory.address, shape, dtype)


def view(array: StoredArray, dtype: DTypeLike) -> StoredArray:
    """The same memory as a flat array of another type."""
    dtype = np.dtype(dtype)
    return StoredArray(array.memory, array.address, (array.nbytes // dtype.itemsize,), dtype)


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
    attach()
    out = np.empty(array.shape, array.dtype)
    if out.size:
        checked(driver.cuMemcpyDtoHAsync(out.ctypes.data, array.address, out.nbytes, int(stream.handle)), "copy to the host")
    stream.synchronize()
    return out


class Copy:
    """A copy of a small array in pinned memory of the host, made again and again: the device and the host go on meanwhile."""

    def __init__(self, like: StoredArray, stream: Any) -> None:
        attach()
        self._source, self._stream, self._event = like, stream, cuda.event(timing=False)
        address = int(checked(driver.cuMemHostAlloc(like.nbytes, 0), "pinned memory"))
        memory = np.ctypeslib.as_array((ctypes.c_byte * like.nbytes).from_address(address))
        self._array = memory.view(like.dtype).reshape(like.shape)
        finalize(self, _free_pinned, address, self._event).atexit = False  # the driver may have gone before

    def begin(self) -> None:
        """Copies the array as it is after all that was launched so far."""
        to, source = self._array.ctypes.data, self._source
        checked(driver.cuMemcpyDtoHAsync(to, source.address, source.nbytes, int(self._stream.handle)), "copy to the host")
        self._event.record(self._stream)

    def wait(self) -> NDArray:
        """The array, once it is there."""
        self._event.synchronize()
        return self._array.copy()


def _free_pinned(address: int, copied: Any) -> None:
    attach()
    copied.synchronize()  # a copy may be on its way
    driver.cuMemFreeHost(address)


def write(array: StoredArray, values: NDArray, stream: Any) -> None:
    """Copies contiguous numbers to the device: an array of the same size and dtype."""
    assert (values.size, values.dtype) == (array.size, array.dtype)
    attach()
    if values.size:
        checked(driver.cuMemcpyHtoDAsync(array.address, values.ctypes.data, values.nbytes, int(stream.handle)), "copy to the device")
