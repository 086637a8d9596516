"""The rows of a sweep as one table, in the plan's order: CSV, and an HTML page."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..base.whole_file import whole_file
from .rows import Row
from .tasks import OK, WRONG

COLUMNS = ("key", "operation", "model", "tokens", "dialect", "precision", "outcome")
RESULTS = ("sha256", "mean_nll", "verdict", "reason", "error")
"""Fields of a row, and of its result. Neither times nor machines: the table of a plan is the same from every cluster."""
_MACHINE = ("host", "processor", "instruction path", "bitnet_np", "numba", "numpy", "python")


def write_tables(out: Path, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """Write results.csv and report.html to a folder. summary: counts and machines, for the page."""
    table = [[row[name] for name in COLUMNS] + [row["result"].get(name) for name in RESULTS] for row in rows]
    with whole_file(out / "results.csv") as part, open(part, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*COLUMNS, *RESULTS))
        writer.writerows([_without_formula(value) for value in line] for line in table)
    with whole_file(out / "report.html") as part:
        part.write_text(page(rows, summary), "utf-8")


def _without_formula(value: Any) -> Any:
    """A value of a CSV file. Text that a spreadsheet would take for a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def page(rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    """The sweep as an HTML document without a script: counts, rows that are not OK first, machines. All texts are escaped."""
    style = files("bitnet_np").joinpath("data", "report.css").read_text("utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    counts = ", ".join(f"{n} {outcome}" for outcome, n in summary["outcomes"].items())
    worst_first = sorted(rows, key=lambda row: (row["outcome"] == OK, row["outcome"] != WRONG))
    lines = [
        (row["outcome"], row["operation"], row["model"], row["tokens"], row["dialect"], row["precision"], _said(row["result"]))
        for row in worst_first
    ]
    machines = [[m.get(name, "") for name in _MACHINE] for m in summary["machines"]]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Sweep: {escape(counts)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(counts)}</h1></header>\n"
        f"<p>{summary['repeated']} of {len(rows)} rows were computed on a second worker, with the same result.</p>\n"
        f"{_html_table(('outcome', 'operation', 'model', 'tokens', 'dialect', 'precision', 'result'), lines)}\n"
        "<h2>Machines, all with the known bits of every kernel</h2>\n"
        f"{_html_table(_MACHINE, machines)}\n"
        "<footer>Written by bitnet_np.</footer>\n</main>\n</body>\n</html>\n"
    )


def _said(result: Mapping[str, Any]) -> str:
    return "; ".join(f"{value}" for value in result.values() if value is not None)


def _html_table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
