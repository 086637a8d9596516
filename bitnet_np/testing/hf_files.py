"""Models as Hugging Face folders, and random folders for any config.json that can be read: for tests, and to compare with transformers."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..files.gguf_writer import present
from ..files.hf_config import Recipe, read_recipe
from ..files.safetensors_file import DTYPES, NAMES, header
from ..model import packing, widen
from ..model.records import Linear, Model, Ternary
from .models import bfloat16_bits, random_model
from .noise import Noise

FLOATS = ("BF16", "F32", "F16")
"""The dtypes that a folder's floats may have."""


def folder_model(config: Mapping[str, Any], seed: int | Noise = 0) -> Model:
    """A random model of this config.json."""
    recipe = read_recipe(config, Path("config.json"))
    fields = {name: value for name, value in vars(recipe.config).items() if name != "architecture"}
    quantization = recipe.quantization
    return random_model(
        seed,
        family=recipe.config.architecture,
        weights="float32" if quantization is None else "ternary",
        tied=recipe.tied,
        inner_norms=quantization is not None and quantization.inner_norms,
        **fields,
    )


def folder_tensors(config: Mapping[str, Any], model: Model, floats: str = "F32") -> dict[str, NDArray]:
    """The tensors of a model by transformers' names, in the layout of config.json's model type. Bfloat16 is uint16.

    floats: the dtype of all but packed ternary matrices, to which numbers are rounded (bfloat16 is cut). Parts of the model that
    config.json does not have, such as biases, are left out. Master weights are some that are quantised to the model's codes.
    """
    recipe = read_recipe(config, Path("config.json"))
    tensors = {}
    for name, values in _named(recipe, model):
        if values.dtype != np.uint8:
            single = widen.float32(values) if values.dtype == np.uint16 else values.astype(np.float32)
            values = bfloat16_bits(single) if floats == "BF16" else single.astype(DTYPES[floats])
        tensors[name] = np.ascontiguousarray(values)
    if recipe.part is None:
        return tensors
    prefixes = {inner: outer for outer, inner in reversed([*recipe.part.prefixes.items()])}  # the first of them, as published
    return {next(prefixes[s] + name.removeprefix(s) for s in prefixes if name.startswith(s)): x for name, x in tensors.items()}


def _named(recipe: Recipe, model: Model) -> Iterator[tuple[str, NDArray]]:
    kind, one = recipe.kind, np.float32(recipe.kind.add_one)
    yield kind.embedding + ".weight", widen.float32(model.token_embd)
    if kind.positions:
        assert model.position_embd is not None
        yield kind.positions + ".weight", widen.float32(model.position_embd)
    yield kind.norm + ".weight", model.output_norm - one
    if model.output_norm_bias is not None:
        yield kind.norm + ".bias", model.output_norm_bias
    if not recipe.tied:
        yield "lm_head.weight", widen.float32(model.head)
    if kind.head_bias:
        assert model.output_bias is not None
        yield "lm_head.bias", model.output_bias
    for n, layer in enumerate(model.layers):
        path, fields = kind.layer.format(n), present(layer)
        modules: dict[str, list[str]] = {}
        for field, module in kind.modules.items():
            if field in fields:
                modules.setdefault(module, []).append(field)
        for module, parts in modules.items():
            value = fields[parts[0]]
            if isinstance(value, Linear):
                yield from _linear(recipe, model, path + module, {field: fields[field] for field in parts})
                continue
            yield f"{path}{module}.weight", value[None] if parts == ["ffn_gate_inp_shexp"] else value - one
            if parts[0] + "_bias" in fields:
                yield f"{path}{module}.bias", fields[parts[0] + "_bias"]
        for i, expert in enumerate(layer.experts):
            for field, module in kind.experts.items():
                yield from _linear(recipe, model, path + module.format(i), {field: getattr(expert, field)})


def _linear(recipe: Recipe, model: Model, module: str, linears: Mapping[str, Linear]) -> Iterator[tuple[str, NDArray]]:
    """The tensors of a module that holds these matrices, by field: one, or rows of several."""
    first, quantization = next(iter(linears.values())), recipe.quantization
    weights = first.weights
    if quantization is not None and quantization.converts(module) and isinstance(weights, Ternary):
        codes = packing.unpack(weights)
        if quantization.packed:
            yield module + ".weight", _four_rows_a_byte(codes)
            yield module + ".weight_scale", np.array([1 / weights.scale if quantization.divides else weights.scale])
        else:
            yield module + ".weight", _masters(codes) * weights.scale
        if first.norm is not None:
            yield module + ".rms_norm.weight", first.norm
    else:
        matrix = _rows(recipe, model, {field: _matrix(linear) for field, linear in linears.items()})
        yield module + ".weight", matrix.T if recipe.kind.transposed else matrix
    biases = {field: linear.bias for field, linear in linears.items() if linear.bias is not None and field in recipe.biases}
    if biases:
        yield module + ".bias", _rows(recipe, model, biases)


def _matrix(linear: Linear) -> NDArray:
    weights = linear.weights
    return packing.unpack(weights) * weights.scale if isinstance(weights, Ternary) else widen.float32(weights)


def _rows(recipe: Recipe, model: Model, parts: Mapping[str, NDArray]) -> NDArray:
    """Rows of matrices or biases as one array: one after the other, or head by head; RoPE's pairs in halves."""
    c, arrays = model.config, []
    for field, rows in parts.items():
        if c.rope == "adjacent" and field in ("attn_q", "attn_k"):  # as in Llama's GGUF files
            rows = rows.reshape(-1, c.head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        arrays.append(rows)
    if recipe.kind.fused_by_head and len(arrays) > 1:
        return np.stack([x.reshape(c.heads, c.head_dim, *x.shape[1:]) for x in arrays], 1).reshape(-1, *arrays[0].shape[1:])
    return np.concatenate(arrays)


def _masters(codes: NDArray[np.int8]) -> NDArray[np.float64]:
    """Numbers with these codes, none of them near half the mean magnitude, where codes change."""
    rng = np.random.default_rng(codes.shape)
    return np.where(codes == 0, rng.uniform(-0.2, 0.2, codes.shape), codes * rng.uniform(0.7, 1.5, codes.shape))


def _four_rows_a_byte(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Codes [N, M] plus 1 as bytes [ceil(N / 4), M]; quarters of the rows lie in two bits each."""
    height = -(-len(codes) // 4)
    quarters = np.zeros((4 * height, codes.shape[1]), np.uint8)
    quarters[: len(codes)] = codes + 1
    a, b, c, d = quarters.reshape(4, height, -1) << np.array([0, 2, 4, 6], np.uint8)[:, None, None]
    return a | b | c | d


# --- files ----------------------------------------------------------------------------------------------------------------------------


def safetensors(tensors: Mapping[str, NDArray]) -> bytes:
    """A .safetensors file, in which uint16 is bfloat16."""
    names = NAMES | {DTYPES["BF16"]: "BF16"}
    start = header((name, names[array.dtype], array.shape) for name, array in tensors.items())
    return start + b"".join(array.tobytes() for array in tensors.values())


def folder_files(config: Mapping[str, Any], tensors: Mapping[str, NDArray], shards: int = 1) -> dict[str, bytes]:
    """The files of a folder by their names: config.json, and the tensors in one file, or in several with an index."""
    files = {"config.json": json.dumps(config, indent=1).encode()}
    if shards == 1:
        return files | {"model.safetensors": safetensors(tensors)}
    places = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": places}).encode()
    for file in dict.fromkeys(places.values()):
        files[file] = safetensors({name: array for name, array in tensors.items() if places[name] == file})
    return files


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray], shards: int = 1) -> Path:
    """Write the files of `folder_files` to a folder, which is made where it is not there. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in folder_files(config, tensors, shards).items():
        (folder / name).write_bytes(raw)
    return folder


def write_hf(folder: Path, config: Mapping[str, Any], model: Model | None = None, *, floats: str = "BF16", shards: int = 1) -> Path:
    """Write a model, or a random one, as a Hugging Face folder of this config.json. Returns the folder."""
    return write_folder(folder, config, folder_tensors(config, folder_model(config) if model is None else model, floats), shards)
