"""Changes to files without knowledge of the format: false lengths and types, bytes lost, doubled or inserted, words replaced."""

import io
import random
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from fuzzing.gguf_bytes import Entry

NUMBERS = [
    *range(18),
    *(31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 65535, 65536),
    *(1 << bit for bit in (20, 30, 31, 32, 40, 62, 63)),
    *((1 << bit) - 1 for bit in (31, 32, 63, 64)),
]
"""The limits of integers of some widths, and the sizes of small models."""

SHAPES = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 65, 96, 127, 128, 129, 256, 257, 384, 512]
_TAME = bytes(byte & 0x2A for byte in range(256))  # no NaN in any type, and no ternary code 3
_LARGEST = 1 << 19  # bytes at most of a tensor that is fitted to another size

FLOAT_VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-5, 1e-45, 1e-30, 1e30, 3e38, float("nan"), float("inf"), float("-inf")]
_PATTERNS = [bytes.fromhex(digits) for digits in ["ff", "00", "007c", "00fc", "807f", "0000c07f", "000080ff", "ffff7f7f", "aa"]]
"""NaN, infinity and the largest numbers of several types."""

_WORDS = re.compile(rb'"[^"]{0,40}"|\'[^\']{0,40}\'|-?\d+(?:\.\d+)?(?:e-?\d+)?|[\[\]{}(),:]|[A-Za-z_]\w*')
_OTHER_WORDS = [
    *b"""-1 0 1e999 1.5 NaN null true None "" "F32" '<f4' '|O' [] {} [[ () ( \\ud800""".split(),
    *(b"9" * 5000, b"[" * 3000),
    *(str(number).encode() for number in NUMBERS),
]


def edit_bytes(raw: bytearray, draw: random.Random, near: int | None = None) -> bytearray:
    """One change in place, within the first `near` bytes unless that is None."""
    end = len(raw) if near is None else min(len(raw), near)
    at, width = draw.randint(0, end), draw.choice([1, 2, 4, 8])
    change = draw.choice(["flip", "set", "add", "insert", "delete", "double", "cut"])
    if change == "flip":
        raw[at : at + 1] = bytes(byte ^ 1 << draw.randrange(8) for byte in raw[at : at + 1])
    elif change == "set":
        number = draw.choice([*NUMBERS, len(raw), draw.getrandbits(64)])
        raw[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    elif change == "add":
        number = int.from_bytes(raw[at : at + width], "little") + draw.randint(-9, 9)
        raw[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    elif change == "insert":
        raw[at:at] = draw.randbytes(draw.randint(1, 16))
    elif change == "delete":
        del raw[at : at + draw.randint(1, 64)]
    elif change == "double":
        raw[at:at] = raw[at : at + draw.randint(1, 64)]
    else:
        del raw[at:]
    return raw


def edited(raw: bytes, draw: random.Random, near: int | None = None) -> bytes:
    """The bytes after one to four changes, as `edit_bytes` makes them."""
    changed = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        edit_bytes(changed, draw, near)
    return bytes(changed)


def edit_words(raw: bytearray, draw: random.Random) -> bytearray:
    """Replace one word, number or bracket of a text, such as JSON or the header of a .npy, in place."""
    words = list(_WORDS.finditer(raw, 0, 4096))
    if words:
        start, end = draw.choice(words).span()
        other = draw.choice(_OTHER_WORDS) if draw.random() < 0.7 else bytes(raw[slice(*draw.choice(words).span())])
        raw[start:end] = other
    return raw


def edit_archive(raw: bytes, draw: random.Random) -> bytearray:
    """The zip archive with one member changed, and a right checksum."""
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(out, "w", draw.choice([0, 8])) as target:
            names = source.namelist()
            chosen = draw.choice(names)
            for name in names:
                data = bytearray(source.read(name))
                if name == chosen:
                    data = edit_words(data, draw) if draw.random() < 0.6 else edit_bytes(data, draw, near=200)
                target.writestr(name, bytes(data))
    except Exception:  # an earlier change damaged it
        return bytearray(raw)
    return bytearray(out.getvalue())


def edit_file(files: dict[str, bytes], draw: random.Random, kept: Sequence[str] = ()) -> None:
    """Change a word, some bytes or an archive's member, mostly near a file's start, where headers are.

    Or let a file be random bytes, overwrite another with it, or delete it, unless it is one of `kept` or the last.
    """
    name, change = draw.choice(sorted(files)), draw.random()
    if change < 0.4:
        files[name] = bytes(edit_archive(files[name], draw) if name.endswith(".npz") else edit_words(bytearray(files[name]), draw))
    elif change < 0.9:
        files[name] = bytes(edit_bytes(bytearray(files[name]), draw, near=draw.choice([16, 64, 300, 4096, None])))
    elif change < 0.92:
        files[name] = draw.randbytes(draw.randint(0, 100))
    elif change < 0.96 or name in kept or len(files) == 1:
        files[draw.choice(sorted(files))] = files[name]
    else:
        del files[name]


def damage(data: bytearray, draw: random.Random) -> bytearray:
    """Replace some bytes of a tensor in place, by random ones or those of NaN, infinity and the largest numbers."""
    for _ in range(draw.randint(1, 3)):
        at, size = draw.randint(0, len(data)), draw.choice([1, 2, 4, 32, 300])
        new = draw.randbytes(size) if draw.random() < 0.5 else draw.choice(_PATTERNS) * size
        data[at : at + len(new)] = new[: len(data) - at]
    return data


def edit_tensors(tensors: list[Entry], draw: random.Random, types: Mapping[Any, Callable[[int], int]]) -> None:
    """Change the shape, type, name or bytes of a tensor, or delete or repeat it. types: the bytes of so many elements of each type."""
    if not tensors:
        return
    i, j, change = draw.randrange(len(tensors)), draw.randrange(len(tensors)), draw.random()
    tensor, dims = tensors[i], list(tensors[i].dims) or [1]  # an earlier change may have left none
    if change < 0.2:
        kind = draw.choice(list(types))
        data = tensor.content().translate(_TAME) if kind != tensor.type else tensor.content()
        tensors[i] = _fitted(replace(tensor, type=kind, data=data), draw, types)
    elif change < 0.4:
        dims[draw.randrange(len(dims))] = draw.choice([*SHAPES, *NUMBERS]) % (1 << 64)
        others = [tensor.dims[::-1], [*tensor.dims, 1], [1, *tensor.dims], tensor.dims[:-1], []]
        tensors[i] = _fitted(replace(tensor, dims=dims if draw.random() < 0.5 else draw.choice(others)), draw, types)
    elif change < 0.5:
        del tensors[i]
    elif change < 0.55:
        tensors.append(replace(tensor, name=f"{tensor.name!s}{draw.choice(['', '_scale', '.x', chr(0), 'é'])}"))
    elif change < 0.65:
        tensors[i], tensors[j] = replace(tensor, name=tensors[j].name), replace(tensors[j], name=tensor.name)
    else:
        data = bytes(damage(bytearray(tensor.content()), draw))
        tensors[i] = replace(tensor, data=data[: draw.randint(0, len(data))] if draw.random() < 0.05 else data)


def _fitted(tensor: Entry, draw: random.Random, types: Mapping[Any, Callable[[int], int]]) -> Entry:
    """The tensor with its bytes repeated or cut to the size of its shape and type, mostly, and unless that is too large."""
    data, elements = tensor.content() or b"\0", prod(tensor.dims)
    size = types[tensor.type](elements) if elements < 1 << 40 else 0
    if size > _LARGEST or draw.random() < 0.3:
        return replace(tensor, data=data)
    return replace(tensor, data=(data * (size // len(data) + 1))[:size])
