"""Memory of the device and of its blocks, with the bounds of allocations and the last thread that touched each word."""

from __future__ import annotations

from bisect import bisect_right, insort

import numpy as np
from numpy.typing import NDArray

BASE = 1 << 44  # of the device's addresses: none is an address of the host
_ALIGNMENT = 256  # of allocations; at least as many bytes between two of them are not allocated


class Fault(Exception):
    """A kernel does something that is an error or left to chance on a GPU."""


class Bytes:
    """Some memory, read and written by many threads at a time. Addresses begin at `base`."""

    def __init__(self, size: int, base: int = 0) -> None:
        self.base, self.size = base, size
        self.raw = np.zeros(-(-size // 8) * 8, np.uint8)
        self._views = {width: self.raw.view(f"u{width}") for width in (1, 2, 4, 8)}

    def check(self, addresses: NDArray[np.int64], size: int) -> None:
        """Raises Fault unless `size` bytes at each address may be touched."""
        if len(addresses) and (addresses.min() < self.base or addresses.max() + size > self.base + self.size):
            raise Fault(
                f"{size} bytes at {_first(addresses, (addresses < self.base) | (addresses + size > self.base + self.size)):#x}: outside"
            )

    def _places(self, addresses: NDArray[np.int64], width: int, count: int) -> NDArray[np.int64]:
        if (addresses & (width * count - 1)).any():
            raise Fault(f"{width * count} bytes at {_first(addresses, addresses & (width * count - 1) != 0):#x}: not aligned")
        self.check(addresses, width * count)
        return (addresses - self.base) // width

    def load(self, addresses: NDArray[np.int64], width: int, count: int) -> list[NDArray]:
        """`count` numbers of `width` bytes, one after another, at each address."""
        places = self._places(addresses, width, count)
        return [self._views[width][places + i] for i in range(count)]

    def store(self, addresses: NDArray[np.int64], width: int, values: list[NDArray]) -> None:
        places = self._places(addresses, width, len(values))
        for i, value in enumerate(values):
            self._views[width][places + i] = value


class Memory(Bytes):
    """The device's memory. New memory is 0xFF bytes: a NaN in every type of float."""

    def __init__(self, size: int = 1 << 28) -> None:
        super().__init__(size, BASE)
        self._starts = list[int]()
        self._sizes = dict[int, int]()
        self._next = BASE

    def allocate(self, size: int) -> int:
        """The address of new memory. None is used twice, so that uses of freed memory show. Raises MemoryError."""
        if self._next + size > BASE + self.size:
            raise MemoryError(f"{size} bytes")
        address = self._next
        self._next += -(-size // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT
        insort(self._starts, address)
        self._sizes[address] = size
        self.raw[address - BASE : address - BASE + size] = 0xFF
        return address

    def free(self, address: int) -> None:
        if self._sizes.pop(address, None) is None:
            raise Fault(f"{address:#x} is freed, which is not allocated")
        self._starts.remove(address)

    def allocation(self, address: int) -> tuple[int, int]:
        """The start and the bytes of the allocation that holds an address. Raises Fault if there is none."""
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._starts[at] + max(1, self._sizes[self._starts[at]]):
            raise Fault(f"{address:#x} is not allocated")
        return self._starts[at], self._sizes[self._starts[at]]

    def allocated(self) -> int:
        return sum(self._sizes.values())

    def check(self, addresses: NDArray[np.int64], size: int) -> None:
        while len(addresses):  # allocation by allocation
            start, length = self.allocation(int(addresses[0]))
            inside = (addresses >= start) & (addresses + size <= start + length)
            if not inside[0]:
                raise Fault(f"{size} bytes at {int(addresses[0]):#x}: past the end of {length} bytes at {start:#x}")
            addresses = addresses[~inside]

    def _slice(self, address: int, size: int) -> slice:
        self.check(np.array([address]), size)
        return slice(address - BASE, address - BASE + size)

    def read(self, address: int, size: int) -> bytes:
        return self.raw[self._slice(address, size)].tobytes() if size else b""

    def write(self, address: int, data: bytes) -> None:
        if len(data):
            self.raw[self._slice(address, len(data))] = np.frombuffer(data, np.uint8)


class Watch:
    """The last thread to read and to write each half of a word: finds threads that touch the same one in no order.

    Time goes in ticks, from each barrier of a block to the next. Within a tick, the threads of a block are in no order. Neither are the
    blocks of a launch.
    """

    THREADS = 1024

    def __init__(self, memory: Bytes) -> None:
        halves = memory.size // 2 + 4
        self.base = memory.base
        self._written, self._read, self._by_many, self._changed = (np.zeros(halves, np.int64) for _ in range(4))
        """The ticks of plain writes and reads, with the thread; of reads by several threads, or minus the launch in which several blocks
        read; of atomic operations."""
        self.tick = self.block = self.launch = 1  # now; the first tick of this block and of this launch

    def _halves(self, addresses: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """The numbers of the halves of words at these addresses."""
        first = (addresses - self.base) >> 1
        return first if size <= 2 else (first[:, None] + np.arange(size // 2)).reshape(-1)

    def _raced(self, marks: NDArray[np.int64], mine: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether another thread may have touched them at the same time."""
        return ((marks // self.THREADS == self.tick) & (marks != mine)) | self._by_others(marks)

    def _by_others(self, marks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether another block of this launch touched them."""
        return (marks // self.THREADS >= self.launch) & (marks // self.THREADS < self.block)

    def _refuse(self, raced: NDArray[np.bool_], halves: NDArray[np.int64], mine: NDArray[np.int64], how: str) -> None:
        if raced.any():
            at = int(np.argmax(raced))
            place = int(halves[at]) * 2 + self.base
            raise Fault(f"a race: thread {mine[at] % self.THREADS} {how} {place:#x}, which another one touched with no barrier between")

    def reads(self, addresses: NDArray[np.int64], size: int, threads: NDArray[np.int64]) -> None:
        """Raises Fault if another thread wrote there in no order with this one."""
        halves = self._halves(addresses, size)
        mine = np.repeat(threads, max(1, size // 2)) + self.tick * self.THREADS
        written, read = self._written[halves], self._read[halves]
        self._refuse(self._raced(written, mine) | (self._changed[halves] == self.tick), halves, mine, "reads")
        several, others = (read // self.THREADS == self.tick) & (read != mine), self._by_others(read)
        self._read[halves] = mine
        several |= self._read[halves] != mine
        self._by_many[halves[several & (self._by_many[halves] != -self.launch)]] = self.tick
        self._by_many[halves[others]] = -self.launch

    def writes(self, addresses: NDArray[np.int64], size: int, threads: NDArray[np.int64]) -> None:
        """Raises Fault if another thread read or wrote there in no order with this one."""
        halves = self._halves(addresses, size)
        mine = np.repeat(threads, max(1, size // 2)) + self.tick * self.THREADS
        written, read = self._written[halves], self._read[halves]
        self._refuse(self._raced(written, mine) | (self._changed[halves] == self.tick), halves, mine, "writes")
        self._refuse(self._raced(read, mine) | np.isin(self._by_many[halves], (self.tick, -self.launch)), halves, mine, "writes")
        self._written[halves] = mine
        self._refuse(self._written[halves] != mine, halves, mine, "writes")

    def changes(self, addresses: NDArray[np.int64], size: int) -> None:
        """An atomic operation. Raises Fault if it meets a plain read or write of the same tick."""
        halves = self._halves(addresses, size)
        for marks in (self._written, self._read):
            if (marks[halves] // self.THREADS == self.tick).any():
                raise Fault("an atomic operation where something was touched with no barrier between")
        self._changed[halves] = self.tick

    def forget(self, address: int, size: int) -> None:
        """The host wrote there, which is in order with everything."""
        halves = slice((address - self.base) >> 1, (address - self.base + size + 1) >> 1)
        for marks in (self._written, self._read, self._by_many, self._changed):
            marks[halves] = 0


def _first(addresses: NDArray[np.int64], wrong: NDArray[np.bool_]) -> int:
    return int(addresses[np.argmax(wrong)])
