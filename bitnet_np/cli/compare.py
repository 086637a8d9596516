"""`bitnet-np compare`: two dumps in any format, without a model."""

import argparse
from pathlib import Path

from ..errors import OptionError
from ..judge import receipt
from ..judge.graph import LOGITS
from ..judge.two_dumps import compare_traces
from ..traces.formats import FORMATS, read_any
from ..traces.points import Trace
from .arguments import check_out
from .check import add_report_arguments, check_report_arguments, show

SUMMARY = "Compare two dumps without a model."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("ours", type=Path, metavar="OURS", help="the dump taken as the reference")
    parser.add_argument("theirs", type=Path, metavar="THEIRS", help="the dump to judge")
    parser.add_argument("--format", choices=FORMATS, help="format of both dumps (default: recognised by their content)")
    parser.add_argument(
        "--partial",
        action="store_true",
        help="compare the tensors that both dumps have; without it, a tensor that THEIRS lacks is an error",
    )
    parser.add_argument(
        "--receipt", type=Path, metavar="F.json", help="write BitNet-rs's parity receipt of both dumps' logits, THEIRS as rust, OURS as cpp"
    )
    add_report_arguments(parser)


def _write_receipt(path: Path, ours: Trace, theirs: Trace) -> None:
    """Write the receipt of two dumps' logits. Raises OptionError if one has none, ShapeError if their shapes differ."""
    for trace in (ours, theirs):
        if LOGITS not in trace.points:
            raise OptionError(f"--receipt needs logits, and {trace.origin} has none")
    rows = receipt.positions(ours.points[LOGITS], theirs.points[LOGITS])
    tokens = "" if ours.tokens is None else ",".join(map(str, ours.tokens.tolist()))
    receipt.write(path, receipt.receipt(rows, model=ours.origin, backend=theirs.origin, prompt=tokens))


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; returns the exit code."""
    check_out("--receipt", arguments.receipt)
    details = check_report_arguments(arguments)
    ours, theirs = (read_any(path, arguments.format) for path in (arguments.ours, arguments.theirs))
    if arguments.receipt is not None:
        _write_receipt(arguments.receipt, ours, theirs)
    report = compare_traces(ours, theirs, arguments.partial, details)
    files = {"reference": arguments.ours, "dump": arguments.theirs}
    return show(arguments, report, f"{theirs.origin} against {ours.origin}", details, files)
