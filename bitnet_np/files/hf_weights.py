"""The tensors of a Hugging Face folder, by the names of our fields.

Float tables stay in the mapped files; ternary matrices are packed one at a time. transformers stores ternary matrices in two ways, and
config.json says which (hf_config.Quantization):

* packed: bytes [ceil(N / 4), M]; bits 2i and 2i + 1 of row r are row i * ceil(N / 4) + r of the matrix, plus 1;
* master weights, quantised here by the rule of ternarize.from_masters.

A Ternary's scale is a float32. In general, neither 1 / weight_scale nor the mean of master weights is a float32 number: they are computed
in higher precision and rounded once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import FileFormatError, NonFiniteError, UnsupportedError
from ..base.tensor_types import F32
from ..kernels import cpu
from ..kernels import packing as kernels
from ..model import ternarize, widen
from ..model.records import Expert, Linear, Ternary, Weights, frozen
from .hf_config import Recipe
from .hf_model_types import FUSED_EXPERTS, FUSED_ROUTER, TextPart
from .mlx_groups import GROUPED, Form, take_numbers
from .safetensors_file import TYPES
from .tensors import FLOATS, CheckedTensors, Shapes, Tensor, rows_of


class HFWeights(CheckedTensors):
    """The weights of a Hugging Face folder, by the names of our fields."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], recipe: Recipe, allow_nan: bool) -> None:
        super().__init__(path, _model_tensors(path, tensors, recipe), allow_nan, recipe.config)
        self._recipe, kind = recipe, recipe.kind
        self.norm_offset, self.stated_dtype = float(kind.add_one), recipe.stated_dtype
        self._modules = {"token_embd": kind.embedding, "position_embd": kind.positions, "output_norm": kind.norm, "output": "lm_head"}

    def place(self, field: str, layer: int | None = None) -> str:
        """The module that has the tensors of a field, alone or with others'."""
        kind = self._recipe.kind
        return self._modules[field] if layer is None else kind.layer.format(layer) + kind.modules[field]

    def has(self, field: str) -> bool:
        """A separate head unless the head is the embedding (see mlx_groups for one in two tables), and its bias if there is one."""
        if field != "output":
            return self._recipe.kind.head_bias
        return not self._recipe.tied or "lm_head.scales" in self

    def vector(self, field: str, size: int, layer: int | None = None) -> NDArray[np.float32]:
        """From <module>.weight, or .bias for a field that ends in _bias."""
        plain = field.removesuffix("_bias")
        module = self.place(plain, layer)
        if plain == field and (form := self._form(module)) is not None:  # the gate of a shared expert: a matrix of one row
            return take_numbers(self, module, (1, size), form).reshape(size)
        name = f"{module}.{'weight' if plain == field else 'bias'}"
        values = self.take_vector(name, size, row=field == "ffn_gate_inp_shexp")
        with np.errstate(invalid="ignore"):  # a signalling NaN, where the caller allows NaN
            return values + np.float32(self.norm_offset) if self.norm_offset else values

    def table(self, field: str, shape: tuple[int, int]) -> NDArray:
        """Floats, as they lie in the file, where they may be transposed, [D, V]; or those that groups stand for."""
        if (form := self._form(module := self.place(field))) is not None:
            return take_numbers(self, module, shape, form, rounded=field != "output")
        return self.upright(self.take(module + ".weight", shape, shape[::-1]), shape)

    def rope_factors(self) -> NDArray[np.float32] | None:
        """Llama 3's, computed from config.json; in float32, as a GGUF file has them."""
        factors = self._recipe.rope_factors
        return None if factors is None else factors.astype(np.float32)

    def linears(self, name: str, shapes: Shapes) -> dict[str, Linear]:
        """From .weight and .bias; where config.json quantises the module, also from .weight_scale and .rms_norm.weight.

        Matrices that are rows of one lie one after the other, or a head's rows of each after those of the head before.
        """
        c, recipe, quantization = self.config, self._recipe, self._recipe.quantization
        rows: dict[str, Any] = dict(rows_of(shapes))
        *_, (n, m) = ((part.stop, shapes[field][1]) for field, part in rows.items())
        if recipe.kind.fused_by_head and len(shapes) > 1:
            if c.kv_heads != c.heads:
                raise UnsupportedError(f"{self.path}: {name} has {c.kv_heads} key-value heads for {c.heads}, expected as many")
            rows = dict(
                zip(shapes, np.arange(n).reshape(c.heads, len(shapes), c.head_dim).swapaxes(0, 1).reshape(len(shapes), -1), strict=True)
            )
        norm = norm_eps = None
        matrices: dict[str, Weights]
        if quantization is None or not quantization.converts(name):
            matrix = self._floats(name, n, m)
            matrices = {field: matrix[part] for field, part in rows.items()}
        else:
            (field,) = shapes  # no model type has several quantised matrices in a module
            packed = quantization.packed
            matrices = {field: packed_matrix(self, name, n, m, quantization.divides) if packed else _quantized_matrix(self, name, n, m)}
            if quantization.inner_norms:
                norm, norm_eps = self.take_vector(name + ".rms_norm.weight", m), quantization.norm_eps
        bias = self.take_vector(name + ".bias", n) if shapes.keys() <= set(recipe.biases) else None
        return {field: Linear(matrices[field], None if bias is None else bias[part], None, norm, norm_eps) for field, part in rows.items()}

    def experts(self, shapes: Mapping[str, tuple[int, int]], layer: int) -> tuple[Expert, ...]:
        """From modules of each expert's own, from mlx-lm's three tensors of all, or from the two that transformers 5 has in memory."""
        kind, count = self._recipe.kind, self.config.experts
        prefix = kind.layer.format(layer)
        fused = prefix + FUSED_EXPERTS
        block = kind.modules["ffn_gate_inp"].removesuffix("gate")
        switched = {field: f"{prefix}{block}switch_mlp.{field.removeprefix('ffn_')}_proj" for field in shapes}
        if switched["ffn_gate"] + ".weight" in self:
            stacks = {field: self._floats(switched[field], count, *shape) for field, shape in shapes.items()}
            weights = [{field: stack[n] for field, stack in stacks.items()} for n in range(count)]
        elif fused + ".gate_up_proj" not in self:
            modules = {field: prefix + module for field, module in kind.experts.items()}
            weights = [{field: self._floats(modules[field].format(n), *shape) for field, shape in shapes.items()} for n in range(count)]
        else:
            (ffn, width), down = shapes["ffn_gate"], shapes["ffn_down"]
            pairs = self.take_floats(fused + ".gate_up_proj", (count, 2 * ffn, width))
            downs = self.take_floats(fused + ".down_proj", (count, *down))
            weights = [{"ffn_gate": pair[:ffn], "ffn_up": pair[ffn:], "ffn_down": of} for pair, of in zip(pairs, downs, strict=True)]
        return tuple(Expert(**{field: Linear(matrix) for field, matrix in expert.items()}) for expert in weights)

    def _form(self, module: str) -> Form | None:
        """The form of a module's weights if they are quantised in groups."""
        groups = self._recipe.groups
        return None if groups is None or f"{module}.scales" not in self else groups(module)

    def _floats(self, module: str, *shape: int) -> NDArray:  # -> [..., N, M]
        if (form := self._form(module)) is not None:
            return take_numbers(self, module, shape, form)
        if self._recipe.kind.transposed:
            return np.ascontiguousarray(self.take_floats(module + ".weight", shape[::-1]).T)
        return self.take_floats(module + ".weight", shape)


def _model_tensors(path: Path, in_files: Mapping[str, Tensor], recipe: Recipe) -> dict[str, Tensor]:
    """The folder's tensors without those that transformers does not read, under the names of a model that has its head."""
    kind, tensors = recipe.kind, _of_part(in_files, recipe.part)
    embedding = kind.embedding + ".weight"
    if f"{kind.file_head}.weight" in tensors and _HEAD not in tensors:
        tensors[_HEAD] = tensors.pop(f"{kind.file_head}.weight")
    if recipe.tied and embedding not in tensors:
        tensors = _with_prefix(tensors, kind.embedding.partition(".")[0] + ".")
    layers = [kind.layer.format(n) for n in range(min(recipe.config.n_layers, len(tensors)))]
    for buffer in (layer + buffer for layer in layers for buffer in kind.buffers):
        tensors.pop(buffer, None)
    if kind.experts:
        _rename_routers(tensors, layers, kind.modules["ffn_gate_inp"])
    return _with_tied_head(path, tensors, recipe) if recipe.tied else tensors


_HEAD = "lm_head.weight"


def _rename_routers(tensors: dict[str, Tensor], layers: Sequence[str], module: str) -> None:
    """Give routers that lie next to fused experts the names that they have elsewhere."""
    for layer in layers:
        router, fused = f"{layer}{module}.weight", f"{layer}{FUSED_ROUTER}.weight"
        if router not in tensors and fused in tensors:
            tensors[router] = tensors.pop(fused)


def _with_tied_head(path: Path, tensors: dict[str, Tensor], recipe: Recipe) -> dict[str, Tensor]:
    """The tensors without a copy of the embedding, which must be one; with one of its groups where its rows and its products differ."""
    embedding, head = recipe.kind.embedding, tensors.pop(_HEAD, None)
    same = tensors.get(f"{embedding}.weight")
    if head is not None and same is not None and not (head.type is same.type and np.array_equal(head.data, same.data)):
        raise FileFormatError(f"{path}: tensor {_HEAD} is not {embedding}.weight, but tie_word_embeddings is true")
    scales = tensors.get(f"{embedding}.scales")
    if recipe.groups is None or scales is None or scales.type is F32:
        return tensors
    return tensors | {f"lm_head.{end}": tensors[name] for end in GROUPED if (name := f"{embedding}.{end}") in tensors}


def _of_part(in_files: Mapping[str, Tensor], part: TextPart | None) -> dict[str, Tensor]:
    """The tensors of a text model, which have other names within a larger model than in a folder of the text model alone."""
    if part is None:
        return dict(in_files)
    tensors = {}
    for name, tensor in in_files.items():
        if not name.startswith(part.other_parts):
            start = next((start for start in part.prefixes if name.startswith(start)), "")
            tensors[part.prefixes.get(start, "") + name.removeprefix(start)] = tensor
    return tensors


def _with_prefix(tensors: dict[str, Tensor], base: str) -> dict[str, Tensor]:
    """Tensors of a model that was saved without its head, and so without the prefix, under names that have it. One that has it stays."""
    return {name if name.startswith(base) or base + name in tensors else base + name: tensor for name, tensor in tensors.items()}


def packed_matrix(tensors: CheckedTensors, module: str, n: int, m: int, divides: bool) -> Ternary:
    """The matrix (N, M) whose codes a file has, four rows in a byte, and whose scale it states."""
    height = -(-n // 4)
    tensor = tensors.take(module + ".weight", (height, m))
    tensors.check_type(tensor, (TYPES["U8"],), ", four weights a byte, in a quantization_mode that is offline")
    name = module + ".weight_scale"  # or its inverse, as [1] or []
    stated = widen.float32(tensors.take_floats(name, (1,), ())).item()
    with np.errstate(over="ignore"):
        scale = np.float32(1 / stated if divides and stated else stated)
    if not (stated > 0 and 0 < scale < np.inf):
        raise NonFiniteError(f"{tensors.path}: tensor {name} is {stated}, expected a positive number, and no infinity when divided by")
    codes = kernels.from_quarters(tensor.data.reshape(height, m), n)
    if cpu.has_code_three(codes):
        raise FileFormatError(f"{tensors.path}: tensor {tensor.name} has the ternary code 3, which means nothing")
    tensor.release()
    return frozen(Ternary(codes, scale, (n, m)))


def _quantized_matrix(tensors: CheckedTensors, module: str, n: int, m: int) -> Ternary:
    """The matrix (N, M) of master weights. They are read twice: for their mean, and for their codes."""
    tensor = tensors.take(module + ".weight", (n, m))
    tensors.check_type(tensor, FLOATS, ", in a quantization_mode that is online")
    masters = tensors.floats(tensor)
    if tensors.allow_nan and cpu.has_non_finite(masters):
        raise NonFiniteError(f"{tensors.path}: tensor {tensor.name} has NaN or infinity in it, which no ternary code stands for")
    weights = ternarize.from_masters(masters)
    tensor.release()
    return weights
