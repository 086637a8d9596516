"""Where arrays are: in NumPy's memory. What a backend has in addition to operations on numbers."""

from collections.abc import Callable
from functools import partial
from operator import setitem
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..base.errors import CapacityError, NonFiniteError
from .numbers import Floats, f32

Places = NDArray[np.int64]
Record = TypeVar("Record")

SIZE = 1 << 16  # numbers of a result that are computed at a time: no array outgrows memory


def slices(count: int, step: int) -> list[slice]:
    """All of `count` items, at most `step` at a time, but at least one."""
    step = max(1, step)
    starts = range(0, count, step)
    return [slice(start, min(start + step, count)) for start in starts]


def parts(count: int, numbers: int, most: int = SIZE) -> list[slice]:
    """All of `count` items of `numbers` numbers each: at a time, as many items as have SIZE numbers together,
    and at most `most`."""
    return slices(count, min(SIZE // numbers, most))


class ArrayStorage:
    """Keys and values [L, B, S, G, K] of a KV cache in NumPy's arrays:
    position p of slot b is at [:, b, p]."""

    most_positions: int | None = None

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[NDArray, NDArray]:
        try:
            return np.zeros(shape, dtype), np.zeros(shape, dtype)
        except (MemoryError, ValueError, OverflowError) as error:
            size = f"{shape[1]} sequences of {shape[2]} positions"
            raise CapacityError(f"KV cache: there is no memory for {size}") from error

    @np.errstate(over="ignore")
    def write(
        self,
        layer: int,
        keys: NDArray,
        values: NDArray,
        slot: Places,
        position: Places,
        k: Floats,
        v: Floats,
    ) -> None:
        """Numbers are rounded to the type of the arrays."""
        for name, out, rows in (("key", keys, k), ("value", values, v)):
            rounded = rows.astype(out.dtype)
            if out.dtype == np.float16 and not np.isfinite(rounded).all():
                what = f"a {name} of layer {layer}"
                raise NonFiniteError(f"KV cache: {what} is not a number within float16's range")
            out[slot, position] = rounded

    def readable(self, array: NDArray) -> NDArray:
        return array.view(np.int16) if array.dtype == np.float16 else array

    def erasing(self, array: NDArray, slot: int, start: int, end: int) -> Callable[[], None]:
        return partial(setitem, array, (slice(None), slot, slice(start, end)), 0)

    def carry(self, source: NDArray, slot: int, out: NDArray, target: int, length: int) -> None:
        out[:, target, :length] = source[:, slot, :length]


def storage() -> ArrayStorage:
    return ArrayStorage()


def upload(array: NDArray) -> NDArray:
    return array


def empty(shape: tuple[int, ...]) -> Floats:
    return np.empty(shape, f32)


def resident(record: Record) -> Record:
    return record


def to_host(array: NDArray) -> NDArray:
    return array


def wait() -> None:
    """Every operation is done when it returns."""


def mark(event: str, count: int = 1) -> None:
    """Nothing is counted here."""
