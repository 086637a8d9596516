"""llama.cpp for the hunt, by llama-cpp-python: bn.hunt(engine), or python llama_cpp_python_engine.py MODEL TOKENS OUT CHUNK THREADS PREFIX.

The hunt is to be told that activations are rounded as in llama.cpp: `--as llama.cpp`.
"""

import sys

import numpy as np
from llama_cpp import Llama


def engine(path, tokens, chunk=None, threads=1, prefix=0):
    if isinstance(tokens, list):
        raise NotImplementedError("batches are not supported here")
    size = chunk or len(tokens)
    model = Llama(str(path), n_ctx=512, n_batch=512, n_ubatch=512, n_threads=threads, logits_all=True, verbose=False)
    if prefix:
        model.eval(tokens[:prefix].tolist())
    for i in range(prefix, len(tokens), size):
        model.eval(tokens[i : i + size].tolist())
    return np.array(model.scores[prefix : len(tokens)])


if __name__ == "__main__":
    model, tokens, out, *numbers = sys.argv[1:]
    np.save(out, engine(model, np.load(tokens), *map(int, numbers)))
