"""The rows of a sweep as one table, in the plan's order."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.whole_file import whole_file
from .rows import Row

COLUMNS = ("key", "operation", "model", "tokens", "dialect", "precision", "outcome")
RESULTS = ("sha256", "mean_nll", "verdict", "reason", "error")
"""Fields of a row, and of its result. Neither times nor machines: the table of a plan is the same from every cluster."""


def write_table(out: Path, rows: Sequence[Row]) -> None:
    """Write results.csv to a folder."""
    table = [[row[name] for name in COLUMNS] + [row["result"].get(name) for name in RESULTS] for row in rows]
    with whole_file(out / "results.csv") as part, open(part, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*COLUMNS, *RESULTS))
        writer.writerows([_without_formula(value) for value in line] for line in table)


def _without_formula(value: Any) -> Any:
    """A value of a CSV file. Text that a spreadsheet would take for a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
