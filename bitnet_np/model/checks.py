"""The check that a Model's arrays have the shapes, dtypes and layout that its Config says.

Kernels have no bounds checks, so no forward pass begins without this one.
"""

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..base.errors import ShapeError, shown
from ..base.tensor_types import ALL_BLOCK_TYPES, TensorType
from ..kernels.fast.emit import LANES
from .families import FAMILIES
from .records import Blocks, Config, Expert, Layer, Linear, Model, Ternary, shapes_of

_CHECKED: WeakKeyDictionary[Model, str] = WeakKeyDictionary()
"""The first flaw of each model that was checked, or "". A check of a large model takes as long as a token of a small one."""


def check_model(model: Model) -> None:
    """Raises ShapeError for a model with an array whose shape, dtype or layout is not what its Config and records.py say.

    The arrays are those in the memory of this machine. A model is looked at once.
    """
    if isinstance(model, str | PathLike):
        raise ShapeError(f"model is the path {shown(str(model))}, expected a Model, as bitnet_np.load gives of a path")
    if not isinstance(model, Model):
        raise ShapeError(f"model is a {type(model).__name__}, expected a Model")
    flaw = _CHECKED.get(model)
    if flaw is None:
        flaw = _CHECKED[model] = next(_flaws(model), "")
    if flaw:
        raise ShapeError(f"the model's {flaw}")


_BEFORE_BRANCHES = {"attn_norm", "ffn_norm"}
"""The norms that a layer must have if its family has them. A layer without another computes, which is how the judge tries that mistake."""
_TABLES = (np.float32, np.float16, np.uint16)


def _flaws(model: Model) -> Iterator[str]:
    c = model.config
    if not isinstance(c, Config) or c.architecture not in FAMILIES:
        yield f"config is {shown(c)}, expected a Config of one of {', '.join(FAMILIES)}"
    required = {"token_embd", "output_norm", "rope_frequency", *(("local_rope_frequency",) if c.local_layers else ())}
    for name, shape in shapes_of(Model, c).items():
        value = getattr(model, name)
        if name == "position_embd" and isinstance(value, np.ndarray):  # there may be more than the context has
            shape = (max(c.context, *value.shape[:1]), c.width)
        if name in required or (value is not None and name != "local_rope_frequency"):
            yield from _array(name, value, shape, *((np.float64,) if name.endswith("rope_frequency") else ()))
    if not isinstance(model.layers, tuple) or len(model.layers) != c.n_layers or not all(isinstance(w, Layer) for w in model.layers):
        yield f"layers are {_described(model.layers)}, expected a tuple of {c.n_layers} Layers"
    shapes = shapes_of(Layer, c)
    for n, layer in enumerate(model.layers):
        yield from (f"layer {n}: {flaw}" for flaw in _flaws_of_layer(c, shapes, layer))


def _flaws_of_layer(c: Config, shapes: Mapping[str, tuple[int, ...]], layer: Layer) -> Iterator[str]:
    if c.dense_ffn and (layer.ffn_gate is not None) != c.gated:
        yield f"ffn_gate is {_described(layer.ffn_gate)}, but the activation is {c.activation}"
    required = _BEFORE_BRANCHES & set(FAMILIES[c.architecture].norms) | ({"ffn_gate_inp_shexp"} if c.shared_ffn else set())
    for name, shape in shapes.items():
        value = getattr(layer, name)
        if 0 in shape or (name == "ffn_gate_inp_shexp" and not c.shared_ffn):
            if value is not None:
                yield f"{name} is {_described(value)}, but the model has {c.experts} experts and a shared one of width {c.shared_ffn}"
        elif len(shape) == 1:
            if value is not None or name in required:
                yield from _array(name, value, shape)
        elif name != "ffn_gate" or c.gated:
            yield from _flaws_of_linear(name, value, shape)
    yield from _flaws_of_experts(c, layer.experts)


def _flaws_of_experts(c: Config, experts: Any) -> Iterator[str]:
    if not isinstance(experts, tuple) or len(experts) != c.experts or not all(isinstance(expert, Expert) for expert in experts):
        yield f"experts are {_described(experts)}, expected a tuple of {c.experts} Experts"
        return
    for n, expert in enumerate(experts):
        for name, shape in shapes_of(Expert, c).items():
            linear = getattr(expert, name)
            yield from (f"expert {n}: {flaw}" for flaw in _flaws_of_linear(name, linear, shape))
            if isinstance(linear, Linear) and linear.norm is not None:
                yield f"expert {n}: {name} has a separate norm, which no family has"


def _flaws_of_linear(name: str, linear: Any, shape: tuple[int, ...]) -> Iterator[str]:
    if not isinstance(linear, Linear):
        yield f"{name} is {_described(linear)}, expected a Linear"
        return
    if isinstance(linear.weights, Ternary):
        yield from ternary_flaws(name, linear.weights, shape)
    else:
        yield from _array(name, linear.weights, shape)
    for field, size in (("bias", shape[0]), ("norm", shape[1])):
        if getattr(linear, field) is not None:
            yield from _array(f"{name}.{field}", getattr(linear, field), (size,))
    if not isinstance(linear.scale, np.float32 | None):
        yield f"{name}.scale is {_described(linear.scale)}, expected float32"
    if not isinstance(linear.norm_eps, float | np.floating | None):
        yield f"{name}.norm_eps is {_described(linear.norm_eps)}, expected a number"


def ternary_flaws(name: str, weights: Ternary, shape: tuple[int, ...]) -> Iterator[str]:
    """The flaws of a packed matrix that is to have that shape. Its codes are not looked at."""
    if not _is_shape(weights.shape, shape):
        yield f"{name} has shape {shown(weights.shape)}, expected {shape}"
        return
    n, m = shape
    yield from _array(f"{name}.codes", weights.codes, (-(-n // LANES) * -(-m // LANES) * 4 * LANES,), np.uint8)
    if not isinstance(weights.scale, np.float32):
        yield f"{name}.scale is {_described(weights.scale)}, expected float32"
    if weights.blocks is not None:
        yield from _array(f"{name}.blocks", weights.blocks, shape)


def _array(name: str, value: Any, shape: tuple[int, ...], *dtypes: Any) -> Iterator[str]:
    """The flaw of an array that is to have that shape and one of `dtypes`; with two axes it may be a table of blocks."""
    if isinstance(value, Blocks) and len(shape) == 2:
        if not _is_shape(value.shape, shape):
            yield f"{name} has shape {shown(value.shape)}, expected {shape}"
        elif not isinstance(value.type, TensorType) or value.type not in ALL_BLOCK_TYPES:
            yield f"{name} has type {_described(value.type)}, expected one of {', '.join(kind.name for kind in ALL_BLOCK_TYPES)}"
        elif shape[1] % value.type.block:
            yield f"{name} has rows of {shape[1]}, expected a multiple of {value.type.name}'s {value.type.block}"
        else:
            yield from _array(f"{name}.data", value.data, (shape[0], value.type.nbytes(shape[1])), np.uint8)
        return
    kinds = dtypes or (_TABLES if len(shape) == 2 else (np.float32,))
    right = isinstance(value, np.ndarray) and value.dtype in kinds and value.shape == shape
    if not right or not value.flags.c_contiguous or not value.flags.aligned:
        names = " or ".join(kind.__name__ for kind in kinds)
        yield f"{name} is {_described(value)}, expected {names} {list(shape)}, C-contiguous and aligned"


def _is_shape(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value) and value == shape


def _described(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
    layout = "" if value.flags.c_contiguous and value.flags.aligned else ", in another layout"
    return f"{value.dtype} {list(value.shape)}{layout}"
