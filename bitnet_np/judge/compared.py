"""Another engine's tensors beside ours: which can be judged, and which have our bits."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .. import spec
from ..engine.forward_pass import run_whole
from ..engine.network import Runtime
from ..engine.tokens import Tokens
from ..model.records import Config
from ..traces.points import SCORES, TOP_EXPERTS, Key, Trace
from ..traces.record import Recorder
from .bounds import invalid_experts, invalid_tensor
from .equivalence import KEYS, QUERIES
from .logits import same_bits


@dataclass(frozen=True)
class Compared:
    """Another engine's tensors, compared with ours. Ours are not stored: a trace of a large model has gigabytes."""

    tensors: dict[Key, NDArray] = field(default_factory=dict)  # [T, width] of those that are valid, as they are in the dump
    problems: dict[Key, str] = field(default_factory=dict)  # why a tensor cannot be judged; empty where it is valid
    same: set[Key] = field(default_factory=set)  # those that have our bits
    sizes: dict[Key, int] = field(default_factory=dict)  # of all our tensors
    first: dict[Key, NDArray] = field(default_factory=dict)  # our queries and keys of the first layer

    def leave_out(self, key: Key) -> None:
        """Take a tensor for one that is not in the dump."""
        self.tensors.pop(key, None)
        self.problems.pop(key, None)
        self.same.discard(key)


def compare(runtime: Runtime, tokens: Tokens, trace: Trace) -> tuple[Compared, NDArray]:
    """The tensors of a trace beside ours, and our logits [1, T, V]."""
    c, dump = runtime.model.config, Compared()
    points = {key: rows_of(c, key, x) if key.name in SCORES and x.ndim == 3 else x for key, x in trace.points.items()}

    def look(key: Key, array: NDArray) -> None:
        ours = array.reshape(len(array), -1)
        dump.sizes[key] = ours.size
        if key.layer == 0 and key.name in (*QUERIES, *KEYS):
            dump.first[key] = ours.copy()
        if key not in points:
            return
        theirs = points[key]
        dump.problems[key] = invalid_tensor(theirs, ours) or (invalid_experts(theirs, c.experts) if key.name == TOP_EXPERTS else "")
        if not dump.problems[key]:
            dump.tensors[key] = theirs.reshape(ours.shape)
            if same_bits(dump.tensors[key], ours):
                dump.same.add(key)

    def record(name: str, layer: int | None, array: NDArray) -> None:
        look(Key(name, layer), array)
        if recorder is not None:
            recorder(name, layer, array)

    layers = {key.layer for key in points if key.name in SCORES and key.layer is not None and key.layer < c.n_layers}
    recorder = None
    if layers:
        recorder = Recorder(lambda key, x: look(key, rows_of(c, key, x)), c, layers=layers, names=SCORES, dialect=runtime.dialect)
    return dump, run_whole(runtime, tokens, record)


def rows_of(c: Config, key: Key, x: NDArray) -> NDArray:
    """Attention's scores [H, T, S] as rows of positions [T, H * T], 0 where a query does not see the key: engines leave anything there.

    Keys behind the T positions are padding of the cache; fewer of them are a shape that is refused.
    """
    length = x.shape[1]
    x = x[..., :length]
    if x.shape[2] == length:
        x = np.where(spec.causal_mask(length, length, window=c.window_of(key.layer or 0)) == 0, x, x.dtype.type(0))
    return x.transpose(1, 0, 2).reshape(length, -1)
