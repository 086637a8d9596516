"""Logits as text: a row of the vocabulary on each line, or a number on each, as simple engines print them.

Blanks, commas, semicolons and square brackets separate numbers, so CSV and JSON arrays can also be read.
"""

from array import array
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np

from ...base.errors import FileFormatError, OptionError, shown
from ..points import Entry
from .arrays import Labelled, bare_shape, check_size

_PIECE = 1 << 16  # bytes of a line that are read at a time
_LONGEST = 1 << 10  # characters of a number
_PLAIN = bytes.maketrans(b",;[]_", b"    ?")  # Python would read 1_0 as 10
_OF_NUMBERS = b"0123456789+-.,;[] \t\r\neinfatyEINFATY"


def is_numbers(start: bytes) -> bool:
    """Whether the first bytes of a file have no other characters than numbers, nan and inf have."""
    return bool(start.split()) and not start.translate(None, _OF_NUMBERS)


def read(path: Path, shape: tuple[int, ...] | None = None) -> Labelled:
    """The logits, as float32. shape: see arrays.bare_shape; without one each line is a row.

    Raises FileFormatError, which names the line, for a word that is no number and for a line that is neither rows nor one number, and
    OptionError for one number a line and no shape.
    """
    numbers = array("f")
    width, before = shape[-1] if shape else 0, 0  # numbers of a row, and those before this line
    for line, words, ends in _pieces(path):
        numbers.extend(_number(word, f"{path}: line {line}") for word in words)
        if ends and len(numbers) > before:
            count, before = len(numbers) - before, len(numbers)
            width = width or count
            if count % width and not (shape and count == 1):
                also = " or 1" if shape else ", as in the first line"
                raise FileFormatError(f"{path}: line {line} has {count} numbers, expected {width}{also}")
    if not numbers:
        raise FileFormatError(f"{path}: no number in it, expected logits")
    if width == 1 and shape is None:
        raise OptionError(f"{path}: one number a line, which needs a shape")
    shape = bare_shape(path, shape or (-1, width), len(numbers))
    check_size(path, len(numbers), prod(shape), f"{list(shape)}", "numbers")
    logits = np.frombuffer(numbers, np.float32).reshape(shape)
    return Labelled({"result_output": Entry(logits.shape, logits.dtype, lambda: logits)}, path, "numbers as text")


def _number(word: bytes, where: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise FileFormatError(f"{where} has {shown(word.decode('utf-8', 'replace'))}, expected numbers") from None


def _pieces(path: Path) -> Iterator[tuple[int, list[bytes], bool]]:
    """Yields the words of each line, of a long one in pieces: the line's number, the words, and whether the line ends after them."""
    line, rest = 1, b""
    with open(path, "rb") as file:
        while piece := file.readline(_PIECE):
            words = (rest + piece.translate(_PLAIN)).split()
            rest = b"" if piece[-1:].translate(_PLAIN).isspace() else words.pop()
            if len(rest) > _LONGEST:
                raise FileFormatError(f"{path}: line {line} has a word of more than {_LONGEST} characters, expected numbers")
            yield line, words, piece.endswith(b"\n")
            line += piece.endswith(b"\n")
    yield line, rest.split(), True
