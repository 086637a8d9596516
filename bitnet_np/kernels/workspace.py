"""Memory for results, for kernels' own arrays, and for weights.

Memory for results is used again as soon as nothing refers to the result it was lent to. A forward pass makes some hundred arrays of the
same few sizes. Fresh memory is zeroed by the system page by page, which takes longer than most kernels that fill it (a norm over 128 rows
ran three times as long). So each thread keeps the memory of deleted arrays, up to LIMIT bytes. An array from here is like any other:
nothing else uses its memory as long as it, or a view of it, is alive.

An array gets the smallest free block that holds it. Where none does, a new block replaces the largest free one. So a thread has no more
blocks than were lent at once, and after a layer or two they fit all that follows: a pass takes little more than it holds at once.
"""

import threading
import weakref
from bisect import bisect_left, insort_left
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .fast.simd import address_of
from .launching import serial

LIMIT = 1 << 28  # bytes that a thread keeps for later; memory beyond that goes back to the system
_LARGEST = LIMIT >> 2  # bytes: above, filling takes longer than zeroing
_ALIGNMENT = 64  # a register of 512 bits never straddles two cache lines


class _Block(NamedTuple):
    memory: NDArray[np.uint8]
    address: int  # of the first aligned byte
    size: int


_SIZE = attrgetter("size")


@dataclass
class Counts:
    """The memory of one thread so far."""

    kept: int = 0  # bytes kept for later
    lent: int = 0  # bytes of live arrays, but for small and large ones
    fresh: int = 0  # arrays in new memory, small and large ones too
    again: int = 0  # arrays in memory that was used before


class _Pool(threading.local):
    def __init__(self, smallest: int = 1 << 14) -> None:
        self.free: list[_Block] = []  # the smallest first
        self.returned: deque[_Block] = deque()  # free, too: whichever thread deletes an array appends to it, which needs no lock
        self.counts = Counts()
        self.smallest = smallest  # bytes: below, NumPy's own allocation is as fast
        self.made: list[_Block] | None = None  # all blocks, while they are to stay


class _Loan:
    """Owns the block of one array. NumPy keeps it as the array's base, so it goes when the last view goes."""

    __slots__ = ("__array_interface__", "block", "counts", "returned")

    def __init__(self, block: _Block, returned: deque[_Block], counts: Counts, interface: dict[str, Any]) -> None:
        self.block, self.returned, self.counts, self.__array_interface__ = block, returned, counts, interface

    def __del__(self) -> None:
        self.counts.lent -= self.block.size
        if self.counts.kept + self.block.size <= LIMIT:
            self.counts.kept += self.block.size
            self.returned.append(self.block)


_pool = _Pool()


class Room(NamedTuple):
    """Memory that some arrays have for themselves."""

    blocks: list[_Block]
    returned: deque[_Block]  # where their memory goes when they are deleted

    def holds(self, array: NDArray) -> bool:
        """Whether an array lies in it."""
        owner = owner_of(array)
        return isinstance(owner, _Loan) and owner.returned is self.returned

    def clear(self) -> None:
        """Fill it with zeros."""
        for block in self.blocks:
            block.memory[:] = 0


def owner_of(array: NDArray) -> Any:
    """The array or other object whose memory an array views."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def counts() -> Counts:
    """The counts of this thread, which go on counting."""
    return _pool.counts


def release() -> None:
    """Give the memory that this thread keeps back to the system."""
    _pool.free.clear()
    _pool.returned.clear()  # the list stays: lent memory comes back to it
    _pool.counts.kept = 0


def empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray:
    """An array like that of np.empty, in memory that may have been used before."""
    dtype = np.dtype(dtype)
    size, tally = prod(shape) * dtype.itemsize, _pool.counts
    if not _pool.smallest <= size <= _LARGEST:
        tally.fresh += 1
        return np.empty(shape, dtype)
    step = 1 << max(0, (size - 1).bit_length() - 4)
    block = _block(-(-size // step) * step, tally)  # eighths of a power of two, so that blocks fit again when there are some more rows
    tally.lent += block.size
    interface = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (block.address, False)}
    return np.asarray(_Loan(block, _pool.returned, tally, interface))


def _block(size: int, tally: Counts) -> _Block:
    """The smallest free block of at least this size, or a new one in place of the largest."""
    free, returned = _pool.free, _pool.returned
    while returned:
        insort_left(free, returned.popleft(), key=_SIZE)  # of equal ones the last, which a cache may still hold, comes first
    place = bisect_left(free, size, key=_SIZE)
    if place < len(free):
        tally.kept -= free[place].size
        tally.again += 1
        return free.pop(place)
    if free:
        tally.kept -= free.pop().size
    tally.fresh += 1
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    block = _Block(memory, -(-memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT, size)
    if _pool.made is not None:
        _pool.made.append(block)
    return block


@contextmanager
def own_room() -> Iterator[Room]:
    """Context in which all arrays, small ones too, get memory that is reserved for them, then and later."""
    usual = vars(_pool).copy()  # of this thread
    _pool.__init__(smallest=1)  # type: ignore[misc]
    made: list[_Block] = []
    _pool.made = made
    try:
        yield Room(made, _pool.returned)
    finally:
        vars(_pool).update(usual)


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """An array like that of np.zeros, for arrays that live long. It is aligned: no register straddles two cache lines."""
    dtype = np.dtype(dtype)
    memory = np.zeros(prod(shape) * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : memory.size - _ALIGNMENT + start].view(dtype).reshape(shape)


@serial
def _misaligned(memory):
    """The bytes from the beginning of an array to the next cache line."""
    return -address_of(memory) % _ALIGNMENT


@serial
def aligned(size):
    """So many aligned bytes, for kernels' own arrays."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = _misaligned(memory)
    return memory[start : start + size]


@serial
def aligned_floats(rows, columns):
    """Float32 [rows, columns], aligned like `aligned`."""
    memory = np.empty(rows * columns + _ALIGNMENT // 4, np.float32)  # not `aligned`: to compile a view of bytes as floats takes long
    start = _misaligned(memory) // 4
    return memory[start : start + rows * columns].reshape(rows, columns)


# --- weights --------------------------------------------------------------------------------------------------------------------------

_PAGE = 1 << 21
_BLOCK = 1 << 26  # bytes that matrices share
_LEAST_SHARED = 1 << 18  # bytes: a smaller array would keep its neighbours' block alive for little


class _Current(threading.local):
    """The block that is being shared out, which lives as long as an array in it, and its first free byte."""

    memory: weakref.ref[NDArray[np.uint8]] | None = None
    free = 0


_current = _Current()


def for_weights(size: int) -> NDArray[np.uint8]:
    """Bytes like those of np.empty, for arrays that live long, on huge pages where the system has them.

    Decoding a token reads all weights once, in order. With pages of 4 KB this stalls at each page, and at loads of registers that straddle
    two cache lines. NumPy asks the system for huge pages, but an array of a few MB contains hardly a whole one, and begins 16 bytes after a
    page. So matrices share blocks: decoding a token of the 2B model takes 0.93 of the time on one thread, 0.98 on two.
    """
    if size < _LEAST_SHARED:
        return np.empty(size, np.uint8)
    memory = _current.memory() if _current.memory else None
    if size > _BLOCK or memory is None or _current.free + size > memory.size:
        memory = np.empty(max(size, _BLOCK) + _PAGE, np.uint8)
        _current.memory, _current.free = weakref.ref(memory), -memory.ctypes.data % _PAGE
    start = _current.free
    _current.free = start - -size // _ALIGNMENT * _ALIGNMENT  # the first begins at a cache line, so all do
    return memory[start : start + size]
