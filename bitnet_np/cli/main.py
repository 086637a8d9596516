"""The command line: `bitnet-np COMMAND`.

Help, wrong usage and `completion` are answered without NumPy and Numba, which take a second to import.
"""

import argparse
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TextIO

from .. import __version__
from ..base.errors import Error
from ..base.tables import printable
from . import progress
from .commands import COMMANDS
from .parser import Parser, add_arguments
from .schemas import PrintSchema

_EXAMPLES = """Examples:
  bitnet-np check model.gguf --tokens 1,2,3 --theirs dump
  bitnet-np logits model.gguf --tokens 1,2,3 --out reference.npy"""
EXIT_CODES = "Exit codes: 0 fine, 1 a difference beyond rounding, 2 invalid input or dump"
_SIGNALS = ", 129, 130 and 143 ended by SIGHUP, Ctrl-C and SIGTERM, 141 output closed by its reader"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code.

    Raises SystemExit as argparse does, and where Ctrl-C, SIGTERM or SIGHUP ended the command: they are meant for the process.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    try:
        arguments = _parsed(sys.argv[1:] if argv is None else argv)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a model's text on a terminal that cannot show it
        with _ending():
            runner = "completion" if arguments.command == "completion" else "running"  # the others need the library
            code: int = import_module(f"{__package__}.{runner}").run(arguments)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # the reader of the output closed it
        _discard(sys.stdout)
        return 141
    except (Error, OSError, MemoryError) as error:
        _say(_message(error))
        return 2
    except KeyboardInterrupt as ended:
        _say("interrupted")
        raise SystemExit(128 + (ended.args or (signal.SIGINT,))[0]) from None


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command. Raises SystemExit after help and wrong usage, OSError where help cannot be printed."""
    parser = build_parser()
    try:
        command = parser.commands.get(words[0], parser) if words else parser
        rest = words if command is parser else words[1:]
        if not rest and not command.takes_nothing:
            command.explain()
        if command is not parser:
            command.check_options(rest)
        return command.parse_args(rest)
    finally:
        sys.stdout.flush()


_ENDING = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
"""Signals that ask a process to end, and their usual handlers."""

_CLEANING = 1.0
"""Seconds after one of them in which others are ignored: they would end the cleaning up."""


@contextmanager
def _ending() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP interrupt like Ctrl-C, so that commands clean up: not where they are ignored or handled.

    The KeyboardInterrupt has the signal's number. At the end it is raised again, in case that a callback of C or a `__del__` lost it.
    """
    known = {getattr(signal, name): usual for name, usual in _ENDING.items() if hasattr(signal, name)}
    is_main = threading.current_thread() is threading.main_thread()
    handled = {number: usual for number, usual in known.items() if is_main and signal.getsignal(number) == usual}
    came: list[tuple[int, float]] = []

    def end(number: int, frame: object) -> None:
        if not came or time.monotonic() > came[-1][1] + _CLEANING:
            came.append((number, time.monotonic()))
            raise KeyboardInterrupt(number)

    for number in handled:
        signal.signal(number, end)
    try:
        yield
        if came:
            raise KeyboardInterrupt(came[0][0])
    finally:
        for number, usual in handled.items():
            signal.signal(number, usual)


def _say(text: str) -> None:
    """Print a line to standard error, after all that the command printed and in place of its bar."""
    for stream, line in ((sys.stdout, ""), (sys.stderr, f"bitnet-np: {printable(text)}\n")):
        try:
            progress.clear()
            print(line, end="", file=stream, flush=True)
        except OSError:  # as on a full disk
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Let output that cannot be written go nowhere: Python would try again at its end, and exit with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _message(error: Exception) -> str:
    """The message of an error, with the file first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def build_parser() -> Parser:
    """The parser of the command line."""
    parser = Parser(
        prog="bitnet-np",
        description="Reference inference of BitNet b1.58 and Llama families.",
        epilog=f"{_EXAMPLES}\n\n{EXIT_CODES}{_SIGNALS}.",
    )
    parser.add_argument("--version", action="version", version=f"bitnet-np {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parser.commands = commands.choices
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.summary, description=command.summary, epilog=f"{command.examples}\n\n{EXIT_CODES}.")
        added.set_defaults(command=name, parser=parser)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.add_argument("--json-schema", action=PrintSchema, nargs=0, help="print the JSON Schema of what --json prints, and end")
        add_arguments(added, command.arguments)
    return parser
