"""KVCache: the keys and values of sequences in progress, each with its own length."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .errors import CapacityError, NonFiniteError, OptionError, SlotError, shown
from .kernels.attention import chunks_touched
from .kernels.scalar import CHUNK
from .model import Config
from .validate import dtype_of, instance, integer

_LOCK = Lock()  # of which passes are at which slots, for moments: one for all caches, which can be copied so

Saved = list[tuple[int, int, int, int, Any]]
"""Of some slots: the slot, its first position that is still there, its length, what it is to be, and keys and values that this covers."""


class KVCache:
    """Keys and values of `batch` sequences (slots) of up to `capacity` positions each.

    `k` and `v` are [L, B, S, G, K], 2 * L * B * S * G * K * itemsize bytes together. `lengths` [B] says how many positions of each slot
    are filled. Everything past a slot's length is zero, always, so that two caches with the same content have the same bytes. Only what
    is filled is ever touched: a capacity that is not used takes addresses, and no memory.

    As float32, the default, the cache holds what the model computes, and logits do not depend on there being a cache. As float16 it
    takes half the memory, and keys and values are rounded on their way in: logits then differ from the definition's. They are still the
    same bits in any chunks and any company, and those of dialect bitnet.cpp do not change, because it rounds there anyway.

    As a ring, for a model all of whose layers see a window only, S is no more than the window and a chunk of attention or two:
    position p is in place p % S, over the position that no later token sees. Logits are the same bits. A slot can then be cut back only
    as far as what the next token would see is still there.

    Several threads may continue sequences of one cache at a time, each its own: one pass at a slot, and no other change meanwhile.
    """

    def __init__(self, config: Config, batch: int = 1, capacity: int | None = None, dtype: DTypeLike = np.float32, *, ring: bool = False):
        """`capacity` defaults to the model's context. Raises OptionError, or CapacityError when the memory cannot be had."""
        instance("config", config, Config)
        self.dtype = dtype_of("KV cache: dtype", dtype, (np.float32, np.float16))
        if ring and (config.window is None or config.window_layers is not None):
            raise OptionError("KV cache: a ring is for a model with a window in every layer, this one has layers that see all positions")
        batch, self.capacity = _sizes(batch, config.context if capacity is None else capacity)
        self.window = config.window if ring else None
        self.k, self.v = self._zeros((config.n_layers, batch, self._places(self.capacity), config.kv_heads, config.head_dim))
        self.lengths = np.zeros(batch, np.int64)
        self._oldest = np.zeros_like(self.lengths)  # the first position of each slot that is still there
        self._written: set[int] = set()  # slots that a forward pass is writing to

    def _places(self, capacity: int) -> int:
        """S. The chunks that one query's window touches, while another chunk is being written: those of a whole chunk of queries."""
        return capacity if self.window is None else min(capacity, chunks_touched(self.window) * CHUNK)

    @property
    def batch(self) -> int:
        """How many slots there are."""
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values together, filled or not."""
        return nbytes_of(self.k.shape, self.dtype)

    def _checked(self, slot: int) -> int:
        slot = integer("KV cache: slot", slot, -(2**63), error=SlotError)
        if not 0 <= slot < self.batch:
            raise SlotError(f"KV cache: slot {slot} does not exist, there are {self.batch}")
        return slot

    def reserve(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Check that counts[i] more positions fit into slot slots[i]; returns the lengths they have now. Changes nothing.

        Raises CapacityError for too many slots or positions, SlotError for a slot that is not there or named twice.
        """
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

    @contextmanager
    def writing(self, slots: NDArray[np.int64]) -> Iterator[None]:
        """Keep slots for a pass over them. Raises SlotError where another thread, or a recorder of a pass, is at one of them already."""
        wanted = set(slots.tolist())
        with _LOCK:
            self._check_idle(wanted)
            self._written |= wanted
        try:
            yield
        finally:
            with _LOCK:
                self._written -= wanted

    def _check_idle(self, slots: Iterable[int]) -> None:
        for slot in self._written.intersection(slots):
            raise SlotError(f"KV cache: a forward pass is writing to slot {slot}, expected it to end first")

    def write(self, layer: int, slot: NDArray[np.int64], position: NDArray[np.int64], k: NDArray, v: NDArray) -> None:
        """Keys and values of one layer, [R, G, K] each, to their slots [R] and positions [R]. `lengths` is the caller's to change.

        Raises NonFiniteError when a float16 cache cannot hold them.
        """
        place = position % self.k.shape[2]
        for name, kept, new in (("key", self.k[layer], k), ("value", self.v[layer], v)):
            if self.dtype == np.float16:
                with np.errstate(over="ignore"):
                    new = new.astype(np.float16)
                if not np.isfinite(new).all():
                    raise NonFiniteError(f"KV cache: a {name} of layer {layer} is not a number within float16's range")
            kept[slot, place] = new

    def pieces(self, slot: NDArray[np.int64], position: NDArray[np.int64]) -> list[slice | NDArray[np.intp]]:
        """Which rows [R] of a call may be written together, and read before the next are: one chunk of each sequence where a ring wraps."""
        chunk = position // CHUNK
        first = np.full(self.batch, chunk.max())
        np.minimum.at(first, slot, chunk)
        turn = chunk - first[slot]
        if position.max() < self.k.shape[2] or not turn.any():
            return [slice(None)]
        return [np.flatnonzero(turn == n) for n in range(turn.max() + 1)]

    def by_pieces(
        self,
        pieces: list[slice | NDArray[np.intp]],
        attended: Callable[..., NDArray],
        arrays: tuple[NDArray, ...],
        slot: NDArray[np.int64],
        position: NDArray[np.int64],
    ) -> NDArray:
        """What `attended` makes of queries, keys and values [R, H or G, K], one piece of the rows after the other."""
        out = np.empty_like(arrays[0])
        for piece in pieces:
            out[piece] = attended(*(array[piece] for array in arrays), slot[piece], position[piece])
        return out

    def advance(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Slot slots[i] holds counts[i] positions more: they have been written in every layer."""
        self.lengths[slots] += counts
        self._oldest = np.maximum(self._oldest, self.lengths - self.k.shape[2])

    def save(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> Saved:
        """What is needed to undo the writing of counts[i] more positions to slot slots[i]: of a ring, what they are written over."""
        saved: Saved = []
        for slot, length, count in zip(slots.tolist(), self.lengths[slots].tolist(), counts.tolist(), strict=True):
            covers = length > 0 and self.k.shape[2] < length + count
            held = self._taken(slot, length, length + count) if covers else None
            saved.append((slot, int(self._oldest[slot]), length, length + count, held))
        return saved

    def restore(self, saved: Saved) -> None:
        """Undo what was written since `save`."""
        for slot, oldest, length, end, held in saved:
            if held is None:
                self.erase(slot, length, end)
            else:
                self._put_back(held, slot, length, end)
            self.lengths[slot], self._oldest[slot] = length, oldest

    def _taken(self, slot: int, start: int, end: int) -> Any:
        """A copy of what is at the places of positions start..end."""
        places = self._between(start, end)
        return self.k[:, slot, places].copy(), self.v[:, slot, places].copy()

    def _put_back(self, held: Any, slot: int, start: int, end: int) -> None:
        places = self._between(start, end)
        self.k[:, slot, places], self.v[:, slot, places] = held

    def _between(self, start: int, end: int) -> slice | NDArray[np.int64]:
        """The places of positions start..end, as far as they are there at the same time."""
        size = self.k.shape[2]
        return slice(start, end) if end <= size else np.arange(max(start, end - size), end) % size

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` positions of a slot; other slots keep every byte.

        Raises SlotError for a slot that is not there, CapacityError for positions that it does not hold, or that it cannot go on from: a
        ring may have forgotten what their next token sees.
        """
        slot, length = self._checked(slot), _whole("length", length)
        if not 0 <= length <= self.lengths[slot]:
            raise CapacityError(f"KV cache: slot {slot} holds {self.lengths[slot]} positions, cannot be cut to {length}")
        self._check_idle((slot,))
        self._check_kept(slot, length)
        self.erase(slot, length, int(self.lengths[slot]))
        self.lengths[slot] = length
        self._oldest[slot] = min(self._oldest[slot], length)

    def _check_kept(self, slot: int, length: int) -> None:
        """Whether a sequence can go on from `length` positions: what its next token sees must be there."""
        if length and self.window is not None and max(0, length - self.window + 1) < self._oldest[slot]:
            raise CapacityError(
                f"KV cache: slot {slot} has forgotten the positions before {self._oldest[slot]}, "
                f"and after {length} a window of {self.window} needs them"
            )

    def rollback(self, slot: int, count: int) -> None:
        """Forget the last `count` positions of a slot: tokens that were tried and not taken. Raises what `truncate` does."""
        slot, count = self._checked(slot), _whole("count", count)
        held = int(self.lengths[slot])
        if not 0 <= count <= held:
            raise CapacityError(f"KV cache: slot {slot} holds {held} positions, cannot go back by {count}")
        self.truncate(slot, held - count)

    def clear(self, slot: int | None = None) -> None:
        """Forget a slot, or all of them. Raises SlotError for one that is not there."""
        for each in range(self.batch) if slot is None else (slot,):
            self.truncate(each, 0)

    def clear_batch(self, slot: int) -> None:
        """Forget one slot, as `clear` does."""
        self.clear(slot)

    def fork(self, source: int, targets: Iterable[int], length: int | None = None) -> None:
        """Copy the first `length` positions of slot `source` (default: all) to other slots, which must be empty.

        A sequence goes on in a target with the bits it would have had in the source. It is a copy of 2 * L * length * G * K * itemsize
        bytes for each target: for the 2B model 154 KB a position in float32, 17 ms for 1,000 positions on one Zen 4 core, or 160 ms where
        the target's memory is touched for the first time. Pages that are shared until one side writes were measured, too: 0.5 ms, and
        17 ms when they are first read. That is not worth a source that may not be cut or cleared while a fork lives; prefilling 1,000
        positions takes ten seconds.

        Raises what `truncate` does for `length`, and SlotError for a target that is not there, not empty, or named twice.
        """
        source, targets = self._checked(source), [self._checked(slot) for slot in _sequence(targets)]
        held = int(self.lengths[source])
        length = held if length is None else _whole("length", length)
        if not 0 <= length <= held:
            raise CapacityError(f"KV cache: slot {source} holds {held} positions, {length} cannot be copied")
        self._check_kept(source, length)
        self._check_idle((source, *targets))
        if len({source, *targets}) <= len(targets):
            raise SlotError(f"KV cache: slots {targets} name one slot twice, or the source {source}")
        for slot in targets:
            if self.lengths[slot]:
                raise SlotError(f"KV cache: slot {slot} holds {self.lengths[slot]} positions, clear it before it is copied to")
        wraps = held > self.k.shape[2]
        for slot in targets:
            self._copy(source, slot, self.k.shape[2] if wraps else length)
            if wraps and length < held:  # with a ring's places came what is past the end
                self.erase(slot, length, held)
            self.lengths[slot], self._oldest[slot] = length, min(length, self._oldest[source])

    def _copy(self, source: int, target: int, places: int) -> None:
        """The first so many places of one slot to another."""
        for layer in (*self.k, *self.v):  # each by itself: of all at once NumPy cannot tell that they do not overlap, and copies twice
            layer[target, :places] = layer[source, :places]

    def resize(self, batch: int | None = None, capacity: int | None = None, *, force: bool = False) -> None:
        """Change the number of slots, or of positions in each. What slots hold stays, as far as there is room for it.

        Raises SlotError or CapacityError, and changes nothing, if a slot in use would go or be cut, unless `force` says that it may.
        Needs memory for the old and the new cache at once.
        """
        batch, capacity = _sizes(self.batch if batch is None else batch, self.capacity if capacity is None else capacity)
        self._check_idle(range(self.batch))
        for slot in np.flatnonzero(self.lengths[:batch] > capacity) if force else ():
            self._check_kept(int(slot), capacity)
        if not force:
            for slot in np.flatnonzero(self.lengths):
                if slot >= batch:
                    raise SlotError(f"KV cache: slot {slot} holds {self.lengths[slot]} positions, cannot shrink to {batch} slots")
                if self.lengths[slot] > capacity:
                    raise CapacityError(f"KV cache: slot {slot} holds {self.lengths[slot]} positions, cannot shrink to {capacity}")
        k, v = self._zeros((self.k.shape[0], batch, self._places(capacity), *self.k.shape[3:]))
        lengths, oldest = np.zeros((2, batch), np.int64)
        slots = min(batch, self.batch)
        lengths[:slots], oldest[:slots] = np.minimum(self.lengths[:slots], capacity), self._oldest[:slots]
        for i in range(slots):
            for new, old in ((k, self.k), (v, self.v)):
                self._move(old, new, i, int(oldest[i]), int(lengths[i]))
        self.k, self.v, self.capacity, self.lengths, self._oldest = k, v, capacity, lengths, oldest

    def _move(self, old: NDArray, new: NDArray, slot: int, start: int, end: int) -> None:
        """Positions start..end of a slot to where they are when it has another size."""
        held = np.arange(start, end)
        new[:, slot, held % new.shape[2]] = old[:, slot, held % old.shape[2]]

    def set_batch_size(self, batch: int, *, force: bool = False) -> None:
        """Change the number of slots, as `resize` does."""
        self.resize(batch, force=force)

    def erase(self, slot: int, start: int, end: int) -> None:
        """Zero positions start..end of a slot in every layer."""
        places = self._between(start, end)
        self.k[:, slot, places] = 0
        self.v[:, slot, places] = 0

    def _zeros(self, shape: tuple[int, ...]) -> tuple[NDArray, NDArray]:
        """Keys and values [L, B, S, G, K]."""
        try:
            return np.zeros(shape, self.dtype), np.zeros(shape, self.dtype)
        except (MemoryError, ValueError) as error:
            wanted = nbytes_of(shape, self.dtype)
            raise CapacityError(f"KV cache: {wanted:,} bytes for {shape[1]} sequences of {shape[2]} positions cannot be had") from error


def _sizes(batch: int, capacity: int) -> tuple[int, int]:
    """Raises OptionError for a cache without a slot or a position."""
    return integer("KV cache: batch", batch, 1), integer("KV cache: capacity", capacity, 1)


def _whole(name: str, value: int) -> int:
    """Of positions: how many there can be depends on the slot. Raises CapacityError for what is no integer."""
    return integer(f"KV cache: {name}", value, -(2**63), error=CapacityError)


def _sequence(slots: Iterable[int]) -> list[int]:
    try:
        return list(slots)
    except TypeError:
        raise SlotError(f"KV cache: slots are {shown(slots)}, expected a collection of integers") from None


def nbytes_of(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Of keys and values."""
    return 2 * dtype.itemsize * prod(shape)
