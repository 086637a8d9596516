"""Logits as bare float32 numbers, little-endian. The file does not say their shape."""

import os
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...base.errors import OptionError
from ..points import Key
from .arrays import Header, Labelled, bare_shape, check_size
from .output import Writer


def read(path: str | os.PathLike[str], shape: tuple[int, ...] | None) -> Labelled:
    """The array of a file of logits of this shape: [T, V], [1, T, V], or [V] of the last token. See arrays.bare_shape."""
    path = Path(path)
    if shape is None:
        raise OptionError(f"{path}: bare float32 numbers, which need a shape")
    size = path.stat().st_size
    shape = bare_shape(path, shape, size // 4)
    check_size(path, size, 4 * prod(shape), f"float32 {list(shape)}")
    header = Header(shape, np.dtype("<f4"), False, 0)
    return Labelled({"result_output": header.entry(path)}, path, "raw float32")


class RawWriter(Writer):
    """Bare float32 logits."""

    names = frozenset({"result_output"})

    def put(self, key: Key, array: NDArray) -> None:
        with open(self.part, "xb") as file:
            array.astype("<f4", copy=False).tofile(file)
