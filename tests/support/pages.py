"""The documentation as the tests read it: pages, fenced blocks of code, tables, links."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("scripts/**/*.md"), *ROOT.glob("tests/**/*.md")})
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    """The path of a page within the repository."""
    return page.relative_to(ROOT).as_posix()


@cache
def text(page: Path) -> str:
    return page.read_text("utf-8")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int  # of the opening fence, from 1
    language: str
    code: str

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages, in order."""
    every = (Block(page, text(page)[: m.start()].count("\n") + 1, m[1], m[2]) for m in _FENCE.finditer(text(page)))
    return [block for block in every if block.language in languages]


def cells(notebook: Path) -> list[Block]:
    """The cells of a notebook as blocks of Python, each with a block of what it prints; the number of a cell stands for its line."""
    every = enumerate(json.loads(text(notebook))["cells"], 1)
    code = [
        (n, cell["source"], [line for output in cell["outputs"] for line in output["text"]])
        for n, cell in every
        if cell["cell_type"] == "code"
    ]
    return [Block(notebook, n, kind, "".join(lines)) for n, *parts in code for kind, lines in zip(("python", "output"), parts, strict=True)]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", text(page))


def spans(page: Path) -> list[str]:
    """Code within the sentences of a page."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def links(page: Path) -> list[str]:
    """The targets of the links of a page."""
    return [unquote(target) for target in _LINK.findall(prose(page))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def table(page: Path, first: str) -> list[list[str]]:
    """The rows, cell by cell, of the one table of a page whose first column has this heading."""
    (rows,) = re.findall(rf"^\| {re.escape(first)} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", text(page), re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
