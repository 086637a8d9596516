"""config.json of published repositories, as their authors wrote it; and the same shape made small, for random weights.

Repositories of one kind differ in their sizes only, so one of each kind stands for the others.
"""

from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0}
_LLAMA |= {"hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None, "use_cache": True}

_MOE = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "output_router_logits": False, "rope_theta": 1000000.0}
_MOE |= {"router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True}
_QWEN_MOE = _MOE | {
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "rms_norm_eps": 1e-06,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

_BITNET_2B = {
    "architectures": ["BitNetForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_bitnet.BitNetConfig", "AutoModelForCausalLM": "modeling_bitnet.BitNetForCausalLM"},
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "relu2",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 4096,
    "model_type": "bitnet",
    "num_attention_heads": 20,
    "num_hidden_layers": 30,
    "num_key_value_heads": 5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}

_FALCON3 = _LLAMA | {
    "activation": "swiglu",
    "bos_token_id": 11,
    "eos_token_id": 11,
    "head_dim": 256,
    "is_bitnet_config": True,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "parallel_attn": False,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "bitnet"},
    "rms_norm_eps": 1e-06,
    "rope_interleaved": False,
    "rope_theta": 1000042,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}

_FALCON_E = _LLAMA | {
    "bos_token_id": 1,
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_size": 2048,
    "is_bitnet_config": True,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "bitnet"},
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
}

_BITNET_B1_58 = {
    "architectures": ["BitnetForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "input_bits": 8,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "pad_token_id": 32000,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32002,
    "weight_bits": 1,
}

_PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 32064,
}

_GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}

_GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}

_MINICPM = {
    "architectures": ["MiniCPMForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig", "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"},
    "bos_token_id": 1,
    "dim_model_base": 256,
    "hidden_act": "silu",
    "initializer_range": 0.1,
    "model_type": "minicpm",
    "rms_norm_eps": 1e-05,
    "scale_depth": 1.4,
    "scale_emb": 12,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

_SAME_LISTS = [1.0 + 0.03 * n for n in range(32)]  # MiniCPM 4's lists are equal, and its context is not stretched


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "microsoft/bitnet-b1.58-2B-4T": _BITNET_2B
    | {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}},
    "microsoft/bitnet-b1.58-2B-4T-bf16": _BITNET_2B
    | {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}},
    "tiiuae/Falcon-E-1B-Instruct": _FALCON_E | _sizes(2048, 6144, 24, 16, 2) | {"rope_theta": 1000042},
    "tiiuae/Falcon3-1B-Instruct-1.58bit": _FALCON3 | _sizes(2048, 8192, 18, 8, 4),
    "tiiuae/Falcon3-3B-Instruct-1.58bit": _FALCON3 | _sizes(3072, 9216, 22, 12, 4),
    "tiiuae/Falcon3-7B-Instruct-1.58bit": _FALCON3 | _sizes(3072, 23040, 28, 12, 4),
    "tiiuae/Falcon3-10B-Instruct-1.58bit": _FALCON3 | _sizes(3072, 23040, 40, 12, 4),
    "HF1BitLLM/Llama3-8B-1.58-100B-tokens": _LLAMA
    | _sizes(4096, 14336, 32, 32, 8)
    | {
        "bos_token_id": 128000,
        "eos_token_id": 128009,
        "is_bitnet_config": True,
        "max_position_embeddings": 8192,
        "quantization_config": {"modules_to_not_convert": None, "quant_method": "bitnet"},
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "1bitLLM/bitnet_b1_58-large": _BITNET_B1_58 | _sizes(1536, 4096, 24, 16, 16),
    "1bitLLM/bitnet_b1_58-3B": _BITNET_B1_58 | _sizes(3200, 8640, 26, 32, 32),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _MOE
    | _sizes(4096, 14336, 32, 32, 8)
    | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "vocab_size": 32000},
    "Qwen/Qwen3-30B-A3B": _QWEN_MOE
    | _sizes(2048, 6144, 48, 32, 4)
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
    | {"attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960, "max_window_layers": 48, "moe_intermediate_size": 768}
    | {"eos_token_id": 151645, "mlp_only_layers": [], "norm_topk_prob": True, "rope_scaling": None},
    "Qwen/Qwen1.5-MoE-A2.7B": _QWEN_MOE
    | _sizes(2048, 5632, 24, 16, 16)
    | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4}
    | {"max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    | {"eos_token_id": 151643, "norm_topk_prob": False, "sliding_window": 32768},
    "SpectraSuite/TriLM_3.9B_Unpacked": _LLAMA
    | _sizes(3072, 9216, 30, 24, 24)
    | {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": 50688,
    },
    "microsoft/Phi-3-mini-4k-instruct": _PHI3 | _sizes(3072, 8192, 32, 32, 32),
    "microsoft/phi-4": _PHI3
    | _sizes(5120, 17920, 40, 40, 10)
    | {"max_position_embeddings": 16384, "rope_theta": 250000, "sliding_window": None, "vocab_size": 100352},
    "openbmb/MiniCPM-2B-sft-bf16": _MINICPM
    | _sizes(2304, 5760, 40, 36, 36)
    | {"eos_token_id": 2, "max_position_embeddings": 4096, "rope_scaling": None, "vocab_size": 122753},
    "openbmb/BitCPM4-1B": _MINICPM
    | _sizes(1536, 3840, 52, 24, 8)
    | {"eos_token_id": [2, 73440], "max_position_embeddings": 32768, "rope_theta": 10000.0, "vocab_size": 73448}
    | {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": _SAME_LISTS,
            "long_factor": _SAME_LISTS,
            "original_max_position_embeddings": 32768,
        }
    },
    "google/gemma-3-1b-it": _GEMMA3_1B | _sizes(1152, 6912, 26, 4, 1),
    "google/gemma-3-4b-it": _GEMMA3_4B,
}
"""By repository. What counts here are the keys. Sizes of Falcon-E, Phi, Gemma 3 and MiniCPM, the files of models with experts, and some
contexts and token ids were not looked up again."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "microsoft/Phi-3-mini-128k-instruct": (
        _PHI3
        | _sizes(3072, 8192, 32, 32, 32)
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}},
        "longrope",
    ),
}
"""By repository: as far as it matters here, and the word in the error that says why it is refused."""

_YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 16384}

_INNER_NORMS = {"inner_norms": True, "eps": 1e-6}

PUBLISHED_GGUF: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "microsoft/bitnet-b1.58-2B-4T-gguf": ("bitnet-b1.58", "ternary", {}, {}),
    "tiiuae/Falcon3-1B-Instruct-1.58bit-GGUF": ("llama", "ternary", {}, {}),
    "tiiuae/Falcon-E-1B-Instruct-GGUF": ("llama", "ternary", {}, {}),
    "microsoft/bitnet-embedding-0.6b": ("qwen3", "ternary", {"qwen3.pooling_type": 1}, _INNER_NORMS),
    "prism-ml/Ternary-Bonsai-8B-gguf": ("qwen3", "Q2_0", {f"qwen3.rope.scaling.{key}": value for key, value in _YARN.items()}, {}),
}
"""By repository: the architecture, the weights as testing.random_model calls them, keys beside those of every such file, and more options
of random_model."""

REFUSED_GGUF = {"microsoft/bitnet-embedding-270m": "attn_k_norm_in"}
"""By repository: the architecture is gemma3, and this the matrix norm that it has no place for."""


def of_text(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the text model, and those that gemma-3-4b-it leaves to its class."""
    if "text_config" not in config:
        return config
    return {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, "head_dim": 256, **config["text_config"]}


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The same model of few numbers: the same keys, and as many heads to a key-value head."""
    if "text_config" in config:
        return config | {"text_config": small(of_text(config))}
    share = config["num_attention_heads"] // config["num_key_value_heads"]
    sizes = _sizes(128 * share, 256, 2, 2 * share, 2) | {"vocab_size": 64, "max_position_embeddings": 64}
    rope = config.get("rope_scaling") or {}
    if rope.get("type") == "longrope":  # heads are 64 wide here
        sizes |= {"original_max_position_embeddings": 32, "rope_scaling": rope | {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}}
    sizes |= {key: 64 for key in ("head_dim", "moe_intermediate_size", "shared_expert_intermediate_size") if key in config}
    return config | sizes
