"""Recording another engine's tensors while it runs in the same process: models of transformers (torch) and of mlx-lm.

Neither framework is imported here. What is asked of a model is `named_modules`, of a torch module its hooks, and of a module of mlx that
Python calls it. The points are those of traces/points.py that are inputs or outputs of modules, and rotated queries and keys: in
transformers what `apply_rotary_pos_emb` of an attention's Python module gives, in mlx-lm what an attention's `rope` gives, called for the
queries first. There are no attention scores. Of experts it is what routers, transformers' `experts` and mlx-lm's `switch_mlp` take and
give: a token's experts are computed within one function.
"""

import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError, ShapeError, shown
from .arrays import as_numpy
from .formats import labels
from .points import LAYER_INPUT, TOP_EXPERTS, Key, Trace

Floats = NDArray[np.floating]
_Take = Callable[[Any, tuple[Any, ...], Any], None]
"""A hook of torch's: takes a module, its arguments and its output, and records what they are."""

EMBEDDING, NORM, LOGITS = Key("inp_embd", None), Key("result_norm", None), Key("result_output", None)

_SCALED = Key("inp_scaled", None)
_FIRST_NORM, _FFN_NORM, _POSITIONS = "input_layernorm", "post_attention_layernorm", "wpe"
_INPUTS = {module for module, name in labels.INPUTS.items() if name != LAYER_INPUT and name not in labels.MODULES}
"""Modules whose input no module gives as its output."""
_ATTENTION = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn|attention|attn)")
_EXPERTS = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:mlp|block_sparse_moe)\.switch_mlp")
_ROTATE = "apply_rotary_pos_emb"
_ROTATED = ("Qcur_rope", "Kcur_rope")


class Recorded(UserDict[Key, Any]):
    """The points recorded so far: rows of one call after another, [T, width]. `data` has the rows of each call."""

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
        normed = self.data.get(Key(key.name.removesuffix("_normed"), key.layer), [])
        if array.ndim == 3 and normed and key.name.endswith("_normed") and len(array) != len(normed[-1]) == array.shape[1]:
            array = array.swapaxes(0, 1)  # some engines have the heads first there
        self.data.setdefault(key, []).append(array.reshape(len(array), -1))

    def finish(self, model: Any, arguments: tuple[Any, ...], output: Any) -> None:
        """Take what a whole model gave for its head's last logits: it may have scaled or capped them."""
        rows, logits = self.data.get(LOGITS), _first(output)
        if rows and tuple(getattr(logits, "shape", ())) == (1, *rows[-1].shape):
            rows[-1] = _numbers(LOGITS, logits)[0]

    def __getitem__(self, key: Key) -> Floats:
        rows = np.concatenate(self.data[key])
        all_rows = sum(map(len, self.data.get(NORM, [])))
        return rows[-1:] if key == LOGITS and len(rows) < all_rows else rows  # a model that generates computes logits where it needs them


_QUERIES_KEYS_VALUES, _GATE_UP = ("Qcur", "Kcur", "Vcur"), ("ffn_gate", "ffn_up")
_FUSED = re.compile(r"(?:.*\.)?(?:layers|h)\.(\d+)\.(?:self_attn\.qkv_proj|attn\.c_attn|(attention\.query_key_value)|(mlp\.gate_up_proj))")
"""Modules of several matrices: side by side, or interleaved by head in GPT-NeoX (group 2)."""


class _Place(NamedTuple):
    """A module of a model, and the points that it takes and gives; None where that is no point, or another module gives it, too."""

    module: Any
    input: Key | None
    output: Key | None
    behind: tuple[Key | None, ...] = ()  # what follows in the tuple that it gives


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
        for module, take in _takes(points, model):
            stack.callback(module.register_forward_hook(take).remove)
        _record_rotations(points, model, stack)
        yield Trace(points, None, f"a recorded {type(model).__name__}")


def _record_rotations(points: Recorded, model: Any, stack: ExitStack) -> None:
    """Record what the function that rotates queries and keys gives, while an attention of the model runs; until the stack is closed."""
    running: list[tuple[int, int | None]] = []  # the layers of attentions that run, and their head widths
    homes = {}
    for layer, attention in _attentions(model):
        home = sys.modules.get(type(attention).__module__)
        if callable(getattr(home, _ROTATE, None)):
            homes[type(attention).__module__] = home

            head_dim = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)

            def enter(*_: Any, entry: tuple[int, int | None] = (layer, head_dim)) -> None:
                running.append(entry)

            stack.callback(attention.register_forward_pre_hook(enter).remove)
            stack.callback(attention.register_forward_hook(lambda *_: running.clear(), always_call=True).remove)
    for home in homes.values():
        rotate = getattr(home, _ROTATE)

        def recorded(*arguments: Any, rotate: Callable[..., Any] = rotate, **named: Any) -> Any:
            output = rotate(*arguments, **named)
            if running:
                layer, head_dim = running[-1]
                for name, heads in zip(_ROTATED, output, strict=False):
                    if len(heads.shape) == 4 and heads.shape[-1] == head_dim:  # else a part of each head is rotated apart
                        _take_heads(points, iter([name]), layer, None, (), heads)
            return output

        stack.callback(setattr, home, _ROTATE, rotate)
        setattr(home, _ROTATE, recorded)


def _attentions(model: Any) -> Iterator[tuple[int, Any]]:
    """Yields the attentions of a model with the numbers of their layers."""
    for path, module in model.named_modules():
        attention = _ATTENTION.fullmatch(path)
        if attention is not None:
            yield int(attention[1]), module


@contextmanager
def record_mlx(model: Any) -> Iterator[Trace]:
    """Records the tensors of an mlx-lm model while the block runs; yields their trace, which grows with each call of the model.

    Everything said of `record_transformers` holds. Modules of mlx have no hooks, and Python looks `__call__` up in the class: while the
    block runs, each recorded module is of a class derived from its own.
    """
    points = Recorded()
    with ExitStack() as stack:
        takes = list(_takes(points, model))
        for layer, attention in _attentions(model):
            if hasattr(attention, "rope"):
                names = cycle(_ROTATED)  # it is called for queries and keys in turn
                takes.append((attention.rope, partial(_take_heads, points, names, layer)))
        for path, module in model.named_modules():
            if (experts := _EXPERTS.fullmatch(path)) is not None:
                takes.append((module, partial(_take_experts, points, int(experts[1]))))
        for module, take in takes:
            kind = module.__class__
            stack.callback(object.__setattr__, module, "__class__", kind)
            object.__setattr__(module, "__class__", _recording(kind, take))
        yield Trace(points, None, f"a recorded {type(model).__name__}")


def _take_experts(points: Recorded, layer: int, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
    """Record what each token's experts gave, [1, T, k, D], and which they are: arguments are x and [1, T, k]."""
    for name, array in ((TOP_EXPERTS, arguments[1]), ("ffn_moe_down", output)):
        points.add(Key(name, layer), _numbers(Key(name, layer), array))


def _recording(kind: type, take: _Take) -> type:
    """A class of modules that are called as those of `kind` are, and whose arguments and outputs are taken."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        output = kind.__call__(self, *arguments, **named)
        take(self, arguments, output)
        return output

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _takes(points: Recorded, model: Any) -> Iterator[tuple[Any, _Take]]:
    """Yields the modules to record, and what takes their inputs and outputs."""
    places = _places(model)
    for place in places:
        yield place.module, partial(_take, points, place)
    if callable(model) and any(place.output == LOGITS and place.module is not model for place in places):
        yield model, points.finish
    for path, module in model.named_modules():
        fused = _FUSED.fullmatch(path)
        if fused is not None:
            yield module, partial(_take_parts, points, model, fused)


def _places(model: Any) -> list[_Place]:
    """The modules of a model to record. Raises OptionError if there is none."""
    if not hasattr(model, "named_modules"):
        raise OptionError(f"model is {shown(model)}, expected a model of transformers or mlx-lm")
    modules = dict(model.named_modules())
    names = labels.names_to_look_up(modules)
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
            places.append(_Place(module, taken, outputs.get(path), tuple(labels.returned(f"{path}.{i}", None) for i in (1, 2))))
    if not places:
        some = ", ".join(list(modules)[1:4]) or "none"
        raise OptionError(f"model is a {type(model).__name__} with the modules {some}, expected some such as model.layers.0.mlp.down_proj")
    if LOGITS not in given and not any(path in outputs and outputs[path] in (EMBEDDING, _SCALED) and "." not in path for path in modules):
        places.append(_Place(model, None, LOGITS))  # its head is the embedding, and not called as a module
    return places


def _first(output: Any) -> Any:
    """The tensor that a module gave, the first of several."""
    first = output[0] if isinstance(output, tuple | list) else output
    return getattr(first, "logits", first)


def _take(points: Recorded, place: _Place, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
    """Record what a module took and gave in one call."""
    if place.input is not None and arguments:
        points.add(place.input, _numbers(place.input, arguments[0]))
    if place.output is not None:
        points.add(place.output, _numbers(place.output, _first(output)))
    for key, other in zip(place.behind, output[1:] if isinstance(output, tuple) else (), strict=False):
        if key is not None:
            points.add(key, _numbers(key, other))


def _take_parts(points: Recorded, model: Any, fused: re.Match[str], module: Any, arguments: tuple[Any, ...], output: Any) -> None:
    """Record what the matrices of one module gave, each by itself."""
    layer, by_head, gate_up = int(fused[1]), fused[2], fused[3]
    names = _GATE_UP if gate_up else _QUERIES_KEYS_VALUES
    rows = _numbers(Key(names[0], layer), _first(output))
    if gate_up:
        parts = np.split(rows, 2, axis=-1)
    else:
        config = getattr(model, "config", None) or getattr(model, "args", None)
        heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
        if not isinstance(heads, int):
            matrix = f"{type(model).__name__} has queries, keys and values in one matrix"
            raise OptionError(f"{matrix}, expected num_attention_heads in its config")
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = rows.shape[-1] // (heads + 2 * kv_heads)
        if by_head:
            rows = rows.reshape(*rows.shape[:-1], heads, 3, head_dim).swapaxes(-3, -2).reshape(rows.shape)
        parts = np.split(rows, [heads * head_dim, (heads + kv_heads) * head_dim], axis=-1)
    for name, part in zip(names, parts, strict=True):
        points.add(Key(name, layer), part)


def _take_heads(points: Recorded, names: Iterator[str], layer: int, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
    """Record heads [1, H, T, K] under the next name."""
    key = Key(next(names), layer)
    rows = _numbers(key, output).swapaxes(1, 2)
    points.add(key, rows.reshape(*rows.shape[:2], -1))


def _numbers(key: Key, array: Any) -> Floats:
    """The numbers of a tensor, copied: the model may change it in place."""
    numbers = as_numpy(str(key), array)
    kinds = {np.dtype(np.float64): np.float64} if key.name != TOP_EXPERTS else {numbers.dtype: np.int32}
    return np.array(numbers, kinds.get(numbers.dtype, np.float32))
