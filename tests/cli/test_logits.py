"""`bitnet-np logits`: every path prints the same checksum, which is that of the numbers it writes."""

import hashlib

import numpy as np
import pytest
from command_line import TINY, TOKENS, save_array, sha256, with_commas

from bitnet_np import EXACT
from bitnet_np.engine.forward_pass import forward_full


def test_logits_in_text(run, model):
    """Their best, behind the shape and the checksum that the page of commands shows."""
    logits = forward_full(model, TOKENS[None])[0, -1]
    lines = run("logits", TINY, "--tokens", with_commas(TOKENS)).splitlines()
    assert [line.split() for line in lines[5:]] == [[str(i), f"{logits[i]:+.6f}"] for i in np.argsort(-logits, kind="stable")[:5]]


def test_logits_in_json(run, model):
    logits = forward_full(model, TOKENS[None])[0]
    result = run("logits", TINY, "--tokens", with_commas(TOKENS), "--json")
    assert result.pop("seconds") > 0
    best = np.argsort(-logits[-1], kind="stable")[:5].tolist()
    top = [[{"id": i, "logit": float(logits[-1, i])} for i in best]]
    assert result == {"shape": [17, 512], "sha256": sha256(logits), "top": top, "dialect": "exact", "mode": "auto", "path": "parallel"}


@pytest.mark.parametrize(
    "options",
    [
        ["--mode", "parallel"],
        ["--mode", "incremental"],
        ["--mode", "auto", "--parallel-threshold", "0"],
        ["--parallel-threshold", "100"],
        ["--chunk", "1"],
        ["--chunk", "7"],
        ["--chunk", "100"],
        ["--mode", "incremental", "--chunk", "3"],
        ["--threads", "1"],
        ["--threads", "2"],
        ["--threads", "2", "--chunk", "7"],
        ["--device", "numpy"],
        ["--device", "numpy", "--chunk", "7"],
    ],
    ids=" ".join,
)
def test_every_path_prints_one_checksum(run, model, options):
    result = run("logits", TINY, "--tokens", with_commas(TOKENS), "--json", *options)
    assert result["sha256"] == sha256(forward_full(model, TOKENS[None]))
    assert result["mode"] == (options[1] if "--mode" in options else "incremental" if "--chunk" in options else "auto")
    short = "100" in options and "--chunk" not in options
    assert result["path"] == ("incremental" if short else "parallel" if result["mode"] == "auto" else result["mode"])


def test_the_environment_names_a_mode(run, refused, model, monkeypatch):
    arguments = ["logits", TINY, "--tokens", with_commas(TOKENS), "--json"]
    for mode, options, path in (
        ("incremental", [], "incremental"),
        ("incremental", ["--mode", "parallel"], "parallel"),
        ("parallel", ["--chunk", "3"], "incremental"),
        ("auto", ["--parallel-threshold", "17"], "incremental"),
        ("", [], "parallel"),
    ):
        monkeypatch.setenv("BITNET_NP_MODE", mode)
        result = run(*arguments, *options)
        assert (result["path"], result["sha256"]) == (path, sha256(forward_full(model, TOKENS[None])))
    monkeypatch.setenv("BITNET_NP_MODE", "fast")
    assert "the environment variable BITNET_NP_MODE is 'fast', expected one of parallel, incremental, auto" in refused(*arguments)


def test_the_checksum_is_of_the_files_numbers(run, model, tmp_path):
    out = tmp_path / "out"
    result = run("logits", TINY, "--tokens", with_commas(TOKENS), "--json", "--out", out)
    array = np.load(out)
    assert array.dtype == np.float32
    assert hashlib.sha256(array.astype("<f4").tobytes()).hexdigest() == result["sha256"]
    np.testing.assert_array_equal(array, forward_full(model, TOKENS[None])[0])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("options", [[], ["--chunk", "5"], ["--mode", "parallel"]])
def test_the_last_position_only(run, model, tmp_path, options):
    logits = forward_full(model, TOKENS[None])
    result = run("logits", TINY, "--tokens", with_commas(TOKENS), "--last", "--json", *options)
    assert (result["shape"], result["sha256"]) == ([512], sha256(logits[0, -1]))
    batch = save_array(tmp_path / "batch.npy", np.stack([TOKENS, TOKENS]))
    result = run("logits", TINY, "--tokens-file", batch, "--last", "--json", *options)
    assert (result["shape"], len(result["top"])) == ([2, 512], 2)
    assert result["sha256"] == sha256(np.stack([logits[0, -1]] * 2))


@pytest.mark.parametrize("options", [[], ["--chunk", "5"]])
def test_another_type_of_cache(run, model, options):
    result = run("logits", TINY, "--tokens", with_commas(TOKENS), "--precision", "kv=q8_0", "--json", *options)
    assert result["sha256"] == sha256(forward_full(model, TOKENS[None], dialect=EXACT.with_cache("q8_0")))
    assert result["sha256"] != sha256(forward_full(model, TOKENS[None]))
    assert result["dialect"] == "exact, kv=q8_0"
