"""The table of Hugging Face's model types: the names that transformers has for their modules and their keys of config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..model.records import GATE_UP, MATRICES, QKV


@dataclass(frozen=True)
class ModelType:
    """The names and the layout of tensors that transformers has for a `model_type` of config.json."""

    architectures: Mapping[str, str]  # activation of the feed-forward -> the architecture of families.FAMILIES with the same arithmetic
    causal_lm: str  # the one class that is read
    modules: Mapping[str, str]  # field of records.Layer -> module of a decoder layer; several matrices may be rows of one
    layer: str = "model.layers.{}."  # the prefix of a decoder layer's modules
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    positions: str = ""  # the module of learned positions, if there are any
    head_bias: bool = False  # the head has a bias
    file_head: str = ""  # the head's module in files, where that is another one than lm_head
    window: Literal["", "all", "switched", "layers"] = ""
    # where sliding_window is on: nowhere; everywhere; if use_sliding_window says so; or in the layers that layer_types or the family names
    names: Mapping[str, str] = field(default_factory=dict)  # the usual name of a key of config.json -> its name here, where they differ
    inert: Mapping[str, Any] = field(default_factory=dict)  # key of config.json -> the one value with which it changes nothing
    tied: bool = False  # whether the head is the embedding if config.json does not say
    quantizable: bool = False  # linears may be BitLinear or AutoBitLinear
    masters: bool = False  # linears quantise master weights, and no quantization_config says so
    transposed: bool = False  # matrices are [M, N]
    fused_by_head: bool = False  # attn_q, attn_k and attn_v are rows of one matrix, a head's after the other's
    whole_rope: bool = True  # without a partial_rotary_factor the whole head is rotated; False: it must be stated
    add_one: bool = False  # norms multiply by 1 + weight
    numbers: Mapping[str, str] = field(default_factory=dict)  # field of Config that few families have -> its key; 1 if missing
    depth_scaled: bool = False  # scale_depth / sqrt(layers) multiplies branches, and hidden_size / dim_model_base divides logits
    caps: Mapping[str, str] = field(default_factory=dict)  # the same for soft caps, which must be stated; null for none
    defaults: Mapping[str, Any] = field(default_factory=dict)  # key -> its value if it is not there, where that is not so for all types
    rope_bases: tuple[float, float] | None = None  # RoPE's bases in global and in local layers, if it states none; None: it must, one
    ignored: tuple[str, ...] = ()  # keys that transformers does not read for this type
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # key -> the matrices that have a bias where it is true
    experts: Mapping[str, str] = field(default_factory=dict)  # field of records.Expert -> module of the expert of a number
    expert_sizes: Mapping[str, str] = field(default_factory=dict)  # field of records.Config -> key that only models of experts have
    buffers: tuple[str, ...] = ()  # tensors of a layer in old files that can be computed; transformers ignores them


HF_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
    "ffn_down": "mlp.down_proj",
}
"""The modules of Llama and of all that descend from it. A model has those of its family's norms and matrices."""

_AFTER_BRANCHES = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_MODULES = HF_MODULES | {"ffn_norm": "pre_feedforward_layernorm"} | _AFTER_BRANCHES
_OLMO_MODULES = {field: module for field, module in HF_MODULES.items() if field not in ("attn_norm", "ffn_norm")} | _AFTER_BRANCHES
_PHI3_MODULES = HF_MODULES | dict.fromkeys(QKV, "self_attn.qkv_proj") | dict.fromkeys(GATE_UP, "mlp.gate_up_proj")
_NEOX_MODULES = {"attn_norm": "input_layernorm", **dict.fromkeys(QKV, "attention.query_key_value"), "attn_output": "attention.dense"}
_NEOX_MODULES |= {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_PHI_MODULES = HF_MODULES | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_MIXTRAL_MODULES = HF_MODULES | {"ffn_gate_inp": "block_sparse_moe.gate"}
_MIXTRAL_EXPERTS = {f"ffn_{name}": f"block_sparse_moe.experts.{{}}.{w}" for name, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
_MOE_MODULES = HF_MODULES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
_MOE_EXPERTS = {f"ffn_{name}": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
_GPT2_MODULES = {"attn_norm": "ln_1", **dict.fromkeys(QKV, "attn.c_attn"), "attn_output": "attn.c_proj"}
_GPT2_MODULES |= {"ffn_norm": "ln_2", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
FUSED_EXPERTS = "mlp.experts"
"""The module of all experts as transformers 5 has them in memory: gate_up_proj [E, 2F, D], gates first, and down_proj [E, D, F]."""
FUSED_ROUTER = "mlp.gate"
"""The module of the router next to it."""

_OLD_ROPE = ("self_attn.rotary_emb.inv_freq",)

_LLAMA_INERT = {"activation": "swiglu", "is_llama_config": True, "parallel_attn": False, "rope_interleaved": False}
"""Keys that published Llama folders carry from their trainers. transformers' Llama reads none of them."""

_GPT2_KEYS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "n_inner"}
_GPT2_KEYS |= {"max_position_embeddings": "n_positions", "hidden_act": "activation_function", "layer_norm_eps": "layer_norm_epsilon"}

_GRANITE_KEYS = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
_GRANITE_KEYS |= {"logit_scale": "logits_scaling", "attention_scale": "attention_multiplier"}

_WINDOW = {"sliding_window": 4096}
_SWITCHED = _WINDOW | {"use_sliding_window": False, "max_window_layers": 28}

_GEMMA: dict[str, Any] = {"tied": True, "add_one": True}
_LATER_GEMMA = _GEMMA | {"modules": _GEMMA_MODULES, "window": "layers", "names": {"hidden_act": "hidden_activation"}}
_LATER_GEMMA |= {"ignored": ("hidden_act", "cache_implementation")}
_GEMMA3_DEFAULTS: dict[str, Any] = _WINDOW | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
}
_GEMMA3_DEFAULTS |= {"vocab_size": 262208, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "final_logit_softcapping": None}
_GEMMA3_DEFAULTS |= {"hidden_activation": "gelu_pytorch_tanh"}

_CAPS = {"score_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
_EXPERT_FFN = {"ffn": "moe_intermediate_size"}
_SHARED_FFN = _EXPERT_FFN | {"shared_ffn": "shared_expert_intermediate_size"}
_BIASES = {"attention_bias": MATRICES[:4], "mlp_bias": MATRICES[4:]}
_GELU = ("gelu_new", "gelu_pytorch_tanh")
_ORIGINAL = "original_max_position_embeddings"


def _type(architecture: str, name: str, *activations: str, modules: Mapping[str, str] = HF_MODULES, **fields: Any) -> ModelType:
    """The row of <name>ForCausalLM, whose feed-forward has one of these activations, SiLU if none is named."""
    return ModelType(dict.fromkeys(activations or ("silu",), architecture), f"{name}ForCausalLM", modules, **fields)


MODEL_TYPES: dict[str, ModelType] = {
    "bitnet": ModelType({"relu2": "bitnet-b1.58", "silu": "bitnet"}, "BitNetForCausalLM", HF_MODULES, quantizable=True, buffers=_OLD_ROPE),
    "llama": _type("llama", "Llama", inert=_LLAMA_INERT, biases=_BIASES, quantizable=True, buffers=_OLD_ROPE),
    "qwen2": _type("qwen2", "Qwen2", window="switched", defaults=_SWITCHED, quantizable=True, buffers=_OLD_ROPE),
    "qwen3": _type("qwen3", "Qwen3", window="switched", defaults=_SWITCHED, quantizable=True, buffers=_OLD_ROPE),
    "mistral": _type("llama", "Mistral", window="all", defaults=_WINDOW, buffers=_OLD_ROPE),
    "mixtral": _type("llama", "Mixtral", modules=_MIXTRAL_MODULES, experts=_MIXTRAL_EXPERTS, ignored=("router_jitter_noise",)),
    "qwen2_moe": _type(
        "qwen2moe", "Qwen2Moe", modules=_MOE_MODULES, experts=_MOE_EXPERTS, expert_sizes=_SHARED_FFN, inert={"qkv_bias": True}
    ),
    "qwen3_moe": _type("qwen3moe", "Qwen3Moe", modules=_MOE_MODULES, experts=_MOE_EXPERTS, expert_sizes=_EXPERT_FFN),
    "phi3": _type("phi3", "Phi3", modules=_PHI3_MODULES, window="all", defaults={_ORIGINAL: 4096}, ignored=(_ORIGINAL,)),
    "smollm3": _type("smollm3", "SmolLM3", tied=True, ignored=("pretraining_tp",)),
    "granite": _type("granite", "Granite", numbers=_GRANITE_KEYS, biases=_BIASES),
    "minicpm": _type(
        "minicpm",
        "MiniCPM",
        tied=True,
        numbers={"embedding_scale": "scale_emb"},
        biases=_BIASES,
        depth_scaled=True,
        defaults={"rope_theta": 1e4},
        buffers=_OLD_ROPE,
    ),
    "olmo2": _type("olmo2", "Olmo2", modules=_OLMO_MODULES),
    "olmo3": _type("olmo2", "Olmo3", modules=_OLMO_MODULES, window="layers", defaults=_WINDOW, rope_bases=(5e5, 5e5)),
    "gemma": _type("gemma", "Gemma", "gelu", "gelu_pytorch_tanh", **_GEMMA, ignored=("hidden_activation",)),
    "gemma2": _type("gemma2", "Gemma2", "gelu_pytorch_tanh", **_LATER_GEMMA, caps=_CAPS, defaults=_WINDOW),
    "gemma3_text": _type(
        "gemma3",
        "Gemma3",
        "gelu_pytorch_tanh",
        **_LATER_GEMMA,
        inert={"attn_logit_softcapping": None},
        caps={"logit_cap": _CAPS["logit_cap"]},
        defaults=_GEMMA3_DEFAULTS,
        rope_bases=(1e6, 1e4),
    ),
    "gpt_neox": _type(
        "gptneox",
        "GPTNeoX",
        "gelu",
        *_GELU,
        modules=_NEOX_MODULES,
        layer="gpt_neox.layers.{}.",
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        file_head="embed_out",
        fused_by_head=True,
        whole_rope=False,
        inert={"attention_bias": True},
        buffers=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    ),
    "gpt2": ModelType(
        dict.fromkeys(_GELU, "gpt2"),
        "GPT2LMHeadModel",
        _GPT2_MODULES,
        layer="transformer.h.{}.",
        embedding="transformer.wte",
        norm="transformer.ln_f",
        positions="transformer.wpe",
        names=_GPT2_KEYS,
        tied=True,
        transposed=True,
        buffers=("attn.bias", "attn.masked_bias"),
    ),
    "phi": _type(
        "phi2",
        "Phi",
        *_GELU,
        modules=_PHI_MODULES,
        norm="model.final_layernorm",
        head_bias=True,
        whole_rope=False,
        inert={"qk_layernorm": False},
        buffers=_OLD_ROPE,
    ),
    "stablelm": _type(
        "stablelm",
        "StableLm",
        biases={"use_qkv_bias": QKV},
        whole_rope=False,
        inert=dict.fromkeys(("qk_layernorm", "use_parallel_residual"), False),
        buffers=_OLD_ROPE,
    ),
    "starcoder2": _type(
        "starcoder2",
        "Starcoder2",
        *_GELU,
        modules=HF_MODULES | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        window="all",
        names={"layer_norm_eps": "norm_epsilon"},
        inert={"use_bias": True, "norm_type": "layer_norm", "mlp_type": "default"},
        tied=True,
        ignored=("embedding_dropout", "residual_dropout"),
    ),
}
"""By `model_type` of config.json. minicpm's class is in its folders. gpt_neox's `gelu` is the exact GELU, which no GGUF architecture has;
gemma's is the one by tanh."""


@dataclass(frozen=True)
class TextPart:
    """The text model in a model that also reads images. Text alone goes through no other part."""

    whole: str  # the class of the whole model
    model_type: str  # of text_config
    other_keys: tuple[str, ...]  # of config.json, for other parts
    prefixes: Mapping[str, str]  # start of the names of its tensors -> start of their names in a folder of the text model alone
    other_parts: tuple[str, ...]  # starts of the names of all other tensors


TEXT_PARTS: dict[str, TextPart] = {
    "gemma3": TextPart(
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        ("vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"),
        {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."},
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    )
}
"""By `model_type` of config.json."""

OTHER_CLASSES: dict[tuple[str, str], ModelType] = {
    ("llama", "BitnetForCausalLM"): ModelType(
        {"silu": "bitnet"},
        "BitnetForCausalLM",
        HF_MODULES | {"attn_sub_norm": "self_attn.inner_attn_ln", "ffn_sub_norm": "mlp.ffn_layernorm"},
        inert={"weight_bits": 1, "input_bits": 8},  # its linears are ternary whatever weight_bits is
        masters=True,
        buffers=_OLD_ROPE,
    )
}
"""By model_type and class: the models whose code is in their own folders. BitnetForCausalLM is bitnet_b1_58-large, -xl and -3B."""
