"""The embedded models: one with a recording of bitnet.cpp to check against, and the demo model, which tells stories.

`tiny.gguf` has random weights in the released file's form; the recording (logits of 1, 2, 17 and 64 tokens, by prefill and by decode) comes
from a build of bitnet.cpp of 2026-03 with squared ReLU and GGML_LLAMAFILE=OFF, so that its prefill and its decode agree.

`demo.gguf` tells small stories, answers questions about them and adds up; docs/demo.md says how it was made.
"""

from contextlib import AbstractContextManager
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_DATA = files("bitnet_np") / "data"
LENGTHS = (1, 2, 17, 64)
DEMO_TOKENS = 160
"""Number of tokens within which most of the demo model's stories end."""


def model_path() -> AbstractContextManager[Path]:
    """Context of the path of the recording's model."""
    return as_file(_DATA / "tiny.gguf")


def demo_path() -> AbstractContextManager[Path]:
    """Context of the path of the demo model."""
    return as_file(_DATA / "demo.gguf")


def recording() -> dict[str, NDArray]:
    """The arrays of the recording: tokens_T<n> [n], logits_decode_T<n> and logits_prefill_T<n> [n, V] for n in LENGTHS."""
    with as_file(_DATA / "tiny_bitnet_cpp.npz") as path, np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
