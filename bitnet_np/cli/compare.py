"""`bitnet-np compare`: two dumps in any format, without a model."""

import argparse
from pathlib import Path

from ..judge.two_dumps import compare_traces
from ..traces.formats import FORMATS, read_any
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
    add_report_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; returns the exit code."""
    details = check_report_arguments(arguments)
    ours, theirs = (read_any(path, arguments.format) for path in (arguments.ours, arguments.theirs))
    report = compare_traces(ours, theirs, arguments.partial, details)
    files = {"reference": arguments.ours, "dump": arguments.theirs}
    return show(arguments, report, f"{theirs.origin} against {ours.origin}", details, files)
