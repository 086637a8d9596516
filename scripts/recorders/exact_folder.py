"""The definition's view of a Hugging Face folder, with scales in float64: those of a Model are float32."""

from collections.abc import Mapping
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np

from bitnet_np import Model, spec
from bitnet_np.files.hf_config import Recipe
from bitnet_np.files.hf_folder import open_folder
from bitnet_np.files.safetensors_file import DTYPES
from bitnet_np.files.tensors import Tensor
from bitnet_np.model import widen
from bitnet_np.model.dense import dense_view
from bitnet_np.model.records import MATRICES


def exact_view(folder: Path, model: Model) -> Any:
    """The model of a folder for spec.forward, with the folder's scales and RoPE factors in float64."""
    source, dense = open_folder(folder), dense_view(model)
    recipe = source.recipe
    c, factors = recipe.config, dense.rope_factors if recipe.rope_factors is None else recipe.rope_factors
    if c.yarn is not None:
        factors = spec.yarn_factors(c.rope_base, c.rope_pairs, c.yarn)
    elif c.longrope is not None:
        factors = np.array(c.longrope.short if model.config.context <= c.longrope.original else c.longrope.long)
    layers = []
    for n, layer in enumerate(dense.layers if recipe.quantization is not None else ()):
        path = recipe.kind.layer.format(n)
        scales = {name: _exact_scale(recipe, source.tensors, path + recipe.kind.modules[name]) for name in MATRICES}
        layers.append(replace(layer, **{name: getattr(layer, name)._replace(scale=scale) for name, scale in scales.items()}))
    return replace(dense, rope_factors=factors, layers=tuple(layers) or dense.layers)


def _exact_scale(recipe: Recipe, tensors: Mapping[str, Tensor], module: str) -> float:
    """The scale of a quantised linear, computed in float64 straight from the file."""
    assert recipe.quantization is not None
    tensor = tensors[module + (".weight_scale" if recipe.quantization.packed else ".weight")]
    values = widen.float32(tensor.data.view(DTYPES[tensor.type.name])).astype(np.float64)
    if not recipe.quantization.packed:
        return max(fsum(np.abs(values)) / values.size, 1e-5)
    return float(1 / values[0] if recipe.quantization.divides else values[0])
