"""Traces in the .safetensors format of Hugging Face: mapped arrays, and a writer of one array at a time.

Arrays are written from the widest numbers to the narrowest, so each is aligned.
"""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ...base.tensor_types import BF16
from ...files.safetensors_file import DTYPES, NAMES, header, open_safetensors
from ...files.tensors import Tensor
from ...model import widen
from ..points import Entry
from .arrays import Labelled
from .output import LabelWriter


def _load(tensor: Tensor) -> NDArray:
    array = tensor.data.view(DTYPES[tensor.type.name]).reshape(tensor.shape)
    return widen.float32(array) if tensor.type is BF16 else array


def read(path: str | os.PathLike[str]) -> Labelled:
    """The arrays of a .safetensors file whose tensors are named by label, such as attn_norm-0. Bfloat16 is widened to float32: exact."""
    path, arrays = Path(path), {}
    for name, tensor in open_safetensors(path).items():
        dtype = np.dtype(np.float32) if tensor.type is BF16 else DTYPES[tensor.type.name]
        arrays[name] = Entry(tensor.shape, dtype, partial(_load, tensor))
    return Labelled(arrays, path, "safetensors")


class SafetensorsWriter(LabelWriter):
    """A .safetensors file. Its header comes first but is known last, so data wait in one file for each width of number."""

    def begin(self) -> None:
        self._table: list[tuple[str, NDArray]] = []  # labels, and arrays without their numbers
        self._data: dict[int, IO[bytes]] = {}
        super().begin()

    def write(self, label: str, array: NDArray) -> None:
        width = array.itemsize
        if width not in self._data:
            part = self.part.with_name(f"{self.part.name}{width}")
            self.open.callback(part.unlink, missing_ok=True)
            self._data[width] = self.opened(part, "x+b")
        array.tofile(self._data[width])
        self._table.append((label, np.broadcast_to(np.zeros((), array.dtype), array.shape)))

    def finish(self) -> None:
        widest_first = sorted(self._table, key=lambda item: -item[1].itemsize)
        with open(self.part, "xb") as file:
            file.write(header((label, NAMES[array.dtype], array.shape) for label, array in widest_first))
            for width in sorted(self._data, reverse=True):
                self._data[width].seek(0)
                shutil.copyfileobj(self._data[width], file, 1 << 20)
