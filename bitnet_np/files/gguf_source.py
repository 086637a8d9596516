"""A GGUF file as the source of a Model: its tensors, by the names of our fields."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import FileFormatError, NonFiniteError, ShapeError
from ..base.tensor_types import ALL_BLOCK_TYPES, I2_S, TERNARY_TYPES
from ..kernels import cpu
from ..kernels.ggml import blocks as block_kernels
from ..model import packing, ternarize
from ..model.families import FAMILIES
from ..model.records import GATE_UP, QKV, Blocks, Config, Expert, Linear, LongRope, Table, Ternary, Weights
from .gguf_config import has_longrope, read_config
from .gguf_file import GGUFFile
from .gguf_names import FACTORS, INNER_NORM, KEYS, LONGROPE, matrix_name, tensor_name
from .overrides import check_has
from .tensors import FLOATS, CheckedTensors, Shapes, Tensor, of_file, rows_of

_TABLES = (*FLOATS, *ALL_BLOCK_TYPES)


class GGUFSource:
    """An open GGUF file, or all files of a model in several."""

    def __init__(self, file: GGUFFile) -> None:
        self.path, self.size, self.tensors = file.path, file.size, file.tensors  # bytes of all files, tensors by the file's own names
        self.kind, self.version, self._file = f"GGUF v{file.version}", file.version, file
        self.metadata: Mapping[str, Any] = file.metadata
        self.keys = self.metadata

    def without(self, key: str) -> "GGUFSource":
        """The file as if its metadata had not this key. Raises OptionError if it has not."""
        check_has(self.path, key, key in self._file.metadata)
        return GGUFSource(replace(self._file, metadata={name: value for name, value in self.metadata.items() if name != key}))

    @cached_property
    def config(self) -> Config:
        """From the metadata, and from the shape of the embedding."""
        return read_config(self._file)

    def weights(self, allow_nan: bool, i2s_layout: str) -> "GGUFWeights":
        """The tensors of the file. `i2s_layout` is one of packing.I2S_LAYOUTS."""
        return GGUFWeights(self._file, self.config, allow_nan, i2s_layout)


class GGUFWeights(CheckedTensors):
    """The weights of a GGUF file, by the names of our fields."""

    def __init__(self, file: GGUFFile, c: Config, allow_nan: bool, i2s_layout: str) -> None:
        super().__init__(file.path, file.tensors, allow_nan, c)
        self._family, self._i2s_layout = FAMILIES[c.architecture], i2s_layout
        if has_longrope(file, c.architecture):
            original = file.get(f"{c.architecture}.{KEYS['yarn_original'].name}", int, c.context)
            lists = {which: tuple(self.take_vector(name, c.rope_pairs).tolist()) for which, name in LONGROPE.items()}
            with of_file(file.path):
                self.config = replace(c, longrope=LongRope(original, **lists))

    def has(self, field: str) -> bool:
        """Whether the tensor is in the file, and the architecture may have it."""
        return tensor_name(field) in self and (field != "output_bias" or self._family.head_bias)

    def vector(self, field: str, size: int, layer: int | None = None) -> NDArray[np.float32]:
        """From <field>.weight or .bias, in a layer from blk.<n>.<field>."""
        return self.take_vector(tensor_name(field, layer), size)

    def table(self, field: str, shape: tuple[int, int]) -> Table:
        """Floats or blocks, as they lie in the file. Floats may be transposed, [D, V]."""
        tensor = self.take(tensor_name(field), shape, shape[::-1])
        self.check_type(tensor, _TABLES)
        if tensor.type not in ALL_BLOCK_TYPES:
            return self.upright(tensor, shape)
        if tensor.shape != shape:
            remark = f"as only floats may be transposed, and its type is {tensor.type.name}"
            raise FileFormatError(f"{self.path}: tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(shape)}, {remark}")
        return self._blocks(tensor)

    def rope_factors(self) -> NDArray[np.float32] | None:
        """From rope_freqs.weight, if the architecture may have it."""
        if not self._family.rope_factors or FACTORS not in self:
            return None
        factors = self.take_vector(FACTORS, self.config.rope_pairs)
        if not (factors > 0).all():
            raise FileFormatError(f"{self.path}: tensor {FACTORS} has the value {factors.min()}, expected positive numbers")
        return factors

    def place(self, field: str, layer: int) -> str:
        """blk.<n>.<field>, or attn_qkv, or ffn_up in a family whose ffn_up contains the gate."""
        if field in GATE_UP and "ffn_up" in self._family.fused:
            return f"blk.{layer}.ffn_up"
        if field in QKV and f"blk.{layer}.attn_qkv.weight" in self:
            return f"blk.{layer}.attn_qkv"
        return matrix_name(self.config, field, layer)

    def experts(self, shapes: Mapping[str, tuple[int, int]], layer: int) -> tuple[Expert, ...]:
        """From blk.<n>.<field>_exps, a matrix of each expert after the other's; in older files from blk.<n>.<field>.<expert>."""
        count, fields = self.config.experts, {}
        for field, (n, m) in shapes.items():
            name = f"blk.{layer}.{field}_exps.weight"
            if name not in self:
                fields[field] = [self.linears(f"blk.{layer}.{field}.{e}", {field: (n, m)})[field] for e in range(count)]
                continue
            tensor = self.take(name, (count, n, m))
            self.check_type(tensor, _TABLES, ", because I2_S has one scale for a whole tensor" if tensor.type is I2_S else "")
            pieces = [slice(e * n, (e + 1) * n) for e in range(count)]
            fields[field] = [Linear(weights) for weights in self._matrices(replace(tensor, shape=(count * n, m)), pieces)]
        return tuple(Expert(**dict(zip(fields, of_one, strict=True))) for of_one in zip(*fields.values(), strict=True))

    def linears(self, name: str, shapes: Shapes) -> dict[str, Linear]:
        """From .weight, .bias and .scale, and the norm of an input."""
        family, rows = self._family, rows_of(shapes)
        *_, (n, m) = ((rows[field].stop, shape[1]) for field, shape in shapes.items())
        tensor = self.take(name + ".weight", (n, m))
        required = all(field in family.biases for field in shapes)
        allowed = all(field in family.optional_biases for field in shapes) and name + ".bias" in self
        bias = self.take_vector(name + ".bias", n) if required or allowed else None
        scale = self.take_vector(name + ".scale", 1)[0] if family.scales and name + ".scale" in self else None
        inner = name + INNER_NORM
        norm = self.take_vector(inner, m) if family.inner_norms and inner in self else None
        matrices = zip(rows.items(), self._matrices(tensor, [*rows.values()]), strict=True)
        return {field: Linear(weights, None if bias is None else bias[part], scale, norm) for (field, part), weights in matrices}

    def _matrices(self, tensor: Tensor, pieces: Sequence[slice]) -> Sequence[Weights]:
        """Matrices of a layer, each of them some rows of a tensor."""
        if tensor.type is I2_S:
            return self._from_i2s(tensor, pieces)
        self.check_type(tensor, (I2_S, *(TERNARY_TYPES if self._family.ternary else _TABLES)))
        if tensor.type not in ALL_BLOCK_TYPES:
            table = self.floats(tensor)
            return [table[rows] for rows in pieces]
        blocks = [self._blocks(tensor, rows) for rows in pieces]
        if tensor.type not in TERNARY_TYPES:
            return blocks
        with of_file(f"{self.path}: tensor {tensor.name}"):
            packed = [ternarize.from_blocks(block) for block in blocks]  # None if its blocks have different scales
        return [block if ternary is None else replace(ternary, blocks=block) for block, ternary in zip(blocks, packed, strict=True)]

    def _blocks(self, tensor: Tensor, rows: slice = slice(None)) -> Blocks:
        data = tensor.data.reshape(tensor.shape[0], -1)[rows]
        if not self.allow_nan and block_kernels.has_non_finite(data, tensor.type):
            raise self.non_finite(tensor)
        return Blocks(data, tensor.type, (len(data), tensor.shape[1]))

    def _from_i2s(self, tensor: Tensor, pieces: Sequence[slice]) -> list[Ternary]:
        """I2_S matrices packed; the pages of the file are released."""
        where = f"{self.path}: tensor {tensor.name}"
        n, m = tensor.shape
        try:
            data = packing.I2S_LAYOUTS[self._i2s_layout](tensor.data, (n, m))
        except ShapeError as error:
            raise FileFormatError(f"{where} in layout {self._i2s_layout}: {error}") from None
        codes = data[: -packing.TRAILER]
        scale = data[codes.size : codes.size + 4].view("<f4")[0]
        if scale < 0 or not (self.allow_nan or np.isfinite(scale)):
            raise NonFiniteError(f"{where} has the scale {scale}, expected a finite number, not negative")
        if cpu.has_code_three(codes):
            raise FileFormatError(f"{where} has the ternary code 3, which means nothing: a damaged file")
        width = packing.i2s_row_bytes(m)
        bounds = [(rows.start, rows.stop) for rows in pieces]
        matrices = [ternarize.from_i2s(codes[start * width : stop * width], scale, (stop - start, m)) for start, stop in bounds]
        tensor.release()
        return matrices
