"""Helpers for tests of the command line: the embedded model, arguments, and files for commands."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import bitnet_np
from bitnet_np.files import embedded

ROOT = Path(bitnet_np.__file__).parents[1]
TINY = str(ROOT / "bitnet_np" / "data" / "tiny.gguf")
TOKENS = embedded.recording()["tokens_T17"]
HOT = ["--temperature", "3"]
needs_text = pytest.mark.skipif(not find_spec("tokenizers") or not find_spec("jinja2"), reason="needs the extra `text`")


def save_array(path, array, **how):
    """Save the array as .npy. Returns the path."""
    np.save(path, array, **how)
    return path


def write_file(path, content):
    """Write bytes or a text. Returns the path."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def with_commas(ids):
    return ",".join(map(str, ids))


def sha256(array):
    """The digest of float32 numbers that commands print."""
    return hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()
