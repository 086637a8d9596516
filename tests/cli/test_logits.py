"""`bitnet-np logits`: every path prints the checksum of the library's numbers, which it writes. Text: docs/commands.md shows it."""

import numpy as np
import pytest
from command_line import TINY, TOKENS, save_array, sha256, with_commas

from bitnet_np import EXACT
from bitnet_np.engine.forward_pass import forward_full

LAST, Q8_0 = {"last_only": True}, {"dialect": EXACT.with_cache("q8_0")}


@pytest.mark.parametrize(
    ("options", "how", "mode", "path"),
    [
        ("", {}, "auto", "parallel"),
        ("--mode parallel", {}, "parallel", "parallel"),
        ("--mode incremental", {}, "incremental", "incremental"),
        ("--mode auto --parallel-threshold 0", {}, "auto", "parallel"),
        ("--parallel-threshold 17", {}, "auto", "incremental"),
        ("--chunk 1", {}, "incremental", "incremental"),
        ("--chunk 100", {}, "incremental", "incremental"),
        ("--mode incremental --chunk 3", {}, "incremental", "incremental"),
        ("--threads 1", {}, "auto", "parallel"),
        ("--threads 2 --chunk 7", {}, "incremental", "incremental"),
        ("--device numpy", {}, "auto", "parallel"),
        ("--device numpy --chunk 7", {}, "incremental", "incremental"),
        ("--last", LAST, "auto", "parallel"),
        ("--last --chunk 5", LAST, "incremental", "incremental"),
        ("--precision kv=q8_0", Q8_0, "auto", "parallel"),
        ("--precision kv=q8_0 --chunk 5", Q8_0, "incremental", "incremental"),
    ],
)
def test_every_path_prints_the_checksum_of_the_librarys_numbers(run, model, tmp_path, options, how, mode, path):
    out = tmp_path / "out"
    for ids, tokens in (
        (TOKENS, ["--tokens", with_commas(TOKENS)]),
        (np.stack([TOKENS, TOKENS[::-1]]), ["--tokens-file", tmp_path / "b.npy"]),
    ):
        save_array(tmp_path / "b.npy", ids)
        logits = forward_full(model, np.atleast_2d(ids), **how)
        result = run("logits", TINY, *tokens, "--out", out, "--json", *options.split())
        assert result.pop("seconds") > 0
        best = [np.argsort(-row, kind="stable")[:5].tolist() for row in (logits if how is LAST else logits[:, -1])]
        top = [
            [{"id": i, "logit": float((row if how is LAST else row[-1])[i])} for i in ids] for row, ids in zip(logits, best, strict=True)
        ]
        logits = logits if ids.ndim == 2 else logits[0]
        said = {"shape": [*logits.shape], "sha256": sha256(logits), "top": top, "mode": mode, "path": path}
        assert result == said | {"dialect": how.get("dialect", EXACT).name}
        array = np.load(out)
        assert (array.dtype, array.tobytes()) == (np.float32, logits.tobytes())


def test_the_environment_names_a_mode(run, refused, monkeypatch):
    arguments = ["logits", TINY, "--tokens", with_commas(TOKENS), "--json"]
    for mode, options, path in (
        ("incremental", [], "incremental"),
        ("incremental", ["--mode", "parallel"], "parallel"),
        ("parallel", ["--chunk", "3"], "incremental"),
        ("auto", ["--parallel-threshold", "17"], "incremental"),
        ("", [], "parallel"),
    ):
        monkeypatch.setenv("BITNET_NP_MODE", mode)
        assert run(*arguments, *options)["path"] == path
    monkeypatch.setenv("BITNET_NP_MODE", "fast")
    assert "the environment variable BITNET_NP_MODE is 'fast', expected one of parallel, incremental, auto" in refused(*arguments)
