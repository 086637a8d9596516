"""The embedded default: a tiny random BitNet model in the released file's form, and what bitnet.cpp computed with it.

`tiny.gguf` and the recording (logits of 1, 2, 17 and 64 tokens, by prefill and by decode) come from a build of bitnet.cpp of 2026-03 with
squared ReLU and GGML_LLAMAFILE=OFF, so that its prefill and its decode agree.
"""

from contextlib import AbstractContextManager
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_DATA = files(__package__) / "data"
LENGTHS = (1, 2, 17, 64)


def model_path() -> AbstractContextManager[Path]:
    """The model file, for as long as the context lasts."""
    return as_file(_DATA / "tiny.gguf")


def recording() -> dict[str, NDArray]:
    """tokens_T<n> [n], logits_decode_T<n> and logits_prefill_T<n> [n, V] for n in LENGTHS."""
    with as_file(_DATA / "tiny_bitnet_cpp.npz") as path, np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
