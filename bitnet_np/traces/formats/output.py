"""Writers of traces: one array at a time, and a file appears only when it is complete."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base.errors import EmptyInputError, OptionError
from ...base.validate import instance, path_of
from ...base.whole_file import whole_file
from ..labels import TOKENS
from ..normal_form import checked_dtype, checked_tokens, normal_form
from ..points import Key

Put: TypeAlias = Callable[[Key, NDArray], None]
"""Writes one array: in normal form, C order, little-endian."""


class Output(NamedTuple):
    """How a format is written. Called with a path, and perhaps tokens, it gives a context: a Writer, whose `add` writes points.

    The file or folder is written under a temporary name in the same place. An existing file is replaced at the end; a folder that is not
    empty is an error at the start. An exception leaves no file behind.
    """

    opened: Callable[["Writer"], Iterator[Put]]  # opens the output at the writer's `part`, yields what writes one array, and closes it
    names: frozenset[str] | None = None  # the points it can hold; None: all
    folder: bool = False
    holds_tokens: bool = False  # as an array like the points

    @contextmanager
    def __call__(self, path: str | os.PathLike[str], tokens: ArrayLike | None = None) -> Iterator["Writer"]:
        path = path_of(path)
        if not path.name:
            raise OptionError(f"{path} has no name, expected that of a file or folder to write")
        ids = None if tokens is None else checked_tokens(np.asarray(tokens), "tokens")
        if not path.parent.is_dir():
            raise OptionError(f"{path}: there is no folder {path.parent}")
        empty = path.is_dir() and not any(path.iterdir())
        if path.exists() and not (empty if self.folder else path.is_file()):
            expected = "a name that is not taken" if self.folder else "a file or a name that is not taken"
            raise OptionError(f"{path} is there already, expected {expected}")
        with whole_file(path, self.folder) as part:
            out = Writer(path, part, ids, self.names)
            with contextmanager(self.opened)(out) as out.put:
                if ids is not None and self.holds_tokens:
                    out.put(Key(TOKENS, None), ids)
                yield out
                if not out.written:
                    raise EmptyInputError(f"{path}: nothing was written to it, expected at least one point")


class Writer:
    """What writes points, each once."""

    put: Put

    def __init__(self, path: Path, part: Path, tokens: NDArray[np.int64] | None, names: frozenset[str] | None) -> None:
        self.path, self.part, self.tokens, self._names = path, part, tokens, names
        self.written: dict[Key, tuple[tuple[int, ...], int]] = {}  # shape and bytes

    def add(self, key: Key, array: NDArray) -> None:
        """Write one point, in normal form."""
        instance("key", key, Key)
        if self._names is not None and key.name not in self._names:
            raise OptionError(f"{self.path}: this format has no {key}, only {', '.join(sorted(self._names))}")
        if key in self.written:
            raise OptionError(f"{self.path}: {key} was written already, expected each point once")
        array = np.asarray(array)
        checked_dtype(key, array.dtype, str(self.path))
        rows = None if self.tokens is None else len(self.tokens)
        array = normal_form(key, array.shape, rows, str(self.path)).of(array)
        self.written[key] = array.shape, array.nbytes
        self.put(key, np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
