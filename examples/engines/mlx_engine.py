"""mlx-lm for the hunt: bn.hunt(engine), or python mlx_engine.py MODEL TOKENS OUT CHUNK PREFIX. Weights of GGUF files are widened to float32."""

import re
import sys
from importlib import import_module

import gguf
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
         "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}  # fmt: skip
NAMES |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
NAMES |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}


def engine(path, tokens, chunk=None, prefix=0):
    if isinstance(tokens, list):
        raise NotImplementedError("batches are not supported here")
    reader = gguf.GGUFReader(path)
    family = reader.fields["general.architecture"].contents()
    of = lambda key, other=None: reader.fields[f"{family}.{key}"].contents() if f"{family}.{key}" in reader.fields else other  # noqa: E731
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    if family not in ("llama", "qwen2", "qwen3") or of("expert_count") or of("attention.sliding_window") or "rope_freqs.weight" in tensors:
        raise NotImplementedError(f"{family} with these settings is not supported here")
    module, heads, width = import_module(f"mlx_lm.models.{family}"), of("attention.head_count"), of("embedding_length")
    if family == "qwen2" and of("attention.key_length", width // heads) * heads != width:
        raise NotImplementedError("other head widths are not supported")
    known = {"model_type": family, "hidden_size": width, "num_hidden_layers": of("block_count"), "num_attention_heads": heads,
             "num_key_value_heads": of("attention.head_count_kv"), "intermediate_size": of("feed_forward_length"), "rope_traditional": family == "llama",
             "rms_norm_eps": of("attention.layer_norm_rms_epsilon"), "rope_theta": of("rope.freq_base"), "attention_bias": "blk.0.attn_q.bias" in tensors,
             "mlp_bias": "blk.0.ffn_up.bias" in tensors, "head_dim": of("attention.key_length", width // heads),
             "vocab_size": len(tensors["token_embd.weight"]), "tie_word_embeddings": "output.weight" not in tensors, "max_position_embeddings": 512}  # fmt: skip
    model = module.Model(module.ModelArgs.from_dict(known))
    parts = [(re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name).groups(), x) for name, x in tensors.items()]
    model.load_weights(
        [(f"model.layers.{n}.{NAMES[name]}.{kind}" if n else f"{NAMES[name]}.{kind}", mx.array(x)) for (n, name, kind), x in parts]
    )
    cache, size = make_prompt_cache(model), chunk or len(tokens)
    starts = [0, *range(prefix, len(tokens), size)] if prefix else [*range(0, len(tokens), size)]
    pairs = zip(starts, [*starts[1:], len(tokens)], strict=True)
    return np.concatenate([np.array(model(mx.array(tokens[None, i:end]), cache=cache)[0].astype(mx.float32)) for i, end in pairs])[prefix:]


if __name__ == "__main__":
    model, tokens, out, chunk, prefix = sys.argv[1:]
    np.save(out, engine(model, np.load(tokens), int(chunk), int(prefix)))
