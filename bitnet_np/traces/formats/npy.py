"""NumPy's .npy: a strict reader of its header, and arrays mapped from a file. Nothing is unpickled, and no size is trusted."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import FileFormatError, shown
from ..points import Entry, Key, Points, Trace, checked_dtype, checked_tokens, normal_shape
from . import stages
from .output import Writer

MAGIC = b"\x93NUMPY"
MAX_POINTS = 1 << 16
"""Most points of one trace; 30 layers have 700."""


class Header(NamedTuple):
    """An array in a file: its shape and dtype, and where its data lie."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    offset: int  # of the data

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def array(self, data: NDArray[np.uint8]) -> NDArray:
        """The array, given its bytes."""
        return data.view(self.dtype).reshape(self.shape, order="F" if self.fortran else "C")

    def mapped(self, path: Path) -> NDArray:
        """The array, mapped from a file whose header was read before. Raises FileFormatError if the file has become shorter."""
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        try:
            return self.array(np.memmap(path, np.uint8, "r", self.offset, (self.nbytes,)).view(np.ndarray))
        except ValueError as error:
            raise FileFormatError(f"{path}: the file has changed since it was opened: {error}") from None


def read_header(stream: IO[bytes], size: int, where: str) -> Header:
    """The header at the start of `stream`, whose size is `size` bytes; leaves it at the data."""
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the format, expected (1, 0) or (2, 0)")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except Exception as error:  # NumPy reads the header as Python's source: a damaged one can raise nearly anything
        raise FileFormatError(f"{where}: no .npy array: {shown(str(error) or type(error).__name__)}") from None
    if dtype.hasobject or dtype.fields is not None or any(type(n) is not int or n < 0 for n in shape) or len(shape) > 8:
        raise FileFormatError(f"{where}: .npy of {shown(dtype)} {shown(shape)}, expected numbers and at most 8 axes")
    header = Header(shape, dtype, fortran, stream.tell())
    if header.offset + header.nbytes != size:
        expected = f"{header.nbytes} bytes for {dtype} {list(shape)}"
        raise FileFormatError(f"{where}: {size - header.offset} bytes of data, expected {expected}")
    return header


def mapped(path: Path) -> tuple[Header, Callable[[], NDArray]]:
    """The header of a .npy file, and a function that maps its array."""
    with open(path, "rb") as file:
        header = read_header(file, os.fstat(file.fileno()).st_size, str(path))
    return header, partial(header.mapped, path)


def collect(arrays: Mapping[str, tuple[Header, Callable[[], NDArray]]], path: Path, kind: str, tokens: NDArray | None) -> Trace:
    """The trace of a file's arrays by their labels; labels that are no point are ignored. Raises FileFormatError if none is a point."""
    where = str(path)
    if tokens is None and "tokens" in arrays:
        tokens = arrays["tokens"][1]()
    ids = None if tokens is None else checked_tokens(tokens, where)
    entries: dict[Key, Entry] = {}
    ignored = []
    for label, (header, load) in arrays.items():
        key = stages.find(label)
        if key is not None:
            insert(entries, key, header, load, None if ids is None else len(ids), where)
        elif label != "tokens":
            ignored.append(label)
    return finished(entries, path, kind, ids, ignored)


def insert(entries: dict[Key, Entry], key: Key, header: Header, load: Callable[[], NDArray], rows: int | None, where: str) -> None:
    """Add a point in normal form to `entries`. Raises FileFormatError if it is there already."""
    if key in entries:
        raise FileFormatError(f"{where}: {key} is there twice, expected each point once")
    shape, dtype = normal_shape(key, header.shape, rows, where), checked_dtype(key, header.dtype, where).newbyteorder("=")
    entries[key] = Entry(shape, dtype, lambda: load().reshape(shape).astype(dtype, copy=False))


def finished(entries: dict[Key, Entry], path: Path, kind: str, ids: NDArray[np.int64] | None, ignored: list[str]) -> Trace:
    """The trace of these entries. Raises FileFormatError if there are none."""
    if not entries:
        labels = ", ".join(shown(label) for label in ignored[:5]) or "nothing"
        raise FileFormatError(f"{path}: no point of a forward pass in it, expected labels such as attn_norm-0; it has {labels}")
    return Trace(Points(entries), ids, f"{path} ({kind})", ignored=tuple(ignored))


def read_folder(path: str | os.PathLike[str], tokens: NDArray | None = None) -> Trace:
    """The trace of a folder of `<label>.npy`, such as attn_norm-0.npy and result_output.npy, and perhaps tokens.npy."""
    path = Path(path)
    files = sorted(entry.name for entry in os.scandir(path) if entry.name.endswith(".npy") and entry.is_file())
    if len(files) > MAX_POINTS:
        raise FileFormatError(f"{path}: {len(files)} .npy files, expected {MAX_POINTS} at most")
    return collect({name.removesuffix(".npy"): mapped(path / name) for name in files}, path, "folder of .npy", tokens)


def read_logits(path: str | os.PathLike[str], tokens: NDArray | None = None) -> Trace:
    """The trace of one .npy of logits: [T, V], [1, T, V], or [V] of the last token."""
    path = Path(path)
    header, load = mapped(path)
    ids = None if tokens is None else checked_tokens(tokens, "tokens")
    entries: dict[Key, Entry] = {}
    insert(entries, Key("result_output", None), header, load, None if ids is None else len(ids), str(path))
    return finished(entries, path, "logits in .npy", ids, [])


class FolderWriter(Writer):
    """A folder of `<label>.npy`, and tokens.npy."""

    folder = True

    def begin(self) -> None:
        if self.tokens is not None:
            np.save(self.part / "tokens.npy", self.tokens, allow_pickle=False)

    def put(self, key: Key, array: NDArray) -> None:
        np.save(self.part / f"{key}.npy", array, allow_pickle=False)


class LogitsWriter(Writer):
    """One .npy of logits."""

    names = frozenset({"result_output"})

    def put(self, key: Key, array: NDArray) -> None:
        with open(self.part, "xb") as file:
            np.save(file, array, allow_pickle=False)
