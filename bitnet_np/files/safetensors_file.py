"""A strict reader of the header of .safetensors files, the format of Hugging Face.

A file is the size of the header as uint64; the header, a JSON object {name: {dtype, shape, data_offsets}, "__metadata__": {text: text}};
and the data, without holes or overlaps. A file is not trusted: every count, length and offset is checked before it is used.
"""

import json
import mmap
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import FileFormatError, shown
from ..base.tensor_types import BF16, F16, F32, F64, TensorType
from ..base.validate import text_of
from .tensors import Tensor, mapped

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # its bits
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
TYPES = {kind.name: kind for kind in (F32, F16, BF16, F64)}
TYPES |= {name: TensorType(name, -1, 1, dtype.itemsize) for name, dtype in DTYPES.items() if name not in TYPES}
"""The dtypes as tensor types, by name. Those that ggml has not get the number -1."""
NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "BF16"}
_MAX_HEADER = 1 << 24
_MOST = 2**59  # numbers of a tensor: of 8 bytes each, they fit into 63 bits
_MAX_TENSORS = 1 << 16


def strict_json(text: bytes | str, where: str) -> Any:
    """The JSON value in a text, in which no object has a key twice. `where` is for messages. Raises FileFormatError."""
    try:
        return json.loads(text, object_pairs_hook=_object_of)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{where}: not JSON: {shown(str(error))}") from None


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for one that has a key twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has a key twice")
    return values


def json_of(path: Path, most: int) -> Any:
    """The JSON value in a file of at most `most` bytes, as `strict_json` reads it. Raises FileFormatError and MissingFileError."""
    return strict_json(text_of(path, most), str(path))


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The start of a file of these tensors, by name, dtype and shape, in the order of their data, up to the first of them."""
    table: dict[str, Any] = {"__metadata__": {"format": "np"}}
    at = 0
    for name, dtype, shape in tensors:
        start, at = at, at + prod(shape) * DTYPES[dtype].itemsize
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, at]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the numbers
    return len(text).to_bytes(8, "little") + text


def _counts(values: object, most: int) -> bool:
    """Whether these are a list of at most `most` numbers that count something."""
    return isinstance(values, list) and len(values) <= most and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _tensor(name: str, entry: Any, start: int, data: mmap.mmap, where: str) -> Tensor:
    """A tensor of the data that start there; its size is checked, its place is not."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileFormatError(f"{where} is {shown(entry)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FileFormatError(f"{where} has dtype {shown(dtype)}, expected one of {', '.join(DTYPES)}")
    if not _counts(shape, 8) or not _counts(offsets, 2) or len(offsets) != 2:
        expected = "expected at most 8 lengths and two offsets"
        raise FileFormatError(f"{where} has shape {shown(shape)} and data_offsets {shown(offsets)}, {expected}")
    size = prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != size:
        raise FileFormatError(f"{where} has data_offsets {offsets}, expected {size} bytes for {dtype} {shape}")
    if prod(max(length, 1) for length in shape) > _MOST:  # NumPy counts so, also where a length is 0
        raise FileFormatError(f"{where} has shape {shape}, expected lengths whose product is at most {_MOST}")
    raw = np.frombuffer(data, np.uint8)[start + offsets[0] : start + offsets[1]]  # read-only, as the mapping is
    return Tensor(name, TYPES[dtype], tuple(shape), raw, start + offsets[0], data)


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """Map a file and check its whole header. Raises FileFormatError for a file that breaks a rule of the format."""
    data = mapped(path, "safetensors")
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MAX_HEADER, len(data) - 8):
        raise FileFormatError(f"{path}: a header of {size} bytes, expected at most {min(_MAX_HEADER, max(0, len(data) - 8))}")
    at = 8 + size
    raw = data[8:at]
    table = strict_json(raw, f"{path}: the header") if raw[:1] == b"{" else None
    if not isinstance(table, dict):
        raise FileFormatError(f"{path}: the header starts with {shown(raw[:8])}, expected a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileFormatError(f"{path}: __metadata__ is {shown(metadata)}, expected an object of strings")
    if len(table) > _MAX_TENSORS:
        raise FileFormatError(f"{path}: {len(table)} tensors, expected {_MAX_TENSORS} at most")
    tensors = {name: _tensor(name, entry, at, data, f"{path}: tensor {shown(name)}") for name, entry in table.items()}
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.data.size)):
        if tensor.offset != at:
            raise FileFormatError(
                f"{path}: tensor {shown(tensor.name)} begins at byte {tensor.offset}, expected {at}: no holes or overlaps"
            )
        at += tensor.type.nbytes(prod(tensor.shape))
    if at != len(data):
        raise FileFormatError(f"{path}: the tensors end at byte {at}, the file at {len(data)}, expected the same")
    return tensors
