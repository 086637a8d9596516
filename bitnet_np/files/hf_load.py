"""A Hugging Face folder -> a Model: float tables left where they lie in the mapped files, ternary matrices packed one at a time.

Where transformers has several ways to state a ternary matrix, config.json says which (hf_config.Quantization):

* packed: bytes [ceil(N / 4), M]; bits 2i and 2i + 1 of row r are row i * ceil(N / 4) + r of the matrix, plus 1;
* master weights: s = 1 / max(1e-5, mean |W|) and the matrix is W * s, rounded half to even and cut to -1, 0, +1, divided by s.

A Ternary's scale is a float32. 1 / weight_scale and the mean are none in general: they are worked out exactly and rounded once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import families, rope, ternarize, widen
from ..errors import FileFormatError, NonFiniteError, UnsupportedError
from ..kernels import cpu
from ..kernels import packing as kernels
from ..model import Config, Layer, Linear, Model, Ternary, Weights, frozen
from .hf_config import Llama3Scaling, Quantization, Recipe, read_recipe
from .hf_folder import Folder
from .parts import FLOATS, Names, Parts, assemble, floats, refuse_type, type_names


def model_from(folder: Folder, progress: Callable[[int, int], None], allow_nan: bool) -> Model:
    """As load.load. Raises FileFormatError, UnsupportedError, ShapeError or NonFiniteError, naming the folder and the key or tensor."""
    recipe = read_recipe(folder.config, folder.path / "config.json")
    kind = recipe.kind
    parts = Parts(folder, recipe.config, allow_nan)
    _strip(parts, recipe)
    names = Names(
        token_embd=kind.embedding,
        position_embd=kind.positions,
        output_norm=kind.norm,
        output=None if recipe.tied else "lm_head",
        output_bias=None,
    )
    factors = None if recipe.llama3 is None else _factors(recipe.config, recipe.llama3)
    return assemble(parts, names, partial(floats, parts), lambda n: _layer(parts, recipe, kind.layer.format(n)), factors, progress)


def _strip(parts: Parts, recipe: Recipe) -> None:
    """Forget what transformers does not read, and complete the names of a model that was saved without its head."""
    kind, tensors = recipe.kind, parts.tensors
    base = kind.embedding.partition(".")[0] + "."
    if recipe.tied and kind.embedding + ".weight" not in tensors:
        for name in [name for name in tensors if base + name not in tensors and not name.startswith(base)]:
            tensors[base + name] = tensors.pop(name)
    for n in range(min(recipe.config.n_layers, len(tensors))):
        for buffer in kind.buffers:
            tensors.pop(kind.layer.format(n) + buffer, None)
    if recipe.tied and (head := tensors.pop("lm_head.weight", None)) is not None:
        embedding = tensors.get(kind.embedding + ".weight")
        if embedding is not None and not (head.type is embedding.type and np.array_equal(head.data, embedding.data)):
            raise FileFormatError(
                f"{parts.file.path}: tensor lm_head.weight is not {kind.embedding}.weight, but tie_word_embeddings is true"
            )


def _factors(c: Config, told: Llama3Scaling) -> NDArray[np.float32]:
    """In float32, as a GGUF file has them."""
    frequencies = rope.rope_frequencies(c.rope_base, 2 * c.rope_pairs)
    return rope.llama3_factors(frequencies, told.factor, told.low, told.high, told.original).astype(np.float32)


def _layer(parts: Parts, recipe: Recipe, path: str) -> Layer:
    config, family, modules = recipe.config, parts.family, recipe.kind.modules
    shapes = families.layer_shapes(config)
    fields: dict[str, Any] = {}
    for name in (*family.norms, *family.head_norms):
        fields[name] = parts.vector(f"{path}{modules[name]}.weight", *shapes[name])
        if config.norm == "layer":
            fields[name + "_bias"] = parts.vector(f"{path}{modules[name]}.bias", *shapes[name])
    sizes = {name: shapes[name] for name in family.matrices}
    if modules["attn_q"] == modules["attn_k"]:
        fields |= _fused(parts, recipe, path + modules["attn_q"], {name: sizes.pop(name) for name in families.QKV})
    for name, (n, m) in sizes.items():
        fields[name] = _linear(parts, recipe, path + modules[name], n, m, name in recipe.biases)
    return frozen(Layer(**fields))


def _linear(parts: Parts, recipe: Recipe, module: str, n: int, m: int, biased: bool) -> Linear:
    quantization = recipe.quantization
    if quantization is None or not quantization.converts(module):
        weights: Weights = _matrix(parts, recipe, module, n, m)
        return Linear(weights, parts.vector(module + ".bias", n) if biased else None)
    weights = _packed(parts, module, n, m, quantization) if quantization.packed else _quantized(parts, module, n, m)
    norm = parts.vector(module + ".rms_norm.weight", m) if quantization.inner_norms else None
    return Linear(
        weights,
        parts.vector(module + ".bias", n) if biased else None,
        norm=norm,
        norm_eps=None if norm is None else quantization.norm_eps,
    )


def _matrix(parts: Parts, recipe: Recipe, module: str, n: int, m: int) -> NDArray:
    if not recipe.kind.transposed:
        return floats(parts, parts.take(module + ".weight", (n, m)))
    return np.ascontiguousarray(floats(parts, parts.take(module + ".weight", (m, n))).T)


def _fused(parts: Parts, recipe: Recipe, module: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Linear]:
    """Queries, keys and values from one matrix and one bias."""
    c = recipe.config
    if c.kv_heads != c.heads:
        raise UnsupportedError(f"{parts.file.path}: {module} has {c.kv_heads} key-value heads for {c.heads}, expected as many")
    rows = c.q_width
    both = _matrix(parts, recipe, module, 3 * rows, c.width), parts.vector(module + ".bias", 3 * rows)
    found = {}
    for i, name in enumerate(shapes):
        if recipe.kind.fused_by_head:
            weights, bias = (array.reshape(c.heads, 3, c.head_dim, -1)[:, i].reshape(rows, -1) for array in both)
            found[name] = Linear(weights, bias.reshape(-1))
        else:
            found[name] = Linear(both[0][i * rows : (i + 1) * rows], both[1][i * rows : (i + 1) * rows])
    return found


# --- ternary matrices -----------------------------------------------------------------------------------------------------------------


def _packed(parts: Parts, module: str, n: int, m: int, quantization: Quantization) -> Ternary:
    file, height = parts.file, -(-n // 4)
    tensor = parts.take(module + ".weight", (height, m))
    if tensor.type.name != "U8":
        raise refuse_type(file, tensor, "U8, four weights a byte, in a quantization_mode that is offline")
    scale = _stated_scale(parts, module + ".weight_scale", quantization.divides)
    codes, three = kernels.from_quarters(tensor.data.reshape(height, m), n)
    if three:
        raise FileFormatError(f"{file.path}: tensor {tensor.name} has the ternary code 3, which means nothing")
    file.release(tensor)
    return frozen(Ternary(codes, np.float32(scale), (n, m)))


def _stated_scale(parts: Parts, name: str, divides: bool) -> float:
    """What products are multiplied by."""
    tensor = parts.tensors.get(name)
    shape = () if tensor is not None and not tensor.shape else (1,)  # both are written
    stated = widen.float32(floats(parts, parts.take(name, shape))).item()
    with np.errstate(over="ignore"):
        scale = np.float32(1 / stated if divides and stated else stated)
    if not (stated > 0 and 0 < scale < np.inf):
        raise NonFiniteError(f"{parts.file.path}: tensor {name} is {stated}, expected a positive number, and no infinity when divided by")
    return 1 / stated if divides else stated


def _quantized(parts: Parts, module: str, n: int, m: int) -> Ternary:
    """Master weights, read twice: for their mean, and for their codes."""
    file = parts.file
    tensor = parts.take(module + ".weight", (n, m))
    if tensor.type not in FLOATS:
        raise refuse_type(file, tensor, type_names(FLOATS) + ", in a quantization_mode that is online")
    masters = floats(parts, tensor)
    if parts.allow_nan and cpu.has_non_finite(masters):
        raise NonFiniteError(f"{file.path}: tensor {tensor.name} has NaN or infinity in it, which no ternary code stands for")
    weights = ternarize.from_masters(masters)
    file.release(tensor)
    return weights
