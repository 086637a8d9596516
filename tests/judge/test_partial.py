"""Tensors of which some numbers were printed: honest engines are right, and the first wrong tensor is named."""

import json

import numpy as np
import pytest
from dumps import recorded
from models import random_model
from printed_nodes import LLAMA, printed, printed_trace

from bitnet_np.cli.main import main
from bitnet_np.engine.dialects import EXACT, LLAMA_CPP
from bitnet_np.judge.honest_engines import dialects, roundings
from bitnet_np.judge.partial import check_partial
from bitnet_np.judge.variant import Variant
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import write_gguf
from bitnet_np.traces.formats import eval_callback
from bitnet_np.traces.points import Key

MODEL = random_model(1, family="llama", weights="float32", n_layers=3, heads=4, kv_heads=2)
IDS = np.array([7, 3, 11, 3, 0, 5, 1, 2, 9])
HEADS = {"Q": 4, "K": 2}
POINTS = recorded(MODEL, IDS)


def judged(tmp_path, points, **how):
    (tmp_path / "t.txt").write_text(printed_trace(points, HEADS))
    return check_partial(MODEL, IDS, eval_callback.read(tmp_path / "t.txt"), **how)


def test_our_own_numbers_as_printed_are_right(tmp_path):
    report = judged(tmp_path, POINTS)
    assert report.verdict == Verdict.ROUNDING
    assert {(o.key.name, o.key.layer) for o in report.operations} == {key for key in POINTS if key[0] in LLAMA}
    assert report.notes[0] == "compared with our engine in the dialect exact"
    assert "2160 of 41130 numbers, and sums" in report.notes[1]


@pytest.mark.parametrize("which", range(4))
def test_honest_engines_are_right(tmp_path, which):
    """Those that round to float16 in other places, one after the other; also judged in another dialect."""
    base = Variant("ours", MODEL, EXACT)
    variant = [*roundings(base), *dialects(base)][which]
    points = recorded(variant.model, IDS, variant.dialect, variant.ops, variant.edit)
    for dialect in (EXACT, LLAMA_CPP):
        report = judged(tmp_path, points, dialect=dialect)
        assert report.verdict <= Verdict.FLIPS, report.reason


@pytest.mark.parametrize("name", ["attn_norm", "Qcur", "Kcur_rope", "kqv_out", "ffn_out", "l_out"])
@pytest.mark.parametrize("change", ["factor", "shift"])
def test_the_first_wrong_tensor_is_named(tmp_path, name, change):
    points = dict(POINTS)
    for layer in (1, 2):
        points[name, layer] = points[name, layer] * 1.1 if change == "factor" else np.roll(points[name, layer], 1, axis=1)
    report = judged(tmp_path, points)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key(name, 1))
    assert report.reason.startswith(f"WRONG at layer 1 {name}: ")


def test_an_error_between_the_printed_numbers_shows_in_the_sum(tmp_path):
    points = dict(POINTS)
    points["ffn_up", 1] = points["ffn_up", 1].copy()
    points["ffn_up", 1][3:-3, 3:-3] = np.abs(points["ffn_up", 1][3:-3, 3:-3])
    report = judged(tmp_path, points)
    assert report.first_wrong.key == Key("ffn_up", 1)
    assert "the sum of its numbers is" in report.reason


def test_the_rows_of_a_last_layer_may_be_those_of_the_last_token(tmp_path):
    """llama.cpp leaves the others out behind the last attention."""
    late = ("attn_o_out", "ffn_inp", "ffn_norm", "ffn_gate", "ffn_up", "ffn_out", "ffn_down", "l_out", "result_norm", "result_output")
    points = {(n, layer): a[-1:] if n in late and layer in (2, None) else a for (n, layer), a in POINTS.items()}
    assert judged(tmp_path, points).verdict == Verdict.ROUNDING
    points["ffn_up", 2] = POINTS["ffn_up", 2][-2:-1]
    report = judged(tmp_path, points)
    assert report.first_wrong.key == Key("ffn_up", 2)
    assert "at position 8, element" in report.reason


def test_what_cannot_be_compared_is_invalid(tmp_path):
    for array, message in ((POINTS["ffn_up", 0][:, :-1], "its shape is"), (POINTS["ffn_up", 0] * np.nan, "not finite")):
        report = judged(tmp_path, POINTS | {("ffn_up", 0): array})
        assert (report.verdict, report.first_wrong.key) == (Verdict.INVALID, Key("ffn_up", 0))
        assert message in report.reason
    report = judged(tmp_path, {("l_out", 7): POINTS["l_out", 0]})
    assert (report.verdict, report.operations) == (Verdict.INVALID, ())


def test_the_command_judges_the_text(tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", MODEL)
    wrong = dict(POINTS) | {("ffn_out", 1): POINTS["ffn_out", 1] * 2}
    for points, code in ((POINTS, 0), (wrong, 1)):
        (tmp_path / "t.txt").write_text(printed_trace(points, HEADS) + printed("other", "ADD", np.ones((2, 2))))
        arguments = ["check", str(tmp_path / "m.gguf"), "--tokens", ",".join(map(str, IDS)), "--theirs", str(tmp_path / "t.txt")]
        assert main([*arguments, "--json"]) == code
        assert (json.loads(capsys.readouterr().out)["verdict"] == "WRONG") == code
    assert main(arguments) == 1
    assert "WRONG at layer 1 ffn_out: " in capsys.readouterr().out
