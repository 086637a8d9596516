"""tinygrad for the hunt: bn.hunt(engine), or python tinygrad_engine.py MODEL TOKENS OUT CHUNK PREFIX for one run."""

import os
import sys

os.environ.setdefault("DEV", "CPU")  # read when tinygrad is imported
os.environ["HALF"] = "0"  # weights stay as the file has them

import gguf
import numpy as np
from tinygrad import Tensor
from tinygrad.llm.model import Transformer

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3moe")  # others are run as if they were one of these
KEYS = ("attention.sliding_window", "rope.scaling.factor")  # are not read


def engine(path, tokens, chunk=None, prefix=0):
    if isinstance(tokens, list):
        raise NotImplementedError("batches are not supported here")
    reader = gguf.GGUFReader(path)
    family = reader.fields["general.architecture"].contents()
    names = {tensor.name for tensor in reader.tensors}
    if family not in FAMILIES or "rope_freqs.weight" in names or any(f"{family}.{key}" in reader.fields for key in KEYS):
        raise NotImplementedError(f"{family} with these settings is not supported")
    model, _ = Transformer.from_gguf(str(path))
    size, rows = chunk or len(tokens), []
    starts = [0, *range(prefix, len(tokens), size)] if prefix else [*range(0, len(tokens), size)]
    for i, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        x = model.token_embd(Tensor([tokens[i:end].tolist()])).float()
        for block in model.blk:
            x = block(x, i)
        rows.append(model.output(model.output_norm(x))[0].numpy())
    return np.concatenate(rows)[prefix:]


if __name__ == "__main__":
    model, tokens, out, chunk, prefix = sys.argv[1:]
    np.save(out, engine(model, np.load(tokens), int(chunk), int(prefix)))
