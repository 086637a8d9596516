"""Results on disk: a JSON line for each row, appended as it comes. They are read as text from anybody, never as Python objects."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..base.errors import FileFormatError, shown
from ..files.safetensors_file import strict_json
from .tasks import Outcome, Task

Row = Mapping[str, Any]

_MOST_LINE = 1 << 20  # bytes
FINAL = ("OK", "WRONG", "INVALID")
"""Outcomes that are a verdict or a value."""

_FIELDS = {"key": str, "operation": str, "model": str, "tokens": str, "outcome": str, "result": dict, "machine": dict}


def row_of(task: Task, outcome: Outcome) -> dict[str, Any]:
    """The row of a task."""
    return {
        "key": task.key,
        "operation": task.operation,
        "model": task.model.path,
        "tokens": task.tokens,
        "dialect": task.dialect,
        "precision": task.precision,
        "outcome": outcome.outcome,
        "result": outcome.result,
        "seconds": round(outcome.seconds, 6),
        "machine": outcome.machine,
    }


def append(path: Path, row: Row) -> None:
    """Add a row at the end of a file, which ends in a line break before and after."""
    with open(path, "ab") as file:
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")


def read(path: Path) -> dict[str, Row]:
    """The rows of a file by key; of several with one key the last. A last line without its end is cut off: its writer was stopped.

    Raises FileFormatError that names the line.
    """
    if not path.exists():
        return {}
    rows: dict[str, Row] = {}
    whole = 0
    for n, line in enumerate(_lines(path), 1):
        if not line.endswith(b"\n"):
            os.truncate(path, whole)
            break
        whole += len(line)
        row = strict_json(line, f"{path}, line {n}")
        for name, kind in _FIELDS.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                raise FileFormatError(f"{path}, line {n}: {shown(row)} has no {name}, expected the row of a sweep")
        rows[row["key"]] = row
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while line := file.readline(_MOST_LINE):
            if len(line) == _MOST_LINE:
                raise FileFormatError(f"{path}: a line of {_MOST_LINE} bytes or more, expected the rows of a sweep")
            yield line
