"""The bytes of GGUF files, right or wrong: a writer that checks nothing, so that tests can give a reader any input.

    gguf([("general.name", text("x")), ("n", number(UINT32, 3))], [Entry("a", (32, 2))])

Any part may be raw bytes; counts, offsets and lengths may be false. A sound file can be taken apart, changed and put together again:
`Document`.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet_np.base.tensor_types import BY_NUMBER
from bitnet_np.files.gguf_file import open_gguf

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
FORMATS = dict(zip((*range(STRING), UINT64, INT64, FLOAT64), "BbHhIifBQqd", strict=True))
"""Of the types of numbers, as `struct` knows them."""


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def string(content: str | bytes, length: int | None = None) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return u64(len(raw) if length is None else length) + raw


def number(kind: int, n: float) -> bytes:
    """A value after its type."""
    return u32(kind) + struct.pack("<" + FORMATS[kind], n)


def text(content: str | bytes, length: int | None = None) -> bytes:
    return u32(STRING) + string(content, length)


def numbers(kind: int, ns: Sequence[float], count: int | None = None) -> bytes:
    return u32(ARRAY) + u32(kind) + u64(len(ns) if count is None else count) + struct.pack(f"<{len(ns)}{FORMATS[kind]}", *ns)


def texts(contents: Sequence[str | bytes], count: int | None = None) -> bytes:
    return u32(ARRAY) + u32(STRING) + u64(len(contents) if count is None else count) + b"".join(string(c) for c in contents)


def value(given: Any) -> bytes:
    """A value of Python's in the type that writers give it."""
    if isinstance(given, bool | int | float):
        return number({bool: BOOL, int: UINT32, float: FLOAT32}[type(given)], given)
    if isinstance(given, str):
        return text(given)
    kind = type(given[0])
    return texts(given) if kind is str else numbers({bool: BOOL, int: INT32, float: FLOAT32}[kind], list(given))


@dataclass(frozen=True)
class Entry:
    """A tensor. `dims` are as in the file, row length first. By default it follows the tensor before it and has made-up data."""

    name: str | bytes
    dims: Sequence[int]
    type: Any = 0  # a number
    offset: int | None = None
    data: bytes | None = None
    n_dims: int | None = None

    def content(self) -> bytes:
        if self.data is not None:
            return self.data
        elements = 1
        for dim in self.dims:
            elements *= dim
        known = BY_NUMBER.get(self.type)
        return bytes(i * 7 % 256 for i in range(known.nbytes(elements) if known else 0))


def gguf(
    keys: Iterable[tuple[str | bytes, bytes]] = (),
    entries: Sequence[Entry] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
    tail: bytes = b"",
) -> bytes:
    """A whole file. Tensor data lie in the order of `entries`, each at a multiple of `alignment`, whatever the table's offsets."""
    keys = list(keys)
    head = magic + u32(version)
    head += u64(len(entries) if tensor_count is None else tensor_count) + u64(len(keys) if key_count is None else key_count)
    head += b"".join(string(key) + value for key, value in keys)
    data = b""
    for entry in entries:
        data += b"\0" * (-len(data) % alignment)
        offset = len(data) if entry.offset is None else entry.offset
        head += string(entry.name) + u32(len(entry.dims) if entry.n_dims is None else entry.n_dims)
        head += b"".join(u64(dim) for dim in entry.dims) + u32(entry.type) + u64(offset)
        data += entry.content()
    if entries:
        head += b"\0" * (-len(head) % alignment)
    return head + data + tail


@dataclass
class Document:
    """A file taken apart: its keys with their values after their types, and its tensors."""

    keys: list[tuple[str | bytes, bytes]]
    entries: list[Entry]

    @classmethod
    def read(cls, path: Path) -> "Document":
        """The document of a sound file."""
        file = open_gguf(path)
        entries = [Entry(name, tensor.shape[::-1], tensor.type.number, data=tensor.data.tobytes()) for name, tensor in file.tensors.items()]
        return cls(_keys(path.read_bytes(), len(file.metadata)), entries)

    def bytes(self, **header: Any) -> bytes:
        return gguf(self.keys, self.entries, **header)

    def put(self, values: Mapping[str, Any]) -> None:
        """Put these values in the place of those of the same keys, or behind all; None leaves a key out."""
        keys = dict(self.keys) | {key: given if given is None else value(given) for key, given in values.items()}
        self.keys = [(key, raw) for key, raw in keys.items() if raw is not None]


def _keys(raw: bytes, count: int) -> list[tuple[str | bytes, bytes]]:
    """The keys of a sound file, and their values after their types."""
    keys: list[tuple[str | bytes, bytes]] = []
    at = 24
    for _ in range(count):
        size = struct.unpack_from("<Q", raw, at)[0]
        key, at = raw[at + 8 : at + 8 + size].decode(), at + 8 + size
        start, kind, at = at, struct.unpack_from("<I", raw, at)[0], at + 4
        items = 1
        if kind == ARRAY:
            kind, items = struct.unpack_from("<IQ", raw, at)
            at += 12
        for _ in range(items if kind == STRING else 0):
            at += 8 + struct.unpack_from("<Q", raw, at)[0]
        if kind != STRING:
            at += items * struct.calcsize("<" + FORMATS[kind])
        keys.append((key, raw[start:at]))
    return keys
