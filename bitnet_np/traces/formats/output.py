"""Writers of traces: one array at a time, and a file appears only when it is complete."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base.errors import EmptyInputError, OptionError
from ...base.validate import instance, path_of
from ...base.whole_file import whole_file
from ..normal_form import checked_dtype, checked_tokens, normal_form
from ..points import Key
from .labels import TOKENS

Put: TypeAlias = Callable[[Key, NDArray], None]
"""Writes one array: in normal form, C order, little-endian."""


class Output(NamedTuple):
    """How a format is written: called with a path, and perhaps tokens, it gives a Writer."""

    opened: Callable[["Writer"], AbstractContextManager[Put]]  # the output at the writer's `part`, while it is open
    names: frozenset[str] | None = None  # the points it can hold; None: all
    folder: bool = False
    holds_tokens: bool = False  # as an array like the points

    def __call__(self, path: str | os.PathLike[str], tokens: ArrayLike | None = None) -> "Writer":
        return Writer(self, path, tokens)


class Writer:
    """A context in which `add` writes points, each once. An exception leaves no file behind.

    The file or folder is written beside its place under a temporary name. An existing file is replaced at the end; a folder that is not
    empty is an error at the start.
    """

    def __init__(self, output: Output, path: str | os.PathLike[str], tokens: ArrayLike | None = None) -> None:
        self._output, self.path = output, path_of(path)
        if not self.path.name:
            raise OptionError(f"{self.path} has no name, expected that of a file or folder to write")
        self.tokens = None if tokens is None else checked_tokens(np.asarray(tokens), "tokens")
        self.written: dict[Key, tuple[tuple[int, ...], int]] = {}  # shape and bytes
        self.part: Path
        self._put: Put

    def __enter__(self) -> Self:
        self._context = self._writing()
        self._context.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.__exit__(kind, error, trace)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if not self.path.parent.is_dir():
            raise OptionError(f"{self.path}: there is no folder {self.path.parent}")
        empty = self.path.is_dir() and not any(self.path.iterdir())
        if self.path.exists() and not (empty if self._output.folder else self.path.is_file()):
            expected = "a name that is not taken" if self._output.folder else "a file or a name that is not taken"
            raise OptionError(f"{self.path} is there already, expected {expected}")
        with whole_file(self.path, self._output.folder) as self.part, self._output.opened(self) as self._put:
            if self.tokens is not None and self._output.holds_tokens:
                self._put(Key(TOKENS, None), self.tokens)
            yield
            if not self.written:
                raise EmptyInputError(f"{self.path}: nothing was written to it, expected at least one point")

    def add(self, key: Key, array: NDArray) -> None:
        """Write one point, in normal form."""
        instance("key", key, Key)
        if self._output.names is not None and key.name not in self._output.names:
            raise OptionError(f"{self.path}: this format has no {key}, only {', '.join(sorted(self._output.names))}")
        if key in self.written:
            raise OptionError(f"{self.path}: {key} was written already, expected each point once")
        array = np.asarray(array)
        checked_dtype(key, array.dtype, str(self.path))
        rows = None if self.tokens is None else len(self.tokens)
        array = normal_form(key, array.shape, rows, str(self.path)).of(array)
        self.written[key] = array.shape, array.nbytes
        self._put(key, np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
