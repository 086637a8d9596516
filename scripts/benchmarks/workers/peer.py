"""Runs llama.cpp for peers.py: a JSON request and a JSON answer per line. It knows nothing of bitnet_np.

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


def run(engine: Any, request: dict) -> dict:
    """The answer to one request, timed. engine: llama_cpp.Llama."""
    import llama_cpp

    api: Any = llama_cpp
    api.llama_set_n_threads(engine.ctx, request["threads"], request["threads"])
    engine.reset()
    if request["do"] == "prefill":
        pieces = [request["tokens"]]
    else:
        engine.eval(request["prompt"])
        pieces = [[token] for token in request["tokens"]]
    begin = time.perf_counter()
    for piece in pieces:
        engine.eval(piece)
    seconds = time.perf_counter() - begin
    logits = api.llama_get_logits(engine.ctx)[: engine.n_vocab()]
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
                import llama_cpp

                answer = {"version": llama_cpp.__version__}
            elif request["do"] == "open":
                engine = llama_cpp.Llama(request["path"], n_ctx=request["context"], verbose=False)
            else:
                answer = run(engine, request)
        except Exception as error:  # the other end reports whatever an engine raises
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
