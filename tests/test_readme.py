"""The README: what its commands print, and what its Python does."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from bitnet_np.cli import main
from bitnet_np.gradients import parameter_shapes
from bitnet_np.testing import random_model

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
