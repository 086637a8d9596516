"""A small GGUF file with values and tensors of several types, and a reader of everything in a file."""

import math
from pathlib import Path

import numpy as np
from fuzzing.gguf_bytes import BOOL, FLOAT32, UINT32, UINT64, Entry, number, numbers, text, texts
from fuzzing.gguf_bytes import gguf as build

from bitnet_np.base.tensor_types import I2_S
from bitnet_np.files.gguf_file import GGUFFile, open_gguf

SAMPLE = build(
    [
        ("general.architecture", text("bitnet-b1.58")),
        ("general.alignment", number(UINT32, 64)),
        ("layers", number(UINT64, 2)),
        ("epsilon", number(FLOAT32, 1e-5)),
        ("flag", number(BOOL, 1)),
        ("tokens", texts(["a", "", "Ġthe", "🙂"])),
        ("scores", numbers(FLOAT32, [0.5, -1, 2])),
        ("flags", numbers(BOOL, [1, 0, 1])),
    ],
    [Entry("norm", [8]), Entry("q", [128, 3], I2_S.number), Entry("table", [4, 2, 3], 1), Entry("k", [256, 1, 1, 2], 12)],
    alignment=64,
)


def write(folder: Path, raw: bytes, name: str = "some.gguf") -> Path:
    path = folder / name
    path.unlink(missing_ok=True)  # a new inode: truncating one that an earlier test still maps would kill the process
    path.write_bytes(raw)
    return path


def read(folder: Path, raw: bytes) -> GGUFFile:
    return open_gguf(write(folder, raw))


def everything(file: GGUFFile) -> None:
    """Decode every value and touch every byte."""
    for value in file.metadata.values():
        np.asarray(value).tobytes()
    for tensor in file.tensors.values():
        assert tensor.data.size == tensor.type.nbytes(math.prod(tensor.shape))
        tensor.data.sum()
