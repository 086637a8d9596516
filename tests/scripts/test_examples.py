"""The examples run, and say what they are meant to."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_batch_inference(capsys):
    assert runpy.run_path(str(EXAMPLES / "batch_inference.py"))["main"]([]) == 0
    out = capsys.readouterr().out
    assert out.count("goes on [") == 4
    assert "12 forward passes for 24 tokens" in out
    assert "slots hold [3, 4, 5] positions" in out
