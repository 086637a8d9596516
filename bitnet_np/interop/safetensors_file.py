"""The .safetensors format of Hugging Face: a strict reader of mapped arrays, and a writer of one array at a time.

The file: uint64 bytes of header, a JSON object {name: {dtype, shape, data_offsets}, "__metadata__": {text: text}}, and the data without
holes or overlaps. Arrays are written from the widest numbers to the narrowest, so each is aligned.
"""

import json
import mmap
import os
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FileFormatError, shown
from ..points import Key, Trace
from .npy import MAX_POINTS, Header, collect
from .output import Writer

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # read as float32
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}
_MAX_HEADER = 1 << 24


def strict_json(text: bytes | str, where: str) -> Any:
    """A JSON value in which no object has a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("an object has a key twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{where}: not JSON: {shown(str(error))}") from None


def _header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The JSON object, and where the data start."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MAX_HEADER, len(data) - 8):
        raise FileFormatError(f"{path}: a header of {size} bytes, expected at most {min(_MAX_HEADER, max(0, len(data) - 8))}")
    raw = data[8 : 8 + size]
    header = strict_json(raw, f"{path}: the header") if raw[:1] == b"{" else None
    if not isinstance(header, dict):
        raise FileFormatError(f"{path}: the header starts with {shown(raw[:8])}, expected a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileFormatError(f"{path}: __metadata__ is {shown(metadata)}, expected an object of strings")
    if len(header) > MAX_POINTS:
        raise FileFormatError(f"{path}: {len(header)} tensors, expected {MAX_POINTS} at most")
    return header, 8 + size


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _tensor(entry: Any, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of a tensor; its size is checked."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileFormatError(f"{where} is {shown(entry)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FileFormatError(f"{where} has dtype {shown(dtype)}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)):
        raise FileFormatError(f"{where} has shape {shown(shape)}, expected at most 8 lengths")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise FileFormatError(f"{where} has data_offsets {shown(offsets)}, expected two")
    size = prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size:
        raise FileFormatError(f"{where} has data_offsets {offsets}, expected {size} bytes for {dtype} {shape}")
    return dtype, tuple(shape), *offsets


def _view(data: mmap.mmap, dtype: str, header: Header) -> Callable[[], NDArray]:
    def load() -> NDArray:
        raw = np.frombuffer(data, np.uint8, header.nbytes, header.offset)
        if dtype == "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return header.array(raw)

    return load


def read(path: str | os.PathLike[str], tokens: NDArray | None = None) -> Trace:
    """A .safetensors file whose tensors are named by label, such as attn_norm-0, or by transformers' module, and perhaps tokens."""
    path = Path(path)
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise FileFormatError(f"{path}: the file is empty, expected safetensors")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    table, start = _header(path, data)
    tensors = {name: _tensor(entry, f"{path}: tensor {shown(name)}") for name, entry in table.items()}
    at = 0
    for name, (_, _, begin, end) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if begin != at:
            raise FileFormatError(f"{path}: tensor {shown(name)} begins at byte {begin} of the data, expected {at}: no holes or overlaps")
        at = end
    if start + at != len(data):
        raise FileFormatError(f"{path}: the tensors end at byte {start + at}, the file at {len(data)}, expected the same")
    arrays = {}
    for name, (dtype, shape, begin, _) in tensors.items():
        header = Header(shape, DTYPES[dtype], False, start + begin)
        told = header._replace(dtype=np.dtype(np.float32)) if dtype == "BF16" else header
        arrays[name] = told, _view(data, dtype, header)
    return collect(arrays, path, "safetensors", tokens)


class SafetensorsWriter(Writer):
    """A .safetensors file. The header comes first and is known last, so data wait in one file for each width of number."""

    def begin(self) -> None:
        self._table: list[tuple[str, NDArray]] = []  # labels, and arrays without their numbers
        self._data: dict[int, IO[bytes]] = {}
        if self.tokens is not None:
            self._write("tokens", self.tokens)

    def put(self, key: Key, array: NDArray) -> None:
        self._write(str(key), array)

    def _part(self, width: int) -> Path:
        return self.part.with_name(f"{self.part.name}{width}")

    def _write(self, label: str, array: NDArray) -> None:
        width = array.itemsize
        if width not in self._data:
            self._data[width] = open(self._part(width), "x+b")  # noqa: SIM115 (closed in close)
        array.tofile(self._data[width])
        self._table.append((label, np.broadcast_to(np.zeros((), array.dtype), array.shape)))

    def finish(self) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "np"}}
        at = 0
        for width in sorted(self._data, reverse=True):
            for label, array in self._table:
                if array.itemsize == width:
                    size = array.size * width
                    header[label] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + size]}
                    at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(self.part, "xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for width in sorted(self._data, reverse=True):
                self._data[width].seek(0)
                shutil.copyfileobj(self._data[width], file, 1 << 20)
        self.close()

    def close(self) -> None:
        for width, file in getattr(self, "_data", {}).items():
            file.close()
            self._part(width).unlink(missing_ok=True)
