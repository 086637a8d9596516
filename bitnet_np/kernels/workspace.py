"""Memory for results, for kernels' own arrays, and for weights.

Memory for results is used again as soon as nothing refers to the result it was lent to. A forward pass makes about a hundred arrays of
the same few sizes. The system zeroes fresh memory page by page, which takes longer than most kernels that fill it (a norm over 128 rows ran
three times as long). Each thread therefore has a pool of up to LIMIT bytes, lent and free together; NumPy allocates arrays beyond that. An
array from here is like any other: nothing else uses its memory as long as it, or a view of it, is alive.

An array gets the smallest free block that holds it. If there is none, a new block replaces the largest free one. A thread thus has no
more blocks than were lent at once, and after a layer or two they fit all later arrays: a pass takes little more than it holds at once.

Ctrl-C raises KeyboardInterrupt between any two steps of Python; at worst, a block is then freed. A block is free when no array refers to
it, which C notices without a step of Python, and bytes are counted when somebody asks.
"""

import threading
import weakref
from bisect import bisect_left, insort_left
from collections import deque
from collections.abc import Callable
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .fast.simd import address_of
from .launching import serial

R = TypeVar("R")

LIMIT = 1 << 28  # bytes of a thread's pool
_LARGEST = LIMIT >> 2  # bytes: above, filling takes longer than zeroing
_ALIGNMENT = 64  # a register of 512 bits never straddles two cache lines


class _Block(NamedTuple):
    memory: NDArray[np.uint8]
    address: int  # of the first aligned byte
    size: int


_SIZE = attrgetter("size")


class _Loan:
    """Owns the block of one array. NumPy keeps it as the array's base, so it goes when the last view goes."""

    __slots__ = ("__array_interface__", "__weakref__", "pool", "returned")
    __array_interface__: dict[str, Any]
    pool: "Pool"
    returned: "_Return"


class _Return(weakref.ref[_Loan]):
    """Brings the block of a loan back: when the loan goes, C appends it to the list of the pool, whichever thread that happens on."""

    __slots__ = ("block",)
    block: _Block


class Pool:
    """Memory that some arrays have for themselves: those of a thread, or of a recorded pass."""

    def __init__(self, smallest: int = 1 << 14) -> None:
        self.free: list[_Block] = []  # the smallest first
        self.returned: deque[_Return] = deque()  # these are free as well
        self.fresh = self.again = 0  # arrays in new memory, small and large ones too; arrays in memory that was used before
        self.smallest = smallest  # bytes: below, NumPy's own allocation is as fast
        self._made: list[weakref.ref[NDArray[np.uint8]]] = []  # memory of all blocks

    @property
    def kept(self) -> int:
        """Bytes kept for later."""
        return sum(map(_SIZE, self.free)) + sum(back.block.size for back in list(self.returned))

    @property
    def lent(self) -> int:
        """Bytes of live arrays, but for small and large ones."""
        return self._size() - self.kept

    def _size(self) -> int:
        """Bytes of all blocks that there are."""
        self._made = [memory for memory in self._made if memory() is not None]
        return sum(array.size - _ALIGNMENT for memory in self._made if (array := memory()) is not None)

    def block(self, size: int) -> _Block | None:
        """The smallest free block of at least this size, or a new one in place of the largest; None beyond the limit."""
        free, returned = self.free, self.returned
        while returned:
            insort_left(free, returned.popleft().block, key=_SIZE)  # of equal ones the last, which a cache may still hold, comes first
        place = bisect_left(free, size, key=_SIZE)
        if place < len(free):
            self.again += 1
            return free.pop(place)
        if free:
            free.pop()
        self.fresh += 1
        return self._made_block(size) if self._size() + size <= LIMIT else None

    def _made_block(self, size: int) -> _Block:
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        self._made.append(weakref.ref(memory))
        return _Block(memory, -(-memory.ctypes.data // _ALIGNMENT) * _ALIGNMENT, size)

    def holds(self, array: NDArray) -> bool:
        """Whether an array lies in it."""
        owner = owner_of(array)
        return isinstance(owner, _Loan) and owner.pool is self


class Room(Pool):
    """A pool of a recorded pass: all its arrays, small ones too, lie in blocks that stay."""

    def __init__(self) -> None:
        super().__init__(smallest=1)
        self._blocks: list[_Block] = []

    def _made_block(self, size: int) -> _Block:
        self._blocks.append(super()._made_block(size))
        return self._blocks[-1]

    def clear(self) -> None:
        """Fill it with zeros."""
        for block in self._blocks:
            block.memory[:] = 0


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.pool = Pool()


_this_thread = _ThisThread()


def owner_of(array: NDArray) -> Any:
    """The array or other object whose memory an array views."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def pool() -> Pool:
    """This thread's."""
    return _this_thread.pool


def release() -> None:
    """Give the memory that this thread keeps back to the system."""
    _this_thread.pool.free.clear()
    _this_thread.pool.returned.clear()  # the list stays: lent memory comes back to it


def empty(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray:
    """An array as np.empty makes it, in memory that may have been used before."""
    dtype, pool = np.dtype(dtype), _this_thread.pool
    size = prod(shape) * dtype.itemsize
    if not pool.smallest <= size <= _LARGEST:
        pool.fresh += 1
        return np.empty(shape, dtype)
    step = 1 << max(0, (size - 1).bit_length() - 4)
    block = pool.block(-(-size // step) * step)  # eighths of a power of two, so that blocks fit again when there are some more rows
    if block is None:
        return np.empty(shape, dtype)
    loan = _Loan()
    loan.pool, loan.returned = pool, _Return(loan, pool.returned.append)
    loan.returned.block = block
    loan.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (block.address, False)}
    return np.asarray(loan)


def in_room(room: Room, function: Callable[..., R], *arguments: Any) -> R:
    """function(*arguments), whose arrays lie in the room."""
    usual = _this_thread.pool
    try:
        _this_thread.pool = room
        return function(*arguments)
    finally:
        _this_thread.pool = usual  # no call, so an interrupt comes before or after


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """An array as np.zeros makes it, for long-lived arrays. It is aligned: no register straddles two cache lines."""
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
