"""`bitnet-np compare`: the verdict on two dumps, and the difference of two models, as they are printed, drawn and returned.

The verdict and the numbers themselves: judge/test_compare_dumps.py and test_compare_models.py.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from command_line import TINY, TOKENS, with_commas

from bitnet_np.cli.nll import kl_facts
from bitnet_np.files.digest import digest_of
from bitnet_np.files.load import load
from bitnet_np.judge.compare_models import compare_models
from bitnet_np.judge.report.report import LEGEND
from bitnet_np.model.matrix_facts import matrix_errors
from bitnet_np.testing.models import random_model
from bitnet_np.traces.record import record_trace


@pytest.fixture
def ours(model, tmp_path):
    """A dump of four tokens."""
    path = tmp_path / "ours.npz"
    record_trace(model, [1, 2, 3, 4], path, names=["l_out", "result_output"])
    return path


@pytest.fixture
def theirs(ours, tmp_path):
    """A function that writes a dump as ours with other arrays by name, or without them where they are None."""

    def write(**changes):
        path = tmp_path / "theirs.npz"
        with np.load(ours) as archive:
            arrays = {**archive, **changes}
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
        return path

    return write


def test_equal_dumps_have_the_same_bits(run, ours, theirs, tmp_path):
    """Printed, as a page and as a picture."""
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "r.html", tmp_path / "map.png"
    lines = run("compare", ours, theirs(), "-v", "--html", page, "--plot", picture).splitlines()
    assert lines[:2] == ["PASS (SAME_BITS): same bits", "4 tensors compared"]
    assert lines[2] == f"{ours.with_name('theirs.npz')} (npz) against {ours} (npz)"
    assert LEGEND in lines
    assert "result_output =" in lines
    digests = {"reference": digest_of(ours), "dump": digest_of(theirs())}
    assert all(f"SHA-256 of the {what}</td><td class=mono>{digest}" in page.read_text("utf-8") for what, digest in digests.items())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_tensor_is_named_with_its_numbers(run, ours, theirs):
    """The output of the second layer is twice what it should be."""
    with np.load(ours) as archive:
        path = theirs(**{"l_out-1": 2 * archive["l_out-1"]})
    lines = run("compare", ours, path, "-v", code=1).splitlines()
    assert lines[0] == "FAIL (WRONG): differs by more than rounding explains"
    assert lines[1].startswith("layer 1 l_out: NMSE 1 at position ")
    assert "note: `bitnet-np check MODEL` judges the dump by its model and names known mistakes" in lines
    assert "layer  1 X" in lines
    (row,) = (line.split() for line in lines if line.startswith("layer 1 l_out  WRONG"))
    assert row[-3:] == ["1", "2", "1"]  # NMSE, scale, cosine
    result = run("compare", ours, path, "--json", code=1)
    assert (result["verdict"], result["first_wrong"]["tensor"], result["first_wrong"]["layer"]) == ("WRONG", "l_out", 1)


def test_a_receipt_of_both_dumps_logits(run, refused, ours, theirs, tmp_path):
    with np.load(ours) as archive:
        logits = archive["result_output"]
    out = tmp_path / "receipt.json"
    run("compare", ours, theirs(), "--receipt", out)
    assert json.loads(out.read_text())["summary"]["all_passed"]
    run("compare", ours, theirs(result_output=np.float32(-1) * logits), "--receipt", out, code=1)
    written = json.loads(out.read_text())
    assert (written["positions"], written["summary"]["first_divergence"]) == (4, 0)
    assert written["rows"][2]["top5_cpp"] == np.argsort(-logits[2], kind="stable")[:5].tolist()
    assert written["rows"][2]["top5_rust"] == np.argsort(logits[2], kind="stable")[:5].tolist()
    assert "--receipt needs logits" in refused("compare", ours, theirs(result_output=None), "--partial", "--receipt", out)
    assert "--receipt is" in refused("compare", ours, theirs(), "--receipt", ours)


def test_dumps_are_held_to_a_receipt(run, refused, ours, theirs, tmp_path):
    """A position that passed in it must pass again; one that did not may fail."""
    with np.load(ours) as archive:
        logits = archive["result_output"]
    wrong, worse, slightly = logits.copy(), logits.copy(), logits.copy()
    wrong[1] *= -1
    worse[1:3] *= -1
    slightly[3] += np.float32(0.011)  # a mean square error of 1.2e-4, beyond 1e-4
    path = tmp_path / "receipt.json"
    run("compare", ours, theirs(result_output=wrong), "--receipt", path, code=1)
    kept = run("compare", ours, theirs(), "--by-receipt", path)
    assert "note: 4 of 4 positions keep the thresholds of the receipt, 3 did in it" in kept
    assert " passed in the receipt" not in run("compare", ours, theirs(result_output=wrong), "--by-receipt", path, code=1)
    for logits, position in ((worse, 2), (slightly, 3)):
        result = run("compare", ours, theirs(result_output=logits), "--by-receipt", path, "--json", code=1)
        assert result["verdict"] == "WRONG"
        assert result["reason"].startswith(f"position {position} passed in the receipt {path} and does not any more: mse ")
    assert "expected at most 0.0001 and 0.1, and at least 0.8" in result["reason"]
    assert "--by-receipt needs logits" in refused("compare", ours, theirs(result_output=None), "--partial", "--by-receipt", path)
    assert "--receipt is" in refused("compare", ours, theirs(), "--by-receipt", path, "--receipt", path)
    written = json.loads(path.read_text())
    rows = [{name: row[name] for name in ("pos", "mse", "max_abs")} for row in written["rows"]]
    path.write_text(json.dumps(written | {"rows": rows}))  # as of BitNet-rs's parity-both
    result = run("compare", ours, theirs(result_output=slightly), "--by-receipt", path, "--json", code=1)
    assert result["reason"].startswith("position 3 passed in the receipt")
    assert "kl is not in all of its rows, and does not count there" in result["notes"]
    short = tmp_path / "short.npz"
    np.savez(short, result_output=wrong[:3])
    assert "has 4 positions, the dumps have 3" in refused("compare", short, short, "--by-receipt", path)


def test_a_tensor_that_theirs_lacks_is_invalid_unless_that_is_allowed(run, ours, theirs):
    path = theirs(**{"l_out-2": None})
    assert "theirs.npz (npz) lacks l_out-2; --partial compares what both have" in run("compare", ours, path, code=2)
    assert "3 tensors compared" in run("compare", ours, path, "--partial")


def test_both_dumps_are_read_in_the_format_that_is_given(refused, ours, theirs):
    message = f"bitnet-np: {ours}: no point of a forward pass in it"
    assert refused("compare", ours, theirs(), "--dump-format", "nodes").startswith(message)


# --- two models -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rounded(run, tmp_path):
    """The embedded model with scales rounded to float16."""
    path = tmp_path / "rounded.gguf"
    run("convert", TINY, path, "--type", "TQ2_0", "--allow-rounding")
    return path


def test_two_models_are_compared_layer_by_layer(run, model, rounded):
    found = compare_models(model, load(rounded), [TOKENS])
    result = run("compare", TINY, rounded, "--models", "--tokens", with_commas(TOKENS), "--json")
    assert (result["ours"], result["theirs"], result["dialect"], result["tokens"]) == (TINY, str(rounded), "exact", 17)
    assert result["kl"] == kl_facts(found.kl)
    assert (result["same_top"], result["settings"]) == (found.same_top.mean(), {})
    assert result["matrices"] == matrix_errors(model, load(rounded))
    assert 0 < max(result["matrices"].values()) < 1e-3
    assert [*result["tensors"][1].values()] == ["attn_norm", 0, found.tensors[1].error, found.tensors[1].growth]
    assert len(result["tensors"]) == len(found.tensors) == 3 + 17 * 3
    lines = run("compare", TINY, rounded, "--models", "--tokens", with_commas(TOKENS)).splitlines()
    largest = max(t.error for t in found.tensors)
    (unit,) = (float(line.split()[-1][:-1]) for line in lines if line.startswith("Relative errors, in units of "))
    cells = [cell for line in lines if re.match("layer  [0-2] [ 0-9.]+$", line) for cell in line.split()[2:]]
    assert (len(cells), max(map(float, cells))) == (51, round(largest / unit, 1 if largest < 9.95 * unit else 0))


def test_the_tables_of_two_models_fit_the_terminal(run, rounded, monkeypatch):
    monkeypatch.setattr("bitnet_np.cli.compare_models.width", lambda: 50)
    lines = run("compare", TINY, rounded, "--models", "--tokens", "1,2").splitlines()
    assert max(len(line) for line in lines if str(rounded.parent) not in line) <= 50
    assert len([line for line in lines if line.startswith("layer  0 ")]) == 2  # 17 tensors, ten of them at a time


def test_settings_that_differ_are_noted_and_infinite_errors_are_null(run, tmp_path, written):
    a, b = (random_model(3, family="qwen3", weights="float32", n_layers=1, eps=eps) for eps in (1e-5, 1e-6))
    down = a.layers[0].ffn_down
    a = replace(a, layers=(replace(a.layers[0], ffn_down=replace(down, weights=0 * down.weights)),))
    options = ("compare", written(a), written(b), "--models", "--tokens", "1,2")
    assert "note: eps is 1e-05 and 1e-06" in run(*options).splitlines()
    result = run(*options, "--json")
    assert result["settings"] == {"eps": ["1e-05", "1e-06"]}
    assert [t["error"] for t in result["tensors"] if t["tensor"] == "ffn_down"] == [None]


def test_the_errors_of_two_models_are_drawn(run, rounded, tmp_path):
    pytest.importorskip("matplotlib")
    run("compare", "--models", TINY, rounded, "--tokens", "1,2", "--plot", tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    run("compare", "--models", TINY, TINY, "--tokens", "1,2", "--plot", tmp_path / "same.png")


def test_a_tolerance_takes_the_place_of_what_roundings_reach(run, refused, ours, theirs):
    """Of a tensor's largest number; the first tensor that differs is named."""
    with np.load(ours) as archive:
        array = archive["l_out-1"].copy()
    array.flat[3] += 0.01 * np.abs(array).max()
    other = theirs(**{"l_out-1": array})
    lines = run("compare", ours, other, "--tolerance", "0.011").splitlines()
    assert lines[0].startswith("PASS (ROUNDING)")
    assert lines[1] == "4 tensors compared; the first that differs is layer 1 l_out"
    wrong = run("compare", ours, other, "--tolerance", "0.009", code=1)
    assert "layer 1 l_out: the largest difference is 0.01 of the largest number, expected at most 0.009" in wrong
    assert "tolerance is 0.0, expected a positive number" in refused("compare", ours, other, "--tolerance", "0")


def test_what_few_engines_write_may_be_missing(run, model, tmp_path):
    record_trace(model, [1, 2], tmp_path / "ours.npz")
    with np.load(tmp_path / "ours.npz") as archive:
        arrays = {name: x for name, x in archive.items() if "_codes" not in name and "_scale" not in name}
    np.savez(tmp_path / "theirs.npz", **arrays)
    assert run("compare", tmp_path / "ours.npz", tmp_path / "theirs.npz").startswith("PASS (SAME_BITS)")
    np.savez(tmp_path / "theirs.npz", **{name: x for name, x in arrays.items() if name != "ffn_up-1"})
    assert "lacks ffn_up-1; --partial" in run("compare", tmp_path / "ours.npz", tmp_path / "theirs.npz", code=2)
