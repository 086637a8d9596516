"""The embedded models: one that is checked against bitnet.cpp, and one that has something to say.

`tiny.gguf` has random weights in the released file's form; the recording (logits of 1, 2, 17 and 64 tokens, by prefill and by decode) comes
from a build of bitnet.cpp of 2026-03 with squared ReLU and GGML_LLAMAFILE=OFF, so that its prefill and its decode agree.

`demo.gguf` tells small stories, answers questions about them and adds up; `python demo/train.py` made it.
"""

from contextlib import AbstractContextManager
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_DATA = files(__package__) / "data"
LENGTHS = (1, 2, 17, 64)
DEMO_TOKENS = 160
"""What most of the demo model's stories end within."""


def model_path() -> AbstractContextManager[Path]:
    """The model of the recording, for as long as the context lasts."""
    return as_file(_DATA / "tiny.gguf")


def demo_path() -> AbstractContextManager[Path]:
    """The model that speaks, for as long as the context lasts."""
    return as_file(_DATA / "demo.gguf")


def recording() -> dict[str, NDArray]:
    """tokens_T<n> [n], logits_decode_T<n> and logits_prefill_T<n> [n, V] for n in LENGTHS."""
    with as_file(_DATA / "tiny_bitnet_cpp.npz") as path, np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
