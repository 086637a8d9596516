"""A model file -> a Model: every tensor checked, float tables left where they lie in the mapped file."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import families, packing, rope, ternarize
from ..errors import Error, FileFormatError, NonFiniteError, OptionError, ShapeError, shown
from ..kernels import blocks as block_kernels
from ..kernels import cpu
from ..model import LONGEST_CONTEXT, Blocks, Config, Layer, Linear, Model, Table, Ternary, Weights, frozen
from ..tensor_types import BLOCK_TYPES, I2_S, TERNARY_TYPES
from ..validate import path_of
from . import gguf_config, hf_load
from .gguf_file import GGUFFile, Tensor, open_gguf
from .hf_config import read_recipe
from .hf_folder import Folder, open_folder
from .parts import FLOATS, Names, Parts, assemble, floats, refuse_type, type_names

_TABLES = (*FLOATS, *BLOCK_TYPES)


OVERRIDABLE: dict[str, type] = {"context": int, "eps": float, "rope_base": float, "rope_scaling": float, "window": int}
"""Fields of Config that do not say what shapes tensors have."""

BEYOND = {"context": LONGEST_CONTEXT}
"""Overrides for `load`: let sequences be longer than the model was trained for. Each number is exact, but the text may make no sense."""


def load(
    path: str | os.PathLike,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    allow_nan: bool = False,
    i2s_layout: str = packing.I2S_DEFAULT,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Open a GGUF file, or a Hugging Face folder, as a model.

    Tables and block types stay in the mapped file; ternary matrices are packed anew (packing.py), and their pages of the file given back,
    so that a model takes no more memory than its file. Everything is read once, to check that scales, norms and tables are finite and that
    no ternary code is 3. `allow_nan` lets NaN and infinity pass, to see what a damaged model computes; a scale below zero or a code of 3
    stays an error. `i2s_layout` is one of packing.I2S_LAYOUTS: no file says which one it has, nor can it be guessed.
    `overrides` are fields of the Config, of OVERRIDABLE, to have instead of what the file says: {"context": 8192}, or BEYOND.
    `progress(done, total)` is called after each layer.

    Raises FileFormatError, UnsupportedError, ShapeError or NonFiniteError, naming the file and the key or tensor; OptionError for another
    layout or for overrides that cannot be; and lets what opening a file raises pass.
    """
    return model_from(open_model(path), progress, allow_nan=allow_nan, i2s_layout=i2s_layout, overrides=overrides)


def open_model(path: str | os.PathLike) -> GGUFFile | Folder:
    """Check the headers of a GGUF file or of a folder's files. Raises as `load` does."""
    path = path_of(path)
    return open_folder(path) if path.is_dir() else open_gguf(path)


def model_from(
    file: GGUFFile | Folder,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    allow_nan: bool = False,
    i2s_layout: str = packing.I2S_DEFAULT,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """As `load`, from what is open."""
    if i2s_layout not in tuple(packing.I2S_LAYOUTS):
        raise OptionError(f"i2s_layout is {i2s_layout!r}, expected one of {', '.join(packing.I2S_LAYOUTS)}")
    if isinstance(file, GGUFFile):
        model = _from_gguf(file, progress, allow_nan, i2s_layout)
    else:
        model = hf_load.model_from(file, progress, allow_nan)
    return overridden(model, overrides) if overrides else model


def overridden(model: Model, overrides: Mapping[str, Any]) -> Model:
    """The model with other numbers in its Config. Raises OptionError for a field, or a value of it, that cannot be."""
    if not isinstance(overrides, Mapping):
        raise OptionError(f"overrides is {shown(overrides)}, expected a mapping of some of {', '.join(OVERRIDABLE)}")
    for name, value in overrides.items():
        if name not in OVERRIDABLE:
            raise OptionError(f"overrides has {shown(name)}, expected some of {', '.join(OVERRIDABLE)}")
        if type(value) is not OVERRIDABLE[name]:
            raise OptionError(f"overrides has {name} = {shown(value)}, expected {OVERRIDABLE[name].__name__}")
    try:
        config = replace(model.config, **overrides)
        if model.position_embd is not None and config.context > model.position_embd.shape[0]:
            raise OptionError(f"the model has learned {model.position_embd.shape[0]} positions, not {config.context}")
        frequency = rope.rope_frequencies(config.rope_base, 2 * config.rope_pairs, model.rope_factors, config.rope_scaling)
        rope.check_angles(config, frequency)
    except Error as error:
        raise OptionError(f"overrides {dict(overrides)}: {error}") from None
    return replace(model, config=config, rope_frequency=frequency)


def read_config(file: GGUFFile | Folder) -> Config:
    """What `model_from` will give the model, without its tensors."""
    return read_recipe(file.config, file.path / "config.json").config if isinstance(file, Folder) else gguf_config.read_config(file)


def _from_gguf(file: GGUFFile, progress: Callable[[int, int], None], allow_nan: bool, i2s_layout: str) -> Model:
    parts = Parts(file, gguf_config.read_config(file), allow_nan, i2s_layout)
    family, tensors = parts.family, parts.tensors
    factors = _rope_factors(parts) if family.rope_factors and "rope_freqs.weight" in tensors else None
    names = Names(
        token_embd="token_embd",
        position_embd="position_embd" if family.positions else None,
        output_norm="output_norm",
        output="output" if "output.weight" in tensors else None,
        output_bias="output" if family.head_bias and "output.bias" in tensors else None,
    )
    return assemble(parts, names, partial(_table, parts), partial(_layer, parts), factors, progress)


def _layer(parts: Parts, n: int) -> Layer:
    config, family = parts.config, parts.family
    shapes = families.layer_shapes(config)
    fields: dict[str, Any] = {}
    for name in (*family.norms, *family.head_norms):
        fields[name] = parts.vector(f"blk.{n}.{name}.weight", *shapes[name])
        if config.norm == "layer" and name in family.norms:
            fields[name + "_bias"] = parts.vector(f"blk.{n}.{name}.bias", *shapes[name])
    sizes = {name: shapes[name] for name in family.matrices}
    if f"blk.{n}.attn_qkv.weight" in parts.tensors:
        fields |= _linears(parts, f"blk.{n}.attn_qkv", {name: sizes.pop(name) for name in families.QKV})
    for name, size in sizes.items():
        fields |= _linears(parts, f"blk.{n}.{name}", {name: size})
    return frozen(Layer(**fields))


def _linears(parts: Parts, name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Linear]:
    """The matrices of one tensor, by their fields: their rows are one after the other in it, and in its bias."""
    family = parts.family
    ends = list(accumulate(shape[0] for shape in shapes.values()))
    tensor = parts.take(name + ".weight", (ends[-1], next(iter(shapes.values()))[1]))
    required = all(field in family.biases for field in shapes)
    allowed = all(field in family.optional_biases for field in shapes) and name + ".bias" in parts.tensors
    bias = parts.vector(name + ".bias", ends[-1]) if required or allowed else None
    scale = parts.vector(name + ".scale", 1)[0] if family.scales and name + ".scale" in parts.tensors else None
    pieces = [slice(end - shape[0], end) for shape, end in zip(shapes.values(), ends, strict=True)]
    return {
        field: Linear(weights, None if bias is None else bias[rows], scale)
        for field, weights, rows in zip(shapes, _weights(parts, tensor, pieces), pieces, strict=True)
    }


def _rope_factors(parts: Parts) -> NDArray[np.float32]:
    factors = parts.vector("rope_freqs.weight", parts.config.rope_pairs)
    if not (factors > 0).all():
        raise FileFormatError(f"{parts.file.path}: tensor rope_freqs.weight has the value {factors.min()}, expected positive numbers")
    return factors


def _table(parts: Parts, tensor: Tensor) -> Table:
    """A matrix of numbers as it lies in the file, all of it finite."""
    if tensor.type not in _TABLES:
        raise refuse_type(parts.file, tensor, type_names(_TABLES))
    return _blocks(parts, tensor) if tensor.type in BLOCK_TYPES else floats(parts, tensor)


def _blocks(parts: Parts, tensor: Tensor, rows: slice = slice(None)) -> Blocks:
    data = tensor.data.reshape(tensor.shape[0], -1)[rows]
    if not parts.allow_nan and block_kernels.has_non_finite(data, tensor.type):
        raise NonFiniteError(f"{parts.file.path}: tensor {tensor.name} has NaN or infinity in it")
    return Blocks(data, tensor.type, (len(data), tensor.shape[1]))


def _weights(parts: Parts, tensor: Tensor, pieces: Sequence[slice]) -> Sequence[Weights]:
    """The matrices of a layer that some rows each of a tensor are."""
    if tensor.type is I2_S:
        return _ternary(parts, tensor, pieces)
    if tensor.type in TERNARY_TYPES:
        return [_ternary_blocks(parts, tensor, rows) for rows in pieces]
    if parts.family.ternary or tensor.type not in _TABLES:
        raise refuse_type(parts.file, tensor, type_names((I2_S, *(TERNARY_TYPES if parts.family.ternary else _TABLES))))
    if tensor.type in BLOCK_TYPES:
        return [_blocks(parts, tensor, rows) for rows in pieces]
    table = floats(parts, tensor)
    return [table[rows] for rows in pieces]


def _ternary_blocks(parts: Parts, tensor: Tensor, rows: slice) -> Weights:
    found = _blocks(parts, tensor, rows)
    try:
        ternary = ternarize.from_blocks(found)
    except FileFormatError as error:
        raise FileFormatError(f"{parts.file.path}: tensor {tensor.name}: {error}") from None
    return found if ternary is None else replace(ternary, blocks=found)


def _ternary(parts: Parts, tensor: Tensor, pieces: Sequence[slice]) -> list[Ternary]:
    n, m = tensor.shape
    try:
        data = packing.I2S_LAYOUTS[parts.i2s_layout](tensor.data, (n, m))
    except ShapeError as error:
        raise FileFormatError(f"{parts.file.path}: tensor {tensor.name} in layout {parts.i2s_layout}: {error}") from None
    codes = data[: -packing.TRAILER]
    scale = data[codes.size : codes.size + 4].view("<f4")[0]
    if scale < 0 or not (parts.allow_nan or np.isfinite(scale)):
        raise NonFiniteError(f"{parts.file.path}: tensor {tensor.name} has the scale {scale}, expected a finite number, not negative")
    if cpu.has_code_three(codes):
        raise FileFormatError(f"{parts.file.path}: tensor {tensor.name} has the ternary code 3, which means nothing: a damaged file")
    width = packing.i2s_row_bytes(m)
    found = [packing.from_i2s(codes[rows.start * width : rows.stop * width], scale, (rows.stop - rows.start, m)) for rows in pieces]
    parts.file.release(tensor)
    return found
