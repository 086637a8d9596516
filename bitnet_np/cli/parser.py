"""The parser of arguments: they are declared as their help shows them, and errors name what a mistyped word may have meant."""

import argparse
import ast
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from ..base.errors import meant

_LINE = re.compile(r"(?:(--?[\w-]+(?:, --[\w-]+)?) ?)?(?:(\w+)@)?(\S*?)([!?+]?)(?: = (\S+))?: (.+)")
_PATHS = ("F", "DIR", "DUMP", "IN", "MODEL", "OUT", "OURS", "PLAN", "THEIRS")
_TYPES = dict.fromkeys("NKQ", int) | dict.fromkeys(_PATHS, Path) | {"X": float}
_MARKS: dict[str, dict[str, Any]] = {"!": {"required": True}, "?": {"nargs": "?"}, "+": {"action": "append", "default": []}}
_LONGEST = 50  # letters of choices that stand in a usage; more are listed in the help alone
_NAMES_OF_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
"""What shtab, which makes a shell's completion of the parser, takes for the names of files."""


def add_arguments(parser: argparse.ArgumentParser, declared: str) -> None:
    """Add arguments that are declared as text, one on a line: its name, what it takes, and after a colon its help.

    What it takes is nothing, values that it may have (`a|b`), or the word that stands for one: N, K and Q are integers, X is a number, and
    F, F.npy, DIR and the like are paths. A default follows (` = 0.0`), which also says the type; the help shows it. `!` marks an option
    that must be given, `?` a first argument that need not be, `+` an option that may be repeated; `text@S` is kept as arguments.text. A
    line that is indented goes on with the help above. A line `one of` or `at most one of` begins options that exclude each other, up to a
    blank line. A line `[name]` begins a group of the help, up to the next one.
    """
    group: argparse._ActionsContainer = parser
    to = group
    for line in re.sub(r"\n +", " ", declared).splitlines():
        if line in ("one of", "at most one of"):
            to = group.add_mutually_exclusive_group(required=line == "one of")
        elif line.startswith("["):
            to = group = parser.add_argument_group(line.strip("[]"))
        elif line:
            _add_argument(to, line)
        else:
            to = group


def _add_argument(to: argparse._ActionsContainer, line: str) -> None:
    parts = _LINE.fullmatch(line)
    assert parts, line
    name, kept_as, takes, mark, default, text = parts.groups()
    how: dict[str, Any] = {"help": text}
    if not name or kept_as:
        how["dest"] = kept_as or takes.partition(".")[0].lower()
    if not takes:
        to.add_argument(*name.split(", "), action="store_true", **how)
        return
    if "|" in takes:
        how |= {"choices": [choice for choice in takes.split("|") if choice], "default": default}
        if len(takes) > _LONGEST:
            how |= {"metavar": "NAME", "help": f"{text}. One of {', '.join(how['choices'])}"}
    else:
        value = default and ast.literal_eval(default)
        how |= {"metavar": takes, "type": type(value) if default else _TYPES.get(takes.partition(".")[0]), "default": value}
    if default and "default" not in text:
        how["help"] += f" (default {default.removesuffix('.0')})"
    how |= _MARKS.get(mark, {})
    action = to.add_argument(*[name] if name else [], **how)
    if action.type is Path:
        action.complete = _NAMES_OF_FILES  # type: ignore[attr-defined]


class _Help(argparse.HelpFormatter):
    """argparse's help, with examples as they are, and a usage of what must be given."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(part if "\n" in part else super(_Help, self)._fill_text(part, width, indent) for part in text.split("\n\n"))

    def _format_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None) -> str:
        groups = [group for group in groups if group.required]
        inside = [action for group in groups for action in group._group_actions]
        needed = [action for action in actions if action.required or not action.option_strings or action in inside]
        text = super()._format_usage(usage, needed, groups, prefix)
        return text if prefix == "" else text.replace(self._prog, f"{self._prog} [options]", 1)  # "": what commands are called by


class Parser(argparse.ArgumentParser):
    """argparse's parser. From Python 3.14 on its option suggest_on_error does the same for commands and values, not for options."""

    commands: Mapping[str, "Parser"] = {}  # the parsers of commands, where it has some

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        """End with the usage in a line and the message in another, where words that are close to a wrong one take the place of all."""
        wrong = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        near = meant(wrong[1], re.findall(r"[^\s',]+", wrong[2])) if wrong else ""
        shorter = message.partition(" (choose from")[0] + near if near else message
        self.exit(2, f"{' '.join(self.format_usage().split())}\n{self.prog}: error: {shorter}\n")

    def explain(self) -> NoReturn:
        """End with the help in place of an error: nothing was given, and something must be."""
        self.exit(2, self.format_help())

    @property
    def takes_nothing(self) -> bool:
        """Whether it can do without any argument."""
        alternatives: list[Any] = [*self._actions, *self._mutually_exclusive_groups]
        return not any(alternative.required for alternative in alternatives)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or usage. Raises OSError where argparse would lose it."""
        print(message, end="", file=file or sys.stderr)

    def check_options(self, words: Sequence[str]) -> None:
        """End with an error if a word looks like an option and is none: argparse would first miss what the right one had given."""
        for word in takewhile(lambda word: word != "--", words):
            name, _, value = word.partition("=")
            if value == "--":  # to argparse before Python 3.13 a value that is no text
                self.error(f"argument {word}: expected another value than --")
            if name.startswith("--") and " " not in name and not any(known.startswith(name) for known in self._option_string_actions):
                self.error(f"unrecognized arguments: {name}{meant(name, list(self._option_string_actions))}")
