"""Hugging Face folders for tests: the definition's view of one, with scales in float64, and a writer."""

import json
import shutil
from dataclasses import replace
from math import fsum
from pathlib import Path

import numpy as np
import pytest
from family_models import SHAPE, half_scales
from models import random_model
from numpy.typing import NDArray
from record_hf_families import LLAMA3, LONGROPE, YARN, _gpt2, _gptneox, _layout, _llama

from bitnet_np import packing, widen
from bitnet_np.dense import dense_view
from bitnet_np.errors import Error
from bitnet_np.families import MATRICES
from bitnet_np.files.hf_folder import open_folder
from bitnet_np.files.hf_model_types import HF_MODULES
from bitnet_np.files.load import load
from bitnet_np.files.tensors import FLOATS

DATA = Path(__file__).parent / "data"
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SIZES = {"vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "num_key_value_heads": 2, "head_dim": 12, "hidden_act": "silu", "rms_norm_eps": 1e-5}
NEOX = {name: SIZES[name] for name in list(SIZES)[:6]} | {"model_type": "gpt_neox", "hidden_act": "gelu", "layer_norm_eps": 1e-5}
NEOX |= {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 40, "n_positions": 64}
GPT2 |= {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
WINDOW = {"use_sliding_window": True, "rope_parameters": PLAIN}
QWEN2_WINDOW = {"model_type": "qwen2", "sliding_window": 6, "max_window_layers": 1} | WINDOW
QWEN3_WINDOW = {"model_type": "qwen3", "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]} | WINDOW
GRANITE = {"model_type": "granite", "attention_bias": True, "mlp_bias": True, "embedding_multiplier": 3, "residual_multiplier": 0.375}
GRANITE |= {"logits_scaling": 2.5, "attention_multiplier": 0.125}
PHI3 = {"model_type": "phi3", "sliding_window": 7, "rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": 0.67}
PHI3 |= {"original_max_position_embeddings": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
SMOLLM3 = {"model_type": "smollm3", "num_hidden_layers": 5, "vocab_size": 31, "intermediate_size": 24, "rope_theta": 10000.0}
SMOLLM3 |= {"no_rope_layers": [1, 1, 1, 0, 1], "tie_word_embeddings": False, "pretraining_tp": 2}
GEMMA = {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 64, "rope_theta": 10000.0}
GEMMA2 = {"model_type": "gemma2", "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 64, "sliding_window": 6}
GEMMA2 |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0, "query_pre_attn_scalar": 12, "num_hidden_layers": 3}
GEMMA2 |= {"rope_theta": 10000.0, "cache_implementation": "hybrid"}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "vocab_size": 31,
    "intermediate_size": 24,
}
GEMMA3 |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 6, "sliding_window_pattern": 2, "rope_theta": 10000.0}
GEMMA3 |= {"rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "query_pre_attn_scalar": 12}
GEMMA3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": 20.0}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "router_aux_loss_coef": 0.01,
    "output_router_logits": False,
}
EXPERTS |= {"rope_parameters": PLAIN, "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 99}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0, "sliding_window": None}
QWEN2_MOE = {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24, "norm_topk_prob": False, "use_sliding_window": False}
FAMILIES = {  # recording of scripts/record_hf_families.py: config.json and the layout of transformers' weights
    "llama_llama3_biases": (
        SIZES
        | {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
        | {"rope_parameters": PLAIN | {"rope_type": "llama3"} | LLAMA3},
        _llama,
    ),
    "qwen2_linear": (
        SIZES
        | {"model_type": "qwen2", "tie_word_embeddings": True}
        | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},  # as older files have it
        _llama,
    ),
    "qwen3_wide_heads": (SIZES | {"model_type": "qwen3", "head_dim": 16, "rope_parameters": PLAIN, "use_sliding_window": False}, _llama),
    "qwen3_yarn": (SIZES | {"model_type": "qwen3", "rope_parameters": PLAIN | {"rope_type": "yarn"} | YARN}, _llama),
    "gptneox_parallel": (NEOX, _gptneox),
    "gptneox_sequential": (NEOX | {"use_parallel_residual": False}, _gptneox),
    "gpt2": (GPT2, _gpt2),
    "mistral_window": (SIZES | {"model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 5}, _llama),
    "qwen2_window": (SIZES | QWEN2_WINDOW | {"tie_word_embeddings": True}, _llama),
    "qwen3_window": (SIZES | QWEN3_WINDOW, _llama),
    "granite": (SIZES | GRANITE | {"rope_parameters": PLAIN | {"rope_type": "llama3"} | LLAMA3}, _layout("granite")),
    "phi3": (SIZES | PHI3, _layout("phi3")),
    "phi3_longrope": (
        SIZES
        | PHI3
        | {"sliding_window": None, "vocab_size": 31, "intermediate_size": 24, "rope_scaling": {"type": "longrope"} | LONGROPE}
        | {"original_max_position_embeddings": 16},
        _layout("phi3"),
    ),
    "smollm3": (SIZES | SMOLLM3, _layout("smollm3")),
    "olmo2": (SIZES | {"model_type": "olmo2", "rope_parameters": PLAIN}, _layout("olmo2")),
    "gemma": (SIZES | GEMMA, _layout("gemma")),
    "gemma2": (SIZES | GEMMA2, _layout("gemma2")),
    "gemma3": (SIZES | GEMMA3, _layout("gemma3_text")),
    "mixtral": (SIZES | MIXTRAL | {"rope_parameters": PLAIN}, _layout("mixtral")),
    "qwen2_moe": (SIZES | EXPERTS | QWEN2_MOE, _layout("qwen2_moe")),
    "qwen3_moe": (SIZES | EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True}, _layout("qwen3_moe")),
}

DTYPES = {
    np.dtype(np.uint16): "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.float64): "F64",
}


def exact_scale(quantization, tensors, module):
    """The scale of a quantised linear, computed in float64 straight from the file."""
    tensor = tensors[module + (".weight_scale" if quantization["quantization_mode"] == "offline" else ".weight")]
    values = widen.float32(tensor.data.view(FLOATS[tensor.type])).astype(np.float64)
    if quantization["quantization_mode"] == "online":
        return max(fsum(np.abs(values)) / values.size, 1e-5)
    return {"bitlinear": 1 / values[0], "autobitlinear": values[0]}[quantization["linear_class"]]


def definition(folder, model):
    """The model for spec.forward, with the file's scales in float64: those of a Ternary are float32."""
    source, dense = open_folder(folder), dense_view(model)
    quantization = source.config_json.get("quantization_config")
    if quantization is None:
        return dense
    layers = []
    for n, layer in enumerate(dense.layers):
        scales = {name: exact_scale(quantization, source.tensors, f"model.layers.{n}.{HF_MODULES[name]}") for name in MATRICES}
        layers.append(replace(layer, **{name: getattr(layer, name)._replace(scale=scale) for name, scale in scales.items()}))
    return replace(dense, layers=tuple(layers))


def write_safetensors(path, tensors: dict[str, NDArray]):
    """Write a safetensors file; uint16 becomes bfloat16."""
    table, at = {}, 0
    for name, array in tensors.items():
        table[name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(array.tobytes() for array in tensors.values()))


def write_folder(path, config, tensors, shards=1):
    """Write config.json and the tensors, in one file or in several with an index."""
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


def recorded_folder(name):
    """config.json and the tensors of a recording, in transformers' names and layout."""
    config, layout = FAMILIES[name]
    model = load(DATA / "hf_families" / f"{name}.gguf", overrides={"context": 64})  # LongRoPE's must be declared
    tensors = {key: np.ascontiguousarray(value) for key, value in layout(model).items()}
    if config.get("tie_word_embeddings", config["model_type"] in ("gpt2", "gemma", "gemma2", "gemma3_text")):
        del tensors["lm_head.weight"]
    return config, tensors


def bitnet_folder(path, **shape):
    """A folder of a BitNetForCausalLM with random weights (autobitlinear, offline), and the model."""
    model = half_scales(random_model(5, **SHAPE | {"ffn": 512} | shape))
    c = model.config
    tensors = {"model.embed_tokens.weight": model.token_embd, "model.norm.weight": model.output_norm}
    for n, layer in enumerate(model.layers):
        for field, module in HF_MODULES.items():
            value = getattr(layer, field)
            if value is None:
                continue
            name = f"model.layers.{n}.{module}.weight"
            if not hasattr(value, "weights"):
                tensors[name] = value
                continue
            rows = (packing.unpack(value.weights) + 1).astype(np.uint8).reshape(4, -1, value.shape[1])
            tensors[name] = rows[0] | rows[1] << 2 | rows[2] << 4 | rows[3] << 6
            tensors[name + "_scale"] = np.array([value.weights.scale])
    config = {"model_type": "bitnet", "hidden_act": "relu2", "vocab_size": c.vocab, "hidden_size": c.width, "intermediate_size": c.ffn}
    config |= {"num_hidden_layers": c.n_layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim}
    config |= {"max_position_embeddings": c.context, "rms_norm_eps": 1e-5, "rope_theta": c.rope_base, "tie_word_embeddings": True}
    config["quantization_config"] = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
    return write_folder(path, config, tensors), model


# --- folders with something wrong in them ----------------------------------------------------------------------------------------------


def array_of(tensor):
    """The numbers of a tensor of a folder; bfloat16 as its bits."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    return tensor.data.view(dtypes[tensor.type.name]).reshape(tensor.shape)


OFFLINE, LLAMA = "bitnet_autooff_gqa_tied", "llama_plain_gqa_untied"


def changed(tmp_path, name, **keys):
    """A recording's folder with changed keys in config.json; None removes one, a dict changes keys of an object."""
    folder = tmp_path / name
    if not folder.exists():
        folder.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(DATA / "hf" / name / file, folder / file)
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


def assert_refused(folder, error, *parts):
    with pytest.raises(Error) as caught:
        load(folder)
    assert type(caught.value) is error
    for part in (str(folder), *parts):
        assert part in str(caught.value)


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
