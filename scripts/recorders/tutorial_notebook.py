"""Writes docs/tutorial.md as a Jupyter notebook: its blocks of Python are cells, and what a block prints is the cell's output."""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```output\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def cells(page: str) -> Iterator[dict[str, Any]]:
    """Yields the cells of a notebook: prose, and blocks of Python with their outputs."""
    end = 0
    for block in _BLOCK.finditer(page):
        yield _cell("markdown", page[end : block.start()])
        printed = [{"output_type": "stream", "name": "stdout", "text": block[2].splitlines(keepends=True)}] if block[2] else []
        yield _cell("code", block[1]) | {"execution_count": None, "outputs": printed}
        end = block.end()
    yield _cell("markdown", page[end:])


def _cell(kind: str, text: str) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "tested_engine" / "tutorial.ipynb")
    out = parser.parse_args().out
    page = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    page = re.sub(r"\]\((?!\.\.|https?:)", "](../../docs/", page).replace("](../examples/tested_engine/", "](")
    notebook = {"cells": list(cells(page)), "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 4}
    out.write_text(json.dumps(notebook, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
