"""Recordings of decoded tokens, which are run again in place of new passes (kernels/recording.py).

Nothing here knows the order of operations. A pass of network.py is recorded as it is. A recording is used
only after it has also given the bits of the next pass.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..kernels.recording import Recording
from ..model.records import Model

Layers = Callable[..., NDArray[np.float32]]

PATIENCE = 8
"""Passes of a kind before one is recorded: a recording costs the time of one more token."""
_MOST = 8  # recordings of a cache, each with the memory of a pass


class Repeats:
    """The recordings of one KV cache. A copy of the cache begins without any.

    Threads may use it at once: a recording is taken out while one of them runs it,
    and the others run their passes as usual.
    """

    def __init__(self) -> None:
        self._passes: Counter[Hashable] = Counter()
        # the model is kept, because the key has its identity
        self._kept: dict[Hashable, tuple[Recording | None, Model]] = {}

    def __reduce__(self) -> tuple[type["Repeats"], tuple[()]]:
        return Repeats, ()

    def run(
        self,
        model: Model,
        kind: Hashable,
        size: int,
        layers: Layers,
        inputs: Sequence[NDArray],
        state: Sequence[NDArray],
    ) -> NDArray[np.float32]:
        """layers(*inputs), by a recording of an earlier pass of this kind and size where there is one.

        state: keys and values, which the pass writes.
        """
        kind = id(model), kind
        self._passes[kind] += 1
        if kept := self._kept.pop((kind, size), None):
            recording = kept[0]
            out = layers(*inputs) if recording is None else self._again(recording, layers, inputs)
        elif self._passes[kind] <= PATIENCE:
            return layers(*inputs)
        else:
            recording = Recording(layers, inputs, state)
            out = recording.result
        # a list, which C makes: other threads change what is kept between two steps of Python
        for oldest in list(self._kept)[: 1 - _MOST]:
            self._kept.pop(oldest, None)
        self._kept[kind, size] = recording if recording and recording.is_whole else None, model
        return out

    def _again(self, recording: Recording, layers: Layers, inputs: Sequence[NDArray]) -> NDArray[np.float32]:
        """The result by a recording. The first time, it is compared with the result of the pass."""
        if recording.is_compared:
            return recording.again(inputs)
        recording.forget()
        again, out = recording.again(inputs), layers(*inputs)
        recording.is_compared, recording.is_whole = True, again.tobytes() == out.tobytes()
        return out
