"""KVCache: the keys and values of sequences in progress, each with its own length."""

import numpy as np
from numpy.typing import NDArray

from .errors import CapacityError, OptionError, SlotError
from .model import Config


class KVCache:
    """Keys and values of `batch` sequences (slots) of up to `capacity` positions each.

    `k` and `v` are float32 [L, B, S, G, K], 2 * L * B * S * G * K * 4 bytes together. `lengths` [B] says how many
    positions of each slot are filled. Everything past a slot's length is zero, always, so that two caches with the same
    content have the same bytes. Only what is filled is ever touched: a capacity that is not used takes addresses, and no memory.
    """

    def __init__(self, config: Config, batch: int = 1, capacity: int | None = None):
        """`capacity` defaults to the model's context. Raises CapacityError when the memory cannot be had."""
        capacity = config.context if capacity is None else capacity
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise OptionError(f"KV cache: {name} is {value}, expected at least 1")
        shape = (config.n_layers, batch, capacity, config.kv_heads, config.head_dim)
        try:
            self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        except (MemoryError, ValueError) as error:
            wanted = 2 * 4 * config.n_layers * batch * capacity * config.kv_width
            raise CapacityError(f"KV cache: {wanted:,} bytes for {batch} sequences of {capacity} positions cannot be had") from error
        self.lengths = np.zeros(batch, np.int64)

    @property
    def batch(self) -> int:
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.batch:
            raise SlotError(f"KV cache: slot {slot} does not exist, there are {self.batch}")
        return slot

    def reserve(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Check that counts[i] more positions fit into slot slots[i]; returns the lengths they have now. Changes nothing."""
        if slots.size > self.batch:
            raise CapacityError(f"Batch size {slots.size} exceeds KVCache capacity {self.batch}. Recreate model with larger batch_size.")
        for slot in slots:
            self._checked(int(slot))
        if np.unique(slots).size != slots.size:
            raise SlotError(f"KV cache: slots {slots.tolist()} name one slot twice")
        lengths = self.lengths[slots]
        for slot, length, count in zip(slots, lengths, counts, strict=True):
            if length + count > self.capacity:
                raise CapacityError(f"KV cache: slot {slot} holds {length} of {self.capacity} positions, {count} more do not fit")
        return lengths

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot; other slots keep every byte."""
        slot = self._checked(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise CapacityError(f"KV cache: slot {slot} holds {self.lengths[slot]} positions, cannot be cut to {length}")
        filled, self.lengths[slot] = int(self.lengths[slot]), length
        self.erase(slot, length, filled)

    def clear(self, slot: int | None = None) -> None:
        """Forget a slot, or all of them."""
        for each in range(self.batch) if slot is None else (slot,):
            self.truncate(each, 0)

    def erase(self, slot: int, start: int, end: int) -> None:
        """Zero positions start..end of a slot in every layer."""
        self.k[:, slot, start:end] = 0
        self.v[:, slot, start:end] = 0
