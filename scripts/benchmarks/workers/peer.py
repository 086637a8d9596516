"""Runs another engine for peers.py: `peer.py NAME`, then a JSON request and a JSON answer per line. It knows nothing of bitnet_np.

{"do": "import"}                                            -> {"version"}
{"do": "open", ...}                                         -> {}
{"do": "prefill", "tokens": [...], "threads": n}            -> {"seconds", "sane"}: logits of the last position, from an empty cache
{"do": "decode", "prompt": [...], "tokens": [...], ...}     -> the same: the prompt is not timed, the tokens are, one by one
"""

import json
import math
import os
import sys
import time
from typing import Any


class LlamaCpp:
    """llama-cpp-python, on a GGUF file."""

    def __init__(self) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        self.version = llama_cpp.__version__

    def open(self, path: str, context: int) -> None:
        self.model = self.api.Llama(path, n_ctx=context, verbose=False)
        self.vocab = self.model.n_vocab()

    def set_threads(self, n: int) -> None:
        self.api.llama_set_n_threads(self.model.ctx, n, n)

    def clear(self) -> None:
        self.model.reset()

    def feed(self, tokens: list[int]) -> None:
        self.model.eval(tokens)

    def logits(self) -> list[float]:
        return self.api.llama_get_logits(self.model.ctx)[: self.vocab]


class Transformers:
    """A random BitNetForCausalLM with dense matrices."""

    def __init__(self, dtype: str) -> None:
        import torch
        import transformers

        self.torch: Any = torch
        self.api: Any = transformers
        self.dtype = getattr(torch, dtype)
        self.version = f"{transformers.__version__}, torch {torch.__version__}"

    def open(self, **config: int) -> None:
        self.torch.manual_seed(0)
        self.torch.set_default_dtype(self.dtype)
        self.model = self.api.BitNetForCausalLM(self.api.BitNetConfig(tie_word_embeddings=True, **config)).eval()

    def set_threads(self, n: int) -> None:
        self.torch.set_num_threads(n)

    def clear(self) -> None:
        self.cache = None

    def feed(self, tokens: list[int]) -> None:
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.last = out.past_key_values, out.logits[0, -1]

    def logits(self) -> list[float]:
        return self.last.tolist()


ENGINES = {
    "llama-cpp": LlamaCpp,
    "transformers": lambda: Transformers("bfloat16"),
    "transformers-f32": lambda: Transformers("float32"),
}


def run(engine: Any, request: dict) -> dict:
    """The answer to one request, timed."""
    engine.set_threads(request["threads"])
    engine.clear()
    if request["do"] == "prefill":
        pieces = [request["tokens"]]
    else:
        engine.feed(request["prompt"])
        pieces = [[token] for token in request["tokens"]]
    begin = time.perf_counter()
    for piece in pieces:
        engine.feed(piece)
    seconds = time.perf_counter() - begin
    logits = engine.logits()
    return {"seconds": seconds, "sane": all(map(math.isfinite, logits)) and min(logits) < max(logits)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # an engine's own output must not mix with answers
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict = {}
            if request["do"] == "import":
                engine = ENGINES[sys.argv[1]]()
                answer = {"version": engine.version}
            elif request["do"] == "open":
                engine.open(**{key: value for key, value in request.items() if key != "do"})
            else:
                answer = run(engine, request)
        except Exception as error:  # the other end reports whatever an engine raises
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
