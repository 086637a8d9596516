"""Write the files that the examples of the documentation use to the current folder: `python examples/files.py`, of a checkout or an sdist.

model.gguf  the embedded test model: BitNet b1.58 with 3 layers of width 256, 512 tokens, random weights
tokens.npy  17 token ids
logits.npy  the logits that bitnet.cpp computes for them, [17, 512]
nodes.npz   every node of bitnet.cpp's graph for them
dump.npz    our own trace of them: the dump of an engine without a bug
"""

import shutil
from pathlib import Path

import numpy as np

from bitnet_np import load
from bitnet_np.files import embedded
from bitnet_np.traces.record import record_trace

NODES = Path(__file__).parents[1] / "tests" / "data" / "bitnet_cpp_tiny_trace.npz"


def main() -> int:
    with embedded.model_path() as path:
        shutil.copyfile(path, "model.gguf")
    recording = embedded.recording()
    tokens = recording["tokens_T17"]
    np.save("tokens.npy", tokens)
    np.save("logits.npy", recording["logits_prefill_T17"])
    shutil.copyfile(NODES, "nodes.npz")
    record_trace(load("model.gguf"), tokens, "dump.npz")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
