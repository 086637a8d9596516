"""NumPy's files: .npy, and .npz, a zip archive of these. Nothing is unpickled, and no size is trusted.

Arrays of a .npy are mapped; those of a .npz are read one at a time, checksums checked, and written uncompressed, one at a time. Logits may
also be bare float32 numbers, little-endian, in a file that does not say their shape.
"""

import os
import re
import zipfile
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError, OptionError, shown
from ...base.validate import check_exists
from ..labels import TOKENS
from ..points import Entry, Key
from .arrays import MAX_POINTS, Header, Labelled, bare_shape, check_size, damaged, files_in, head_of
from .output import Put, Writer

MAGIC = b"\x93NUMPY"
STEP_FOLDER = re.compile(r"step-[0-9]{1,9}")
MAX_FILES = 1 << 20
"""Most files of one folder: a thousand steps of decoding have 30,000 in a model of 30 layers whose layers have one point each."""

MAX_RATIO = 64
"""The largest ratio of an array to its compressed form, and of all to the file, beyond MAX_SMALL. Deflate could reach 1032."""

MAX_SMALL = 1 << 25  # bytes

_UNNAMED = "arr_0"
_UNSOUND = "no sound .npz"


def read_header(stream: IO[bytes], size: int, where: str) -> Header:
    """The header at the start of `stream`, whose size is `size` bytes; leaves it at the data."""
    with damaged(f"{where}: no .npy array"):  # NumPy reads the header as Python's source
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the format, expected (1, 0) or (2, 0)")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    if dtype.hasobject or dtype.fields is not None or any(type(n) is not int or n < 0 for n in shape) or len(shape) > 8:
        raise FileFormatError(f"{where}: .npy of {shown(dtype)} {shown(shape)}, expected numbers and at most 8 axes")
    header = Header(shape, dtype, fortran, stream.tell())
    if header.offset + header.nbytes != size:
        expected = f"{header.nbytes} bytes for {dtype} {list(shape)}"
        raise FileFormatError(f"{where}: {size - header.offset} bytes of data, expected {expected}")
    return header


def entry_of(path: Path) -> Entry:
    """The array in a .npy file. Raises MissingFileError or FileFormatError."""
    check_exists(path)
    with open(path, "rb") as file:
        return read_header(file, os.fstat(file.fileno()).st_size, str(path)).entry(path)


def read_folder(path: Path) -> Labelled:
    """The arrays of a folder of `<label>.npy`, such as attn_norm-0.npy and result_output.npy, and perhaps tokens.npy.

    Rows that were written step by step are in `<label>.step-<n>.npy` or `step-<n>/<label>.npy`.
    """
    files = files_in(path, ".npy", STEP_FOLDER, MAX_FILES)
    return Labelled({name.removesuffix(".npy"): entry_of(file) for name, file in files.items()}, path, "folder of .npy")


def read_logits(path: Path) -> Labelled:
    """The array of one .npy of logits: [T, V], [1, T, V], or [V] of the last token."""
    return Labelled({"result_output": entry_of(path)}, path, "logits in .npy")


def read_bare(path: Path, shape: tuple[int, ...] | None) -> Labelled:
    """The array of a file of bare logits of this shape: [T, V], [1, T, V], or [V] of the last token. See arrays.bare_shape."""
    if shape is None:
        raise OptionError(f"{path}: bare float32 numbers, which need a shape")
    size = path.stat().st_size
    shape = bare_shape(path, shape, size // 4)
    check_size(path, size, 4 * prod(shape), f"float32 {list(shape)}")
    return Labelled({"result_output": Header(shape, np.dtype("<f4"), False, 0).entry(path)}, path, "raw float32")


def read_archive(path: Path) -> dict[str, Entry]:
    """The arrays of an .npz, checked against their headers, by the names of its members."""
    _, size = head_of(path, 0)  # a missing file raises OSError here; below, OSErrors come from damaged contents
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


def read_npz(path: Path) -> Labelled:
    """The arrays of an .npz whose members are named by label, such as attn_norm-0 and result_output, and perhaps tokens.

    A single array that np.savez was given without a name, which is called arr_0, is taken for logits.
    """
    arrays = read_archive(path)
    if set(arrays) - {TOKENS} == {_UNNAMED}:
        arrays["logits"] = arrays.pop(_UNNAMED)
    return Labelled(arrays, path, "npz")


def write_npz(out: Writer) -> Iterator[Put]:
    """An uncompressed .npz. The same points give the same bytes: members carry no time."""
    with zipfile.ZipFile(out.part, "x", zipfile.ZIP_STORED) as archive:

        def put(key: Key, array: NDArray) -> None:
            with archive.open(zipfile.ZipInfo(f"{key}.npy"), "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array, allow_pickle=False)

        yield put


def write_folder(out: Writer) -> Iterator[Put]:
    """A folder of `<label>.npy`, and tokens.npy."""
    yield lambda key, array: np.save(out.part / f"{key}.npy", array, allow_pickle=False)


def write_logits(out: Writer) -> Iterator[Put]:
    """One .npy of logits."""
    with open(out.part, "xb") as file:
        yield lambda key, array: np.save(file, array, allow_pickle=False)


def write_bare(out: Writer) -> Iterator[Put]:
    """Bare float32 logits."""
    with open(out.part, "xb") as file:
        yield lambda key, array: array.astype("<f4", copy=False).tofile(file)
