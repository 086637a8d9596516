"""Hugging Face folders for tests: the definition's view of one, with scales in float64, and a writer."""

import json
import shutil
from pathlib import Path

from family_models import SHAPE, half_scales
from models import random_model
from numpy.typing import NDArray
from published_configs import PUBLISHED, small

from bitnet_np.files.hf_folder import open_folder
from bitnet_np.files.load import load
from bitnet_np.files.safetensors_file import DTYPES
from bitnet_np.testing.hf_files import folder_tensors, safetensors, write_folder, write_hf

DATA = Path(__file__).parents[1] / "data"
FAMILIES = json.loads((DATA / "hf_families" / "configs.json").read_text("utf-8"))
"""config.json of each recording there."""


def write_safetensors(path, tensors: dict[str, NDArray]):
    """Write a safetensors file; uint16 becomes bfloat16."""
    path.write_bytes(safetensors(tensors))


def recorded_folder(name):
    """config.json and the tensors of a recording, in transformers' names and layout."""
    model = load(DATA / "hf_families" / f"{name}.gguf", overrides={"context": 64})  # LongRoPE's must be declared
    return FAMILIES[name], folder_tensors(FAMILIES[name], model)


def bitnet_folder(path, **shape):
    """A folder of a BitNetForCausalLM with random weights (autobitlinear, offline), and the model."""
    model = half_scales(random_model(5, **SHAPE | {"ffn": 512} | shape))
    c = model.config
    config = {"model_type": "bitnet", "hidden_act": "relu2", "vocab_size": c.vocab, "hidden_size": c.width, "intermediate_size": c.ffn}
    config |= {"num_hidden_layers": c.n_layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim}
    config |= {"max_position_embeddings": c.context, "rms_norm_eps": 1e-5, "rope_theta": c.rope_base, "tie_word_embeddings": True}
    config["quantization_config"] = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    return write_hf(path, config, model, floats="F32"), model


# --- folders with something wrong in them ----------------------------------------------------------------------------------------------


def array_of(tensor):
    """The numbers of a tensor of a folder; bfloat16 as its bits."""
    return tensor.data.view(DTYPES[tensor.type.name]).reshape(tensor.shape)


OFFLINE, LLAMA = "bitnet_autooff_gqa_tied", "llama_plain_gqa_untied"


def changed(tmp_path, name, **keys):
    """A recording's folder with changed keys in config.json, or that of a published one made small, of random weights.

    None removes a key, a dict changes keys of an object.
    """
    folder = tmp_path / name
    if name in PUBLISHED:
        write_hf(folder, small(PUBLISHED[name]))
    elif name in FAMILIES:
        write_folder(folder, *recorded_folder(name))
    elif not folder.exists():
        shutil.copytree(next(path for path in (DATA / "hf" / name, DATA / name) if path.exists()), folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in keys.items():
        if value is None:
            config.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = {k: v for k, v in (config[key] | value).items() if v is not None}
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rewritten(tmp_path, edit, name=OFFLINE):
    """A recording's folder whose tensors `edit` has changed."""
    folder = changed(tmp_path, name)
    source = open_folder(folder)
    tensors = {key: array_of(tensor).copy() for key, tensor in source.tensors.items()}
    edit(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def put(name, value):
    """An edit that replaces or adds this tensor."""
    return lambda tensors: tensors.update({name: value})
