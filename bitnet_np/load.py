"""A model file -> a Model: every tensor checked, weights left where they lie in the mapped file."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import families, packing
from .errors import FileFormatError, NonFiniteError, UnsupportedError
from .gguf_file import GGUFFile, Tensor, open_gguf
from .kernels import cpu
from .model import Layer, Linear, Model, Ternary
from .tensor_types import BF16, F16, F32, I2_S

_FLOATS: dict[Any, np.dtype] = {F32: np.dtype("<f4"), F16: np.dtype("<f2"), BF16: np.dtype("<u2")}


def load(path: str | os.PathLike, progress: Callable[[int, int], None] = lambda done, total: None) -> Model:
    """Open a GGUF file as a model.

    The weights stay in the mapped file: a model takes no more memory than what of the file the system keeps. Everything is
    read once, to check that scales, norms and tables are finite and that no ternary code is 3. `progress(done, total)` is
    called after each layer.

    Raises FileFormatError, UnsupportedError or NonFiniteError, naming the file and the key or tensor.
    """
    return model_from(open_gguf(path), progress)


def model_from(file: GGUFFile, progress: Callable[[int, int], None] = lambda done, total: None) -> Model:
    """As `load`, from an open file."""
    config = families.read_config(file)
    shapes = families.layer_shapes(config)
    tensors = dict(file.tensors)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = tensors.pop(name, None)
        if tensor is None:
            raise FileFormatError(f"{file.path}: tensor {name} is missing")
        if tensor.shape != shape:
            raise FileFormatError(f"{file.path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def layer(n: int) -> Layer:
        parts: dict[str, Any] = {}
        for field, shape in shapes.items():
            tensor = take(f"blk.{n}.{field}.weight", shape)
            parts[field] = Linear(_ternary(file, tensor)) if field in families.MATRICES else _norm(file, tensor)
        return packing.frozen(Layer(**parts))

    vocabulary = (config.vocab, config.width)
    token_embd = _table(file, take("token_embd.weight", vocabulary))
    output_norm = _norm(file, take("output_norm.weight", (config.width,)))
    output = _table(file, take("output.weight", vocabulary)) if "output.weight" in tensors else None
    layers = []
    for n in range(config.n_layers):
        layers.append(layer(n))
        progress(n + 1, config.n_layers)
    if tensors:
        raise UnsupportedError(f"{file.path}: tensor {next(iter(tensors))} has no place in architecture {config.architecture}")
    frequencies = families.rope_frequencies(config.rope_base, config.head_dim)
    return packing.frozen(Model(config, token_embd, tuple(layers), output_norm, frequencies, output))


def _refuse_type(file: GGUFFile, tensor: Tensor, expected: str) -> UnsupportedError:
    return UnsupportedError(f"{file.path}: tensor {tensor.name} has type {tensor.type.name}, supported here: {expected}")


def _table(file: GGUFFile, tensor: Tensor) -> NDArray:
    """A float matrix in its own dtype (bfloat16 as uint16 bits), all of it finite."""
    if tensor.type not in _FLOATS:
        raise _refuse_type(file, tensor, "F32, F16, BF16")
    table = tensor.data.view(_FLOATS[tensor.type]).reshape(tensor.shape)
    if cpu.has_non_finite(table):
        raise NonFiniteError(f"{file.path}: tensor {tensor.name} has NaN or infinity in it")
    return table


def _norm(file: GGUFFile, tensor: Tensor) -> NDArray[np.float32]:
    return packing.float32(_table(file, tensor))


def _ternary(file: GGUFFile, tensor: Tensor) -> Ternary:
    if tensor.type is not I2_S:
        raise _refuse_type(file, tensor, "I2_S")
    n, m = tensor.shape
    codes = tensor.data[: -packing.TRAILER]
    scale = tensor.data[codes.size : codes.size + 4].view("<f4")[0]
    if not (np.isfinite(scale) and scale >= 0):
        raise NonFiniteError(f"{file.path}: tensor {tensor.name} has the scale {scale}, expected a finite number, not negative")
    if cpu.has_code_three(codes):
        raise FileFormatError(
            f"{file.path}: tensor {tensor.name} has the ternary code 3, which means nothing: a damaged file or another layout"
        )
    return Ternary(tensor.data, scale, (n, m))
