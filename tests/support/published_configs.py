"""config.json of published repositories, as their authors wrote it (data/published); and the same shape made small, for random weights."""

import json
from pathlib import Path
from typing import Any

_EVERY = json.loads((Path(__file__).parents[1] / "data" / "published" / "configs.json").read_text("utf-8"))

REFUSED = {"microsoft/Phi-3-mini-128k-instruct": "longrope"}
"""By repository: the word in the error that says why it is refused."""
PUBLISHED: dict[str, dict[str, Any]] = {name: config for name, config in _EVERY.items() if name not in REFUSED}
REFUSED_CONFIGS: dict[str, dict[str, Any]] = {name: _EVERY[name] for name in REFUSED}

_YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 16384}

_INNER_NORMS = {"inner_norms": True, "eps": 1e-6}

PUBLISHED_GGUF: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "microsoft/bitnet-b1.58-2B-4T-gguf": ("bitnet-b1.58", "ternary", {}, {}),
    "tiiuae/Falcon3-1B-Instruct-1.58bit-GGUF": ("llama", "ternary", {}, {}),
    "tiiuae/Falcon-E-1B-Instruct-GGUF": ("llama", "ternary", {}, {}),
    "microsoft/bitnet-embedding-0.6b": ("qwen3", "ternary", {"pooling_type": 1}, _INNER_NORMS),
    "prism-ml/Ternary-Bonsai-8B-gguf": ("qwen3", "Q2_0", {f"rope.scaling.{key}": value for key, value in _YARN.items()}, {}),
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
    sizes = {"hidden_size": 128 * share, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2 * share}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
    rope = config.get("rope_scaling") or {}
    if rope.get("type") == "longrope":  # heads are 64 wide here
        sizes |= {"original_max_position_embeddings": 32, "rope_scaling": rope | {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}}
    sizes |= {key: 64 for key in ("head_dim", "moe_intermediate_size", "shared_expert_intermediate_size") if key in config}
    return config | sizes
