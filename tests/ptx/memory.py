"""Memory of the device and of its blocks: the bounds of what is allocated, and threads that race."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BASE = 1 << 44  # of the device's addresses: none is an address of the host
_ALIGNMENT = 256  # of allocations; at least as many bytes between two of them are not allocated
READ, WRITE, ATOMIC = 1, 2, 4


class Fault(Exception):
    """A kernel does something that is an error or left to chance on a GPU."""


class Memory:
    """Some memory, read and written by many threads at a time. Bytes are 0xFF at first: a NaN in every type of float."""

    def __init__(self, size: int, base: int = BASE) -> None:
        self.raw, self.base = np.full(-(-size // 8) * 8, 0xFF, np.uint8), base
        self._views = {width: self.raw.view(f"u{width}") for width in (1, 2, 4, 8)}
        self._starts, self._ends, self._next = np.zeros(0, np.int64), np.zeros(0, np.int64), base

    def allocate(self, size: int) -> NDArray[np.uint8]:
        """New bytes, which are never given again. Raises MemoryError."""
        start = self._next
        if start + size > self.base + self.raw.size:
            raise MemoryError(f"{size} bytes")
        self._starts, self._ends = np.append(self._starts, start), np.append(self._ends, start + size)
        self._next += -(-size // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
        return self.raw[start - self.base :][:size]

    @property
    def taken(self) -> int:
        """Bytes that were given so far."""
        return self._next - self.base

    def address_of(self, array: NDArray) -> int:
        """The device's address of an array in this memory."""
        return self.base + array.ctypes.data - self.raw.ctypes.data

    def _places(self, addresses: NDArray[np.int64], width: int, count: int) -> NDArray[np.int64]:
        """Raises Fault unless `count` numbers of `width` bytes may be touched at each address."""
        number = np.searchsorted(self._starts, addresses, "right") - 1
        outside = (number < 0) | (addresses + width * count > self._ends[number])
        for wrong, why in ((outside, "not allocated"), (addresses & (width * count - 1) != 0, "not aligned")):
            if np.count_nonzero(wrong):  # takes a third of the time of any()
                raise Fault(f"{width * count} bytes at {int(addresses[np.argmax(wrong)]):#x}: {why}")
        return (addresses - self.base) // width

    def load(self, addresses: NDArray[np.int64], width: int, count: int) -> list[NDArray]:
        """`count` numbers of `width` bytes, one after another, at each address."""
        places = self._places(addresses, width, count)
        return [self._views[width][places + i] for i in range(count)]

    def change(self, addresses: NDArray[np.int64], order: NDArray[np.int64], combine: np.ufunc, values: NDArray) -> NDArray:
        """Combine the number at each address with a value, in this order. Returns what was there before each."""
        places, numbers = self._places(addresses, values.itemsize, 1), self._views[values.itemsize].view(values.dtype)
        old = np.empty(values.shape, values.dtype)
        for i in order:
            old[i] = numbers[places[i]]
            numbers[places[i]] = combine(old[i], values[i])
        return old

    def store(self, addresses: NDArray[np.int64], width: int, values: list[NDArray]) -> None:
        places = self._places(addresses, width, len(values))
        for i, value in enumerate(values):
            self._views[width][places + i] = value


class Watch:
    """What threads touch, half a word at a time. Threads of a block are in no order between two barriers, nor are blocks of a launch."""

    def __init__(self) -> None:
        self._touched: list[NDArray[np.int64]] = []  # since the last barrier: [3, n], the half, the thread and READ, WRITE or ATOMIC
        self._by_block: list[NDArray[np.int64]] = []  # since the beginning of the block, and by blocks in place of threads before

    def touch(self, addresses: NDArray[np.int64], size: int, threads: NDArray[np.int64], kind: int) -> None:
        halves = (addresses >> 1)[:, None] + np.arange(max(1, size // 2))
        touched = np.empty((3, *halves.shape), np.int64)
        touched[0], touched[1], touched[2] = halves, threads[:, None], kind
        self._touched.append(touched.reshape(3, -1))

    def barrier(self) -> None:
        """Raises Fault if threads have raced."""
        if self._touched:
            self._by_block.append(_merged(self._touched, "thread"))
            self._touched.clear()

    def end_block(self, number: int) -> NDArray[np.int64]:
        """What the block touched."""
        self.barrier()
        touched = np.concatenate([np.zeros((3, 0), np.int64), *self._by_block], axis=1)
        touched[1] = number
        self._by_block.clear()
        return touched


def _merged(parts: list[NDArray[np.int64]], who: str) -> NDArray[np.int64]:
    """Each half once, with all that was done to it.

    Raises Fault if there was a write by one and anything by another, or an atomic operation and a read.
    """
    halves, actors, kinds = np.concatenate(parts, axis=1)
    order = np.argsort(halves, kind="stable")
    halves, actors, kinds = halves[order], actors[order], kinds[order]
    starts = np.flatnonzero(np.diff(halves, prepend=-1))
    least, most = np.minimum.reduceat(actors, starts), np.maximum.reduceat(actors, starts)
    done = np.bitwise_or.reduceat(kinds, starts)
    raced = (least != most) & ((done & WRITE > 0) | (done == READ | ATOMIC))
    if raced.any():
        at = int(np.argmax(raced))
        raise Fault(f"a race of {who}s {least[at]} and {most[at]} at {2 * int(halves[starts[at]]):#x}")
    return np.stack([halves[starts], least, done])


def check_blocks(touched: list[NDArray[np.int64]]) -> None:
    """Raises Fault if blocks of a launch, by what each touched, have raced."""
    if touched and sum(part.shape[1] for part in touched):
        _merged(touched, "block")
