"""One token after another, on the CPU or on a device, where a token is one launch of a captured graph."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..cache import KVCache
from ..errors import ShapeError
from ..kernels import cpu
from ..model import Model
from ..transformer import EXACT, Dialect, Floats, Head, Rows, check_finite, check_tokens, forward, ignore, run_layers
from .device import DeviceCache

Step = Callable[[ArrayLike], Floats]  # tokens [B] -> logits [B, V]


_FIRST = 1024  # positions that a graph serves at least


class Decoder:
    """One more token of each of some sequences of a cache at a time: the bits of `forward`, by one launch.

    The graph reads positions from the device's memory and moves them on, so that one serves all tokens up to some position, and then one
    of twice as many: the blocks it launches and the memory it works in grow with what sequences hold, not with what they may hold. Tokens
    go there and logits come back.
    """

    def __init__(self, model: Model, cache: DeviceCache, on: Any, slots: ArrayLike = (0,)) -> None:
        """Compiles what is not compiled yet, and captures."""
        self._model, self._cache, self._on = model, cache, on
        self._slots = np.asarray(slots, np.int64)
        self._next = cache.reserve(self._slots, np.ones(self._slots.size, np.int64))
        arrays = np.zeros_like(self._slots), self._slots, self._next, np.arange(self._slots.size)
        self._tokens, slot, self._position, last = map(on.upload, arrays)
        self._rows = Rows(self._tokens, last, slot, self._position, last)
        self._capture()

    def _capture(self) -> None:
        """A graph for the next positions."""
        from ..kernels.cuda import rows
        from . import graph
        from .arrays import Arena

        model, cache, on, position = self._model, self._cache, self._on, self._position
        self._memory = self._logits = None  # of the one before,
        self._room = 0  # which serves nothing more, even if there will be no other
        room = min(cache.capacity, max(_FIRST, 2 * int(self._next.max())))
        position.chunks = -(-room // on.chunk)
        table, arena = None, Arena()
        if model.config.rope != "none":
            table = [on.upload(part) for part in cpu.rotations(EXACT.angles(np.arange(room), model))]

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            return on.attend_next(q, k, v, self._rows.slot, position, cache.k[layer], cache.v[layer], model.config.window_of(layer))

        def run() -> None:
            before, on.arena = on.arena, arena
            self._logits = None  # so that every run finds as much memory free
            try:
                rotations = on.take_rotations(*table, position) if table else None
                self._logits = run_layers(model, self._rows, rotations, attend, False, EXACT, on, ignore)  # a row of each is its last
                on.launch(rows.advance, self._slots.size, position, room - 1)
            finally:
                on.arena = before

        self._memory = table, arena  # the graph knows addresses and keeps nothing
        saved = cache.save(self._slots, np.ones_like(self._slots))
        try:
            run()  # compiles, and takes the memory that the graph is to work in
        finally:
            on.overwrite(position, self._next)
            cache.restore(saved)
        self.graph = graph.captured(on.stream, run, on.overlap)
        """Alone it is the next position of each sequence, for the tokens that are there, without a check."""
        self._room = room

    def __call__(self, tokens: ArrayLike) -> Floats:
        """Logits [B, V] of the next tokens [B]. Raises ShapeError, TokenRangeError, CapacityError or NonFiniteError."""
        ids = np.asarray(tokens)
        if ids.shape != self._slots.shape:
            raise ShapeError(f"tokens has shape {ids.shape}, expected {self._slots.shape}: one for each sequence")
        ids, _ = check_tokens(self._model.config, ids[:, None])
        position = self._cache.reserve(self._slots, np.ones(ids.size, np.int64))
        if not np.array_equal(position, self._next):  # slots were cut, or written to by others
            self._next = position
            self._on.overwrite(self._position, position)
        if position.max() >= self._room:
            self._capture()
        saved = self._cache.save(self._slots, np.ones(ids.size, np.int64))
        self._on.overwrite(self._tokens, ids[:, 0])
        self.graph.launch()
        sequence = np.arange(ids.size)
        try:
            logits = check_finite(self._on.to_host(self._logits), Rows(ids[:, 0], sequence, self._slots, position, sequence), True)
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
