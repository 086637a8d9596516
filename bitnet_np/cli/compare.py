"""`bitnet-np compare`: two dumps in any format, without a model, or two models."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.errors import OptionError
from ..judge import receipt
from ..judge.dump import compare_traces
from ..judge.law.graph import LOGITS
from ..judge.report.report import Report
from ..judge.verdict import Verdict
from ..traces.formats import read_any
from ..traces.points import Trace
from . import compare_models
from .check import details_of, show
from .commands import SECTIONS
from .parser import add_arguments


def _given(arguments: argparse.Namespace, declared: str) -> list[str]:
    """Those of the declared options that have been given."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, declared)
    return [action.option_strings[-1] for action in parser._actions if getattr(arguments, action.dest, action.default) != action.default]


def _rows(option: str, ours: Trace, theirs: Trace) -> list[dict[str, Any]]:
    """The rows of a receipt of two dumps' logits. Raises OptionError if one has none, ShapeError if their shapes differ."""
    for trace in (ours, theirs):
        if LOGITS not in trace.points:
            raise OptionError(f"{option} needs logits, and {trace.origin} has none")
    return receipt.positions(ours.points[LOGITS], theirs.points[LOGITS])


def _by_receipt(path: Path, ours: Trace, theirs: Trace, report: Report) -> Report:
    """The report, which is WRONG if a position that passed in the receipt does not keep its thresholds any more."""
    (limit, before), now = receipt.read(path), _rows("--by-receipt", ours, theirs)
    if len(before) != len(now):
        raise OptionError(f"--by-receipt {path} has {len(before)} positions, the dumps have {len(now)}")
    passed, passes = ([receipt.passes(row, limit, then) for row, then in zip(rows, before, strict=True)] for rows in (before, now))
    counts = f"{sum(passes)} of {len(now)} positions keep the thresholds of the receipt, {sum(passed)} did in it"
    absent = [
        f"{name} is not in all of its rows, and does not count there" for name in receipt.MEASURED if any(name not in row for row in before)
    ]
    report = replace(report, notes=(*report.notes, counts, *absent))
    lost = next((row for row, was, still in zip(now, passed, passes, strict=True) if was and not still), None)
    if lost is None:
        return report
    numbers = f"mse {lost['mse']}, kl {lost['kl']}, top-5 agreement {lost['topk_agree']}"
    expected = f"at most {limit.mse:g} and {limit.kl:g}, and at least {limit.topk:g}"
    reason = f"position {lost['pos']} passed in the receipt {path} and does not any more: {numbers}, expected {expected}"
    return replace(report, verdict=max(report.verdict, Verdict.WRONG), reason=f"{reason}; {report.reason}")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; returns the exit code."""
    given = _given(arguments, SECTIONS["OF_DUMPS" if arguments.models else "OF_MODELS"])
    given += [f"--{name}" for name in ("html", "quiet", "verbose") if arguments.models and getattr(arguments, name)]
    given += ["--format"] if arguments.models and arguments.format not in ("text", "json") else []
    if given:
        kind, how = ("dumps", "without") if arguments.models else ("models", "with")
        raise OptionError(f"{given[0]} is for {kind}, expected it {how} --models")
    if arguments.models:
        return compare_models.run(arguments)
    details = details_of(arguments)
    ours, theirs = (read_any(path, arguments.dump_format) for path in (arguments.ours, arguments.theirs))
    if arguments.receipt is not None:
        tokens = "" if ours.tokens is None else ",".join(map(str, ours.tokens.tolist()))
        rows = _rows("--receipt", ours, theirs)
        receipt.write(arguments.receipt, receipt.receipt(rows, model=ours.origin, backend=theirs.origin, prompt=tokens))
    report = compare_traces(ours, theirs, arguments.partial, details, arguments.tolerance)
    if arguments.by_receipt is not None:
        report = _by_receipt(arguments.by_receipt, ours, theirs, report)
    if report.first_wrong is not None:
        report = replace(report, notes=(*report.notes, "`bitnet-np check MODEL` judges the dump by its model and names known mistakes"))
    files = {"reference": arguments.ours, "dump": arguments.theirs}
    facts = {"tokens": None if ours.tokens is None else [ours.tokens.tolist()], "dialect": None}
    return show(arguments, report, f"{theirs.origin} against {ours.origin}", details, files, facts)
