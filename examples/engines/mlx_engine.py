"""mlx-lm for the hunt: bn.hunt(engine), or python mlx_engine.py MODEL TOKENS OUT CHUNK PREFIX. Weights are widened to float32."""

import re
from importlib import import_module

import mlx.core as mx
import numpy as np
from calls import calls, main, opened
from mlx_lm.models.cache import make_prompt_cache

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}  # fmt: skip
NAMES |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
NAMES |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
KEYS = {"hidden_size": "embedding_length", "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv", "intermediate_size": "feed_forward_length", "rope_theta": "rope.freq_base",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon", "head_dim": "attention.key_length"}  # fmt: skip


def engine(path, tokens, chunk=None, prefix=0):
    family, of, tensors = opened(path, ("llama", "qwen2", "qwen3"))
    known = {name: of(key) for name, key in KEYS.items()}
    if family == "qwen2" and known["head_dim"] * known["num_attention_heads"] != known["hidden_size"]:
        raise NotImplementedError("other head widths are not supported")
    known |= {"model_type": family, "vocab_size": len(tensors["token_embd.weight"]), "tie_word_embeddings": "output.weight" not in tensors}
    module = import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(known | {"max_position_embeddings": 512, "rope_traditional": family == "llama"}))
    parts = [(re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name).groups(), mx.array(x)) for name, x in tensors.items()]
    model.load_weights([(f"{f'model.layers.{n}.' if n else ''}{NAMES[name]}.{kind}", x) for (n, name, kind), x in parts])
    cache = make_prompt_cache(model)
    rows = [model(mx.array(tokens[None, i:end]), cache=cache)[0] for i, end in calls(tokens, chunk, prefix)]
    return np.concatenate([np.array(x.astype(mx.float32)) for x in rows])[prefix:]


if __name__ == "__main__":
    main(engine)
