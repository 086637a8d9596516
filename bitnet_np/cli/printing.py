"""Output of the commands: text that fits and colours a terminal, verdicts, and JSON. Nothing of the library is imported."""

import argparse
import json
import os
import shutil
import sys
from textwrap import wrap


def width() -> int | None:
    """Columns of the terminal that standard output is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fitted(text: str, columns: int | None) -> str:
    """Text of at most this many columns: a longer line goes on below, indented by two more. None: as it is."""
    if columns is None:
        return text
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += wrap(line, max(columns, 20), subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def coloured(text: str, passed: bool) -> str:
    """Text in bold green or red on a terminal, unless NO_COLOR is set (no-color.org)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[1;{32 if passed else 31}m{text}\033[0m"


def outcome(passed: bool, text: str) -> str:
    """The first line of a report: PASS or FAIL, then why."""
    return f"{coloured('PASS' if passed else 'FAIL', passed)}{text}"


def answer(arguments: argparse.Namespace, facts: object, text: str, code: int = 0) -> int:
    """Print the facts with --json and the text without; returns the exit code."""
    if arguments.json:
        print_json(facts)
    else:
        print(text)
    return code


def print_json(value: object) -> None:
    """Print one value as indented JSON."""
    print(json.dumps(value, indent=2))
