"""Two models of one family on the same tokens, tensor by tensor: a quantised one against the original."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError, ShapeError, shown
from ..base.progress import Progress, silent
from ..base.validate import function
from ..engine.backend import Backend
from ..engine.cache import KVCache, new_cache
from ..engine.dialects import EXACT, Dialect
from ..engine.forward_pass import run_cached
from ..engine.network import Record, Runtime
from ..engine.tokens import Tokens, check_context, check_tokens, pad
from ..kernels import cpu
from ..kernels.float_state import steady
from ..model.records import Model
from ..traces.points import Key
from .equivalence import KEYS, QUERIES, in_pairs
from .law.graph import operations
from .measures import kl_divergence

_SHAPE = ["architecture", "vocab", "n_layers", "width", "ffn", "heads", "kv_heads", "head_dim", "experts", "experts_used", "shared_ffn"]
_ROWS = 16  # tokens of one pass: memory is that of their tensors in one of the models, 0.1 GB at the shape of 2B-4T


@dataclass(frozen=True)
class TensorError:
    """How far a tensor of the second model is from the first's, over all tokens."""

    key: Key
    error: float  # root of sum (theirs - ours)^2 / sum ours^2; infinity where ours is 0 and theirs is not
    growth: float  # how much larger that is than the largest error of the tensors that it is computed from; 0 if it is not


@dataclass(frozen=True)
class ModelDifference:
    """What differs between two models on some tokens."""

    tensors: tuple[TensorError, ...]  # in the order they are computed
    kl: NDArray[np.float64]  # of each token: the divergence of the second model's prediction from the first's, in nats
    same_top: NDArray[np.bool_]  # of each token: whether both predict the same one
    settings: dict[str, tuple[object, object]]  # fields of Config that differ, with both values

    @property
    def costliest(self) -> list[TensorError]:
        """The tensors whose error is larger than that of what they are computed from, those with the largest growth first."""
        return sorted((t for t in self.tensors if t.growth > 0), key=lambda t: -t.growth)


@steady
def compare_models(
    ours: Model,
    theirs: Model,
    sequences: Sequence[Sequence[int] | NDArray],
    *,
    names: tuple[str, str] = ("ours", "theirs"),
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    progress: Progress = silent,
) -> ModelDifference:
    """The difference of two models on sequences of token ids, [T] each; ours is taken as the original. names: of both, for messages.

    Both models run side by side, some tokens at a time through KV caches, and each tensor is compared as soon as it is computed: only the
    caches grow with the number of tokens. int8 codes, their scales and the numbers of experts are left out. Where one model rotates
    the halves of heads and the other adjacent numbers, as Llama's folders and GGUF files do, queries and keys are put in the same order.

    Raises ShapeError for models of different families or shapes, and what `forward` raises.
    """
    function("progress", progress)
    if not (isinstance(names, tuple | list) and len(names) == 2):
        raise OptionError(f"names is {shown(names)}, expected the names of both models")
    runtimes = [Runtime(model, dialect, ops).checked() for model in (ours, theirs)]
    settings = {name: (value, getattr(theirs.config, name)) for name, value in vars(ours.config).items()}
    # GGUF files have float32, config.json more digits
    in_float32 = {name: [np.float32(x) if isinstance(x, float) else x for x in both] for name, both in settings.items()}
    differing = {name: both for name, both in settings.items() if in_float32[name][0] != in_float32[name][1]}
    rope = ["rope"] if "none" in differing.get("rope", ()) else []
    wrong = [f"{name} is {differing[name][0]} and {differing[name][1]}" for name in (*_SHAPE, *rope) if name in differing]
    if wrong:
        raise ShapeError(f"{names[0]} and {names[1]} are models of different families or shapes, expected the same: {', '.join(wrong)}")
    tokens = check_tokens(ours.config, *pad(sequences))
    check_context(ours.config, tokens.lengths)
    check_context(theirs.config, tokens.lengths)
    sums: dict[Key, NDArray[np.float64]] = {}
    measures, done = [], 0
    for row, length in zip(tokens.ids, tokens.lengths, strict=True):
        caches = [new_cache(runtime.model.config, 1, int(length), ops) for runtime in runtimes]
        for ids in np.split(row[:length], range(_ROWS, length, _ROWS)):
            measures.append(_compare_rows(runtimes, caches, ids, sums))
            done += len(ids)
            progress(done, int(tokens.lengths.sum()))
    kl, same_top = map(np.concatenate, zip(*measures, strict=True))
    return ModelDifference(_errors(runtimes[0], sums), kl, same_top, differing)


def _compare_rows(
    runtimes: Sequence[Runtime], caches: Sequence[KVCache], ids: NDArray[np.int64], sums: dict[Key, NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """KL divergence and whether the top token is the same, of the next tokens [R], whose squared errors are added to `sums`."""
    kept: dict[Key, NDArray[np.float32]] = {}
    ours, theirs = (runtime.model.config for runtime in runtimes)
    order = np.empty(ours.head_dim, np.intp)  # the element of their heads that each of ours is
    order[in_pairs(ours)] = in_pairs(theirs)

    def keep(name: str, layer: int | None, array: NDArray) -> None:
        if array.dtype == np.float32 and not name.endswith("_scale"):
            kept[Key(name, layer)] = array.copy()

    def compare(name: str, layer: int | None, array: NDArray) -> None:
        one = kept.pop(Key(name, layer), None)
        if one is not None:
            wide = one.astype(np.float64)
            if ours.rope != theirs.rope and name in (*QUERIES, *KEYS):
                array = array.reshape(len(array), -1, ours.head_dim)[..., order].reshape(wide.shape)
            squares = np.array([np.square(array - wide).sum(), np.square(wide).sum()])
            sums[Key(name, layer)] = sums.get(Key(name, layer), 0) + squares

    def logits(n: int, record: Record) -> NDArray[np.float64]:
        rows = run_cached(replace(runtimes[n], record=record), Tokens.whole(ids[None]), caches[n], np.zeros(1, np.int64))[0]
        return rows.astype(np.float64)

    a, b = logits(0, keep), logits(1, compare)
    return kl_divergence(a, b), a.argmax(axis=1) == b.argmax(axis=1)


def _errors(runtime: Runtime, sums: dict[Key, NDArray[np.float64]]) -> tuple[TensorError, ...]:
    """The relative error of each tensor, and how much it has grown over those of the operation's inputs."""
    error = {key: float(np.sqrt(a / b)) if b else np.inf if a else 0.0 for key, (a, b) in sums.items()}
    found = []
    for operation in operations(runtime.model, runtime.dialect):
        if operation.key in error:
            before = max((error[source] for source in operation.inputs if source in error), default=0.0)
            after = error[operation.key]
            found.append(TensorError(operation.key, after, after - before if after > before else 0.0))
    return tuple(found)
