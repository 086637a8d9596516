"""Memory for results, used again as soon as nobody holds the result it was lent for.

A forward pass makes some hundred arrays of the same few sizes. Fresh memory is zeroed by the system page by page, which takes longer than
most kernels that fill it (a norm over 128 rows ran three times as long). So each thread keeps the memory of arrays that are gone, up
to LIMIT bytes. An array from here is like any other: it is its own as long as it, or a view of it, is alive.
"""

import threading
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

LIMIT = 1 << 28  # bytes that a thread keeps for later; what more is given back goes back to the system
_SMALLEST, _LARGEST = 1 << 14, LIMIT >> 2  # bytes: below, NumPy's own allocation is as fast; above, filling takes longer than zeroing
_ALIGNMENT = 64  # a register of 512 bits never straddles two cache lines


class _Block(NamedTuple):
    memory: NDArray[np.uint8]
    address: int  # of its first aligned byte
    size: int


@dataclass
class Counts:
    """What happened on one thread so far."""

    kept: int = 0  # bytes that are free for later
    lent: int = 0  # bytes of arrays that are alive, as far as they may be kept
    fresh: int = 0  # arrays of memory that is new, small and large ones too
    again: int = 0  # arrays of memory that was there


class _Pool(threading.local):
    def __init__(self) -> None:
        self.free: dict[int, list[_Block]] = {}  # by size
        self.counts = Counts()


class _Loan:
    """Owns the block of one array. NumPy keeps it as the array's base, so it goes when the last view goes."""

    __slots__ = ("__array_interface__", "block", "counts", "free")

    def __init__(self, block: _Block, free: list[_Block], counts: Counts, interface: dict[str, Any]) -> None:
        self.block, self.free, self.counts, self.__array_interface__ = block, free, counts, interface

    def __del__(self) -> None:
        self.counts.lent -= self.block.size
        if self.counts.kept + self.block.size <= LIMIT:
            self.counts.kept += self.block.size
            self.free.append(self.block)


_pool = _Pool()


def counts() -> Counts:
    """This thread's, which go on."""
    return _pool.counts


def release() -> None:
    """Let the system have what this thread keeps."""
    for blocks in _pool.free.values():  # the lists stay: arrays that are lent come back to them
        blocks.clear()
    _pool.counts.kept = 0


def empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray:
    """As np.empty: what is in it is left over from before."""
    dtype = np.dtype(dtype)
    size, told = prod(shape) * dtype.itemsize, _pool.counts
    if not _SMALLEST <= size <= _LARGEST:
        told.fresh += 1
        return np.empty(shape, dtype)
    size = 1 << (size - 1).bit_length() if size < 1 << 20 else -(-size >> 20) << 20  # of few sizes, so that they meet again
    free = _pool.free.setdefault(size, [])
    if free:
        block = free.pop()
        told.kept -= size
        told.again += 1
    else:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        block = _Block(memory, -(-memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT, size)
        told.fresh += 1
    told.lent += size
    interface = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (block.address, False)}
    return np.asarray(_Loan(block, free, told, interface))
