"""The instructions of ptx.py in plain Python, for Numba's CUDA simulator: the same names, the same results.

Rules for floats are compiled for the CPU, so that they round as they do there. Lanes of a warp are threads of Python here, and meet at a
barrier where a warp would exchange registers.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numba import njit
from numba.cuda.simulator import kernel, kernelapi
from numpy.typing import NDArray

from .. import simd

_WARP = 32
_PATIENCE = 600  # seconds that a thread waits for others: more means that a kernel lets some of them miss a meeting


_swapped_in_one = kernelapi.swapped_cuda_module


@contextmanager
def _swapped(function: Any, fake: Any) -> Iterator[None]:
    """The simulator's `cuda` in the modules of this package too, and not only in the kernel's own: its device functions may be there."""
    with ExitStack() as stack:
        stack.enter_context(_swapped_in_one(function, fake))
        for name, module in list(sys.modules.items()):
            if name.rpartition(".")[0] == __package__:
                stack.enter_context(_swapped_in_one(SimpleNamespace(__globals__=vars(module)), fake))
        yield


kernel.swapped_cuda_module = _swapped


def use_barriers() -> None:
    """Run blocks as the simulator does, which polls its threads, but ten times as fast: they meet at a barrier, all of them or none."""

    def run(manager: Any, grid_point: tuple, *arguments: Any) -> None:
        size = tuple(manager._block_dim)
        manager.barrier = threading.Barrier(math.prod(size))
        threads = [kernel.BlockThread(partial(manager._f, *arguments), manager, grid_point, point, False) for point in np.ndindex(*size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            if thread.exception:
                manager.barrier.abort()
                raise thread.exception[0].with_traceback(thread.exception[1])

    kernel.BlockManager.run = run
    kernel.BlockThread.syncthreads = lambda thread: thread._manager.barrier.wait(_PATIENCE)


def device(function: Callable) -> Callable:
    return function


inlined = device


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


def half_bits(x: np.float32) -> np.int16:
    half = np.float32(x).astype(np.float16)
    return half.view(np.int16) if np.isfinite(half) else np.int16(0x7E00)


def _bytes(words: Any, kind: type) -> np.ndarray:
    return np.array(words, np.uint32).view(kind).astype(np.int32)


def syncthreads() -> None:
    thread: Any = threading.current_thread()
    thread.syncthreads()


def this_thread() -> int:
    thread: Any = threading.current_thread()
    return thread.threadIdx.x


thread_again = this_thread


def _planes(words: Any) -> NDArray[np.int32]:
    """The four bytes of each of four words at each of the four places of two bits, plane p times 4^p: [..., 4] -> [..., 4, 4 planes, 4]."""
    masks = np.uint32(0x03030303) << np.array([0, 2, 4, 6], np.uint32)
    four = np.ascontiguousarray(np.array(words, np.uint32)[..., None] & masks)
    return four.view(np.uint8).reshape(*four.shape, 4).astype(np.int32)


def dot_tiles(count: int) -> Callable:
    def dot(sums: tuple, weights: tuple, low: tuple, high: tuple, valid: int) -> tuple:
        total = np.array(sums, np.int32).reshape(2, 4)  # row, plane
        for tile in range(min(count, valid)):
            x = _bytes([*low[4 * tile : 4 * tile + 4], *high[4 * tile : 4 * tile + 4]], np.int8)
            x = x.reshape(4, 2, 1, 4)  # plane, columns of words 0 and 1 or 2 and 3, row, byte
            four = _planes(weights[4 * tile : 4 * tile + 4]).reshape(2, 2, 4, 4).transpose(2, 0, 1, 3)
            total += (four * x).sum(axis=(1, 3), dtype=np.int32).T
        return tuple(total.reshape(-1))

    return dot


# --- numbers of tables ----------------------------------------------------------------------------------------------------------------


def float_zeros(count: int) -> Callable:
    return lambda: (np.float32(0),) * count


def _numbers(words: tuple, kind: str) -> NDArray[np.float32]:
    bits = np.array(words, np.uint32)
    if kind == "bfloat16":
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if kind == "float16" else np.float32).astype(np.float32)


def multiply_rows(kind: str, rows: int, tokens: int, edge: bool = False) -> Callable:
    def multiply(sums: tuple, words: tuple, x: Any, first: int, stride: int, last: int, far: int, left: int) -> tuple:
        total = list(sums)
        for row, token in np.ndindex(rows, tokens):
            start, at = min(first + token * stride, last) + far, row * tokens + token
            for step, number in enumerate(_numbers(words[4 * row : 4 * row + 4], kind)):
                value = x[start + simd.LANES * step] if not edge or simd.LANES * step < left else np.float32(0)
                total[at] = fma(number, value, total[at])
        return tuple(total)

    return multiply


# --- among the lanes of a warp --------------------------------------------------------------------------------------------------------


class _Meeting:
    def __init__(self, lanes: int) -> None:
        self.barrier, self.values = threading.Barrier(lanes), [None] * lanes
        self.result: Any = None


_meetings: WeakKeyDictionary[Any, dict[int, _Meeting]] = WeakKeyDictionary()  # by block, then warp
_lock = threading.Lock()


def _exchange(value: Any, combine: Callable[[list], Any] = list) -> tuple[int, Any]:
    """This thread's lane, and what `combine` makes, once, of what all lanes of its warp brought."""
    thread: Any = threading.current_thread()
    warp, lane = divmod(thread.thread_id, _WARP)
    block = thread._manager
    with _lock:
        meetings = _meetings.setdefault(block, {})
        if warp not in meetings:
            meetings[warp] = _Meeting(min(_WARP, int(np.prod(block._block_dim)) - warp * _WARP))
    meeting = meetings[warp]
    meeting.values[lane] = value
    if meeting.barrier.wait(_PATIENCE) == 0:
        meeting.result = combine(meeting.values)
    meeting.barrier.wait(_PATIENCE)
    return lane, meeting.result  # whoever comes next waits for this lane before there is another result


def quad_sum(x: np.int32) -> np.int32:
    lane, values = _exchange(x)
    return np.int32(sum(int(value) for value in values[lane // 4 * 4 : lane // 4 * 4 + 4]))


def warp_sum(x: np.int32) -> np.int32:
    return np.int32(_exchange(int(x), sum)[1])


def warp_max(x: np.int32) -> np.int32:
    return np.int32(_exchange(int(x), max)[1])


def _by_halving(lanes: NDArray[np.float32]) -> Any:  # [16, ...] -> [...]
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def half_warp_sum(x: np.float32) -> np.float32:
    lane, values = _exchange(x)
    return _by_halving(np.array(values[lane // 16 * 16 : lane // 16 * 16 + 16], np.float32))


def quad_max(x: np.float32) -> np.float32:
    lane, values = _exchange(x)
    return max(values[lane // 4 * 4 : lane // 4 * 4 + 4])


def fold_quad(numbers: Any) -> np.float32:
    lane, values = _exchange(np.array(numbers[:16]))
    lanes = np.concatenate([value.reshape(4, 4) for value in values[lane // 4 * 4 : lane // 4 * 4 + 4]], axis=1)  # parts, 16 lanes
    total = np.zeros(16, np.float32)
    for part in lanes:
        total = total + part
    return _by_halving(total)


def fold_quarters(columns: int) -> Callable:
    def fold(sums: Any) -> tuple:
        lane, values = _exchange(np.array(sums))
        lanes = np.array([values[lane % 8 + 8 * quarter].reshape(4, columns, 4)[lane // 8 ^ quarter] for quarter in range(4)])
        return tuple(_by_halving(lanes.transpose(0, 2, 1).reshape(16, columns)))

    return fold


# --- one kernel after another ---------------------------------------------------------------------------------------------------------


def let_next_begin() -> None:
    """Kernels come one after another, here."""


await_previous = in_turn = let_next_begin


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def load4(array: Any, offset: int) -> tuple:
    assert offset % 4 == 0, "a load of 16 bytes is aligned"
    return tuple(array[offset + i] for i in range(4))


def get(array: Any, offset: int) -> Any:
    return array[offset]


def put(array: Any, offset: int, value: Any) -> None:
    array[offset] = value


def put4(array: Any, offset: int, *four: Any) -> None:
    assert offset % 4 == 0, "a store of 16 bytes is aligned"
    array[offset : offset + 4] = four


def prefetch(array: Any, offset: int) -> None:
    assert 0 <= offset < array.size, "what is asked for is there"


def load_fragments(count: int, in_global: bool = False) -> Callable:
    def load(array: Any, offset: int, stride: int) -> tuple:
        return tuple(value for i in range(count) for value in load4(array, offset + i * stride))

    return load


def load_within(count: int) -> Callable:
    def load(array: Any, offset: int, stride: int, last: int) -> tuple:
        return tuple(value for i in range(count) for value in load4(array, min(offset + i * stride, last)))

    return load


def load_column(count: int) -> Callable:
    def load(array: Any, offset: int, stride: int, last: int) -> tuple:
        found = [array[min(offset + i * stride, last)] for i in range(count)]
        return tuple(value.view(np.float16).astype(np.float32) if value.dtype == np.int16 else value for value in found)

    return load


def load_halves(count: int) -> Callable:
    def load(array: Any, offset: int) -> tuple:
        assert offset % count == 0, "a load of several numbers is aligned"
        return tuple(array[offset + i].view(np.float16).astype(np.float32) for i in range(count))

    return load


def chain_column(count: int) -> Callable:
    def chain(total: np.float32, weights: Any, at: int, values: tuple) -> np.float32:
        for i in range(count):
            total = fma(weights[at + i], values[i], total)
        return total

    return chain


def fold_column(count: int) -> Callable:
    def fold(total: np.float32, factors: Any, old: int, new: int, values: tuple, valid: int) -> np.float32:
        for i in range(min(count, valid)):
            total = fma(total, factors[old + i], times(values[i], factors[new + i]))
        return total

    return fold


def copy_async(shared: Any, to: int, source: Any, start: int, size: int) -> None:
    assert (to | start) % 4 == 0, "a copy of 16 bytes is aligned"
    for i in range(4):
        shared[to + i] = source[start + i] if size else 0


def commit_copies() -> None:
    """Copies are finished when they begin, here."""


def wait_copies(pending: int) -> Callable:
    return commit_copies


# --- tuples of registers --------------------------------------------------------------------------------------------------------------


def for_each(function: Callable, picks: Sequence[Sequence[int]]) -> Callable:
    def run(values: tuple, rest: tuple) -> None:
        for i, pick in enumerate(picks):
            function(i, tuple(values[at] for at in pick), *rest)

    return run


# --- tensor cores ---------------------------------------------------------------------------------------------------------------------


def zeros(count: int) -> Callable:
    return lambda: (np.int32(0),) * count


def _fragments(a: NDArray[np.int32], b: Any) -> NDArray[np.int32]:
    """What 32 lanes hold of products m16n8k32, by the PTX manual: bytes [32, 4, 4] of a, words [32, 2] of b -> [16, 8]."""
    rows = a.reshape(8, 4, 2, 2, 4).transpose(3, 0, 2, 1, 4).reshape(16, 32)  # (group + 8), (columns below 16 and others, quad, byte)
    b = np.ascontiguousarray(np.array(b, np.uint32)).view(np.int8).reshape(8, 4, 2, 4).astype(np.int32)
    return rows @ b.transpose(2, 1, 3, 0).reshape(32, 8)


def _mine(product: NDArray[np.int32], lane: int) -> NDArray[np.int32]:
    """The sums of [..., 16, 8] that a lane holds: [..., 4]."""
    group, column = lane // 4, lane % 4 * 2
    return product[..., [group, group, group + 8, group + 8], [column, column + 1, column, column + 1]]


def multiply(rows: int, tokens: int, half: int) -> Callable:
    def products(lanes: list) -> NDArray[np.int32]:  # [rows, tokens, 16, 8]
        total = np.zeros((rows, tokens, 16, 8), np.int32)
        weights, codes = (np.array(words, np.uint32) for words in zip(*lanes, strict=True))
        for part, row, token in np.ndindex(2, rows, tokens):
            plane = 2 * half + part
            four = _planes(weights[:, 4 * row : 4 * row + 4])[:, :, plane] >> 2 * plane
            total[row, token] += _fragments(four, codes[:, 4 * token + 2 * part : 4 * token + 2 * part + 2])
        return total

    def step(sums: tuple, weights: tuple, codes: tuple) -> tuple:
        lane, product = _exchange((weights, codes), products)
        return tuple(np.array(sums, np.int32) + _mine(product, lane).reshape(-1))

    return step


def multiply_tiles(count: int, tokens: int, step: int) -> Callable:
    def products(lanes: list) -> NDArray[np.int32]:  # [tokens, planes, 16, 8]
        total = np.zeros((tokens, 4, 16, 8), np.int32)
        weights, codes = zip(*lanes, strict=True)
        for token, plane in np.ndindex(tokens, 4):
            b = [words[8 * token + 2 * plane : 8 * token + 2 * plane + 2] for words in codes]
            total[token, plane] = _fragments(_planes(weights)[:, :, plane], b)
        return total

    def multiply(sums: tuple, weights: tuple, valid: int, codes: Any, at: int, stride: int) -> tuple:
        total = np.array(sums, np.int32)
        for tile in range(min(count, valid)):
            starts = [at + tile * step + token * stride + far for token in range(tokens) for far in (0, 16)]
            mine = [word for start in starts for word in load4(codes, start)]
            lane, product = _exchange((weights[4 * tile : 4 * tile + 4], mine), products)
            total += _mine(product, lane).reshape(-1)
        return tuple(total)

    return multiply
