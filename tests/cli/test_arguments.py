"""Arguments that several commands share: how a model is loaded."""

import numpy as np

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
