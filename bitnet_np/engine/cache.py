"""KVCache: the keys and values of sequences in progress, each with its own length."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import call
from threading import get_ident
from typing import TypeVar

import numpy as np
from numpy.typing import DTypeLike

from ..base.errors import CapacityError, SlotError, listed
from ..base.validate import dtype_of, flag, instance, integer, items_of
from ..kernels.storage import HOST, nbytes_of
from ..model.records import Config
from .backend import Array, Backend, Storage
from .repeats import Repeats
from .tokens import Ints, Rows

R = TypeVar("R")

Attention = Callable[[int, Array, Array, Array, Array, Array], Array]
"""Attention of one layer: layer, q [R, H, K], keys and values [B, S, G, K], slots [R],
positions [R] -> [R, H, K]."""

Part = slice | Ints
"""Some of a pass's rows: consecutive ones, or those of these numbers."""

ALL = slice(None)


def rows_of(array: Array, part: Part) -> Array:
    """These rows of an array; the array itself for all of them, also on a device."""
    return array if part is ALL else array[part]


@dataclass(frozen=True)
class Attend:
    """Attention of a pass over new rows: their keys and values are written, and their queries attend to
    everything in their slots."""

    storage: Storage
    keys: Array  # [L, B, S, G, K]; with L = 1 for whole sequences, whose layers take turns
    values: Array
    rows: Rows  # in the storage's memory
    attention: Attention
    mark: Callable[[str, int], None] = lambda event, count: None  # of each write: "kv_write", positions
    repeats: Repeats | None = None  # recordings of passes like this one, where it may have some
    masked: bool = False  # whether a mask, by which rows may see later ones, replaces the causal rule

    def __call__(self, layer: int, q: Array, k: Array, v: Array, part: Part = ALL) -> Array:
        """Write k and v [R, G, K] of some rows, if given; then attend by their q [R, H, K], if given,
        to all that is written."""
        keys, values = (array[layer % len(array)] for array in (self.keys, self.values))
        slot, position = rows_of(self.rows.slot, part), rows_of(self.rows.position, part)
        if k is not None:
            self.storage.write(layer, keys, values, slot, position, k, v)
            self.mark("kv_write", len(k))
        if q is None:
            return None
        keys, values = self.storage.readable(keys), self.storage.readable(values)
        return self.attention(layer, q, keys, values, slot, position)


class KVCache:
    """Keys and values of `batch` sequences (slots) of up to `capacity` positions each.

    `k` and `v` are [L, B, S, G, K], 2 * L * B * S * G * K * itemsize bytes together. `lengths` [B] says how
    many positions of each slot are filled. Everything past a slot's length is zero, always, so that two
    caches with the same content have the same bytes. Only filled positions are ever touched: unused capacity
    takes address space, but no memory.

    As float32, the default, the cache holds what the model computes, and logits do not depend on there being
    a cache. As float16 it takes half the memory, and keys and values are rounded on their way in: logits then
    differ from the definition's. They are still the same bits in any chunks and any batch, and those of
    dialect bitnet.cpp do not change, because it rounds there anyway.

    Several threads may run passes over one cache at the same time, each over different slots; nothing else
    may change the cache meanwhile.
    """

    def __init__(
        self,
        config: Config,
        batch: int = 1,
        capacity: int | None = None,
        dtype: DTypeLike = np.float32,
        *,
        storage: Storage = HOST,
    ):
        """`capacity` defaults to the model's context,
        `storage` to NumPy's arrays (new_cache makes caches for other backends).

        Raises OptionError, or CapacityError when there is not enough memory.
        """
        instance("config", config, Config)
        self.storage = storage
        self.dtype = dtype_of("KV cache: dtype", dtype, (np.float32, np.float16))
        batch, capacity = self._sizes(batch, config.context if capacity is None else capacity)
        shape = config.n_layers, batch, capacity, config.kv_heads, config.head_dim
        self.k, self.v = storage.zeros(shape, self.dtype)  # [L, B, S, G, K]
        self.lengths = np.zeros(batch, np.int64)
        self._written: set[int] = set()  # slots that a forward pass is writing to
        self.repeats = Repeats()

    def __repr__(self) -> str:
        filled = f"{listed(self.lengths.tolist())} of {self.capacity} positions"
        return f"<KVCache of {self.dtype}: {filled} in {self.batch} slots>"

    def _sizes(self, batch: int, capacity: int) -> tuple[int, int]:
        """Batch and capacity, checked. Raises OptionError,
        or CapacityError for more positions than the storage can hold."""
        batch, capacity = integer("KV cache: batch", batch, 1), integer("KV cache: capacity", capacity, 1)
        most = self.storage.most_positions
        if most is not None and capacity > most:
            raise CapacityError(f"KV cache: {capacity:,} positions, on the device expected at most {most:,}")
        return batch, capacity

    @property
    def batch(self) -> int:
        """Number of slots."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Number of positions that a slot has room for."""
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together, filled or not."""
        return nbytes_of(self.k.shape, self.dtype)

    def _checked(self, slot: int) -> int:
        return integer("KV cache: slot", slot, 0, self.batch - 1, SlotError)

    def _held(self, slot: int, name: str, value: int) -> int:
        """An argument that is a number of positions which the slot holds. Raises CapacityError for more."""
        return integer(f"KV cache: {name} of slot {slot}", value, 0, int(self.lengths[slot]), CapacityError)

    def reserve(self, slots: Ints, counts: Ints) -> Ints:
        """Check that counts[i] more positions fit into slot slots[i]; returns the slots' lengths now.
        Changes nothing.

        Raises CapacityError for too many slots or positions,
        SlotError for a slot that does not exist or is named twice.
        """
        if slots.size > self.batch:
            exceeds = f"Batch size {slots.size} exceeds KVCache capacity {self.batch}"
            raise CapacityError(f"{exceeds}. Make a KVCache with batch={slots.size}.")
        for slot in slots:
            self._checked(int(slot))
        if np.unique(slots).size != slots.size:
            raise SlotError(f"KV cache: slots {slots.tolist()} name one slot twice")
        lengths = self.lengths[slots]
        for slot, length, count in zip(slots, lengths, counts, strict=True):
            if length + count > self.capacity:
                holds = f"slot {slot} holds {length} of {self.capacity} positions"
                raise CapacityError(f"KV cache: {holds}, {count} more do not fit")
        return lengths

    def _check_idle(self, slots: Iterable[int]) -> None:
        if taken := self._written.intersection(slots):
            raise _written_to(taken)

    def append(self, slots: Ints, counts: Ints, write: Callable[[Ints], R]) -> R:
        """write(start), which writes counts[i] more positions to slot slots[i], from start[i] on.
        The slots hold them afterwards.

        If it raises, the cache is as it was, and so it is where Ctrl-C comes before the end. Raises what
        `reserve` raises, and SlotError if another pass, of a thread or a recorder, writes to one of the
        slots.

        Python lets other threads run, and raises KeyboardInterrupt, behind calls and at the beginnings of
        functions and of a loop's rounds. So nothing is called from the look at `_written` to `try`, nor at
        the end, and what has to be undone is undone by one call of C.
        """
        this = _Pass(get_ident(), self, set(slots.tolist()))
        key = id(this)
        if taken := self._written & this.slots:
            raise _written_to(taken)
        self._written |= this.slots
        _passes[key] = this
        try:
            start = self.reserve(slots, counts)
            places = slots.tolist(), start.tolist(), (start + counts).tolist()
            this.parts = self._parts(zip(*places, strict=True))
            undo = map(call, this.parts)
            try:
                out = write(start)
            except BaseException:
                deque(undo, 0)
                raise
            self.lengths[slots] = start + counts
            this.parts = ()
            return out
        finally:
            self._written -= this.slots
            del _passes[key]

    def _parts(self, parts: Iterable[tuple[int, int, int]]) -> Sequence[Callable[[], object]]:
        """What zeros positions start..end of slots, (slot, start, end) each, in every layer,
        where each is called."""
        return [self.storage.erasing(array, *part) for part in parts for array in (self.k, self.v)]

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot; other slots keep every byte.

        Raises SlotError for a slot that does not exist, CapacityError for a length that it does not have.
        """
        slot = self._checked(slot)
        length = self._held(slot, "length", length)
        self._check_idle((slot,))
        erase = map(call, self._parts([(slot, length, int(self.lengths[slot]))]))
        self.lengths[slot] = length
        deque(erase, 0)  # all of them, by one call of C

    def rollback(self, slot: int, count: int) -> None:
        """Forget the last `count` positions of a slot. Raises what `truncate` does."""
        slot = self._checked(slot)
        count = self._held(slot, "count", count)
        self.truncate(slot, int(self.lengths[slot]) - count)

    def clear(self, slot: int | None = None) -> None:
        """Forget a slot, or all of them. Raises SlotError for one that does not exist."""
        slots = range(self.batch) if slot is None else (slot,)
        for number in slots:
            self.truncate(number, 0)

    def fork(self, source: int, targets: Iterable[int], length: int | None = None) -> None:
        """Copy the first `length` positions of slot `source` (default: all) to other slots,
        which must be empty.

        A sequence continues in a target with the bits it would have had in the source. It is a copy of
        2 * L * length * G * K * itemsize bytes for each target: for the 2B model 154 KB a position in
        float32, 17 ms for 1,000 positions on one Zen 4 core, or 160 ms if the target's memory is touched for
        the first time. Copy-on-write pages were also measured: 0.5 ms, and 17 ms when they are first read.
        That does not justify a source that may not be truncated or cleared while a fork lives: prefilling
        1,000 positions takes ten seconds.

        Raises what `truncate` does for `length`, and SlotError for a target that does not exist,
        is not empty, or is named twice.
        """
        source = self._checked(source)
        targets = [self._checked(slot) for slot in items_of("KV cache: slots", targets, SlotError)]
        length = int(self.lengths[source]) if length is None else self._held(source, "length", length)
        self._check_idle((source, *targets))
        if len({source, *targets}) <= len(targets):
            raise SlotError(f"KV cache: slots {targets} name one slot twice, or the source {source}")
        for slot in targets:
            if self.lengths[slot]:
                held = f"slot {slot} holds {self.lengths[slot]} positions"
                raise SlotError(f"KV cache: {held}, clear it before it is copied to")

        def copy(start: Ints) -> None:
            for slot in targets:
                for array in (self.k, self.v):
                    self.storage.carry(array, source, array, slot, length)

        self.append(np.array(targets, np.int64), np.full(len(targets), length), copy)

    def _check_room(self, batch: int, capacity: int) -> None:
        """Raises SlotError or CapacityError if a slot in use would not fit into `batch` slots of `capacity`
        positions."""
        for slot in np.flatnonzero(self.lengths):
            held = f"slot {slot} holds {self.lengths[slot]} positions"
            if slot >= batch:
                raise SlotError(f"KV cache: {held}, cannot shrink to {batch} slots")
            if self.lengths[slot] > capacity:
                raise CapacityError(f"KV cache: {held}, cannot shrink to {capacity}")

    def resize(self, batch: int | None = None, capacity: int | None = None, *, force: bool = False) -> None:
        """Change the number of slots, or of positions in each. Slots keep what they hold,
        as far as there is room for it.

        Raises SlotError or CapacityError, and changes nothing, if a slot in use would go or be cut, unless
        `force` is set. Needs memory for the old and the new cache at once.
        """
        batch = self.batch if batch is None else batch
        batch, capacity = self._sizes(batch, self.capacity if capacity is None else capacity)
        self._check_idle(range(self.batch))
        if not flag("force", force):
            self._check_room(batch, capacity)
        k, v = self.storage.zeros((self.k.shape[0], batch, capacity, *self.k.shape[3:]), self.dtype)
        lengths = np.zeros(batch, np.int64)
        slots = min(batch, self.batch)
        lengths[:slots] = np.minimum(self.lengths[:slots], capacity)
        for i in range(slots):
            for new, old in ((k, self.k), (v, self.v)):
                self.storage.carry(old, i, new, i, int(lengths[i]))
        self.k, self.v, self.lengths = k, v, lengths


@dataclass(eq=False)
class _Pass:
    """A pass that is running."""

    thread: int
    cache: KVCache
    slots: set[int]
    parts: Sequence[Callable[[], object]] = ()  # what undoes it


_passes: dict[int, _Pass] = {}


def _after_fork() -> None:
    """In a forked child: undo the passes of other threads, which are not there."""
    for key, writing in list(_passes.items()):
        if writing.thread != get_ident():
            for erase in writing.parts:
                erase()
            writing.cache._written -= writing.slots
            del _passes[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _written_to(slots: set[int]) -> SlotError:
    return SlotError(f"KV cache: a forward pass is writing to slot {min(slots)}, expected it to end first")


def new_cache(
    config: Config,
    batch: int,
    capacity: int | None,
    ops: Backend,
    dtype: DTypeLike = np.float32,
) -> KVCache:
    """A KV cache in the memory of a backend. Raises what KVCache does."""
    return KVCache(config, batch, capacity, dtype, storage=ops.storage())
