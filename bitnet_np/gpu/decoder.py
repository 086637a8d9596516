"""One token after another on a device: a captured graph, launched once for each token.

A launch from Python takes some 0.2 ms of the host, and a token takes hundreds of launches. A captured graph is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
from cuda.bindings import driver
from numba import cuda
from numpy.typing import NDArray

from ..engine.cache import Attend, KVCache
from ..engine.dialects import EXACT
from ..engine.network import Floats, Rotations, Runtime, check_finite, rotation_tables, run_layers
from ..engine.tokens import Rows, Tokens
from ..kernels import cpu
from ..model.records import Model
from .arrays import Arena

if TYPE_CHECKING:
    from .backend import Cuda

FIRST = 1024  # the least positions of a graph


class GraphDecoder:
    """One more token of each of some sequences of a cache at a time: the bits of `forward`, by one launch.

    Tokens, positions and what depends on them go to fixed places on the device. One graph serves all tokens up to some position; then one
    for twice as many replaces it: its blocks and its memory grow with the length of sequences, not with the cache's capacity.

    A step for which there is no graph runs launch by launch, and leaves compiled kernels and free memory for the graph of the next one.
    """

    def __init__(self, model: Model, cache: KVCache, on: Cuda, slots: NDArray[np.int64]) -> None:
        """The model and the cache are on the device."""
        self._on, self._runtime, self._cache, self._slots = on, Runtime(model, EXACT, on), cache, slots
        sequence = np.arange(slots.size)
        self._rows = on.resident(Rows(np.zeros_like(slots), sequence, slots, np.zeros_like(slots), sequence))
        self._there = {local: (on.upload(cos), on.upload(sin)) for local, (cos, sin) in self._turned(np.zeros_like(slots)).items()}
        self._room, self._arena = 0, Arena()
        self._graph: Callable[[], None] | None = None
        self._logits = self._keys = None

    def __call__(self, tokens: NDArray[np.int64]) -> Floats:
        """Logits [B, V] of the next tokens [B], ids of the vocabulary. Raises what `forward` does."""
        on = self._on
        with self._cache.appending(self._slots, np.ones_like(self._slots)) as position:
            rows = Rows.of(self._runtime.model.config, Tokens.whole(tokens[:, None]), self._slots, position)
            if position.max() >= self._room or self._cache.k is not self._keys:
                self._room = min(self._cache.capacity, max(FIRST, 2 * int(position.max())))
                self._graph, self._arena, self._logits, self._keys = None, Arena(), None, self._cache.k
            elif self._graph is None:
                self._graph = captured(on.stream, self._run)
            on.overwrite(self._rows.tokens, tokens)
            on.overwrite(self._rows.position, position)
            for local, turn in self._turned(position).items():
                for there, values in zip(self._there[local], turn, strict=True):
                    on.overwrite(there, values)
            (self._graph or self._run)()
            return check_finite(on.to_host(self._logits), rows, True)

    def _turned(self, position: NDArray[np.int64]) -> Rotations:
        """Cosines and sines of these positions, by kind of layer; none for a model without RoPE."""
        model = self._runtime.model
        return rotation_tables(cpu, EXACT, position, model) if model.config.rope != "none" else {}

    def _run(self) -> None:
        """The launches of a step. Every time they have the same memory, which is this decoder's own."""
        on, cache = self._on, self._cache
        self._rows.position.largest = self._room - 1
        attend = Attend(cache.storage, cache.k, cache.v, self._rows, self._runtime.attention)
        before, on.arena = on.arena, self._arena
        self._logits = None
        try:
            self._logits = run_layers(self._runtime, self._rows, self._there or None, attend)  # each sequence has one row, its last
        finally:
            on.arena = before


def captured(stream: Any, run: Callable[[], None]) -> Callable[[], None]:
    """A function that launches what `run` launches on the stream, in the same memory, as one graph.

    `run` must have been called before: capturing does not compile. Raises RuntimeError with the driver's error.
    """
    handle = driver.CUstream(int(stream.handle))
    with cuda.defer_cleanup():
        _checked(driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            run()
        finally:
            graph = _checked(driver.cuStreamEndCapture(handle))
    launchable = _checked(driver.cuGraphInstantiate(graph, 0))
    _checked(driver.cuGraphDestroy(graph))

    def launch() -> None:
        _checked(driver.cuGraphLaunch(launchable, handle))

    finalize(launch, driver.cuGraphExecDestroy, launchable)
    return launch


def _checked(result: tuple) -> Any:
    """The value that a function of the driver returns after its error. Raises RuntimeError with the error's name."""
    error, *values = result
    if error:
        raise RuntimeError(f"CUDA: {error.name}")
    return values[0] if values else None
