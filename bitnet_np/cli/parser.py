"""The parser of arguments: they are declared as their help shows them, and errors name what a mistyped word may have meant."""

import argparse
import ast
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..base.errors import meant

_LINE = re.compile(r"(?:(--?[\w-]+) ?)?(?:(\w+)@)?(\S*?)([!?+]?)(?: = (\S+))?: (.+)")
_TYPES = (
    dict.fromkeys("NKQ", int) | dict.fromkeys(("F", "DIR", "DUMP", "IN", "MODEL", "OUT", "OURS", "PLAN", "THEIRS"), Path) | {"X": float}
)
_MARKS: dict[str, dict[str, Any]] = {"!": {"required": True}, "?": {"nargs": "?"}, "+": {"action": "append", "default": []}}
_NAMES_OF_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""What shtab, which makes a shell's completion of the parser, takes for the names of files."""


def add_arguments(parser: argparse.ArgumentParser, declared: str) -> None:
    """Add arguments that are declared as text, one on a line: its name, what it takes, and behind a colon its help.

    What it takes is nothing, values that it may have (`a|b`), or the word that stands for one: N, K and Q are integers, X is a number, and
    F, F.npy, DIR and the like are paths. A default follows (` = 0.0`), which says the type, too. `!` marks an option that must be given,
    `?` a first argument that need not be, `+` an option that may be repeated; `text@S` is kept as arguments.text. A line that is indented
    goes on with the help above. A line `one of` or `at most one of` begins options that exclude each other, up to a blank line.
    """
    to: argparse._ActionsContainer = parser
    for line in re.sub(r"\n +", " ", declared).splitlines():
        if line in ("one of", "at most one of"):
            to = parser.add_mutually_exclusive_group(required=line == "one of")
        elif line:
            _add_argument(to, line)
        else:
            to = parser


def _add_argument(to: argparse._ActionsContainer, line: str) -> None:
    parts = _LINE.fullmatch(line)
    assert parts, line
    name, kept_as, takes, mark, default, text = parts.groups()
    how: dict[str, Any] = {"help": text}
    if not name or kept_as:
        how["dest"] = kept_as or takes.partition(".")[0].lower()
    if not takes:
        to.add_argument(name, action="store_true", **how)
        return
    if "|" in takes:
        how |= {"choices": [choice for choice in takes.split("|") if choice], "default": default}
    else:
        value = default and ast.literal_eval(default)
        how |= {"metavar": takes, "type": type(value) if default else _TYPES.get(takes.partition(".")[0]), "default": value}
    how |= _MARKS.get(mark, {})
    action = to.add_argument(*[name] if name else [], **how)
    if action.type is Path:
        action.complete = _NAMES_OF_FILES  # type: ignore[attr-defined]


class Parser(argparse.ArgumentParser):
    """argparse's parser. From Python 3.14 on its option suggest_on_error does the same for commands and values, not for options."""

    commands: Mapping[str, "Parser"] = {}  # the parsers of commands, where it has some

    def error(self, message: str) -> NoReturn:
        """End with the usage and the message, to which a command or value is added that is close to a wrong one."""
        wrong = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        super().error(message + (meant(wrong[1], re.findall(r"[^\s',]+", wrong[2])) if wrong else ""))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or usage. Raises OSError where argparse would lose it."""
        print(message, end="", file=file or sys.stderr)

    def check_options(self, words: Sequence[str]) -> None:
        """End with an error if a word looks like an option and is none: argparse would first miss what the right one had given."""
        for word in words[: words.index("--")] if "--" in words else words:
            name, _, value = word.partition("=")
            if value == "--":  # to argparse before Python 3.13 a value that is no text
                self.error(f"argument {word}: expected another value than --")
            if name.startswith("--") and " " not in name and not any(known.startswith(name) for known in self._option_string_actions):
                self.error(f"unrecognized arguments: {name}{meant(name, list(self._option_string_actions))}")
