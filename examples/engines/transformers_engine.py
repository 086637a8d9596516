"""transformers for the hunt: bn.hunt(engine), or python transformers_engine.py MODEL TOKENS OUT CHUNK PREFIX for one run.

The model is a GGUF file, which transformers widens to float32 (it needs accelerate). Attention is eager, in float32.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from calls import calls, main
from transformers import AutoModelForCausalLM


@lru_cache(2)
def load(path, _size):
    path = Path(path)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def engine(path, tokens, chunk=None, prefix=0):
    model, rows, past = load(str(path), Path(path).stat().st_mtime_ns), [], None
    for i, end in calls(tokens, chunk, prefix):
        out = model(torch.as_tensor(tokens[i:end])[None], past_key_values=past, use_cache=True)
        past = out.past_key_values
        rows.append(out.logits[0].float().numpy())
    return np.concatenate(rows)[prefix:]


if __name__ == "__main__":
    main(engine)
