"""`bitnet-np grad`: the library's loss and gradients, printed and written, and judged by `compare`."""

import numpy as np
import pytest
from models import random_model

from bitnet_np.files.load import load
from bitnet_np.testing.models import write_gguf
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import Key, gradient_key
from bitnet_np.training.gradients import loss_and_gradients, parameters_of


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(6, table="float16", width=128, ffn=128, heads=4, kv_heads=2, head_dim=32))
    return path


def test_the_command_says_norms_and_writes_gradients(run, model_file, tmp_path):
    out = tmp_path / "ours.npz"
    printed = run("grad", model_file, "--tokens", "1,2,3,4,5", "--json", "--out", out)
    model = load(model_file)
    loss, gradients = loss_and_gradients(model.config, parameters_of(model), [[1, 2, 3, 4, 5]], weights="none")
    assert printed["loss"] == loss
    assert {row["name"]: row["shape"] for row in printed["gradients"]} == {name: list(g.shape) for name, g in gradients.items()}
    for row in printed["gradients"]:
        assert row["norm"] == pytest.approx(np.linalg.norm(gradients[row["name"]]), rel=1e-12)
        assert row["max"] == np.abs(gradients[row["name"]]).max()
    trace = read_any(out)
    assert trace.tokens.tolist() == [1, 2, 3, 4, 5]
    assert trace.points[Key("loss", None)].tolist() == [[loss]]
    assert len(trace.points) == len(gradients) + 1
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(trace.points[gradient_key(name)].reshape(gradient.shape), gradient)
    text = run("grad", model_file, "--tokens", "1,2,3,4,5")
    assert f"loss  {loss:.6f} nats a token (4 predicted)" in text
    assert "blk.1.ffn_down.weight" in text


def test_gradients_of_another_engine_are_judged(run, model_file, tmp_path):
    """`compare` judges gradients by GGUF's names: equal ones, rounded ones, a matrix that is wrong, a row that is wrong."""
    out, theirs = tmp_path / "ours.npz", tmp_path / "theirs.npz"
    run("grad", model_file, "--tokens", "1,2,3,4,5", "--out", out)
    model = load(model_file)
    _, gradients = loss_and_gradients(model.config, parameters_of(model), [[1, 2, 3, 4, 5]], weights="none")

    def verdict(code, **changed):
        np.savez(theirs, tokens=[1, 2, 3, 4, 5], **{**gradients, **changed})
        printed = run("compare", out, theirs, "--partial", "--json", code=code)
        return printed["verdict"], (printed["first_wrong"] or {}).get("tensor")

    assert verdict(0) == ("SAME_BITS", None)
    assert verdict(0, **{name: gradient.astype(np.float32) for name, gradient in gradients.items()}) == ("ROUNDING", None)
    name = "blk.1.attn_k.weight"
    assert verdict(0, **{name: gradients[name] * (1 + 2**-20)}) == ("ROUNDING", None)
    assert verdict(1, **{name: gradients[name] * 1.2}) == ("WRONG", "grad_attn_k")
    assert verdict(1, **{name: -gradients[name]}) == ("WRONG", "grad_attn_k")
    assert verdict(2, **{name: gradients[name] * np.nan})[0] == "INVALID"
    table = gradients["token_embd.weight"].copy()
    table[3] = table[4]
    assert verdict(1, **{"token_embd.weight": table}) == ("WRONG", "grad_token_embd")
    table[3] = 0
    assert verdict(1, **{"token_embd.weight": table}) == ("WRONG", "grad_token_embd")
    run("check", model_file, "--tokens", "1,2,3,4,5", "--theirs", out, code=2)  # it has no tensor of a forward pass


def test_a_format_without_gradients_is_refused(refused, model_file, tmp_path):
    assert "has no gradients" in refused("grad", model_file, "--tokens", "1,2", "--out", tmp_path / "g.kld")
    assert not (tmp_path / "g.kld").exists()
