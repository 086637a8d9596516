"""Passes that are run again instead of anew: a decoded token is like the one before it (kernels/recording.py).

Nothing here knows the order of operations. A pass of network.py is recorded as it is, and a recording is used after it has given the same
bits as the pass after it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..kernels.recording import Recording
from ..model.records import Model

Layers = Callable[..., NDArray[np.float32]]

PATIENCE = 8
"""Passes of a kind before one is recorded: what is recorded must pay for some 30 ms of compiling, and for one token more."""
_MOST = 8  # recordings of a cache, each with the memory of a pass


class _Kept:
    """A recording, or none where a kind of pass cannot be recorded."""

    def __init__(self, recording: Recording, model: Model) -> None:
        self.recording = recording if recording.is_whole else None
        self.model = model  # kept, because the key has its identity
        self.is_compared = False


class Repeats:
    """The recordings of one KV cache. A copy of the cache begins without any.

    Threads may use it at once: a recording is taken out while one of them runs it, and the others run their passes as usual.
    """

    def __init__(self) -> None:
        self._passes: Counter[Hashable] = Counter()
        self._kept: dict[Hashable, _Kept] = {}

    def __reduce__(self) -> tuple[type["Repeats"], tuple[()]]:
        return Repeats, ()

    def run(
        self, model: Model, kind: Hashable, size: int, layers: Layers, inputs: Sequence[NDArray], state: Sequence[NDArray]
    ) -> NDArray[np.float32]:
        """layers(*inputs), by a recording of an earlier pass of this kind and size where there is one.

        state: keys and values, which the pass writes.
        """
        kind = id(model), kind
        self._passes[kind] += 1
        kept = self._kept.pop((kind, size), None)
        if kept is None:
            if self._passes[kind] <= PATIENCE:
                return layers(*inputs)
            recording = Recording(layers, inputs, state)
            kept, out = _Kept(recording, model), recording.result
        else:
            out = self._again(kept, layers, inputs)
        while len(self._kept) >= _MOST:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[kind, size] = kept
        return out

    def _again(self, kept: _Kept, layers: Layers, inputs: Sequence[NDArray]) -> NDArray[np.float32]:
        """The result by a recording, which is compared with that of the pass itself the first time."""
        if kept.recording is None:
            return layers(*inputs)
        if not kept.is_compared:
            kept.recording.forget()
        again = kept.recording.again(inputs)
        if kept.is_compared:
            return again
        out = layers(*inputs)
        if again.tobytes() != out.tobytes():
            kept.recording = None
        kept.is_compared = True
        return out
