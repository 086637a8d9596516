"""config.json of published repositories, as their authors wrote it; and the same shape made small, for random weights.

Repositories of one kind differ in their sizes only, so one of each kind stands for the others.
"""

from typing import Any

_USUAL = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
_UNSCALED = _USUAL | {"attention_bias": False, "attention_dropout": 0.0, "rope_scaling": None}


def _kind(class_name: str, model_type: str) -> dict[str, Any]:
    return {"architectures": [class_name], "model_type": model_type}


def _own(kind: str, name: str) -> dict[str, Any]:
    """A kind whose code is in its own folder."""
    classes = {"AutoConfig": f"configuration_{kind}.{name}Config", "AutoModelForCausalLM": f"modeling_{kind}.{name}ForCausalLM"}
    return _kind(f"{name}ForCausalLM", kind) | {"auto_map": classes}


def _sizes(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _text(vocab: int, context: int, bos: int, eos: Any, eps: float = 1e-05) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "rms_norm_eps": eps,
    }


def _quantized(**keys: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "bitnet", **keys}}


_HEAD = {"modules_to_not_convert": ["lm_head"]}
_LLAMA = _UNSCALED | _kind("LlamaForCausalLM", "llama") | {"mlp_bias": False, "pretraining_tp": 1, "tie_word_embeddings": False}
_FALCON = _LLAMA | _quantized(**_HEAD) | {"is_bitnet_config": True, "rope_theta": 1000042}
_FALCON3 = _FALCON | _text(131072, 32768, 11, 11, 1e-06) | {"activation": "swiglu", "head_dim": 256}
_FALCON3 |= {"parallel_attn": False, "rope_interleaved": False}
_FALCON_E = _FALCON | _text(32768, 32768, 1, 11) | {"head_dim": 128}

_BITNET_2B = _USUAL | _own("bitnet", "BitNet") | _sizes(2560, 6912, 30, 20, 5) | _text(128256, 4096, 128000, 128001)
_BITNET_2B |= {"hidden_act": "relu2", "rope_theta": 500000.0, "tie_word_embeddings": True}
_BITNET_B1_58 = _UNSCALED | _kind("BitnetForCausalLM", "llama") | _text(32002, 2048, 1, 2) | {"input_bits": 8, "weight_bits": 1}
_BITNET_B1_58 |= {"pad_token_id": 32000, "pretraining_tp": 1, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float16"}

_MOE = _USUAL | {"attention_dropout": 0.0, "output_router_logits": False, "router_aux_loss_coef": 0.001, "rope_theta": 1000000.0}
_MOE |= {"sliding_window": None, "tie_word_embeddings": False}
_QWEN_MOE = _MOE | {"decoder_sparse_step": 1, "use_sliding_window": False}

_PHI3 = _UNSCALED | _own("phi3", "Phi3") | _text(32064, 4096, 1, 32000) | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "pad_token_id": 32000}
_PHI3 |= {"original_max_position_embeddings": 4096, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False}
_PHI3 |= {"transformers_version": "4.40.2"}

_GEMMA3 = {"initializer_range": 0.02, "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0"}
_GEMMA3_1B = _UNSCALED | _kind("Gemma3ForCausalLM", "gemma3_text") | _text(262144, 32768, 2, [1, 106], 1e-06) | _GEMMA3
_GEMMA3_1B |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA3_1B |= {"head_dim": 256, "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000, "pad_token_id": 0}
_GEMMA3_1B |= {"cache_implementation": "hybrid", "sliding_window": 512, "sliding_window_pattern": 6}
del _GEMMA3_1B["hidden_act"]
_GEMMA3_4B_TEXT = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
_GEMMA3_4B_TEXT |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
_GEMMA3_4B = _GEMMA3 | _kind("Gemma3ForConditionalGeneration", "gemma3") | {"text_config": _GEMMA3_4B_TEXT}
_GEMMA3_4B |= {"boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144, "mm_tokens_per_image": 256}
_GEMMA3_4B |= {"vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27}}

_MINICPM = _USUAL | _own("minicpm", "MiniCPM") | {"dim_model_base": 256, "initializer_range": 0.1, "scale_depth": 1.4, "scale_emb": 12}
_SAME_LISTS = [1.0 + 0.03 * n for n in range(32)]  # MiniCPM 4's lists are equal, and its context is not stretched
_SAME = {"rope_type": "longrope", "short_factor": _SAME_LISTS, "long_factor": _SAME_LISTS, "original_max_position_embeddings": 32768}


PUBLISHED: dict[str, dict[str, Any]] = {
    "microsoft/bitnet-b1.58-2B-4T": _BITNET_2B | _quantized(linear_class="autobitlinear", quantization_mode="offline"),
    "microsoft/bitnet-b1.58-2B-4T-bf16": _BITNET_2B | _quantized(linear_class="autobitlinear", quantization_mode="online"),
    "tiiuae/Falcon-E-1B-Instruct": _FALCON_E | _sizes(2048, 6144, 24, 16, 2),
    "tiiuae/Falcon3-1B-Instruct-1.58bit": _FALCON3 | _sizes(2048, 8192, 18, 8, 4),
    "tiiuae/Falcon3-3B-Instruct-1.58bit": _FALCON3 | _sizes(3072, 9216, 22, 12, 4),
    "tiiuae/Falcon3-7B-Instruct-1.58bit": _FALCON3 | _sizes(3072, 23040, 28, 12, 4),
    "tiiuae/Falcon3-10B-Instruct-1.58bit": _FALCON3 | _sizes(3072, 23040, 40, 12, 4),
    "HF1BitLLM/Llama3-8B-1.58-100B-tokens": _LLAMA
    | (_sizes(4096, 14336, 32, 32, 8) | _text(128256, 8192, 128000, 128009) | _quantized(modules_to_not_convert=None))
    | {"is_bitnet_config": True, "rope_interleaved": False, "rope_theta": 500000.0},
    "1bitLLM/bitnet_b1_58-large": _BITNET_B1_58 | _sizes(1536, 4096, 24, 16, 16),
    "1bitLLM/bitnet_b1_58-3B": _BITNET_B1_58 | _sizes(3200, 8640, 26, 32, 32),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": _MOE
    | (_kind("MixtralForCausalLM", "mixtral") | _sizes(4096, 14336, 32, 32, 8) | _text(32000, 32768, 1, 2))
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen/Qwen3-30B-A3B": _QWEN_MOE
    | (_kind("Qwen3MoeForCausalLM", "qwen3_moe") | _sizes(2048, 6144, 48, 32, 4) | _text(151936, 40960, 151643, 151645, 1e-06))
    | {"attention_bias": False, "head_dim": 128, "max_window_layers": 48, "mlp_only_layers": [], "rope_scaling": None}
    | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8},
    "Qwen/Qwen1.5-MoE-A2.7B": _QWEN_MOE
    | (_kind("Qwen2MoeForCausalLM", "qwen2_moe") | _sizes(2048, 5632, 24, 16, 16) | _text(151936, 8192, 151643, 151643, 1e-06))
    | {"max_window_layers": 21, "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4, "sliding_window": 32768}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "SpectraSuite/TriLM_3.9B_Unpacked": _LLAMA
    | (_sizes(3072, 9216, 30, 24, 24) | _text(50688, 2048, 0, 0))
    | {"rope_theta": 10000.0, "torch_dtype": "float16"},
    "microsoft/Phi-3-mini-4k-instruct": _PHI3 | _sizes(3072, 8192, 32, 32, 32),
    "microsoft/phi-4": _PHI3
    | _sizes(5120, 17920, 40, 40, 10)
    | {"max_position_embeddings": 16384, "rope_theta": 250000, "sliding_window": None, "vocab_size": 100352},
    "openbmb/MiniCPM-2B-sft-bf16": _MINICPM | _sizes(2304, 5760, 40, 36, 36) | _text(122753, 4096, 1, 2) | {"rope_scaling": None},
    "openbmb/BitCPM4-1B": _MINICPM
    | (_sizes(1536, 3840, 52, 24, 8) | _text(73448, 32768, 1, [2, 73440]))
    | {"rope_theta": 10000.0, "rope_scaling": _SAME},
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
