"""A model file -> a Model: every tensor checked, weights left where they lie in the mapped file."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import families, packing, quants
from .errors import FileFormatError, NonFiniteError, UnsupportedError
from .gguf_file import GGUFFile, Tensor, open_gguf
from .kernels import blocks as block_kernels
from .kernels import cpu
from .model import Blocks, Config, Layer, Linear, Model, Table, Ternary, Weights
from .tensor_types import BF16, BLOCK_TYPES, F16, F32, I2_S, TERNARY_TYPES

_FLOATS: dict[Any, np.dtype] = {F32: np.dtype("<f4"), F16: np.dtype("<f2"), BF16: np.dtype("<u2")}
_TABLES = (*_FLOATS, *BLOCK_TYPES)
_QKV = ("attn_q", "attn_k", "attn_v")


def load(path: str | os.PathLike, progress: Callable[[int, int], None] = lambda done, total: None) -> Model:
    """Open a GGUF file as a model.

    The weights stay in the mapped file: a model takes no more memory than what of the file the system keeps; but TQ1_0 and TQ2_0
    matrices with one scale become packed copies, a quarter of a byte for each weight. Everything is read once, to check that scales,
    norms and tables are finite and that no ternary code is 3. `progress(done, total)` is called after each layer.

    Raises FileFormatError, UnsupportedError or NonFiniteError, naming the file and the key or tensor.
    """
    return model_from(open_gguf(path), progress)


def model_from(file: GGUFFile, progress: Callable[[int, int], None] = lambda done, total: None) -> Model:
    """As `load`, from an open file."""
    config = families.read_config(file)
    parts = _Parts(file, config)
    token_embd = _table(file, parts.take("token_embd.weight", (config.vocab, config.width)))
    position_embd = _table(file, parts.take("position_embd.weight", (config.context, config.width))) if parts.family.positions else None
    output_norm, output_norm_bias = parts.vector("output_norm.weight", config.width), parts.norm_bias("output_norm.bias", config.width)
    output = _table(file, parts.take("output.weight", (config.vocab, config.width))) if "output.weight" in parts.tensors else None
    head_bias = parts.family.head_bias and "output.bias" in parts.tensors
    factors = _rope_factors(parts) if parts.family.rope_factors and "rope_freqs.weight" in parts.tensors else None
    layers = []
    for n in range(config.n_layers):
        layers.append(_layer(parts, n))
        progress(n + 1, config.n_layers)
    output_bias = parts.vector("output.bias", config.vocab) if head_bias else None
    if parts.tensors:
        raise UnsupportedError(f"{file.path}: tensor {next(iter(parts.tensors))} has no place in architecture {config.architecture}")
    frequencies = families.rope_frequencies(config.rope_base, 2 * config.rope_pairs, factors, config.rope_scaling)
    return packing.frozen(
        Model(
            config=config,
            token_embd=token_embd,
            layers=tuple(layers),
            output_norm=output_norm,
            rope_frequency=frequencies,
            output=output,
            output_bias=output_bias,
            output_norm_bias=output_norm_bias,
            position_embd=position_embd,
            rope_factors=factors,
        )
    )


class _Parts:
    """The tensors of a file that nobody has taken yet."""

    def __init__(self, file: GGUFFile, config: Config) -> None:
        self.file, self.config, self.family = file, config, families.FAMILIES[config.architecture]
        self.tensors = dict(file.tensors)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise FileFormatError(f"{self.file.path}: tensor {name} is missing")
        if tensor.shape != shape:
            raise FileFormatError(f"{self.file.path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        return packing.float32(_floats(self.file, self.take(name, (size,))))

    def norm_bias(self, name: str, size: int) -> NDArray[np.float32] | None:
        return self.vector(name, size) if self.config.norm == "layer" else None


def _layer(parts: _Parts, n: int) -> Layer:
    config, family = parts.config, parts.family
    shapes = families.layer_shapes(config)
    fields: dict[str, Any] = {}
    for name in (*family.norms, *family.head_norms):
        fields[name] = parts.vector(f"blk.{n}.{name}.weight", *shapes[name])
        if name in family.norms:
            fields[name + "_bias"] = parts.norm_bias(f"blk.{n}.{name}.bias", *shapes[name])
    fused = f"blk.{n}.attn_qkv"
    matrices = list(family.matrices)
    if fused + ".weight" in parts.tensors:
        fields |= _split(_linear(parts, fused, (config.q_width + 2 * config.kv_width, config.width), _QKV), config)
        matrices = [name for name in matrices if name not in _QKV]
    for name in matrices:
        fields[name] = _linear(parts, f"blk.{n}.{name}", (shapes[name][0], shapes[name][1]), (name,))
    return packing.frozen(Layer(**{name: value for name, value in fields.items() if value is not None}))


def _linear(parts: _Parts, name: str, shape: tuple[int, int], matrices: tuple[str, ...]) -> Linear:
    """A matrix with what belongs to it; `matrices` are the names of those it holds."""
    file, family = parts.file, parts.family
    weights = _weights(file, parts.take(name + ".weight", shape), family)
    required = all(matrix in family.biases for matrix in matrices)
    allowed = required or all(matrix in family.optional_biases for matrix in matrices)
    bias = parts.vector(name + ".bias", shape[0]) if required or (allowed and name + ".bias" in parts.tensors) else None
    scale = parts.vector(name + ".scale", 1)[0] if family.scales and name + ".scale" in parts.tensors else None
    return Linear(weights, bias, scale)


def _split(fused: Linear, config: Config) -> dict[str, Linear]:
    """Rows of a fused matrix: of queries, keys and values, one after the other."""
    rows = np.cumsum([0, config.q_width, config.kv_width, config.kv_width])
    return {
        name: Linear(packing.rows(fused.weights, start, end), None if fused.bias is None else fused.bias[start:end], fused.scale)
        for name, start, end in zip(_QKV, rows[:-1].tolist(), rows[1:].tolist(), strict=True)
    }


def _rope_factors(parts: _Parts) -> NDArray[np.float32]:
    factors = parts.vector("rope_freqs.weight", parts.config.rope_pairs)
    if not (factors > 0).all():
        raise FileFormatError(f"{parts.file.path}: tensor rope_freqs.weight has the value {factors.min()}, expected positive numbers")
    return factors


def _refuse_type(file: GGUFFile, tensor: Tensor, expected: str) -> UnsupportedError:
    remark = f" ({tensor.type.remark})" if tensor.type.remark else ""
    return UnsupportedError(f"{file.path}: tensor {tensor.name} has type {tensor.type.name}{remark}, supported here: {expected}")


def _names(types: Any) -> str:
    return ", ".join(kind.name for kind in types)


def _floats(file: GGUFFile, tensor: Tensor) -> NDArray:
    """A float array in its own dtype (bfloat16 as uint16 bits), all of it finite."""
    if tensor.type not in _FLOATS:
        raise _refuse_type(file, tensor, _names(_FLOATS))
    array = tensor.data.view(_FLOATS[tensor.type]).reshape(tensor.shape)
    if cpu.has_non_finite(array):
        raise NonFiniteError(f"{file.path}: tensor {tensor.name} has NaN or infinity in it")
    return array


def _table(file: GGUFFile, tensor: Tensor) -> Table:
    """A matrix of numbers as it lies in the file, all of it finite."""
    if tensor.type not in _TABLES:
        raise _refuse_type(file, tensor, _names(_TABLES))
    return _blocks(file, tensor) if tensor.type in BLOCK_TYPES else _floats(file, tensor)


def _blocks(file: GGUFFile, tensor: Tensor) -> Blocks:
    n, m = tensor.shape
    found = Blocks(tensor.data.reshape(n, -1), tensor.type, (n, m))
    if block_kernels.has_non_finite(found.data, found.type):
        raise NonFiniteError(f"{file.path}: tensor {tensor.name} has NaN or infinity in it")
    return found


def _weights(file: GGUFFile, tensor: Tensor, family: families.Family) -> Weights:
    """A matrix of a layer."""
    if tensor.type is I2_S:
        return _ternary(file, tensor)
    if tensor.type in TERNARY_TYPES:
        found = _blocks(file, tensor)
        try:
            ternary = quants.ternary_of(found)
        except FileFormatError as error:
            raise FileFormatError(f"{file.path}: tensor {tensor.name}: {error}") from None
        return found if ternary is None else replace(ternary, blocks=found)
    if family.ternary or tensor.type not in _TABLES:
        raise _refuse_type(file, tensor, _names((I2_S, *(TERNARY_TYPES if family.ternary else _TABLES))))
    return _table(file, tensor)


def _ternary(file: GGUFFile, tensor: Tensor) -> Ternary:
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
