"""The names that GGUF files have for the fields of a model. Reader and writer share these tables.

Keys stand here without the architecture that a file puts before them: "context_length" is "llama.context_length" in a file.
"""

from typing import Any, NamedTuple

import numpy as np

from ..model.families import Family
from ..model.records import Config


class Key(NamedTuple):
    """A metadata key of an architecture."""

    name: str
    type: type


KEYS: dict[str, Key] = {
    "vocab": Key("vocab_size", int),
    "context": Key("context_length", int),
    "width": Key("embedding_length", int),
    "n_layers": Key("block_count", int),
    "ffn": Key("feed_forward_length", int),
    "rope_width": Key("rope.dimension_count", int),
    "heads": Key("attention.head_count", int),
    "kv_heads": Key("attention.head_count_kv", int),
    "head_dim": Key("attention.key_length", int),
    "value_dim": Key("attention.value_length", int),  # no field: always head_dim here
    "eps": Key("attention.layer_norm_rms_epsilon", float),  # in families with LayerNorms another: see keys_of
    "rope_base": Key("rope.freq_base", float),
    "local_rope_base": Key("rope.freq_base_swa", float),
    "scaling_type": Key("rope.scaling.type", str),  # no field: says whether the factor is one
    "rope_scaling": Key("rope.scaling.factor", float),
    "old_rope_scaling": Key("rope.scale_linear", float),  # no field: the name of rope_scaling in older files
    "yarn_original": Key("rope.scaling.original_context_length", int),  # no field, as the next four: Config.yarn and rope_magnitude
    "yarn_factor": Key("rope.scaling.attn_factor", float),
    "yarn_log": Key("rope.scaling.yarn_log_multiplier", float),
    "yarn_fast": Key("rope.scaling.yarn_beta_fast", float),
    "yarn_slow": Key("rope.scaling.yarn_beta_slow", float),
    "yarn_stated": Key("rope.scaling.yarn_attn_factor", float),  # no field: with YaRN, llama.cpp computes it again
    "parallel_residual": Key("use_parallel_residual", bool),
    "window": Key("attention.sliding_window", int),  # of Llama and Qwen llama.cpp reads neither key, and attends to every position
    "window_layers": Key("attention.sliding_window_pattern", np.ndarray),
    "attention_scale": Key("attention.scale", float),
    "score_cap": Key("attn_logit_softcapping", float),
    "embedding_scale": Key("embedding_scale", float),
    "residual_scale": Key("residual_scale", float),
    "logit_scale": Key("logit_scale", float),
    "logit_cap": Key("final_logit_softcapping", float),
    "experts": Key("expert_count", int),
    "experts_used": Key("expert_used_count", int),
    "expert_ffn": Key("expert_feed_forward_length", int),  # no field: ffn, where a file has it
    "shared_ffn": Key("expert_shared_feed_forward_length", int),
    "pooling": Key("pooling_type", int),  # the place of Config.pooling in records.Pooling
}
"""By field of Config, or by another name if Config has no such field, in the order of the released file."""

YARN = ("yarn_original", "yarn_factor", "yarn_log", "yarn_fast", "yarn_slow", "yarn_stated")
"""The keys of YaRN other than the factor."""

SIZES = ("context", "width", "n_layers", "ffn", "heads", "kv_heads", "head_dim", "value_dim", "vocab")
"""Fields whose keys every family has."""

REQUIRED = ("context", "width", "n_layers", "ffn", "heads", "eps")
"""Fields that a file of any family must state. Family.required has more of them."""

FACTORS = "rope_freqs.weight"
"""The tensor that holds Model.rope_factors."""

INNER_NORM = "_norm_in.weight"
"""The end of the tensor that holds the norm inside a linear, after the matrix's name, as bitnet.cpp's embedding models have it."""

LONGROPE = {"short": "rope_factors_short.weight", "long": "rope_factors_long.weight"}
"""The tensors that hold the lists of Config.longrope."""

NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_gating_func": 1,  # softmax
    "use_parallel_residual": None,  # llama.cpp reads it for gptneox only; converters write true into files of stablelm without it
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": None,
    "rope.scaling.original_context_length": None,  # llama.cpp reads it for yarn only; Llama 3's scaling is in rope_freqs.weight
}
"""Keys that writers put into files although they change nothing, with the value that changes nothing (None: any value)."""


def keys_of(family: Family) -> dict[str, Key]:
    """The keys that a file of the family may have, by field of Config."""
    rope = family.config["rope"] != "none"
    names = {
        *(*SIZES, "eps", "pooling", *family.numbers),
        *(("rope_base", "rope_width") if rope else ()),
        *(("scaling_type", "rope_scaling", "old_rope_scaling", *YARN) if rope and family.scaling else ()),
        *(("parallel_residual",) if family.chooses_residual else ()),
        *(("window", "window_layers") if family.windows else ()),
        *(("expert_ffn",) if family.expert_width else ()),
    }
    keys = {name: key for name, key in KEYS.items() if name in names}
    return keys if family.config["norm"] == "rms" else keys | {"eps": Key("attention.layer_norm_epsilon", float)}


_SHARED = {f"ffn_{name}": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}


def matrix_name(c: Config, field: str, layer: int) -> str:
    """The tensor of a layer's matrix without its ending; those of the shared expert have separate names."""
    return f"blk.{layer}.{_SHARED.get(field, field) if c.experts else field}"


def tensor_name(field: str, layer: int | None = None) -> str:
    """The tensor that holds a field of Model, or of a Layer of this number: output_bias -> output.bias, attn_q -> blk.0.attn_q.weight."""
    plain = field.removesuffix("_bias")
    return f"{'' if layer is None else f'blk.{layer}.'}{plain}.{'weight' if plain == field else 'bias'}"
