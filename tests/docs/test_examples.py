"""Every example of the documentation is run as a reader would run it, and prints what is shown.

A page is a session: its `console` and `python` blocks run from top to bottom in one folder and one namespace. In a console block, `$`
begins a command and what follows is its output, where a line `...` stands for any lines. An `output` block is what the Python before it
prints. Blocks of `sh` hold what is not run here, because it takes long or needs another machine: their commands and options must exist.
"""

import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pages
import pytest

from bitnet_np.cli.main import build_parser, main
from pytest_bitnet_np import Oracle

RUNNABLE = ("console", "python", "output")
README = pages.ROOT / "README.md"
ORACLE = Oracle("a test of a page", None, {})  # the plugin's fixture


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that looks like a checkout in which `python examples/files.py` has been run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pages.ROOT / "examples", "examples")
    shutil.copytree(pages.ROOT / "bitnet_np" / "data", "bitnet_np/data")
    files = runpy.run_path(str(pages.ROOT / "examples" / "files.py"))
    assert files["main"]() == 0
    return tmp_path


def as_shown(shown, printed):
    """Whether a text is what was printed, where a line `...` stands for any lines, and `...` within a line for any text."""
    lines = [re.escape(line).replace(r"\.\.\.", ".*") + "\n" if line != "..." else "(?:.*\n)*?" for line in shown.splitlines()]
    return re.fullmatch("".join(lines), printed) is not None


class Session:
    """A reader who types what a page shows."""

    def __init__(self, capsys, monkeypatch):
        self.capsys, self.monkeypatch = capsys, monkeypatch
        self.names = {"__name__": "page"}
        self.code = 0  # of the last command
        self.printed = ""  # by the last block of Python

    def run(self, block):
        if block.language == "python":
            exec(compile("\n" * block.line + block.code, str(block), "exec"), self.names)
            self.run_tests()
            self.printed = self.capsys.readouterr().out
            return
        if block.language == "output":
            assert as_shown(block.code, self.printed), f"{block}:\n{self.printed}"
            return
        assert block.code.startswith("$ "), block
        for step in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
            command, shown = step.split("\n", 1)
            self.command(shlex.split(command))
            out, err = self.capsys.readouterr()
            printed = (out + err).replace("\\", "/")  # paths of Windows
            assert as_shown(shown, printed), f"{block}: $ {command}\n{printed}"

    def run_tests(self):
        """As pytest does with the plugin, once each."""
        for name in [name for name in self.names if name.startswith("test_")]:
            test = self.names.pop(name)
            test(*[ORACLE] * len(inspect.signature(test).parameters))

    def command(self, words):
        if words == ["echo", "$?"]:
            print(self.code)
        elif words[0] == "bitnet-np":
            self.code = main(words[1:])
        else:
            assert words[0] == "python", words
            self.monkeypatch.setattr(sys, "argv", words[1:])
            self.code = runpy.run_path(words[1])["main"]()


PAGES = [page for page in pages.PAGES if pages.blocks(page, *RUNNABLE)]


LEFT = {
    "docs/library.md": lambda names: len(names["points"]) == 78,
    "docs/training.md": lambda names: names["gradients"]["blk.0.attn_q.weight"].dtype == np.float64,
}
"""What must be so when the last block of a page has run."""
STARTS = {"docs/tutorial.md": "examples/tested_engine"}
"""The folders in which pages say that they start."""
NOTEBOOKS = {"docs/tutorial.md": pages.ROOT / "examples" / "tested_engine" / "tutorial.ipynb"}
"""The pages that are notebooks, too (test_site.py compares them): the cells are run in place of the blocks, without Jupyter."""


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_a_page_does_what_it_shows(page, folder, capsys, monkeypatch):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    session = Session(capsys, monkeypatch)
    capsys.readouterr()
    monkeypatch.chdir(STARTS.get(pages.name(page), "."))
    monkeypatch.syspath_prepend(Path.cwd())
    notebook = NOTEBOOKS.get(pages.name(page))
    for block in pages.cells(notebook) if notebook else pages.blocks(page, *RUNNABLE):
        session.run(block)
    assert LEFT.get(pages.name(page), lambda names: True)(session.names)


def test_the_test_of_an_engine_fails_for_a_wrong_dump(folder):
    nodes = dict(np.load("nodes.npz"))
    (wrong,) = (name for name in nodes if ".ffn_down-1." in name)
    np.savez("dump.npz", **nodes | {wrong: -nodes[wrong]})
    names = {}
    exec(pages.blocks(README, "python")[0].code, names)
    with pytest.raises(pytest.fail.Exception, match="WRONG at layer 1 ffn_down: the sign is flipped"):
        names["test_engine"](ORACLE)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_workflow_shows_the_verdict_as_an_annotation(folder, capsys, sign):
    """The last line of its step is a command of GitHub Actions, and the step fails by its exit code."""
    nodes = dict(np.load("nodes.npz"))
    np.savez("dump.npz", **{name: x * sign if ".ffn_down-1." in name else x for name, x in nodes.items()})
    (block,) = pages.blocks(pages.ROOT / "docs" / "commands.md", "yaml")
    step = re.search(r"- run: (bitnet-np .*)\n", block.code)[1]
    capsys.readouterr()
    code = main(shlex.split(step)[1:])
    last = capsys.readouterr().out.splitlines()[-1]
    said = {
        1: (0, "::notice title=bitnet-np::NARROW: "),
        -1: (1, "::error title=bitnet-np::WRONG at layer 1 ffn_down: the sign is flipped"),
    }
    assert (code, last[: len(said[sign][1])]) == said[sign]


@pytest.mark.skipif(os.name == "nt", reason="needs sh")
@pytest.mark.parametrize(("built", "judged", "code"), [(0, 0, 0), (0, 1, 1), (0, 2, 125), (2, 0, 125)])
def test_the_recipe_for_git_bisect_skips_what_cannot_be_judged(tmp_path, built, judged, code):
    (block,) = pages.blocks(pages.ROOT / "docs" / "faq.md", "bash")
    assert unknown_options(shlex.split(block.code.splitlines()[2])) == []
    for name, result in (("make", built), ("engine", 0), ("bitnet-np", judged)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {result}\n")
        (tmp_path / name).chmod(0o755)
    paths = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    assert subprocess.run(["sh", "-c", block.code], cwd=tmp_path, env=os.environ | {"PATH": paths}).returncode == code


# --- what is not run ------------------------------------------------------------------------------------------------------------------


def commands(page):
    """The words of each command of a page: of its `sh` blocks without comments, and of code within sentences."""
    for block in pages.blocks(page, "sh"):
        for line in block.code.splitlines():
            for part in line.split(" && "):
                yield shlex.split(part, comments=True)
    for span in pages.spans(page):
        yield span.split()


def is_ours(words):
    return words[:1] == ["bitnet-np"] or (words[:1] == ["python"] and not words[1].startswith("-"))


COMMANDS = [(page, words) for page in pages.PAGES for words in commands(page) if len(words) > 1 and is_ours(words)]


def unknown_options(words):
    """Options of a command that its program does not have."""
    given = words[2:]
    if words[0] == "bitnet-np" and words[1].startswith("-"):
        known, given = build_parser()._option_string_actions, words[1:]
    elif words[0] == "bitnet-np":
        known = [] if words[1] == "COMMAND" else build_parser().commands[words[1]]._option_string_actions
    else:
        program = pages.ROOT / words[1]
        source = "".join(path.read_text("utf-8") for path in (program.glob("*.py") if program.is_dir() else [program]))
        known = re.findall(r'"(--[\w-]+)"', source)
    return [word for word in given if word.startswith("--") and word not in [*known, "--help"]]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: pages.name(value) if isinstance(value, Path) else " ".join(value))
def test_commands_and_options_that_are_named_exist(page, words):
    assert unknown_options([word.strip("[]") for word in words]) == []


def test_commands_in_blocks_are_complete():
    """Where a whole command is shown, it parses."""
    lines = [line for page in pages.PAGES for block in pages.blocks(page, "sh") for line in block.code.splitlines()]
    for line in lines:
        if line.startswith("bitnet-np "):
            assert build_parser().parse_args(shlex.split(line.partition(" > ")[0], comments=True)[1:])


# --- the mechanism itself -------------------------------------------------------------------------------------------------------------


def test_there_are_examples():
    """Lest the tests above run none."""
    pages_with_some = ("README", *(f"docs/{page}" for page in ("judging", "models", "commands", "library", "demo", "training", "contract")))
    assert {f"{page}.md" for page in pages_with_some} <= set(map(pages.name, PAGES))
    assert sum(len(pages.blocks(page, *RUNNABLE)) for page in PAGES) >= 25
    assert len(COMMANDS) >= 40
    assert unknown_options(["bitnet-np", "logits", "--fast"]) == unknown_options(["python", "scripts/bench.py", "--fast"]) == ["--fast"]
    assert (unknown_options(["bitnet-np", "--help"]), unknown_options(["bitnet-np", "--fast"])) == ([], ["--fast"])


def test_a_session_notices_a_wrong_example(folder, capsys, monkeypatch):
    session = Session(capsys, monkeypatch)
    capsys.readouterr()
    session.run(pages.Block(README, 1, "console", "$ bitnet-np mask 2 2 --bool\n1 0\n1 1\n$ echo $?\n0\n"))
    session.run(pages.Block(README, 1, "console", "$ bitnet-np mask 3 3 --bool\n1 ...\n...\n1 1 1\n"))
    for wrong in ("1 0\n1 0\n", "1 0\n", "1 .\n1 1\n", "1 0\n...\n1 0\n"):
        with pytest.raises(AssertionError, match=r"README\.md:1: \$ bitnet-np mask 2 2"):
            session.run(pages.Block(README, 1, "console", f"$ bitnet-np mask 2 2 --bool\n{wrong}"))
    with pytest.raises(AssertionError, match="no"):
        session.run(pages.Block(README, 1, "python", "def test_it():\n    assert False, 'no'\n"))
    session.run(pages.Block(README, 1, "python", "print(1)\n"))
    session.run(pages.Block(README, 1, "output", "1\n"))
    with pytest.raises(AssertionError, match=r"README\.md:1:\n +1"):
        session.run(pages.Block(README, 1, "output", "2\n"))
