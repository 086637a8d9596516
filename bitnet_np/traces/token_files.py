"""Files of token ids, and numbers in texts."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.errors import EmptyInputError, Error, OptionError, ShapeError
from ..base.validate import text_of
from .formats import npy

_Ids = TypeVar("_Ids")
_MOST_TEXT = 1 << 28  # bytes: some 50 million token ids


def parse_numbers(option: str, text: str, kind: type[int] | type[float]) -> list:
    """The numbers in a text, separated by commas or blanks, perhaps in brackets. Raises OptionError: the option, or file and line."""
    brackets = re.fullmatch(r"\s*\[(.*)\]\s*", text, re.DOTALL)
    try:
        return [kind(part) for part in (brackets[1] if brackets else text).replace(",", " ").split()]
    except ValueError:
        what = "integers" if kind is int else "numbers"
        raise OptionError(f"{option} is {text[:60]!r}, expected {what} separated by commas or blanks") from None


def read_token_ids(path: Path) -> NDArray:
    """The array in a file of token ids, [T] or [B, T]: .npy, .json or .txt (one sequence a line). Raises OptionError or ShapeError."""
    return _read(path, array_of_ids)


def read_sequences(path: Path) -> list[NDArray]:
    """The sequences in such a file, [T] each, of any lengths."""
    return _read(path, _sequences_of_ids)


def _read(path: Path, of: Callable[[Any], _Ids]) -> _Ids:
    if path.suffix == ".npy":
        return of(npy.entry_of(path).load())
    if path.suffix not in (".json", ".txt"):
        raise OptionError(f"{path}: expected a name that ends in .npy, .json or .txt")
    try:
        text = text_of(path, _MOST_TEXT)
        if path.suffix == ".txt":
            rows = [parse_numbers(f"{path}, line {n}", line, int) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
            return of(rows[0] if len(rows) == 1 else rows)
        return of(json.loads(text))
    except Error:
        raise
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{path}: no array of token ids: {error}") from None


def array_of_ids(values: Any) -> NDArray:
    """Nested lists as an array. Raises ValueError for sequences of different lengths."""
    sizes = [len(row) for row in values if isinstance(row, list)] if isinstance(values, list) else []
    if sizes and min(sizes) < max(sizes):
        raise ValueError(f"its sequences have {min(sizes)} to {max(sizes)} tokens, expected as many in each")
    return np.asarray(values)


def _sequences_of_ids(values: Any) -> list[NDArray]:
    if isinstance(values, list) and values and all(isinstance(row, list) for row in values):
        return [array_of_ids(row) for row in values]
    return list(np.atleast_2d(array_of_ids(values)))


def check_ids(source: str, ids: NDArray) -> NDArray:
    """Returns the ids, [T] or [B, T]. source: where they come from. Raises ShapeError or EmptyInputError. The vocabulary is not known."""
    if ids.ndim not in (1, 2):
        raise ShapeError(f"{source}: token ids have shape {list(ids.shape)}, expected [T] or [B, T]")
    if ids.size == 0:
        raise EmptyInputError(f"{source}: Tokens cannot be empty")
    if ids.dtype.kind not in "iu":
        raise ShapeError(f"{source}: token ids have dtype {ids.dtype}, expected integers of 64 bits at most")
    return ids
