"""Writers of traces: one array at a time, and a file appears only when it is complete."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base.errors import EmptyInputError, OptionError
from ...base.validate import instance, path_of
from ...base.whole_file import whole_file
from ..normal_form import checked_dtype, checked_tokens, normal_form
from ..points import Key
from .labels import TOKENS


class Writer:
    """A context in which `add` writes points, each once. An exception leaves no file behind.

    The file or folder is written beside its place under a temporary name. An existing file is replaced at the end; a folder that is not
    empty is an error at the start.
    """

    folder: ClassVar[bool] = False
    names: ClassVar[frozenset[str] | None] = None  # the points it can hold; None: all

    def __init__(self, path: str | os.PathLike[str], tokens: ArrayLike | None = None) -> None:
        self.path = path_of(path)
        if not self.path.name:
            raise OptionError(f"{self.path} has no name, expected that of a file or folder to write")
        self.tokens = None if tokens is None else checked_tokens(np.asarray(tokens), "tokens")
        self.written: dict[Key, tuple[tuple[int, ...], int]] = {}  # shape and bytes
        self.open = ExitStack()  # ended when the output is complete, or thrown away

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
        if self.path.exists() and not (empty if self.folder else self.path.is_file()):
            expected = "a name that is not taken" if self.folder else "a file or a name that is not taken"
            raise OptionError(f"{self.path} is there already, expected {expected}")
        with whole_file(self.path, self.folder) as self.part:
            try:
                self.begin()
                yield
                if not self.written:
                    raise EmptyInputError(f"{self.path}: nothing was written to it, expected at least one point")
                self.finish()
                self.open.close()
            finally:
                with suppress(Exception):  # where the output is thrown away, closed or not
                    self.open.close()

    def add(self, key: Key, array: NDArray) -> None:
        """Write one point, in normal form."""
        instance("key", key, Key)
        if self.names is not None and key.name not in self.names:
            raise OptionError(f"{self.path}: this format has no {key}, only {', '.join(sorted(self.names))}")
        if key in self.written:
            raise OptionError(f"{self.path}: {key} was written already, expected each point once")
        array = np.asarray(array)
        checked_dtype(key, array.dtype, str(self.path))
        rows = None if self.tokens is None else len(self.tokens)
        array = normal_form(key, array.shape, rows, str(self.path)).of(array)
        self.written[key] = array.shape, array.nbytes
        self.put(key, np.ascontiguousarray(array, array.dtype.newbyteorder("<")))

    def opened(self, path: Path, mode: str) -> IO[Any]:
        """A new file that is closed when the output is complete, or thrown away."""
        file = open(path, mode, encoding=None if "b" in mode else "utf-8", newline=None if "b" in mode else "\n")  # noqa: SIM115
        return self.open.enter_context(file)

    def begin(self) -> None:
        """Open the output, at self.part."""

    def put(self, key: Key, array: NDArray) -> None:
        """Write one array: C order, little-endian."""
        raise NotImplementedError

    def finish(self) -> None:
        """Complete the output."""


class LabelWriter(Writer):
    """A writer of arrays by their labels: tokens first, if there are any."""

    def begin(self) -> None:
        if self.tokens is not None:
            self.write(TOKENS, self.tokens)

    def put(self, key: Key, array: NDArray) -> None:
        self.write(str(key), array)

    def write(self, label: str, array: NDArray) -> None:
        """Write one array under its label."""
        raise NotImplementedError
