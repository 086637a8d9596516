"""llama.cpp for the hunt, by llama-cpp-python: bn.hunt(engine), or python llama_cpp_python_engine.py MODEL TOKENS OUT CHUNK THREADS PREFIX.

The hunt is to be told that activations are rounded as in llama.cpp: `--as llama.cpp`.
"""

import numpy as np
from calls import calls, main
from llama_cpp import Llama


def engine(path, tokens, chunk=None, threads=1, prefix=0):
    model = Llama(str(path), n_ctx=512, n_batch=512, n_ubatch=512, n_threads=threads, logits_all=True, verbose=False)
    for i, end in calls(tokens, chunk, prefix):
        model.eval(tokens[i:end].tolist())
    return np.array(model.scores[prefix : len(tokens)])


if __name__ == "__main__":
    main(engine)
