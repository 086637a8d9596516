"""onnxruntime for the hunt: bn.hunt(engine), or python onnxruntime_engine.py MODEL TOKENS OUT CHUNK PREFIX for one run."""

import numpy as np
import onnxruntime
from calls import calls, main, opened
from onnx_llama import graph_of


def engine(path, tokens, chunk=None, prefix=0):
    _, of, w = opened(path, ("llama",))
    graph, names, (heads, width) = graph_of(of, w)
    session = onnxruntime.InferenceSession(graph)
    cache, rows = {name: np.zeros((1, heads, 0, width), np.float32) for name in names}, []
    for i, end in calls(tokens, chunk, prefix):
        numbers = {"ids": tokens[None, i:end], "last": np.array([end - 1], np.int32), "total": np.array(end, np.int32)}
        logits, *after = session.run(None, numbers | cache)
        cache = dict(zip(names, after, strict=True))
        rows.append(logits[0])
    return np.concatenate(rows)[prefix:]


if __name__ == "__main__":
    main(engine)
