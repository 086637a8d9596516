"""A sweep: the rows of a plan, each computed once, whatever stops it in between, and its files.

Rows are appended to rows.jsonl as they come. They are read as text from anybody, never as Python objects.
"""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..base.errors import FileFormatError, OptionError, shown
from ..base.progress import Progress, silent
from ..base.tables import printable
from ..base.whole_file import whole_file
from ..files.safetensors_file import strict_json
from ..judge.report.ci import Case, junit, markdown
from .cluster import arrived
from .tasks import INVALID, KILLED, OK, WRONG, Row, Task, perform

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

ROWS, TABLE = "rows.jsonl", "results.csv"
SUMMARIES = {"junit.xml": junit, "summary.md": markdown}
COLUMNS = ("key", "operation", "model", "tokens", "dialect", "precision", "outcome")
RESULTS = ("sha256", "mean_nll", "verdict", "reason", "error")
"""Columns of the table: of a row, and of its result. Neither times nor machines: the table of a plan is the same from every cluster."""

_KINDS = dict.fromkeys(COLUMNS, str) | {"result": dict, "machine": dict}
_MOST_LINE = 1 << 20  # bytes


def sweep(
    plan: Sequence[Task],
    out: Path,
    client: Any = None,
    *,
    progress: Progress = silent,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Compute the rows of a plan of which the folder `out` has neither a verdict nor a value, and write a table and summaries of all of
    them there. Returns all, in the plan's order.

    client: Dask's, of `cluster.connected`; None computes in this process. on_row: called with each new row when it is on disk.

    Raises OptionError while another sweep writes to `out`, FileFormatError for a file of rows that is none, DifferentBitsError when a
    machine fails its selftest, ServerError when the scheduler is lost; rows that were done before stay.
    """
    out.mkdir(parents=True, exist_ok=True)
    with held(out):
        rows = {row["key"]: row for row in _read(out / ROWS) if row["outcome"] in (OK, WRONG, INVALID)}
        left = [task for task in plan if task.key not in rows]
        before = len(plan) - len(left)
        progress(before, len(plan))
        for n, row in enumerate(map(perform, left) if client is None else _on_cluster(client, left), before + 1):
            with open(out / ROWS, "ab") as file:
                file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            rows[row["key"]] = row
            on_row(row)
            progress(n, len(plan))
        ordered = [rows[task.key] for task in plan]
        _write_table(out / TABLE, ordered)
        for name, form in SUMMARIES.items():
            with whole_file(out / name) as part:
                part.write_text(form("bitnet-np sweep", list(map(_case, ordered))) + "\n", "utf-8", "backslashreplace")
        return ordered


def _on_cluster(client: Any, tasks: Sequence[Task]) -> Iterator[Row]:
    for n, row in arrived(client, perform, tasks):
        yield row or tasks[n].row(KILLED, {"error": "the worker died of this task, again and alone"})


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder until the block ends, or the process does: the system frees the lock then.

    The file `lock` remains, empty. Raises OptionError if another process has it.
    """
    with open(folder / "lock", "ab") as file:
        try:
            if sys.platform == "win32":
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OptionError(f"{folder}: another sweep writes its results there, expected a folder of this one's own") from None
        yield


def _read(path: Path) -> Iterator[Row]:
    """The rows of a file, if it is there. A last line without its end is cut off: its writer was stopped. Raises FileFormatError."""
    whole = 0
    if not path.exists():
        return
    with open(path, "rb") as file:
        for n, line in enumerate(iter(lambda: file.readline(_MOST_LINE), b""), 1):
            if len(line) == _MOST_LINE:
                raise FileFormatError(f"{path}: a line of {_MOST_LINE} bytes or more, expected the rows of a sweep")
            if not line.endswith(b"\n"):
                os.truncate(path, whole)
                return
            whole += len(line)
            row = strict_json(line, f"{path}, line {n}")
            for name, kind in _KINDS.items():
                if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                    raise FileFormatError(f"{path}, line {n}: {shown(row)} has no {name}, expected the row of a sweep")
            yield row


def _write_table(path: Path, rows: Sequence[Row]) -> None:
    """The rows as CSV. Text that a spreadsheet would take for a formula gets an apostrophe in front."""
    table = [[row[name] for name in COLUMNS] + [row["result"].get(name) for name in RESULTS] for row in rows]
    with whole_file(path) as part, open(part, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*COLUMNS, *RESULTS))
        for line in table:
            writer.writerow(f"'{x}" if isinstance(x, str) and x.startswith(("=", "+", "-", "@", "\t", "\r")) else x for x in line)


def reason_of(row: Row) -> str:
    """Why a row ended as it did, or its value."""
    result = row["result"]
    return str(result.get("reason") or result.get("error") or result.get("mean_nll") or result.get("sha256", ""))


def _case(row: Row) -> Case:
    named = (row["operation"], Path(row["model"]).name, row["tokens"], row["dialect"], row["precision"])
    failed = {OK: "", WRONG: "failure"}.get(row["outcome"], "error")
    return Case(printable(" ".join(filter(None, named))), failed, printable(f"{row['outcome']}: {reason_of(row)}"))
