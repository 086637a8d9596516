"""Logits as bare float32 numbers, little-endian. The file does not say their shape."""

import os
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import FileFormatError, OptionError
from ..points import Entry, Key, Trace, checked_tokens
from .arrays import Header, finished, insert
from .output import Writer


def read(path: str | os.PathLike[str], shape: tuple[int, ...], tokens: NDArray | None = None) -> Trace:
    """The trace of a file of logits of this shape: [T, V], [1, T, V], or [V] of the last token."""
    path = Path(path)
    if not shape or min(shape) < 1:
        raise OptionError(f"{path}: shape is {list(shape)}, expected positive lengths")
    size = path.stat().st_size
    if size != 4 * prod(shape):
        raise FileFormatError(f"{path}: {size} bytes, expected {4 * prod(shape)} for float32 {list(shape)}")
    ids = None if tokens is None else checked_tokens(tokens, "tokens")
    header = Header(tuple(shape), np.dtype("<f4"), False, 0)
    entries: dict[Key, Entry] = {}
    insert(entries, Key("result_output", None), header, partial(header.mapped, path), None if ids is None else len(ids), str(path))
    return finished(entries, path, "raw float32", ids, [])


class RawWriter(Writer):
    """Bare float32 logits."""

    names = frozenset({"result_output"})

    def put(self, key: Key, array: NDArray) -> None:
        with open(self.part, "xb") as file:
            array.astype("<f4", copy=False).tofile(file)
