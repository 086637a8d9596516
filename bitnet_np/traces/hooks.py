"""Recording another engine's tensors while it runs in the same process: models of transformers (torch) and of mlx-lm.

Neither framework is imported here. A model must have `named_modules`, and Python must call its modules. Python looks `__call__` up in the
class, so a module is recorded by giving it a derived class. Recorded points are those of traces/points.py that are inputs or outputs of
modules, and rotated queries and keys: results of `apply_rotary_pos_emb` in transformers, of an attention's `rope` in mlx-lm, which is
called for the queries first. Attention scores are not recorded. For experts, the inputs and outputs of routers, transformers' `experts` and
mlx-lm's `switch_mlp` are recorded, because a token's experts are computed within one function.
"""

import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError, ShapeError, shown
from . import labels
from .arrays import as_numpy
from .points import LAYER_INPUT, TOP_EXPERTS, Key, Trace

Floats = NDArray[np.floating]
Arguments = tuple[Any, ...]

EMBEDDING, NORM, LOGITS = Key("inp_embd", None), Key("result_norm", None), Key("result_output", None)

_SCALED = Key("inp_scaled", None)
_FIRST_NORM, _FFN_NORM, _POSITIONS = "input_layernorm", "post_attention_layernorm", "wpe"
_INPUTS = {module for module, name in labels.INPUTS.items() if name != LAYER_INPUT and name not in labels.MODULES}
"""Modules whose input no module gives as its output."""
_ROTATE = "apply_rotary_pos_emb"
_ROTATED = ("Qcur_rope", "Kcur_rope")
_QUERIES_KEYS_VALUES, _GATE_UP = ("Qcur", "Kcur", "Vcur"), ("ffn_gate", "ffn_up")
_ATTENTION = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn|attention|attn)")
_EXPERTS = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:mlp|block_sparse_moe)\.switch_mlp")
_FUSED = re.compile(r"(?:.*\.)?(?:layers|h)\.(\d+)\.(?:self_attn\.qkv_proj|attn\.c_attn|(attention\.query_key_value)|(mlp\.gate_up_proj))")
"""Modules of several matrices: side by side, or interleaved by head in GPT-NeoX (group 2)."""


class _Hook(NamedTuple):
    """A module to record."""

    module: Any
    take: Callable[[Arguments, Any], None] = lambda arguments, output: None  # records what it took and gave in one call
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # of each call


class Recorded(UserDict[Key, Any]):
    """The points recorded so far: rows of one call after another, [T, width]. `data` has the rows of each call."""

    def add(self, key: Key, tensor: Any) -> None:
        """Append the rows of one call: [1, T, ...] or [T, width], and [1, H, T, K] of normed heads.

        Raises ShapeError for a batch of several sequences.
        """
        array = _numbers(key, tensor)
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

    def add_heads(self, key: Key, tensor: Any) -> None:
        """Append heads [1, H, T, K]."""
        rows = _numbers(key, tensor).swapaxes(1, 2)
        self.add(key, rows.reshape(*rows.shape[:2], -1))

    def __getitem__(self, key: Key) -> Floats:
        rows = np.concatenate(self.data[key])
        all_rows = sum(map(len, self.data.get(NORM, [])))
        return rows[-1:] if key == LOGITS and len(rows) < all_rows else rows  # a model that generates computes logits where it needs them


@contextmanager
def record_transformers(model: Any) -> Iterator[Trace]:
    """Records the tensors of a model of transformers while the block runs; yields their trace, which grows with each call of the model.

    The model is called with one sequence [1, T], once for a prefill, and then as often as tokens are decoded over its cache; each call
    appends its rows. Numbers are widened to float32, float64 stays: both are exact. If the model computed logits of some positions
    only, as `generate` does, the trace has those of the last.

    Afterwards the model is as it was, also after an exception. Raises OptionError for a model that has no module of a known name, and
    ShapeError from within the model's call for several sequences.
    """
    if not hasattr(model, "named_modules"):
        raise OptionError(f"model is {shown(model)}, expected a model of transformers or mlx-lm")
    points, modules = Recorded(), dict(model.named_modules())
    with ExitStack() as stack:
        for hook in [*_of_modules(points, model, modules), *_of_functions(points, model, modules)]:
            kind = hook.module.__class__
            stack.callback(object.__setattr__, hook.module, "__class__", kind)
            object.__setattr__(hook.module, "__class__", _recording(kind, hook))
        yield Trace(points, None, f"a recorded {type(model).__name__}")


record_mlx = record_transformers
"""The same of a model of mlx-lm."""


def _recording(kind: type, hook: _Hook) -> type:
    """A class of modules that are called as those of `kind` are, and whose arguments and outputs are taken."""

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        with hook.around():
            output = kind.__call__(self, *arguments, **named)
        hook.take(arguments, output)
        return output

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


# --- inputs and outputs of modules ----------------------------------------------------------------------------------------------------


def _of_modules(points: Recorded, model: Any, modules: dict[str, Any]) -> Iterator[_Hook]:
    """Yields the modules that take or give points. Raises OptionError if there is none."""
    names = labels.names_to_look_up(modules)
    outputs = {path: key for path in modules if (key := labels.direct(names[path])) is not None}
    outputs |= {path: _SCALED for path, key in outputs.items() if key == EMBEDDING and hasattr(modules[path], "embed_scale")}
    inputs = _inputs(model, names, set(outputs.values()))
    if not inputs and not outputs:
        first = ", ".join(list(modules)[1:4]) or "none"
        raise OptionError(f"model is a {type(model).__name__} with the modules {first}, expected some such as model.layers.0.mlp.down_proj")
    for path in inputs | outputs:
        others = tuple(labels.returned(f"{path}.{i}", None) for i in (1, 2))
        yield _Hook(modules[path], partial(_take, points, inputs.get(path), (outputs.get(path), *others)))
    if LOGITS in outputs.values():
        if callable(model):
            yield _Hook(model, partial(_take_last_logits, points))
    elif not any(key in (EMBEDDING, _SCALED) and "." not in path for path, key in outputs.items()):
        yield _Hook(model, partial(_take, points, None, (LOGITS,)))  # its head is the embedding, and not called as a module


def _inputs(model: Any, names: dict[str, str], given: set[Key]) -> dict[str, Key]:
    """The points that modules take and no module gives, by path."""
    has_positions = any(path.rpartition(".")[2] == _POSITIONS for path in names)
    parallel = bool(getattr(getattr(model, "config", None), "use_parallel_residual", False))
    inputs: dict[str, Key] = {}
    for path, name in names.items():
        side, taken = labels.side_of(name), None
        if side is not None and side.module in _INPUTS and not (parallel and side.module == _FFN_NORM):
            taken = labels.second(name + ".input", given, None)
        elif side == (_FIRST_NORM, 0, False) and has_positions:
            taken = Key("inpL", None)
        if taken is not None and taken not in given | set(inputs.values()):
            inputs[path] = taken
    return inputs


def _take(points: Recorded, taken: Key | None, given: tuple[Key | None, ...], arguments: Arguments, output: Any) -> None:
    """Record what a module took and gave in one call; given: the points of its output, or of the items of a tuple."""
    if taken is not None and arguments:
        points.add(taken, arguments[0])
    others = output[1:] if isinstance(output, tuple) else ()
    for key, tensor in zip(given, (_first(output), *others), strict=False):
        if key is not None:
            points.add(key, tensor)


def _take_last_logits(points: Recorded, arguments: Arguments, output: Any) -> None:
    """Take what a whole model gave for its head's last logits: it may have scaled or capped them."""
    rows, logits = points.data.get(LOGITS), _first(output)
    if rows and tuple(getattr(logits, "shape", ())) == (1, *rows[-1].shape):
        rows[-1] = _numbers(LOGITS, logits)[0]


def _first(output: Any) -> Any:
    """The tensor that a module gave, the first of several."""
    first = output[0] if isinstance(output, tuple | list) else output
    return getattr(first, "logits", first)


def _numbers(key: Key, array: Any) -> Floats:
    """The numbers of a tensor, copied: the model may change it in place."""
    numbers = as_numpy(str(key), array)
    kinds = {np.dtype(np.float64): np.float64} if key.name != TOP_EXPERTS else {numbers.dtype: np.int32}
    return np.array(numbers, kinds.get(numbers.dtype, np.float32))


# --- what has no separate module ------------------------------------------------------------------------------------------------------


def _of_functions(points: Recorded, model: Any, modules: dict[str, Any]) -> Iterator[_Hook]:
    """Yields the modules in which several matrices are one, rotations are computed, or experts."""
    for path, module in modules.items():
        if (fused := _FUSED.fullmatch(path)) is not None:
            yield _Hook(module, partial(_take_parts, points, model, fused))
        if (experts := _EXPERTS.fullmatch(path)) is not None:
            yield _Hook(module, partial(_take_experts, points, int(experts[1])))
        if (attention := _ATTENTION.fullmatch(path)) is None:
            continue
        layer, home = int(attention[1]), sys.modules.get(type(module).__module__)
        if hasattr(module, "rope"):
            keys = cycle([Key(name, layer) for name in _ROTATED])  # it is called for queries and keys in turn
            yield _Hook(module.rope, lambda arguments, output, keys=keys: points.add_heads(next(keys), output))  # type: ignore[misc]
        elif callable(getattr(home, _ROTATE, None)):
            head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
            yield _Hook(module, around=partial(_rotating, points, home, layer, head_dim))


def _take_parts(points: Recorded, model: Any, fused: re.Match[str], arguments: Arguments, output: Any) -> None:
    """Record the parts of what a module of several matrices gave."""
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


def _take_experts(points: Recorded, layer: int, arguments: Arguments, output: Any) -> None:
    """Record what each token's experts gave, [1, T, k, D], and which they are: arguments are x and [1, T, k]."""
    points.add(Key(TOP_EXPERTS, layer), arguments[1])
    points.add(Key("ffn_moe_down", layer), output)


@contextmanager
def _rotating(points: Recorded, home: Any, layer: int, head_dim: int | None) -> Iterator[None]:
    """Context of an attention's call, in which the function that rotates its queries and keys is recorded."""
    rotate = getattr(home, _ROTATE)

    def recorded(*arguments: Any, **named: Any) -> Any:
        output = rotate(*arguments, **named)
        for name, heads in zip(_ROTATED, output, strict=False):
            if len(heads.shape) == 4 and heads.shape[-1] == head_dim:  # else a part of each head is rotated apart
                points.add_heads(Key(name, layer), heads)
        return output

    setattr(home, _ROTATE, recorded)
    try:
        yield
    finally:
        setattr(home, _ROTATE, rotate)
