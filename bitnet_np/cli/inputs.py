"""Inputs of the commands: token ids and other numbers."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EmptyInputError, Error, OptionError, ShapeError
from ..text.tokenizer import Tokenizer
from ..traces.formats import npy
from ..validate import text_of

_MOST_TEXT = 1 << 28  # bytes: some 50 million token ids


def parse_numbers(option: str, text: str, kind: type[int] | type[float]) -> list:
    """The numbers in a text, separated by commas or blanks. Raises OptionError that names the option, or file and line."""
    try:
        return [kind(part) for part in text.replace(",", " ").split()]
    except ValueError:
        what = "integers" if kind is int else "numbers"
        raise OptionError(f"{option} is {text[:60]!r}, expected {what} separated by commas or blanks") from None


def _read_tokens(path: Path) -> NDArray:
    """Token ids [T] or [B, T] from .npy, .json or .txt (one sequence a line)."""
    if path.suffix == ".npy":
        return npy.mapped(path)[1]()
    if path.suffix not in (".json", ".txt"):
        raise OptionError(f"{path}: expected a name that ends in .npy, .json or .txt")
    try:
        text = text_of(path, _MOST_TEXT)
        if path.suffix == ".txt":
            rows = [parse_numbers(f"{path}, line {n}", line, int) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
            return _array(rows[0] if len(rows) == 1 else rows)
        return _array(json.loads(text))
    except Error:
        raise
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{path}: no array of token ids: {error}") from None


def _array(values: Any) -> NDArray:
    sizes = [len(row) for row in values if isinstance(row, list)] if isinstance(values, list) else []
    if sizes and min(sizes) < max(sizes):
        raise ValueError(f"its sequences have {min(sizes)} to {max(sizes)} tokens, expected as many in each")
    return np.asarray(values)


def token_ids(arguments: argparse.Namespace, tokenizer: Callable[[], Tokenizer]) -> NDArray:
    """The token ids of the command, [T] or [B, T]."""
    if arguments.tokens is not None:
        ids, source = _array(parse_numbers("--tokens", arguments.tokens, int)), "--tokens"
    elif arguments.tokens_file is not None:
        ids, source = _read_tokens(arguments.tokens_file), str(arguments.tokens_file)
    else:
        ids, source = _array(tokenizer().encode(arguments.text)), "the text"
    if ids.ndim not in (1, 2):
        raise ShapeError(f"{source}: token ids have shape {list(ids.shape)}, expected [T] or [B, T]")
    if ids.size == 0:
        raise EmptyInputError(f"{source}: Tokens cannot be empty")
    if ids.dtype.kind not in "iu":
        raise ShapeError(f"{source}: token ids have dtype {ids.dtype}, expected integers of 64 bits at most")
    return ids
