"""A parser of arguments whose errors name what a mistyped word may have meant."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from ..base.errors import meant


class Parser(argparse.ArgumentParser):
    """argparse's parser. From Python 3.14 on its option suggest_on_error does the same for commands and values, not for options."""

    commands: Mapping[str, "Parser"] = {}  # the parsers of commands, where it has some

    def error(self, message: str) -> NoReturn:
        """End with the usage and the message, to which a command or value is added that is close to a wrong one."""
        wrong = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        super().error(message + (meant(wrong[1], re.findall(r"[^\s',]+", wrong[2])) if wrong else ""))

    def check_options(self, words: Sequence[str]) -> None:
        """End with an error if a word looks like an option and is none: argparse would first miss what the right one had given."""
        for word in words[: words.index("--")] if "--" in words else words:
            name, _, value = word.partition("=")
            if value == "--":  # to argparse before Python 3.13 a value that is no text
                self.error(f"argument {word}: expected another value than --")
            if name.startswith("--") and " " not in name and not any(known.startswith(name) for known in self._option_string_actions):
                self.error(f"unrecognized arguments: {name}{meant(name, list(self._option_string_actions))}")
