"""Keys and values on a device: the memory of a KV cache there, with float16 as its bits (int16)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..base.errors import CapacityError
from ..engine.backend import Array
from ..kernels.storage import nbytes_of

if TYPE_CHECKING:
    from .backend import Cuda


class DeviceStorage:
    """backend.Storage on a device.

    A key or value beyond float16's range becomes NaN, and so do the logits: the pass raises NonFiniteError in the end.
    """

    def __init__(self, on: Cuda) -> None:
        self.on = on
        self.most_positions: int | None = on.most_positions

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[Array, Array]:
        dtype = np.dtype(dtype)
        needed, free = nbytes_of(shape, dtype), self.on.free_bytes()
        if needed > free:
            raise CapacityError(
                f"KV cache: {needed:,} bytes for {shape[1]} sequences of {shape[2]} positions, the device has {free:,} free"
            )
        kind = np.float32 if dtype == np.float32 else np.int16
        return self.on.zeros(shape, kind), self.on.zeros(shape, kind)

    def write(self, layer: int, keys: Array, values: Array, slot: Array, position: Array, k: Array, v: Array) -> None:
        self.on.keep(k, v, slot, position, keys, values)

    def readable(self, array: Array) -> Array:
        return array

    def erase(self, array: Array, slot: int, start: int, end: int) -> None:
        self.on.erase(array, slot, start, end)

    def carry(self, source: Array, slot: int, out: Array, target: int, start: int, end: int) -> None:
        self.on.carry(source, slot, out, target, start, end)

    def held(self, array: Array, slot: int, start: int, end: int) -> Array:
        out = self.on.empty((array.shape[0], 1, end - start, *array.shape[3:]), array.dtype)
        self.carry(array, slot, out, 0, start, end)
        return out

    def by_pieces(
        self,
        pieces: Sequence[NDArray[np.intp]],
        attend: Callable[..., Array],
        q: Array,
        k: Array,
        v: Array,
        slot: NDArray[np.int64],
        position: NDArray[np.int64],
    ) -> Array:
        out = self.on.empty(q.shape)
        for piece in pieces:
            rows, *where = (self.on.upload(array[piece]) for array in (np.arange(slot.size), slot, position))
            self.on.put(attend(*(self.on.take(array, rows) for array in (q, k, v)), *where), rows, out)
        return out
