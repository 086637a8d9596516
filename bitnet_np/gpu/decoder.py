"""One token after another on a device: a captured graph, launched once for each token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..cache import KVCache
from ..dialects import EXACT
from ..model import Model
from ..network import Floats, Rotations, Runtime, check_finite, rotation_tables, run_layers, scoring
from ..tokens import Rows

if TYPE_CHECKING:
    from .backend import Cuda

_FIRST = 1024  # the least positions of a graph


class GraphDecoder:
    """One more token of each of some sequences of a cache at a time: the bits of `forward`, by one launch.

    The graph reads positions from the device's memory and advances them, so one graph serves all tokens up to some position. Then a graph
    for twice as many positions replaces it: its blocks and its memory grow with the length of sequences, not with the cache's capacity.
    Tokens go to the device and logits come back.

    A greedy graph also leaves the tokens it chose where the next launch takes its tokens. So that can be launched while the host still
    waits for this one: the device has no pause between two tokens (`largest`).
    """

    def __init__(self, model: Model, cache: KVCache, on: "Cuda", slots: NDArray[np.int64], greedy: bool = False) -> None:
        """Compiles missing kernels, and captures a graph. The model and the cache are on the device.

        greedy: the graph also finds the largest logit of each sequence, for `largest`.
        """
        from .arrays import Copy

        self._model, self._cache, self._on, self._greedy = model, cache, on, greedy
        self._slots = slots
        self._next = cache.reserve(self._slots, np.ones(self._slots.size, np.int64))
        arrays = np.zeros_like(self._slots), self._slots, self._next, np.arange(self._slots.size)
        self._tokens, slot, self._position, last = map(on.upload, arrays)
        self._rows = Rows(self._tokens, last, slot, self._position, last)
        self._largest = on.empty(slots.shape, np.int64)
        self._copies = [Copy(self._largest, on.stream) for _ in range(2 if greedy else 0)]  # of the newest step, and of the one before
        self._ahead: NDArray[np.int64] | None = None  # tokens of a step that is launched and not asked for yet
        self._capture()

    def _capture(self) -> None:
        """A graph for the next positions."""
        from ..kernels.cuda import rows
        from . import graph
        from .arrays import Arena

        model, cache, on, position = self._model, self._cache, self._on, self._position
        self._memory = self._logits = None  # those of the graph before
        self._room = 0  # the graph before serves no more positions, even if capturing fails
        room = min(cache.capacity, max(_FIRST, 2 * int(self._next.max())))
        position.chunks = -(-room // on.chunk)
        tables: Rotations | None = None
        arena = Arena()
        if model.config.rope != "none":
            tables = rotation_tables(on, EXACT, np.arange(room), model)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            kept, window = (cache.k[layer], cache.v[layer]), model.config.window_of(layer)
            return on.attend_next(q, k, v, self._rows.slot, position, *kept, window, *scoring(model.config))

        def run() -> None:
            before, on.arena = on.arena, arena
            self._logits = None  # so that every run has the same free memory
            try:
                rotations = {local: on.take_rotations(*table, position) for local, table in tables.items()} if tables else None
                self._logits = run_layers(Runtime(model, EXACT, on), self._rows, rotations, attend)  # each sequence has one row, its last
                if self._greedy:
                    on.largest(self._logits, self._largest)
                chosen = self._largest if self._greedy else self._tokens
                on.launch(rows.advance, self._slots.size, position, room - 1, chosen, self._tokens)
            finally:
                on.arena = before

        self._memory = tables, arena  # the graph has addresses and keeps nothing alive
        saved = cache.save(self._slots, np.ones_like(self._slots))
        on.overwrite(position, self._next)  # the graph before has stopped at its last one
        try:
            run()  # compiles, and takes the memory of the graph
        finally:
            on.overwrite(position, self._next)
            cache.restore(saved)
        self.graph = graph.captured(on.stream, run, on.overlap)
        """Alone it is the next position of each sequence, for the tokens that are there, without a check."""
        self._room = room

    def __call__(self, tokens: NDArray[np.int64]) -> Floats:
        """Logits [B, V] of the next tokens [B], ids of the vocabulary. Raises CapacityError or NonFiniteError."""
        with self._launched(tokens) as rows:
            return check_finite(self._on.to_host(self._logits), rows, True)

    def largest(self, tokens: NDArray[np.int64], more: bool = False) -> NDArray[np.int64]:
        """The place of the largest logit of each sequence, the first of equal ones: [B]. Arguments and errors as in a call.

        The logits stay on the device, and 8 bytes for each sequence come back. more: the next step will probably be that of these results,
        so it is launched before they are there. Until it is asked for, or `forget` is called, nothing else may write to the slots.
        """
        with self._launched(tokens) as rows:
            copy, is_ahead = self._copies[0], more and self._next.max() < self._room
            if is_ahead:
                self._launch()
            places = copy.wait()
            self._ahead = places if is_ahead else None
            if (places < 0).any():
                self.forget()
                self._launch_at(rows.position, tokens)  # again, for its logits
                check_finite(self._on.to_host(self._logits), rows, True)
            return places

    def forget(self) -> None:
        """Takes back a step that was launched and not asked for."""
        if self._ahead is not None:
            for slot, end in zip(self._slots.tolist(), self._next.tolist(), strict=True):
                self._cache.erase(slot, end - 1, end)
            self._ahead = None

    @contextmanager
    def _launched(self, tokens: NDArray[np.int64]) -> Iterator[Rows]:
        """Appends the tokens to their sequences; the body reads the results. If it raises, the tokens are taken back."""
        with self._cache.appending(self._slots, np.ones_like(self._slots)) as position:
            if self._ahead is not None and np.array_equal(tokens, self._ahead) and np.array_equal(position, self._next - 1):
                self._ahead = None
            else:
                self.forget()
                self._launch_at(position, tokens)
            sequence = np.arange(tokens.size)
            yield Rows(tokens, sequence, self._slots, position, sequence)

    def _launch_at(self, position: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        if not np.array_equal(position, self._next):  # others have truncated slots, or written to them
            self._next = position
            self._on.overwrite(self._position, position)
        if position.max() >= self._room:
            self._capture()
        self._on.overwrite(self._tokens, tokens)
        self._launch()

    def _launch(self) -> None:
        """Launches the step of the tokens and positions that are on the device."""
        self.graph.launch()
        self._next = self._next + 1  # the device's positions, whether or not the logits are finite
        if self._greedy:
            self._copies.reverse()
            self._copies[0].begin()


class SteadyDecoder:
    """A `GraphDecoder` for a batch whose sequences change: to capture one takes as long as a step launch by launch."""

    def __init__(self, model: Model, cache: KVCache, on: "Cuda") -> None:
        self._model, self._cache, self._on = model, cache, on
        self._slots: list[int] = []
        self._decoder: GraphDecoder | None = None

    def decoder(self, slots: list[int]) -> GraphDecoder | None:
        """The decoder, a greedy one, for a step of these slots, one token each; None if they are not those of the step before.

        It is called before each step; slots are empty where a step is not of one token each.
        """
        if not slots or slots != self._slots:
            if self._decoder is not None:
                self._decoder.forget()
            self._slots, self._decoder = slots, None
            return None
        if self._decoder is None:
            self._decoder = GraphDecoder(self._model, self._cache, self._on, np.array(slots), greedy=True)
        return self._decoder
