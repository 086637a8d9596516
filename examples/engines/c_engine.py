"""An engine in C for the hunt, by ctypes: bn.hunt(engine), or python c_engine.py MODEL TOKENS OUT CHUNK PREFIX for one run.

engine.so is in the folder that ENGINE names, or here: cc -O2 -shared -fPIC engine.c -o engine.so -lm
"""

import ctypes
import os
from pathlib import Path

import numpy as np
from calls import calls, main, opened

LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
KEYS = {"layers": "block_count", "width": "embedding_length", "ffn": "feed_forward_length", "heads": "attention.head_count",
        "kv_heads": "attention.head_count_kv", "head_dim": "attention.key_length", "vocab": "vocab_size",
        "eps": "attention.layer_norm_rms_epsilon", "base": "rope.freq_base"}  # fmt: skip
FIELDS = [(name, ctypes.c_float if name in ("eps", "base") else ctypes.c_int) for name in KEYS]
shape = type("shape", (ctypes.Structure,), {"_fields_": FIELDS})
library = ctypes.CDLL(Path(os.environ.get("ENGINE", Path(__file__).parent)) / "engine.so")


def engine(path, tokens, chunk=None, prefix=0):
    _, of, w = opened(path, ("llama",))
    s = shape(*map(of, KEYS.values()))
    head = "output.weight" if "output.weight" in w else "token_embd.weight"
    names = ["token_embd.weight", "output_norm.weight", head, *(f"blk.{n}.{name}.weight" for n in range(s.layers) for name in LAYER)]
    pointers = (ctypes.c_void_p * len(names))(*(w[name].ctypes.data for name in names))
    keys, values = np.zeros((2, s.layers, len(tokens), s.kv_heads * s.head_dim), np.float32)
    logits, ids = np.zeros((len(tokens), s.vocab), np.float32), np.array(tokens, np.int32)
    for i, end in calls(tokens, chunk, prefix):
        ours = [ctypes.c_void_p(x.ctypes.data) for x in (keys, values, logits[i:])]
        library.engine(ctypes.byref(s), pointers, ctypes.c_void_p(ids[i:].ctypes.data), end - i, i, len(ids), *ours)
    return logits[prefix:]


if __name__ == "__main__":
    main(engine)
