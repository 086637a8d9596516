"""Another engine's tensors beside ours: which can be judged, which have our bits, and the type that each is kept in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

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
from .first_looks import distance_of
from .law.expected import Storage
from .law.graph import EMBEDDING, TOKENS, Operation
from .law.precision import DIGITS, FLOAT32, Precision, storage_type
from .measures import same_bits
from .options import Options


@dataclass(frozen=True)
class Compared:
    """Another engine's tensors, compared with ours. Ours are not stored: a trace of a large model has gigabytes."""

    tensors: dict[Key, NDArray] = field(default_factory=dict)  # [T, width] of those that are valid, as they are in the dump
    problems: dict[Key, str] = field(default_factory=dict)  # why a tensor cannot be judged; empty where it is valid
    same: set[Key] = field(default_factory=set)  # those that have our bits
    sizes: dict[Key, int] = field(default_factory=dict)  # of all our tensors
    first: dict[Key, NDArray] = field(default_factory=dict)  # our queries and keys of the first layer
    flat: list[Key] = field(default_factory=list)  # those that have one axis, of all rows
    distances: dict[Key, float] = field(default_factory=dict)  # distance of tensors of layers from ours, where none is of layer 0
    distances_below: dict[Key, float] = field(default_factory=dict)  # and from ours of the layer before


def compare(runtime: Runtime, tokens: Tokens, trace: Trace) -> tuple[Compared, NDArray]:
    """The tensors of a trace beside ours, and our logits [1, T, V]."""
    c, dump = runtime.model.config, Compared()
    points = {key: rows_of(c, key, x) if key.name in SCORES and x.ndim == 3 else x for key, x in trace.points.items()}
    from_later = 0 not in {key.layer for key in points}

    def look(key: Key, array: NDArray) -> None:
        ours = array.reshape(len(array), -1)
        dump.sizes[key] = ours.size
        if key.layer == 0 and key.name in (*QUERIES, *KEYS):
            dump.first[key] = ours.copy()
        if from_later and key.layer is not None and (above := Key(key.name, key.layer + 1)) in points:
            dump.distances_below[above] = distance_of(ours, points[above])
        if key not in points:
            return
        theirs = points[key]
        if theirs.shape == (1, ours.size) != ours.shape:
            dump.flat.append(key)
            theirs = theirs.reshape(ours.shape)
        if from_later and key.layer is not None:
            dump.distances[key] = distance_of(ours, theirs)
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
        recorder = Recorder(lambda key, x: look(key, rows_of(c, key, x)), runtime, layers=layers, names=SCORES)
    return dump, run_whole(replace(runtime, record=record), tokens)


def rows_of(c: Config, key: Key, x: NDArray) -> NDArray:
    """Attention's scores [H, T, S] as rows of positions [T, H * T], 0 where a query does not see the key: engines leave anything there.

    Keys behind the T positions are padding of the cache; fewer of them are a shape that is refused.
    """
    length = x.shape[1]
    x = x[..., :length]
    if x.shape[2] == length:
        x = np.where(spec.causal_mask(length, length, window=c.window_of(key.layer or 0)) == 0, x, x.dtype.type(0))
    return x.transpose(1, 0, 2).reshape(length, -1)


@dataclass(frozen=True)
class Types:
    """The types of all tensors of one dump."""

    precision: Precision
    read: dict[Key, str] | None  # those read off the dump; None: as declared, and no others
    act: str  # of tensors that are not in the dump
    declared: Precision = FLOAT32

    @classmethod
    def of(cls, options: Options, tensors: Mapping[Key, NDArray], same: Collection[Key]) -> Types:
        """The types that are declared, and the narrower ones that a dump's tensors show. same: the tensors that have our bits."""
        declared = options.precision or FLOAT32
        if options.is_strict:
            return cls(declared, None, declared.act, declared)
        own = {EMBEDDING} & set(same)  # rows of a narrow table are narrow in every engine
        read = {k: storage_type(x) for k, x in tensors.items() if k not in own and not k.name.endswith(("_codes", "_scale", TOP_EXPERTS))}
        return cls(declared, read, min([declared.act, *read.values()], key=DIGITS.__getitem__), declared)

    def __getitem__(self, key: Key) -> str:
        if key == TOKENS:
            return "float32"
        if self.read is None:
            return self.act
        read = self.read.get(key, "float32" if key == EMBEDDING else self.act)
        return min(read, self.precision.act, key=DIGITS.__getitem__)

    def storage(self, operation: Operation) -> Storage:
        """The types of an operation's numbers."""
        return Storage(tuple(self[k] for k in operation.inputs), self[operation.key], self.precision)

    def with_cache(self, kind: str) -> Types:
        """The same types with keys and values of this type; attention's probabilities are as narrow in engines with float16 caches."""
        return replace(self, precision=replace(self.precision, kv=kind, probs="float16" if kind == "float16" else self.precision.probs))

    @property
    def strict(self) -> bool:
        """Whether no rounding is taken for intended that was not declared."""
        return self.read is None

    @property
    def judged_as(self) -> Precision | None:
        """The types that were declared, or read off the dump; None where all of these are float32."""
        if self.strict:
            return self.precision
        precision = replace(self.precision, act=self.act)
        return None if precision == FLOAT32 else precision

    def notes(self) -> list[str]:
        """The precision that the dump is judged in, in words, where it is not float32."""
        notes = [f"judged in the declared precision: {self.declared}"] if self.declared != FLOAT32 else []
        if self.read is None:
            return notes
        count = {kind: list(self.read.values()).count(kind) for kind in DIGITS}
        narrow = {kind: n for kind, n in count.items() if n and DIGITS[kind] < DIGITS[self.declared.act]}
        notes += [f"judged as {kind}, read off the dump: {n} of {len(self.read)} tensors" for kind, n in narrow.items()]
        if self.precision.kv != self.declared.kv:
            notes.append(f"a KV cache of {self.precision.kv} is assumed: the first attention shows it")
        return notes
