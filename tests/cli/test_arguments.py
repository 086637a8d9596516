"""Arguments that several commands share: how a model is loaded, and where a result is written."""

from contextlib import contextmanager

import numpy as np
from command_line import TINY, write_file

from bitnet_np.testing.models import random_model, write_gguf


def test_a_model_with_nan_in_it_is_run_if_that_is_said(run, refused, tmp_path):
    model = random_model(1, family="llama", tied=False)
    write_gguf(tmp_path / "sound.gguf", model)
    model.token_embd.flags.writeable = True
    model.token_embd[7, 3] = np.nan  # no token of the prompt is 7
    write_gguf(tmp_path / "nan.gguf", model)
    for command in (["logits"], ["generate"], ["nll"], ["trace", "--out", tmp_path / "t.npz"]):
        arguments = [command[0], tmp_path / "nan.gguf", "--tokens", "1,2,3", *command[1:], "--json"]
        assert "tensor token_embd.weight has NaN or infinity in it" in refused(*arguments)
        run(*arguments, "--allow-nan")
    sound, damaged = (run("logits", tmp_path / f"{name}.gguf", "--tokens", "1,2,3", "--json", "--allow-nan") for name in ("sound", "nan"))
    assert damaged["sha256"] == sound["sha256"]


@contextmanager
def failing_save(monkeypatch, error):
    """np.save raises the error in the middle of a file."""

    def save(file, array):
        file.write(b"half of it")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", save)
        yield


def test_a_failing_disk_leaves_nothing_half_written(refused, run, tmp_path, monkeypatch):
    out = write_file(tmp_path / "out.npy", "the one before")
    with failing_save(monkeypatch, OSError(28, "No space left on device")):
        assert "No space left" in refused("logits", TINY, "--tokens", "1", "--out", out)
    with failing_save(monkeypatch, KeyboardInterrupt()):
        run("logits", TINY, "--tokens", "1", "--out", out, code=130)
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]
    assert out.read_text() == "the one before"
