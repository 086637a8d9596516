"""Recording another engine's tensors while it runs in the same process: models of transformers (torch) and of mlx-lm.

Neither framework is imported here. What is asked of a model is `named_modules`, of a torch module its hooks, and of a module of mlx that
Python calls it. The points are those of traces/points.py that are inputs or outputs of modules, so there are no rotated queries and keys
and no attention scores.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .errors import OptionError, ShapeError, shown
from .traces.arrays import as_numpy
from .traces.formats import labels
from .traces.points import Key, Trace

Floats = NDArray[np.floating]

EMBEDDING, NORM, LOGITS = Key("inp_embd", None), Key("result_norm", None), Key("result_output", None)

_SCALED = Key("inp_scaled", None)
_FIRST_NORM, _FFN_NORM, _POSITIONS = "input_layernorm", "post_attention_layernorm", "wpe"
_INPUTS = {_FFN_NORM, "self_attn.attn_sub_norm", "self_attn.o_proj", "mlp.ffn_sub_norm", "mlp.down_proj"}
"""Modules whose input no module gives as its output."""


class Recorded(Mapping[Key, Floats]):
    """The points recorded so far: rows of one call after another, [T, width]."""

    def __init__(self) -> None:
        self._rows: dict[Key, list[Floats]] = {}

    def add(self, key: Key, array: Floats) -> None:
        """Append the rows of one call: [1, T, ...] or [T, width], and [1, H, T, K] of normed heads.

        Raises ShapeError for a batch of several sequences.
        """
        if array.ndim > 2:
            if len(array) != 1:
                raise ShapeError(f"{key} has shape {list(array.shape)} in the model, expected one sequence: [1, T, ...]")
            array = array[0]
        if array.ndim < 2 or array.size == 0:
            raise ShapeError(f"{key} has shape {list(array.shape)} in the model, expected [1, T, ...]")
        normed = self._rows.get(Key(key.name.removesuffix("_normed"), key.layer), [])
        if array.ndim == 3 and normed and len(array) != len(normed[-1]) == array.shape[1]:
            array = array.swapaxes(0, 1)  # some engines have the heads first there
        self._rows.setdefault(key, []).append(array.reshape(len(array), -1))

    def __getitem__(self, key: Key) -> Floats:
        rows = np.concatenate(self._rows[key])
        all_rows = sum(map(len, self._rows.get(NORM, [])))
        return rows[-1:] if key == LOGITS and len(rows) < all_rows else rows  # a model that generates computes logits where it needs them

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Key]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class _Place(NamedTuple):
    """A module of a model, and the points that it takes and gives; None where that is no point, or another module gives it, too."""

    module: Any
    input: Key | None
    output: Key | None


@contextmanager
def record_transformers(model: Any) -> Iterator[Trace]:
    """Records the tensors of a torch model while the block runs; yields their trace, which grows with each call of the model.

    The model is called with one sequence [1, T], once for a prefill, and then as often as tokens are decoded over its cache; each call
    appends its rows. Numbers are widened to float32, float64 stays: both are exact. Where the model computed logits of some positions
    only, as `generate` does, the trace has those of the last.

    Afterwards the model is as it was, also after an exception. Raises OptionError for a model that has no module of a known name, and
    ShapeError from within the model's call for several sequences.
    """
    points = Recorded()
    with ExitStack() as stack:
        for place in _places(model):

            def hook(module: Any, arguments: tuple[Any, ...], output: Any, place: _Place = place) -> None:
                _take(points, place, arguments, output)

            stack.callback(place.module.register_forward_hook(hook).remove)
        yield _trace(points, model)


@contextmanager
def record_mlx(model: Any) -> Iterator[Trace]:
    """Records the tensors of an mlx-lm model while the block runs; yields their trace, which grows with each call of the model.

    Everything said of `record_transformers` holds. Modules of mlx have no hooks, and Python looks `__call__` up in the class: while the
    block runs, each recorded module is of a class derived from its own.
    """
    points = Recorded()
    with ExitStack() as stack:
        for place in _places(model):
            kind = place.module.__class__
            stack.callback(object.__setattr__, place.module, "__class__", kind)
            object.__setattr__(place.module, "__class__", _recording(kind, place, points))
        yield _trace(points, model)


def _recording(kind: type, place: _Place, points: Recorded) -> type:
    """A class of modules that are called as those of `kind` are, and recorded."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        output = kind.__call__(self, *arguments, **named)
        _take(points, place, arguments, output)
        return output

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _trace(points: Recorded, model: Any) -> Trace:
    return Trace(points, None, f"a recorded {type(model).__name__}")


def _places(model: Any) -> list[_Place]:
    """The modules of a model to record. Raises OptionError if there is none."""
    if not hasattr(model, "named_modules"):
        raise OptionError(f"model is {shown(model)}, expected a model of transformers or mlx-lm")
    modules = dict(model.named_modules())
    names = labels.told_apart(modules)
    outputs = {path: key for path in modules if (key := labels.direct(names[path])) is not None}
    outputs |= {path: _SCALED for path, key in outputs.items() if key == EMBEDDING and hasattr(modules[path], "embed_scale")}
    given = set(outputs.values())
    has_positions = any(path.rpartition(".")[2] == _POSITIONS for path in modules)
    parallel = bool(getattr(getattr(model, "config", None), "use_parallel_residual", False))
    places = []
    for path, module in modules.items():
        side = labels.side_of(names[path])
        taken = None
        if side is not None and side.module in _INPUTS:
            taken = labels.second(names[path] + ".input", given, None)
        elif side == (_FIRST_NORM, 0, False) and has_positions:
            taken = Key("inpL", None)
        if taken in given or (parallel and side is not None and side.module == _FFN_NORM):
            taken = None
        if taken is not None:
            given.add(taken)
        if taken is not None or path in outputs:
            places.append(_Place(module, taken, outputs.get(path)))
    if not places:
        some = ", ".join(list(modules)[1:4]) or "none"
        raise OptionError(f"model is a {type(model).__name__} with the modules {some}, expected some such as model.layers.0.mlp.down_proj")
    if LOGITS not in given and not any(path in outputs and outputs[path] in (EMBEDDING, _SCALED) and "." not in path for path in modules):
        places.append(_Place(model, None, LOGITS))  # its head is the embedding, and not called as a module
    return places


def _take(points: Recorded, place: _Place, arguments: tuple[Any, ...], output: Any) -> None:
    """Record what a module took and gave in one call."""
    if place.input is not None and arguments:
        points.add(place.input, _numbers(place.input, arguments[0]))
    if place.output is not None:
        first = output[0] if isinstance(output, tuple | list) else output
        points.add(place.output, _numbers(place.output, getattr(first, "logits", first)))


def _numbers(key: Key, array: Any) -> Floats:
    """The numbers of a tensor, copied: the model may change it in place."""
    numbers = as_numpy(str(key), array)
    return np.array(numbers, np.float64 if numbers.dtype == np.float64 else np.float32)
