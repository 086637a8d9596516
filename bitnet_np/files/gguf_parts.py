"""A model in several GGUF files -> one GGUFFile, as llama.cpp's gguf-split cuts it: NAME-00001-of-00003.gguf and so on.

Each part states its number from 0 on (split.no), how many parts there are (split.count), and the tensors of all (split.tensors.count). The
first one holds the model's metadata. Every part is mapped, and no tensor is copied.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ..base.errors import FileFormatError, UnsupportedError
from .gguf_file import GGUFFile, open_gguf
from .tensors import Tensor

_MOST = 1024  # ours: each part stays open; models of a terabyte are in some 30 parts


def open_parts(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file, and all parts of its model if it is one of several: the first, or any other.

    The result has the path that was given, the first part's metadata and every part's tensors. Raises as `open_gguf` does, and
    FileFormatError for a part that is missing, or that is not what its name and the other parts say.
    """
    given = open_gguf(path)
    count = given.get("split.count", int, 1)
    if count <= 1:
        return given
    if count > _MOST:
        raise UnsupportedError(f"{given.path}: split.count is {count}, expected at most {_MOST} parts")
    number = given.require("split.no", int) + 1
    match = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", given.path.name, re.DOTALL)
    if match is None or (int(match[2]), int(match[3])) != (number, count):
        raise FileFormatError(
            f"{given.path}: this is part {number} of {count} by split.no, expected a name that ends in -{number:05}-of-{count:05}.gguf"
        )
    name = match[1]  # that all parts have in front of their number
    parts = [_part(given, given.path.with_name(f"{name}-{no + 1:05}-of-{count:05}.gguf"), no, count) for no in range(count)]
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for tensor in part.tensors.values():
            if tensor.name in tensors:
                raise FileFormatError(f"{part.path}: tensor {tensor.name} is in a part before, too, expected each in one part")
            tensors[tensor.name] = tensor
    stated = parts[0].get("split.tensors.count", int, len(tensors))
    if stated != len(tensors):
        raise FileFormatError(f"{parts[0].path}: split.tensors.count is {stated}, but its {count} parts have {len(tensors)} tensors")
    return replace(parts[0], path=given.path, tensors=MappingProxyType(tensors), size=sum(part.size for part in parts))


def _part(given: GGUFFile, path: Path, no: int, count: int) -> GGUFFile:
    """The part of that number, from 0 on."""
    if path == given.path:
        return given
    try:
        part = open_gguf(path)
    except FileNotFoundError:
        raise FileFormatError(f"{given.path}: part {no + 1} of {count} is missing, expected the file {path}") from None
    for key, expected in (("split.no", no), ("split.count", count)):
        if part.require(key, int) != expected:
            raise FileFormatError(f"{path}: {key} is {part.metadata[key]}, expected {expected}")
    return part
