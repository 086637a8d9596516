"""Writes the tiny models of the test sets into models/: `python models.py`. Every fault names one of them."""
import os
import sys

from bitnet_np.model.records import LongRope, Yarn
from bitnet_np.model.rope import longrope_magnitude, yarn_magnitude
from bitnet_np.testing.models import random_model, write_gguf

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "models")
S = dict(width=64, ffn=96, heads=4, kv_heads=2, head_dim=16, n_layers=3, vocab=96, context=256)
Q = dict(width=64, ffn=128, heads=4, kv_heads=2, head_dim=16, n_layers=3, vocab=96, context=256)
LONG = LongRope(64, (1.0, 1.02, 1.05, 1.1, 1.2, 1.3), (1.1, 1.6, 2.5, 4.0, 6.5, 11.0))
K = dict(width=256, ffn=256, heads=4, kv_heads=2, head_dim=64, n_layers=2, vocab=80, context=256)
MODELS = {
    "llama": dict(seed=11, family="llama", tied=False, **S),
    "llama_tied": dict(seed=12, family="llama", table="float16", tied=True, **S),
    "llama_q8": dict(seed=13, family="llama", table="Q8_0", tied=False, **Q),
    "llama_q4": dict(seed=14, family="llama", table="Q8_0", weights="Q4_0", tied=False, **Q),
    "llama_q41": dict(seed=15, family="llama", table="Q8_0", weights="Q4_1", tied=False, **Q),
    "llama_q50": dict(seed=16, family="llama", table="Q8_0", weights="Q5_0", tied=False, **Q),
    "llama_q51": dict(seed=17, family="llama", table="Q8_0", weights="Q5_1", tied=False, **Q),
    "llama_q2k": dict(seed=18, family="llama", table="Q8_0", weights="Q2_K", tied=False, **K),
    "llama_q3k": dict(seed=19, family="llama", table="Q8_0", weights="Q3_K", tied=False, **K),
    "llama_q4k": dict(seed=20, family="llama", table="Q8_0", weights="Q4_K", tied=False, **K),
    "llama_q5k": dict(seed=21, family="llama", table="Q8_0", weights="Q5_K", tied=False, **K),
    "llama_q6k": dict(seed=22, family="llama", table="Q6_K", weights="Q6_K", tied=False, **K),
    "llama_iq4nl": dict(seed=23, family="llama", table="Q8_0", weights="IQ4_NL", tied=False, **Q),
    "llama_mxfp4": dict(seed=24, family="llama", table="Q8_0", weights="MXFP4", tied=False, **Q),
    "llama_bf16": dict(seed=25, family="llama", table="bfloat16", tied=False, **S),
    "llama_mha": dict(seed=26, family="llama", tied=False, **{**S, "kv_heads": 4, "heads": 4}),
    "llama_mqa": dict(seed=27, family="llama", tied=False, **{**S, "kv_heads": 1, "heads": 4}),
    "llama_wide": dict(seed=28, family="llama", tied=False, **{**S, "heads": 5, "kv_heads": 5, "head_dim": 20, "width": 88, "ffn": 152, "vocab": 131}),
    "llama_lin": dict(seed=29, family="llama", tied=False, rope_scaling=4.0, **S),
    "mistral": dict(seed=30, family="llama", tied=False, window=24, **S),
    "mixtral": dict(seed=31, family="llama", tied=False, experts=4, experts_used=2, **S),
    "qwen2": dict(seed=32, family="qwen2", tied=True, **S),
    "qwen2_w": dict(seed=33, family="qwen2", tied=True, window=20, window_layers=(1, 2), **S),
    "qwen3": dict(seed=34, family="qwen3", tied=True, **{**S, "head_dim": 32}),
    "qwen3moe": dict(seed=35, family="qwen3moe", tied=False, **{**S, "experts": 8, "experts_used": 3, "ffn": 48}),
    "qwen2moe": dict(seed=36, family="qwen2moe", tied=False, **{**S, "experts": 6, "experts_used": 2, "ffn": 48}),
    "gemma": dict(seed=37, family="gemma", tied=True, **{**S, "head_dim": 32, "kv_heads": 1}),
    "gemma2": dict(seed=38, family="gemma2", tied=True, **{**S, "head_dim": 24, "window": 16}),
    "gemma3": dict(seed=39, family="gemma3", tied=True, **{**S, "head_dim": 24, "n_layers": 7, "window": 16, "ffn": 64}),
    "phi3": dict(seed=40, family="phi3", tied=False, rope_width=12, window=24, **S),
    "phi2": dict(seed=41, family="phi2", tied=False, rope_width=8, **{**S, "kv_heads": 4}),
    "gptneox": dict(seed=42, family="gptneox", tied=False, rope_width=8, **{**S, "kv_heads": 4}),
    "gpt2": dict(seed=43, family="gpt2", tied=True, **{**S, "kv_heads": 4}),
    "starcoder2": dict(seed=44, family="starcoder2", tied=True, **S),
    "stablelm": dict(seed=45, family="stablelm", tied=False, rope_width=8, **S),
    "granite": dict(seed=46, family="granite", tied=True, **S),
    "minicpm": dict(seed=47, family="minicpm", tied=True, **S),
    "olmo2": dict(seed=48, family="olmo2", tied=False, **S),
    "smollm3": dict(seed=49, family="smollm3", tied=True, **{**S, "n_layers": 4}),
    "llama_eps": dict(seed=52, family="llama", tied=False, eps=0.05, **S),
    "llama_theta": dict(seed=53, family="llama", tied=False, rope_base=500000.0, **S),
    "gemma3_lin": dict(seed=54, family="gemma3", tied=True, rope_scaling=8.0, **{**S, "head_dim": 24, "n_layers": 7, "window": 16, "ffn": 64}),
    "llama_g3": dict(seed=55, family="llama", tied=False, **{**S, "heads": 6, "kv_heads": 2}),
    "llama_h8": dict(seed=56, family="llama", tied=False, **{**S, "heads": 8, "kv_heads": 4, "head_dim": 8}),
    "llama_tq2": dict(seed=50, family="llama", tied=False, weights="TQ2_0", table="Q8_0", **K),
    "bitnet": dict(seed=60, family="bitnet-b1.58", tied=True, weights="TQ2_0", table="float16", **K),
    "bitnet_mha": dict(seed=61, family="bitnet-b1.58", tied=True, weights="TQ2_0", table="float16", **{**K, "kv_heads": 4, "n_layers": 3}),
    "qwen3_yarn": dict(seed=62, family="qwen3", tied=True, **{**S, "head_dim": 32, "yarn": Yarn(4.0, 64), "rope_magnitude": yarn_magnitude(4.0)}),
    "phi3_long": dict(seed=63, family="phi3", tied=False, rope_width=12, longrope=LONG, rope_magnitude=longrope_magnitude(4.0, 64), **{**S, "context": 64}),
    "starcoder2_w": dict(seed=64, family="starcoder2", tied=True, window=18, **S),
    "qwen3_eps": dict(seed=66, family="qwen3", tied=True, eps=0.02, **{**S, "head_dim": 32}),
    "stablelm_eps": dict(seed=67, family="stablelm", tied=False, rope_width=8, eps=0.02, **S),
    "mixtral_w": dict(seed=68, family="llama", tied=False, experts=4, experts_used=2, **{**S, "width": 70}),
    "qwen2moe_s": dict(seed=69, family="qwen2moe", tied=False, shared_ffn=96, **{**S, "experts": 6, "experts_used": 2, "ffn": 48}),
    "llama_iq3s": dict(seed=70, family="llama", table="Q8_0", weights="IQ3_S", tied=False, **K),
    "llama_iq4xs": dict(seed=71, family="llama", table="Q8_0", weights="IQ4_XS", tied=False, **K),
    "gemma2_eps": dict(seed=72, family="gemma2", tied=True, eps=0.02, **{**S, "head_dim": 24, "window": 16}),
    "llama_long": dict(seed=65, family="llama", tied=False, **{**S, "vocab": 160, "n_layers": 2, "context": 512}),
}


def main(only=()):
    os.makedirs(HERE, exist_ok=True)
    for name, args in MODELS.items():
        if only and name not in only:
            continue
        args = dict(args)
        try:
            write_gguf(os.path.join(HERE, name + ".gguf"), random_model(args.pop("seed"), **args))
            print(name)
        except Exception as e:
            print("FAILED", name, type(e).__name__, e)


if __name__ == "__main__":
    main(sys.argv[1:])
