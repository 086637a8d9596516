"""Files of token ids, and numbers in texts."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.errors import EmptyInputError, Error, OptionError, ShapeError, shown
from ..base.validate import text_of
from .arrays import as_numpy
from .formats import npy

_Ids = TypeVar("_Ids")
_Row = TypeVar("_Row")
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
    """The array in a file of token ids, [T] or [B, T]: .npy, .json or .txt (one sequence a line), or .npz and JSON of padded ids.

    Raises OptionError or ShapeError.
    """
    return _read(path, array_of_ids)


def read_sequences(path: Path) -> list[NDArray]:
    """The sequences in such a file, [T] each, of any lengths."""
    return _read(path, _sequences_of_ids)


def _read(path: Path, of: Callable[[Any], _Ids]) -> _Ids:
    if path.suffix == ".npy":
        return of(npy.entry_of(path).load())
    if path.suffix == ".npz":
        return of(_one_or_all(unpadded(str(path), {name: entry.load() for name, entry in npy.read_npz(path).arrays.items()})))
    if path.suffix not in (".json", ".txt"):
        raise OptionError(f"{path}: expected a name that ends in .npy, .npz, .json or .txt")
    try:
        text = text_of(path, _MOST_TEXT)
        if path.suffix == ".txt":
            rows = [parse_numbers(f"{path}, line {n}", line, int) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
            return of(_one_or_all(rows))
        value = json.loads(text)
        return of(_one_or_all(unpadded(str(path), value)) if isinstance(value, dict) else value)
    except Error:
        raise
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{path}: no array of token ids: {error}") from None


def _one_or_all(rows: list[_Row]) -> _Row | list[_Row]:
    return rows[0] if len(rows) == 1 else rows


def unpadded(where: str, held: Mapping[Any, Any]) -> list[list[int]]:
    """The sequences of padded ids [T] or [B, T] under `input_ids` or `tokens`, without their padding.

    What is no padding says `attention_mask`, of the same shape, or `lengths` [B]; without either nothing is. Raises ShapeError.
    """
    name = next((name for name in ("input_ids", "tokens") if name in held), None)
    if name is None:
        raise ShapeError(f"{where} has {shown([*held])}, expected input_ids, with attention_mask or lengths where they are padded")
    ids = np.atleast_2d(check_ids(f"{where}: {name}", as_numpy(f"{where}: {name}", held[name])))
    kept = np.atleast_2d(as_numpy(f"{where}: attention_mask", held.get("attention_mask", np.ones_like(ids)))) != 0
    if "lengths" in held:
        kept = np.arange(ids.shape[1]) < as_numpy(f"{where}: lengths", held["lengths"]).reshape(-1, 1)
    if kept.shape != ids.shape:
        raise ShapeError(f"{where}: {name} has shape {list(ids.shape)}, its mask or lengths {list(kept.shape)}, expected the same")
    return [row[mask].tolist() for row, mask in zip(ids, kept, strict=True)]


def array_of_ids(values: Any) -> NDArray:
    """Nested lists as an array. Raises ValueError for sequences of different lengths."""
    rows = values if isinstance(values, list) else []
    sizes = [len(row) for row in rows if isinstance(row, list)]
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
