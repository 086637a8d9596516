"""NumPy's .npy: a strict reader of its header, and arrays mapped from a file. Nothing is unpickled, and no size is trusted.

And logits as bare float32 numbers, little-endian, in a file that does not say their shape.
"""

import os
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from ...base.errors import FileFormatError, OptionError, shown
from ...base.validate import check_exists
from ..points import Entry
from .arrays import Header, Labelled, bare_shape, check_size, damaged, files_in
from .output import LOGITS, Put, Writer, output

MAGIC = b"\x93NUMPY"
STEP_FOLDER = re.compile(r"step-[0-9]{1,9}")
MAX_FILES = 1 << 20
"""Most files of one folder: a thousand steps of decoding have 30,000 in a model of 30 layers whose layers have one point each."""


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


def read_folder(path: str | os.PathLike[str]) -> Labelled:
    """The arrays of a folder of `<label>.npy`, such as attn_norm-0.npy and result_output.npy, and perhaps tokens.npy.

    Rows that were written step by step are in `<label>.step-<n>.npy` or `step-<n>/<label>.npy`.
    """
    path = Path(path)
    files = files_in(path, ".npy", STEP_FOLDER, MAX_FILES)
    return Labelled({name.removesuffix(".npy"): entry_of(file) for name, file in files.items()}, path, "folder of .npy")


def read_logits(path: str | os.PathLike[str]) -> Labelled:
    """The array of one .npy of logits: [T, V], [1, T, V], or [V] of the last token."""
    path = Path(path)
    return Labelled({"result_output": entry_of(path)}, path, "logits in .npy")


def read_bare(path: str | os.PathLike[str], shape: tuple[int, ...] | None) -> Labelled:
    """The array of a file of bare logits of this shape: [T, V], [1, T, V], or [V] of the last token. See arrays.bare_shape."""
    path = Path(path)
    if shape is None:
        raise OptionError(f"{path}: bare float32 numbers, which need a shape")
    size = path.stat().st_size
    shape = bare_shape(path, shape, size // 4)
    check_size(path, size, 4 * prod(shape), f"float32 {list(shape)}")
    return Labelled({"result_output": Header(shape, np.dtype("<f4"), False, 0).entry(path)}, path, "raw float32")


@output(folder=True, holds_tokens=True)
def write_folder(out: Writer) -> Iterator[Put]:
    """A folder of `<label>.npy`, and tokens.npy."""
    yield lambda key, array: np.save(out.part / f"{key}.npy", array, allow_pickle=False)


@output(names=LOGITS)
def write_logits(out: Writer) -> Iterator[Put]:
    """One .npy of logits."""
    with open(out.part, "xb") as file:
        yield lambda key, array: np.save(file, array, allow_pickle=False)


@output(names=LOGITS)
def write_bare(out: Writer) -> Iterator[Put]:
    """Bare float32 logits."""
    with open(out.part, "xb") as file:
        yield lambda key, array: array.astype("<f4", copy=False).tofile(file)
