"""Record tiny models that mlx-lm quantised in groups, and what it computes with them: `record_mlx.py DIR`.

It needs mlx-lm, and mlx[cpu] where there is no Apple processor. Each model is a folder as mlx-lm saves it, with recorded.npz: `tokens` [T],
`logits` [T, V], `embedding` (the rows of the tokens), and of each other quantised module its first rows, as a product with the identity in
float32 gives them. Weights are random from a fixed seed.
"""

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 35])
ROWS = 4
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "hidden_act": "silu",
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
BITS = {"k_proj": 8, "v_proj": 3, "o_proj": 2, "gate_proj": 5, "up_proj": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
NO_DENSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
MODELS: dict[str, tuple[dict[str, Any], str, dict[str, int]]] = {
    "llama": ({"model_type": "llama", "tie_word_embeddings": True}, "bfloat16", BITS),
    "qwen3_moe": ({"model_type": "qwen3_moe", "tie_word_embeddings": False, **EXPERTS, **NO_DENSE}, "float32", {"gate": 8}),
}
"""The settings of each model, its type, and the bits of modules that have not 4."""


def record(name: str, folder: Path) -> None:
    """Write one model and what mlx-lm computes with it."""
    mx, tree, utils = (importlib.import_module(name) for name in ("mlx.core", "mlx.utils", "mlx_lm.utils"))
    settings, kind, bits = MODELS[name]
    config = SHAPE | settings
    mx.random.seed(0)
    model_class, arguments = utils._get_classes(config)
    model = model_class(arguments.from_dict(config))
    norms = {path: mx.random.uniform(0.5, 1.5, value.shape) for path, value in tree.tree_flatten(model.parameters()) if "norm" in path}
    model.update(tree.tree_unflatten(list(norms.items())))
    model.set_dtype(getattr(mx, kind))

    def predicate(path: str, module: Any) -> bool | dict[str, Any]:
        own = bits.get(path.rpartition(".")[2])
        return True if own is None else {"group_size": 32, "bits": own}

    model, config = utils.quantize_model(model, config, 32, 4, quant_predicate=predicate)
    folder.mkdir(parents=True, exist_ok=True)
    utils.save_model(folder, model)
    utils.save_config(config, folder / "config.json")
    recorded = {"tokens": TOKENS, "logits": model(mx.array(TOKENS[None]))[0], "embedding": model.model.embed_tokens(mx.array(TOKENS))}
    for path, module in model.named_modules():
        if "scales" in module and not path.endswith("embed_tokens"):
            part = {key: module[key].reshape(-1, module[key].shape[-1])[:ROWS] for key in ("weight", "scales", "biases")}
            identity = mx.eye(part["scales"].shape[-1] * module.group_size)
            recorded[path] = mx.quantized_matmul(identity, *part.values(), True, module.group_size, module.bits).T
    numbers: dict[str, Any] = {key: value if key == "tokens" else np.array(value.astype(mx.float32)) for key, value in recorded.items()}
    np.savez_compressed(folder / "recorded.npz", **numbers)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record models that mlx-lm quantised, and what it computes with them.")
    parser.add_argument("out", type=Path, metavar="DIR")
    options = parser.parse_args(argv)
    for name in MODELS:
        record(name, options.out / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
