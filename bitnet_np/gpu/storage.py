"""Keys and values on a device: the memory of a KV cache there, with float16 as its bits (int16)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from ..base.errors import CapacityError
from ..engine.backend import Array
from ..kernels.cuda import rows as row_kernels
from ..kernels.storage import nbytes_of

if TYPE_CHECKING:
    from .backend import Cuda


class DeviceStorage:
    """backend.Storage on a device.

    A key or value beyond float16's range becomes NaN, and so do the logits: the pass raises NonFiniteError in the end.

    Erasing launches kernels, one by one, in Python. Where Ctrl-C comes in between, keys and values stay past a slot's length. No kernel
    reads them, and no copy of the slot has them.
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
        self.on.each(row_kernels.keep(keys.dtype == np.int16), k.size, k, v, slot, position, keys, values)

    def readable(self, array: Array) -> Array:
        return array

    def erasing(self, array: Array, slot: int, start: int, end: int) -> Callable[[], None]:
        flat = _of_positions(array)
        return partial(self.on.each, row_kernels.erase, flat.shape[0] * (end - start) * flat.shape[3], flat, slot, start, end)

    def carry(self, source: Array, slot: int, out: Array, target: int, length: int) -> None:
        flat = _of_positions(out)
        self.on.each(row_kernels.carry, flat.shape[0] * length * flat.shape[3], _of_positions(source), slot, flat, target, length)


def _of_positions(cache: Array) -> Array:
    """[L, B, S, G, K] -> [L, B, S, G * K]."""
    return cache.reshape(*cache.shape[:3], cache.shape[3] * cache.shape[4])
