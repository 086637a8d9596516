"""The README: what its commands print and what they take, and what its Python does."""

import argparse
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from bitnet_np.cli.main import _parser, main
from bitnet_np.testing import random_model
from bitnet_np.traces.points import MEANINGS
from bitnet_np.training.gradients import parameter_shapes

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")
DATA = Path(__file__).parent / "data"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "bitnet_np" / "data" / "tiny.gguf", "model.gguf")
    shutil.copy(DATA / "bitnet_cpp_tiny_trace.npz", "nodes.npz")
    with np.load(DATA / "bitnet_cpp_tiny.npz") as recorded:
        np.save("tokens.npy", recorded["tokens_T17"])
        np.save("logits.npy", recorded["logits_prefill_T17"])
    return tmp_path


def commands():
    """The parsers of the subcommands."""
    (found,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return found.choices


def options_of(command):
    return [max(action.option_strings, key=len) for action in command._actions if action.option_strings]


def as_shown(shown, printed):
    """Whether a text is what was printed, where a line `...` stands for any lines."""
    parts = [re.escape(part) for part in re.split(r"(?m)^\.\.\.\n", shown)]
    return re.fullmatch("(?:.*\n)*?".join(parts), printed) is not None


CONSOLE = blocks("console")


@pytest.mark.parametrize("block", CONSOLE, ids=[block.splitlines()[0] for block in CONSOLE])
def test_commands_print_what_is_shown(block, here, capsys):
    command, shown = block.split("\n", 1)
    main(shlex.split(command.removeprefix("$ bitnet-np ")))
    assert as_shown(shown, capsys.readouterr().out)


def test_check_prints_what_is_shown(capsys):
    assert main(["check"]) == 0
    assert as_shown("...\n" + blocks("text")[0] + "...\n", capsys.readouterr().out)


def test_every_option_is_in_the_readme():
    found = {(name, option) for name, command in commands().items() for option in options_of(command)}
    assert {option for _, option in found if not re.search(rf"(?<![\w-]){option}(?![\w-])", TEXT)} <= {"--help", "--version"}
    assert ("logits", "--chunk") in found


@pytest.mark.parametrize("name", commands())
def test_every_command_has_a_row_and_every_argument_a_help(name):
    assert f"| `bitnet-np {name}" in TEXT
    assert [action.dest for action in commands()[name]._actions if not action.help] == []


def test_the_table_of_names_is_that_of_the_points():
    rows = re.findall(r"^\| `(\w+?)(?:-N)?` \| \[([^\]]+)\] \| (.+) \|$", TEXT, re.MULTILINE)
    assert {name: (axes.replace(",", ""), text) for name, axes, text in rows} == MEANINGS


def test_there_are_examples():
    """Lest the tests above run none."""
    assert (len(CONSOLE), len(blocks("text")), len(blocks("python"))) == (3, 1, 3)
    assert not as_shown("a\n...\nb\n", "a\nc\n")


def test_the_test_of_an_engine(here, capsys):
    """It fails for what it is given here, and says why."""
    shutil.copy("nodes.npz", "dump.npz")
    names = {"tokens": np.load("tokens.npy")}
    exec(blocks("python")[0], names)
    with pytest.raises(AssertionError, match="WRONG at layer 0 kqv_out"):
        names["test_engine"]()


def test_python_runs(here, capsys):
    names = {}
    exec(blocks("python")[1], names)
    assert len(names["points"]) == 78


def test_training_runs():
    config, rng = random_model(0).config, np.random.default_rng(0)
    parameters = {name: rng.standard_normal(shape, np.float32) for name, shape in parameter_shapes(config).items()}
    names = {"config": config, "parameters": parameters, "tokens": np.array([[1, 2, 3]]), "lengths": None}
    exec(blocks("python")[2], names)
    assert names["gradients"].keys() == parameters.keys()
    assert names["exported"].shape == parameters["blk.0.attn_q.weight"].shape
