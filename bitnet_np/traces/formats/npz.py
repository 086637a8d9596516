"""NumPy's .npz: a zip archive of .npy files. Written uncompressed, one array at a time; read one array at a time, checksums checked."""

import os
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import Error, FileFormatError, shown
from ...model import Config
from ..points import Key, Trace
from .arrays import MAX_POINTS, Array, Header, collect
from .labels import TOKENS
from .npy import read_header
from .output import Writer

MAX_RATIO = 64
"""The largest ratio of an array to its compressed form, for arrays larger than MAX_SMALL. Deflate could reach 1032."""

MAX_SMALL = 1 << 25  # bytes

_UNNAMED = "arr_0"

T = TypeVar("T")


class Archive:
    """An open .npz whose arrays have been checked against their headers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:  # a missing file raises OSError here; below, OSErrors come from damaged contents
            size = os.fstat(file.fileno()).st_size
        self._zip = self._safely(str(path), lambda: zipfile.ZipFile(path))
        infos = self._zip.infolist()
        if len(infos) > MAX_POINTS:
            raise FileFormatError(f"{path}: {len(infos)} members, expected {MAX_POINTS} at most")
        self.arrays: dict[str, Array] = {}
        for info in infos:
            label = info.filename.removesuffix(".npy")
            where = f"{path}: member {shown(info.filename)}"
            if label in self.arrays:
                raise FileFormatError(f"{where} is there twice, expected each name once")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                raise FileFormatError(f"{where} is encrypted or compressed by method {info.compress_type}, expected 0 or 8")
            if info.compress_size > size or info.file_size > max(MAX_SMALL, MAX_RATIO * info.compress_size):
                sizes = f"{info.compress_size} bytes that unpack to {info.file_size}"
                raise FileFormatError(f"{where} has {sizes} in a file of {size}, expected at most {MAX_RATIO} times as many")
            self.arrays[label] = self._safely(where, partial(self._header, info, where)), self._loader(info, where)

    def _safely(self, where: str, action: Callable[[], T]) -> T:
        """The result of `action`; its exceptions become FileFormatError: zipfile raises nearly anything for a damaged archive."""
        try:
            return action()
        except Error:
            raise
        except Exception as error:
            reason = shown(str(error) or type(error).__name__)
            raise FileFormatError(f"{where}: no sound .npz: {reason}") from None

    def _header(self, info: zipfile.ZipInfo, where: str) -> Header:
        with self._zip.open(info) as stream:
            return read_header(stream, info.file_size, where)

    def _loader(self, info: zipfile.ZipInfo, where: str) -> Callable[[], NDArray]:
        def load() -> NDArray:
            with self._zip.open(info) as stream:
                header = read_header(stream, info.file_size, where)
                data = np.frombuffer(stream.read(), np.uint8)  # to the end, where the checksum is checked
            if data.size != header.nbytes:
                raise FileFormatError(f"{where} has {data.size} bytes of data, expected {header.nbytes}")
            return header.array(data)

        return lambda: self._safely(where, load)


def read(path: str | os.PathLike[str], tokens: NDArray | None = None, config: Config | None = None) -> Trace:
    """The trace of an .npz whose members are named by label, such as attn_norm-0 and result_output, and perhaps tokens.

    A single array that np.savez was given without a name, which is called arr_0, is taken for logits.
    """
    path = Path(path)
    arrays = Archive(path).arrays
    if set(arrays) - {TOKENS} == {_UNNAMED}:
        arrays["logits"] = arrays.pop(_UNNAMED)
    return collect(arrays, path, "npz", tokens, config)


class NpzWriter(Writer):
    """An uncompressed .npz. The same points give the same bytes: members carry no time."""

    _zip: zipfile.ZipFile | None = None

    def begin(self) -> None:
        self._zip = zipfile.ZipFile(self.part, "x", zipfile.ZIP_STORED)
        if self.tokens is not None:
            self._write("tokens", self.tokens)

    def put(self, key: Key, array: NDArray) -> None:
        self._write(str(key), array)

    def _write(self, label: str, array: NDArray) -> None:
        assert self._zip is not None
        with self._zip.open(zipfile.ZipInfo(label + ".npy"), "w", force_zip64=True) as stream:
            np.lib.format.write_array(stream, array, allow_pickle=False)

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        if self._zip is not None:
            self._zip.close()
            self._zip = None
