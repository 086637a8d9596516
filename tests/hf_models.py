"""Hugging Face folders of small BitNet models as our records: safetensors and config.json -> `Model`, and the definition's view of it.

Only what this package implements is read: BitNetForCausalLM with squared ReLU, sub-norms, per-token int8, no norm inside the linears. What
the numbers mean is said by config.json, never guessed: a scale is multiplied by or divided by as `quantization_config` says.
"""

import json
from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_np import packing
from bitnet_np.families import MATRICES, rope_frequencies
from bitnet_np.model import Config, Layer, Linear, Model

MODULES = {  # field of model.Layer: module of a decoder layer
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
    "ffn_down": "mlp.down_proj",
}

_DTYPES = {"BF16": "<u2", "F32": "<f4", "U8": "u1"}  # bfloat16 as its bits


class Loaded(NamedTuple):
    """A folder read. A `Ternary` keeps its scale in float32; `definition` has the scale that the file implies, in float64."""

    model: Model
    definition: Any  # what spec.forward takes


def read_safetensors(path: Path) -> dict[str, NDArray]:
    """Name -> array. bfloat16 comes as uint16 bits."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(raw[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def unpack_2bit(packed: NDArray[np.uint8], rows: int) -> NDArray[np.int8]:  # [ceil(N/4), M] -> [N, M] of -1, 0, +1
    """Bits 2i and 2i + 1 of packed[r] are row i * ceil(N/4) + r, plus 1."""
    assert packed.dtype == np.uint8
    assert len(packed) == -(-rows // 4)
    planes = [packed >> 2 * i & 3 for i in range(4)]
    return np.concatenate(planes)[:rows].astype(np.int8) - 1


def quantized_at_load(master: NDArray[np.float32]) -> tuple[NDArray[np.int8], float]:
    """Master weights -> -1, 0, +1 and the scale they are multiplied by: the mean magnitude, at least 1e-5. Ties go to even."""
    wide = master.astype(np.float64)
    steps = 1.0 / max(fsum(np.abs(wide).ravel()) / wide.size, 1e-5)
    return np.clip(np.rint(wide * steps), -1, 1).astype(np.int8), 1.0 / steps


def read_config(config: dict[str, Any]) -> Config:
    """config.json as ours. What would be another arithmetic is refused."""
    assert config["architectures"] == ["BitNetForCausalLM"]
    assert config["hidden_act"] == "relu2"
    assert not config["attention_bias"]
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "bitnet"
    assert quantization["modules_to_not_convert"] == ["lm_head"]
    assert not quantization.get("use_rms_norm", False)
    rope = config["rope_parameters"]
    assert rope["rope_type"] == "default"
    heads = config["num_attention_heads"]
    return Config(
        architecture="bitnet-b1.58",
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        width=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        eps=config["rms_norm_eps"],
        rope_base=config["rope_parameters"]["rope_theta"],
    )


def matrix_of(tensors: dict[str, NDArray], module: str, rows: int, quantization: dict[str, Any]) -> packing.DenseLinear:
    """A linear's -1, 0, +1, and in float64 what they are multiplied by."""
    kind = quantization["linear_class"], quantization["quantization_mode"]
    weight = tensors[module + ".weight"]
    if kind == ("autobitlinear", "online"):
        return packing.DenseLinear(*quantized_at_load(packing.float32(weight)))
    scale = float(packing.float32(tensors[module + ".weight_scale"])[0])
    factor = {("bitlinear", "offline"): 1 / scale, ("autobitlinear", "offline"): scale}[kind]
    return packing.DenseLinear(unpack_2bit(weight, rows), factor)


def read(folder: Path) -> Loaded:
    """A folder as `save_pretrained` or the published packing lays it out."""
    told = json.loads((folder / "config.json").read_text())
    c = read_config(told)
    tensors = read_safetensors(folder / "model.safetensors")
    rows = {"attn_q": c.q_width, "attn_k": c.kv_width, "attn_v": c.kv_width, "ffn_gate": c.ffn, "ffn_up": c.ffn}
    layers, wide = [], []
    for n in range(c.n_layers):
        module = {field: f"model.layers.{n}.{name}" for field, name in MODULES.items()}
        matrices = {m: matrix_of(tensors, module[m], rows.get(m, c.width), told["quantization_config"]) for m in MATRICES}
        norms = {field: packing.float32(tensors[module[field] + ".weight"]) for field in MODULES if field not in MATRICES}
        packed = {field: Linear(packing.pack(matrix.matrix, matrix.scale)) for field, matrix in matrices.items()}
        layers.append(packing.frozen(Layer(**norms, **packed)))
        wide.append(replace(packing.dense(layers[-1]), **matrices))
    model = packing.frozen(
        Model(
            config=c,
            token_embd=tensors["model.embed_tokens.weight"].copy(),
            layers=tuple(layers),
            output_norm=packing.float32(tensors["model.norm.weight"]),
            rope_frequency=rope_frequencies(c.rope_base, c.head_dim),
            output=None if told["tie_word_embeddings"] else tensors["lm_head.weight"].copy(),
        )
    )
    return Loaded(model, replace(packing.dense(model), layers=tuple(wide)))
