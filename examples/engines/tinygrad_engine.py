"""tinygrad for the hunt: bn.hunt(engine), or python tinygrad_engine.py MODEL TOKENS OUT CHUNK PREFIX for one run."""

import os

os.environ.setdefault("DEV", "CPU")  # read when tinygrad is imported
os.environ["HALF"] = "0"  # weights stay as the file has them
os.environ["CACHELEVEL"] = "0"  # its cache on disk is of one thread

import numpy as np
from calls import calls, main, opened
from tinygrad import Tensor
from tinygrad.llm.model import Transformer


def engine(path, tokens, chunk=None, prefix=0):
    opened(path, ("llama", "qwen2", "qwen3"))  # others are run as if they were one of these
    model, _ = Transformer.from_gguf(str(path))
    rows = []
    for i, end in calls(tokens, chunk, prefix):
        x = model.token_embd(Tensor([tokens[i:end].tolist()])).float()
        for block in model.blk:
            x = block(x, i)
        rows.append(model.output(model.output_norm(x))[0].numpy())
    return np.concatenate(rows)[prefix:]


if __name__ == "__main__":
    main(engine)
