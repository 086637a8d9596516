"""The instructions of ptx.py in plain Python, for Numba's CUDA simulator: the same names, the same results.

Rules for floats are compiled for the CPU, so that they round as they do there. Lanes of a warp are threads of Python here, and meet at a
barrier where a warp would exchange registers.
"""

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numba import njit

from .. import simd

_WARP = 32


def device(function: Callable) -> Callable:
    return function


@njit
def fma(a, b, c):
    return simd.fma(a, b, c)


@njit
def times(a, b):
    return np.float32(a * b)


@njit
def plus(a, b):
    return np.float32(a + b)


def fma64(a: np.float64, b: np.float64, c: np.float64) -> np.float64:
    """The kernels' products of two float32 are exact in float64."""
    return np.float64(a * b + c)


def float_bits(x: np.float32) -> np.int32:
    return np.float32(x).view(np.int32)


def bits_float(bits: np.int32) -> np.float32:
    return np.int32(bits).view(np.float32)


def half_value(bits: np.uint32) -> np.float32:
    return np.float32(np.uint16(bits & 0xFFFF).view(np.float16))


def _bytes(words: Any, kind: type) -> np.ndarray:
    return np.array(words, np.uint32).view(kind).astype(np.int32)


def dp4a(a: np.uint32, b: np.uint32, c: np.int32) -> np.int32:
    return np.int32(c + np.dot(_bytes([a], np.uint8), _bytes([b], np.int8)))


# --- among the lanes of a warp --------------------------------------------------------------------------------------------------------


class _Meeting:
    def __init__(self, lanes: int) -> None:
        self.barrier, self.values = threading.Barrier(lanes), [None] * lanes


_meetings: WeakKeyDictionary[Any, dict[int, _Meeting]] = WeakKeyDictionary()  # by block, then warp
_lock = threading.Lock()


def _exchange(value: Any) -> tuple[int, list]:
    """This thread's lane, and what all lanes of its warp brought."""
    thread: Any = threading.current_thread()
    warp, lane = divmod(thread.thread_id, _WARP)
    block = thread._manager
    with _lock:
        meetings = _meetings.setdefault(block, {})
        if warp not in meetings:
            meetings[warp] = _Meeting(min(_WARP, int(np.prod(block._block_dim)) - warp * _WARP))
    meeting = meetings[warp]
    meeting.values[lane] = value
    meeting.barrier.wait(60)
    values = list(meeting.values)
    meeting.barrier.wait(60)
    return lane, values


def quad_sum(x: np.int32) -> np.int32:
    lane, values = _exchange(x)
    return np.int32(sum(int(value) for value in values[lane // 4 * 4 : lane // 4 * 4 + 4]))


def _halve(x: np.float32, combine: Callable) -> np.float32:
    lane, values = _exchange(x)
    lanes = values[lane // 16 * 16 : lane // 16 * 16 + 16]
    for half in (8, 4, 2, 1):
        lanes = [combine(lanes[i], lanes[i + half]) for i in range(half)]
    return lanes[0]


def half_warp_sum(x: np.float32) -> np.float32:
    return _halve(x, plus)


def half_warp_max(x: np.float32) -> np.float32:
    return _halve(x, lambda a, b: b if b > a else a)


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def load4(array: Any, offset: int) -> tuple:
    assert offset % 4 == 0, "a load of 16 bytes is aligned"
    return tuple(array[offset + i] for i in range(4))


def load_fragments(count: int) -> Callable:
    def load(array: Any, offset: int, stride: int) -> tuple:
        return tuple(value for i in range(count) for value in load4(array, offset + i * stride))

    return load


def copy_async(shared: Any, to: int, source: Any, start: int, size: int) -> None:
    assert (to | start) % 4 == 0, "a copy of 16 bytes is aligned"
    for i in range(4):
        shared[to + i] = source[start + i] if size else 0


def commit_copies() -> None:
    """Copies are finished when they begin, here."""


def wait_copies(pending: int) -> Callable:
    return commit_copies


# --- tensor cores ---------------------------------------------------------------------------------------------------------------------


def zeros(count: int) -> Callable:
    return lambda: (np.int32(0),) * count


def multiply(rows: int, tokens: int, half: int) -> Callable:
    """As the PTX manual lays out the fragments of m16n8k32, not as ternary.py reads them."""

    def step(sums: tuple, weights: tuple, codes: tuple) -> tuple:
        lane, lanes = _exchange((weights, codes))
        total = np.array(sums, np.int32).reshape(rows, tokens, 4)
        for part in range(2):
            a, b = np.zeros((rows, 16, 32), np.int32), np.zeros((tokens, 32, 8), np.int32)
            for other, (theirs, bytes_) in enumerate(lanes):
                group, column = other // 4, other % 4 * 4
                for row in range(rows):
                    word = int(theirs[4 * row + 2 * half + part])
                    for register in range(4):  # (row group, low columns), (group + 8, low), (group, high), (group + 8, high)
                        place = column + register // 2 * 16
                        a[row, group + register % 2 * 8, place : place + 4] = _bytes([word >> 2 * register & 0x03030303], np.int8)
                for token in range(tokens):
                    for register in range(2):
                        place = column + register * 16
                        b[token, place : place + 4, group] = _bytes([bytes_[4 * token + 2 * part + register]], np.int8)
            group, column = lane // 4, lane % 4 * 2
            product = a[:, None] @ b[None]
            for i in range(4):
                total[:, :, i] += product[:, :, group + i // 2 * 8, column + i % 2]
        return tuple(total.reshape(-1))

    return step
