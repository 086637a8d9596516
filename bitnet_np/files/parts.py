"""The tensors of an open model file or folder, taken one by one: what is missing, misshapen or not finite is refused by its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import families, packing, rope, widen
from ..errors import FileFormatError, NonFiniteError, UnsupportedError
from ..kernels import cpu
from ..model import Config, Layer, Model, Table, frozen
from ..tensor_types import BF16, F16, F32, F64
from .gguf_file import Tensor

FLOATS: dict[Any, np.dtype] = {F32: np.dtype("<f4"), F16: np.dtype("<f2"), BF16: np.dtype("<u2"), F64: np.dtype("<f8")}


class Source(Protocol):
    """What has tensors."""

    @property
    def path(self) -> Path:
        """For messages."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def release(self, tensor: Tensor) -> None:
        """Its data will not be read again."""


class Parts:
    """The tensors of a file that nobody has taken yet."""

    def __init__(self, file: Source, config: Config, allow_nan: bool = False, i2s_layout: str = packing.I2S_DEFAULT) -> None:
        self.file, self.config, self.family = file, config, families.FAMILIES[config.architecture]
        self.allow_nan, self.i2s_layout = allow_nan, i2s_layout
        self.tensors = dict(file.tensors)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise FileFormatError(f"{self.file.path}: tensor {name} is missing")
        if tensor.shape != shape:
            raise FileFormatError(f"{self.file.path}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        return widen.float32(floats(self, self.take(name, (size,))))


def refuse_type(file: Source, tensor: Tensor, expected: str) -> UnsupportedError:
    remark = f" ({tensor.type.remark})" if tensor.type.remark else ""
    return UnsupportedError(f"{file.path}: tensor {tensor.name} has type {tensor.type.name}{remark}, supported here: {expected}")


def type_names(types: Any) -> str:
    return ", ".join(kind.name for kind in types)


def floats(parts: Parts, tensor: Tensor) -> NDArray:
    """A float array in its own dtype (bfloat16 as uint16 bits; float64 as float32, which must hold it), all of it finite."""
    if tensor.type not in FLOATS:
        raise refuse_type(parts.file, tensor, type_names(FLOATS))
    array = np.require(tensor.data.view(FLOATS[tensor.type]).reshape(tensor.shape), requirements="A")  # a copy where a file aligns nothing
    if tensor.type is F64:
        array = _narrowed(parts, tensor, array)
    if not parts.allow_nan and cpu.has_non_finite(array):
        raise NonFiniteError(f"{parts.file.path}: tensor {tensor.name} has NaN or infinity in it")
    return array


def _narrowed(parts: Parts, tensor: Tensor, wide: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore", under="ignore"):
        narrow = wide.astype(np.float32)
    lost = (narrow != wide) & ~np.isnan(wide)
    if lost.any():
        raise UnsupportedError(
            f"{parts.file.path}: tensor {tensor.name} of type F64 has the number {float(wide[lost][0])!r}, which float32 cannot hold"
        )
    return narrow


def frequencies(parts: Parts, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:  # [J]
    """RoPE's, all scaling included, if every angle of the context can be computed."""
    config = parts.config
    found = rope.rope_frequencies(config.rope_base, 2 * config.rope_pairs, factors, config.rope_scaling)
    try:
        rope.check_angles(config, found)
    except UnsupportedError as error:
        raise UnsupportedError(f"{parts.file.path}: {error}") from None
    return found


@dataclass(frozen=True)
class Names:
    """What the tensors outside of layers are called, without .weight and .bias. None: a model without it."""

    token_embd: str
    position_embd: str | None
    output_norm: str
    output: str | None
    output_bias: str | None


def assemble(
    parts: Parts,
    names: Names,
    table: Callable[[Tensor], Table],
    layer: Callable[[int], Layer],
    factors: NDArray[np.float32] | None,
    progress: Callable[[int, int], None],
) -> Model:
    """A model of all tensors, each of them once. table: of the embeddings and the head; layer: of a number; factors: of RoPE.

    Raises UnsupportedError for a tensor that nobody has taken.
    """
    c = parts.config

    def matrix(name: str, rows: int) -> Table:
        return table(parts.take(name + ".weight", (rows, c.width)))

    token_embd = matrix(names.token_embd, c.vocab)
    position_embd = matrix(names.position_embd, c.context) if names.position_embd else None
    output_norm = parts.vector(names.output_norm + ".weight", c.width)
    output_norm_bias = parts.vector(names.output_norm + ".bias", c.width) if c.norm == "layer" else None
    output = matrix(names.output, c.vocab) if names.output else None
    output_bias = parts.vector(names.output_bias + ".bias", c.vocab) if names.output_bias else None
    layers = []
    for n in range(c.n_layers):
        layers.append(layer(n))
        progress(n + 1, c.n_layers)
    if parts.tensors:
        raise UnsupportedError(f"{parts.file.path}: tensor {next(iter(parts.tensors))} has no place in architecture {c.architecture}")
    return frozen(
        Model(
            config=c,
            token_embd=token_embd,
            layers=tuple(layers),
            output_norm=output_norm,
            rope_frequency=frequencies(parts, factors),
            output=output,
            output_bias=output_bias,
            output_norm_bias=output_norm_bias,
            position_embd=position_embd,
            rope_factors=factors,
        )
    )
