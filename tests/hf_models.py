"""Hugging Face folders for tests: the definition's view of one, with scales in float64, and a writer."""

import json
from dataclasses import replace
from math import fsum

import numpy as np
from numpy.typing import NDArray

from bitnet_np import packing
from bitnet_np.families import HF_MODULES, MATRICES
from bitnet_np.files.hf_folder import open_folder
from bitnet_np.files.parts import FLOATS

DTYPES = {
    np.dtype(np.uint16): "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.float64): "F64",
}


def exact_scale(told, tensors, module):
    """What the codes of a quantised linear are multiplied by: worked out here once more, straight from the file."""
    tensor = tensors[module + (".weight_scale" if told["quantization_mode"] == "offline" else ".weight")]
    values = packing.float32(tensor.data.view(FLOATS[tensor.type])).astype(np.float64)
    if told["quantization_mode"] == "online":
        return max(fsum(np.abs(values)) / values.size, 1e-5)
    return {"bitlinear": 1 / values[0], "autobitlinear": values[0]}[told["linear_class"]]


def definition(folder, model):
    """What spec.forward takes, with the scales that the file implies in float64: a Ternary has a float32."""
    source, dense = open_folder(folder), packing.dense(model)
    told = source.config.get("quantization_config")
    if told is None:
        return dense
    layers = []
    for n, layer in enumerate(dense.layers):
        scales = {name: exact_scale(told, source.tensors, f"model.layers.{n}.{HF_MODULES[name]}") for name in MATRICES}
        layers.append(replace(layer, **{name: getattr(layer, name)._replace(scale=scale) for name, scale in scales.items()}))
    return replace(dense, layers=tuple(layers))


def write_safetensors(path, tensors: dict[str, NDArray]):
    """uint16 is written as bfloat16."""
    table, at = {}, 0
    for name, array in tensors.items():
        table[name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(array.tobytes() for array in tensors.values()))


def write_folder(path, config, tensors, shards=1):
    """config.json and the tensors, in one file or by an index."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return path
    names = list(tensors)
    where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        write_safetensors(path / file, {name: tensors[name] for name in names if where[name] == file})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path
