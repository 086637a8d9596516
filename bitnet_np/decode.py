"""One token after another, on the CPU or on a device, where a token is one launch of a captured graph."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .cache import KVCache
from .device import DeviceCache
from .errors import TokenRangeError
from .kernels import cpu
from .model import Model
from .transformer import EXACT, Dialect, Floats, Head, Rows, _decoder, _finite, check_tokens, forward, ignore

Step = Callable[[ArrayLike], Floats]  # tokens [B] -> logits [B, V]


class Decoder:
    """One more token of each of some sequences of a cache at a time: the bits of `forward`, by one launch.

    The graph reads positions from the device's memory and moves them on, so that one serves all tokens; tokens go there and logits come
    back. It works in memory of its own.
    """

    def __init__(self, model: Model, cache: DeviceCache, on: Any, slots: ArrayLike = (0,)) -> None:
        """Compiles what is not compiled yet, and captures."""
        from .kernels.cuda import graph, rows
        from .kernels.cuda.arrays import Arena

        self._model, self._cache, self._on = model, cache, on
        self._slots = np.asarray(slots, np.int64)
        n, capacity = self._slots.size, cache.capacity
        cache.reserve(self._slots, np.ones(n, np.int64))
        self._tokens, slot, last = (on.upload(array) for array in (np.zeros(n, np.int64), self._slots, np.arange(n)))
        self._next = cache.lengths[self._slots]
        self._position = on.upload(self._next)
        self._position.chunks = -(-capacity // on.chunk)
        inside = Rows(self._tokens, last, slot, self._position, last)
        table, arena = None, Arena()
        if model.config.rope != "none":
            table = [on.upload(part) for part in cpu.rotations(EXACT.angles(np.arange(capacity), model))]

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            return on.attend_next(q, k, v, slot, self._position, cache.k[layer], cache.v[layer], model.config.window_of(layer))

        def run() -> None:
            before, on.arena = on.arena, arena
            self._logits = None  # so that every run finds as much memory free
            try:
                rotations = on.take_rotations(*table, self._position) if table else None
                self._logits = _decoder(model, inside, rotations, attend, False, EXACT, on, ignore)  # a row of each is its last
                on.launch(rows.advance, n, self._position, capacity - 1)
            finally:
                on.arena = before

        self._memory = inside, table, arena  # the graph knows addresses and keeps nothing
        saved = cache.save(self._slots, np.ones(n, np.int64))
        run()  # compiles, and takes the memory that the graph is to work in
        on.overwrite(self._position, self._next)
        cache.restore(saved)
        self.graph = graph.captured(on.stream, run, on.overlap)
        """Alone it is the next position of each sequence, for the tokens that are there, without a check."""

    def __call__(self, tokens: ArrayLike) -> Floats:
        """Logits [B, V] of the next tokens [B]. Raises CapacityError, TokenRangeError, NonFiniteError as `forward` does."""
        ids = np.asarray(tokens)
        if ids.shape != self._slots.shape:
            raise TokenRangeError(f"tokens have shape {ids.shape}, expected {self._slots.shape}: one for each sequence")
        ids, _ = check_tokens(self._model.config, ids[:, None])
        position = self._cache.reserve(self._slots, np.ones(ids.size, np.int64))
        if not np.array_equal(position, self._next):  # slots were cut, or written to by others
            self._on.overwrite(self._position, position)
        saved = self._cache.save(self._slots, np.ones(ids.size, np.int64))
        self._on.overwrite(self._tokens, ids[:, 0])
        self.graph.launch()
        sequence = np.arange(ids.size)
        try:
            logits = _finite(self._on.to_host(self._logits), Rows(ids[:, 0], sequence, self._slots, position, sequence), True)
        except BaseException:
            self._cache.restore(saved)
            self._next = position + 1  # where the device is; it is told to go back when there is a next token
            raise
        self._cache.advance(self._slots, np.ones(ids.size, np.int64))
        self._next = position + 1
        return logits


def stepper(model: Model, cache: KVCache, ops: Any = cpu, *, dialect: Dialect = EXACT, head: Head | None = None) -> Step:
    """A function from the next tokens [B] of the first B slots to their logits [B, V], as fast as `ops` can."""
    if isinstance(cache, DeviceCache):
        return Decoder(model, cache, ops.backend, np.arange(cache.batch))

    def step(tokens: ArrayLike) -> NDArray[np.float32]:
        return forward(model, np.asarray(tokens)[:, None], cache, last_only=True, dialect=dialect, ops=ops, head=head)

    return step
