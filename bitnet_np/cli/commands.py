"""What can be typed: every command with its arguments, as commands.txt has them in the form that parser.py reads.

Nothing of the library is imported here, so that help and wrong usage are answered at once. tests/cli/test_commands.py compares the names
that options take with the library's tables.
"""

from pathlib import Path
from string import Template
from typing import NamedTuple


class Command(NamedTuple):
    """A command, which the module of its name runs."""

    summary: str
    arguments: str
    examples: str

    @classmethod
    def of(cls, text: str) -> "Command":
        """The parts of a text: its first line, its last two, and what is between them."""
        summary, *arguments, one, two = text.splitlines()
        return cls(summary, "\n".join(arguments), f"Examples:\n{one}\n{two}")


def _sections(text: str) -> dict[str, str]:
    """The sections of a text by their names, each after a line `=== name`. `$NAME` stands for the section of that name before it."""
    sections: dict[str, str] = {}
    for section in text.split("=== ")[1:]:
        name, _, content = section.partition("\n")
        sections[name] = Template(content.removesuffix("\n")).substitute(sections)
    return sections


SECTIONS = _sections(Path(__file__).with_suffix(".txt").read_text("utf-8"))
"""Arguments that commands share, by names in capital letters, and the commands: judging and what it needs first."""
COMMANDS = {name: Command.of(text) for name, text in SECTIONS.items() if name.islower()}
