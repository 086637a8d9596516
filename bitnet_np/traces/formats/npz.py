"""NumPy's .npz: a zip archive of .npy files. Written uncompressed, one array at a time; read one array at a time, checksums checked."""

import os
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError, shown
from ..points import Entry, Key
from .arrays import MAX_POINTS, Labelled, damaged
from .labels import TOKENS
from .npy import read_header
from .output import Put, Writer, output

MAX_RATIO = 64
"""The largest ratio of an array to its compressed form, and of all to the file, beyond MAX_SMALL. Deflate could reach 1032."""

MAX_SMALL = 1 << 25  # bytes

_UNNAMED = "arr_0"
_UNSOUND = "no sound .npz"


def read_archive(path: Path) -> dict[str, Entry]:
    """The arrays of an .npz, checked against their headers, by the names of its members."""
    with open(path, "rb") as file:  # a missing file raises OSError here; below, OSErrors come from damaged contents
        size = os.fstat(file.fileno()).st_size
    with damaged(f"{path}: {_UNSOUND}"):
        archive = zipfile.ZipFile(path)
    infos = archive.infolist()
    if len(infos) > MAX_POINTS:
        raise FileFormatError(f"{path}: {len(infos)} members, expected {MAX_POINTS} at most")
    arrays: dict[str, Entry] = {}
    for info in infos:
        label = info.filename.removesuffix(".npy")
        where = f"{path}: member {shown(info.filename)}"
        if label in arrays:
            raise FileFormatError(f"{where} is there twice, expected each name once")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise FileFormatError(f"{where} is encrypted or compressed by method {info.compress_type}, expected 0 or 8")
        if info.compress_size > size or info.file_size > max(MAX_SMALL, MAX_RATIO * info.compress_size):
            sizes = f"{info.compress_size} bytes that unpack to {info.file_size}"
            raise FileFormatError(f"{where} has {sizes} in a file of {size}, expected at most {MAX_RATIO} times as many")
        with damaged(f"{where}: {_UNSOUND}"), archive.open(info) as stream:
            header = read_header(stream, info.file_size, where)
            arrays[label] = Entry(header.shape, header.dtype, partial(_load, archive, info, where))
    if (unpacked := sum(info.file_size for info in infos)) > max(MAX_SMALL, MAX_RATIO * size):
        raise FileFormatError(f"{path}: {size} bytes that unpack to {unpacked}, expected at most {MAX_RATIO} times as many")
    return arrays


def _load(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> NDArray:
    with damaged(f"{where}: {_UNSOUND}"), archive.open(info) as stream:
        header = read_header(stream, info.file_size, where)
        data = np.frombuffer(stream.read(), np.uint8)  # to the end, where the checksum is checked
        if data.size != header.nbytes:
            raise FileFormatError(f"{where} has {data.size} bytes of data, expected {header.nbytes}")
        return header.array(data)


def read(path: str | os.PathLike[str]) -> Labelled:
    """The arrays of an .npz whose members are named by label, such as attn_norm-0 and result_output, and perhaps tokens.

    A single array that np.savez was given without a name, which is called arr_0, is taken for logits.
    """
    path = Path(path)
    arrays = read_archive(path)
    if set(arrays) - {TOKENS} == {_UNNAMED}:
        arrays["logits"] = arrays.pop(_UNNAMED)
    return Labelled(arrays, path, "npz")


@output(holds_tokens=True)
def write(out: Writer) -> Iterator[Put]:
    """An uncompressed .npz. The same points give the same bytes: members carry no time."""
    with zipfile.ZipFile(out.part, "x", zipfile.ZIP_STORED) as archive:

        def put(key: Key, array: NDArray) -> None:
            with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)

        yield put
