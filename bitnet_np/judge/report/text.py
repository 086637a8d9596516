"""The report as text: short for a PASS; for a FAIL verdict, place, cause and next step first and last, and what is wrong in between."""

from collections.abc import Iterator, Sequence

import numpy as np

from ...base.errors import listed
from ...base.tables import printable, table
from ..measures import Judgement
from ..verdict import Verdict
from ..words import pieces
from .report import CLOSER_HEADER, TABLE_HEADER, Report, closer_rows, closer_summary, heat_map, next_step, table_rows

_MOST = 12  # lines of wrong tensors, of causes and of sequences; the rest is only counted

JUDGEMENT_HEADER = ("tokens", "max error", "mean error", "NMSE", "scale", "KL", "top-1", "top-5", "verdict")


def judgement_row(name: str, j: Judgement) -> tuple:
    """A row of the table of logits."""
    return (name, j.max_error, j.mean_error, j.nmse, j.scale, j.kl, j.top1, j.top5, j.verdict.name)


def as_text(report: Report, heading: str = "", verbosity: int = 1, columns: int | None = None) -> str:
    """The report for people. heading: what was judged against what. verbosity: 0 for one line, 1, or 2 for all layers and tables.
    columns: those of the terminal, which the map has to fit, if it is one."""
    passed, outcome, reason = report.passed, report.verdict.outcome, printable(report.reason)
    step = [f"next: {next_step(report)}"] * bool(next_step(report))
    last = [f"{outcome}: {printable(report.headline)}", *step]
    if verbosity == 0:
        return last[0]
    first = [f"{outcome} ({report.verdict}): {report.verdict.text}", reason, *step, *[heading] * bool(heading)]
    middle = ["\n".join(f"note: {note}" for note in report.notes)] * bool(report.notes)
    middle += _tables(report, columns, verbosity > 1) if verbosity > 1 or not passed else []
    return "\n\n".join(["\n".join(first), *middle, *["\n".join(last)] * bool(middle and not passed)])


def _tables(report: Report, columns: int | None, every: bool) -> Iterator[str]:
    """Sequences, causes and the map of tensors: what is wrong of them, or with `every` all, and the tables of numbers."""
    reports = dict(enumerate(report.sequences))
    if reports:
        said = [f"  sequence {b}: {printable(one.headline)}" for b, one in reports.items() if every or not one.passed]
        yield "\n".join([f"of {len(reports)} sequences:", *_first(said), f"what follows is on sequence {report.sequence}"])
    if len(report.causes) > 1:
        yield "\n".join(["causes:", *_first([f"  {cause}: {listed(places)}" for cause, places in report.causes.items()])])
    logits, operations = report.logits, report.operations
    if every and logits is not None and logits.verdict != Verdict.INVALID:
        yield table(JUDGEMENT_HEADER, [judgement_row("logits", logits)])
    if len(operations) > 1:
        layers = {o.key.layer for o in operations if o.key.layer is not None}
        odd = {o.key.layer for o in operations if o.key.layer is not None and o.verdict > Verdict.ROUNDING}
        rest = f"layers {show_layers([*layers - odd])}: all = or ." if layers - odd and not every else ""
        yield heat_map(report, columns, layers if every else odd) + f"\n{rest}" * bool(rest)
    if every and len(operations) > 1:
        if bad := [o for o in operations if not o.verdict.passed]:
            yield "\n".join(_first(table(TABLE_HEADER, table_rows(bad)).splitlines(), 1))
        if summary := closer_summary(report):
            yield f"RMS errors, in units of 2^-24 of a tensor's RMS:\n{table(CLOSER_HEADER, closer_rows(report))}\n{summary}"


def _first(lines: list[str], header: int = 0) -> list[str]:
    """The first lines below a header, and how many more there are."""
    most = header + _MOST
    return lines[:most] + [f"and {len(lines) - most} more"] * (len(lines) > most)


def show_layers(layers: Sequence[int | None]) -> str:
    """Numbers of layers in short form: 0-2, 5."""
    runs = pieces(np.array(sorted(layer for layer in layers if layer is not None)))
    return ", ".join(f"{run[0]}-{run[-1]}" if run.size > 1 else f"{run[0]}" for run in runs if run.size) or "-"
