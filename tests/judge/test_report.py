"""Verdicts, and reports on a dump, as people and as machines read them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dumps import FAULTS, MODEL, TOKENS, trace

from bitnet_np import check
from bitnet_np.base.errors import OptionError, WrongError
from bitnet_np.judge.detail import Details
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.measures import Judgement
from bitnet_np.judge.report.pictures import check_plot, plot
from bitnet_np.judge.report.report import LEGEND, OperationVerdict, Report, heat_map, next_step, table_rows
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import LAYER_NAMES, Key, key_of


def test_verdicts_have_an_order_exit_codes_and_names():
    assert sorted(Verdict) == list(Verdict)
    assert [(verdict.exit_code, verdict.outcome) for verdict in Verdict] == [(0, "PASS")] * 4 + [(1, "FAIL"), (2, "FAIL")]
    for verdict in Verdict:
        assert str(verdict) == f"{verdict}" == verdict.name
        assert f"{verdict:>10}" == verdict.name.rjust(10)


@pytest.mark.parametrize("verdict", Verdict)
def test_a_report_is_true_if_it_passed(verdict):
    report = Report(verdict, "the reason")
    assert bool(report) == report.passed == verdict.passed == (verdict.outcome == "PASS")
    if verdict.passed:
        assert report.raise_if_wrong() is report
    else:
        step = f"; next: {next_step(report)}" if next_step(report) else ""
        with pytest.raises(WrongError, match=f"^{re.escape(f'{verdict}: the reason{step}')}$"):
            report.raise_if_wrong()


def test_report_for_people_and_machines():
    dump, ids = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    report = judge_trace(MODEL, trace(dump), ids)
    rows = {line.split()[1]: line for line in heat_map(report).splitlines() if line.startswith("layer")}
    assert ["X" in rows[n] for n in "012"] == [False, True, False]
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert (plain["first_wrong"]["tensor"], plain["first_wrong"]["layer"]) == ("ffn_out", 1)
    assert "key" not in plain["first_wrong"]
    assert all(key_of(label) for o in plain["operations"] for label in o["across"])
    assert plain["verdict"] == "WRONG"
    assert [row[3] for row in table_rows([replace(report.first_wrong, bound_ratio=x) for x in (1e9, 1e38)])] == [1e9, None]


@pytest.mark.parametrize(
    ("ours", "theirs", "closer"),
    [(1.0, 2.0, "ours"), (2.0, 1.0, "theirs"), (1.0, 1.04, "alike"), (1.04, 1.0, "alike"), (0.0, 0.0, "alike"), (None, 1.0, None)],
)
def test_whose_errors_are_smaller_by_more_than_5_percent_is_closer(ours, theirs, closer):
    assert OperationVerdict(Key("Qcur", 0), Verdict.ROUNDING, ours_rms=ours, theirs_rms=theirs).closer == closer


def test_logits_are_the_reason_where_they_are_worse_than_every_operation():
    flips = (Verdict.FLIPS, "3 tensors")
    for operations, logits, expected in (
        (flips, (Verdict.WRONG, "NMSE is 1"), (Verdict.WRONG, "logits: NMSE is 1")),
        (flips, (Verdict.FLIPS, "close"), flips),
        (flips, (Verdict.INVALID, "equal rows"), (Verdict.INVALID, "logits: equal rows")),
        ((Verdict.WRONG, "no bias"), (Verdict.INVALID, "equal rows"), (Verdict.WRONG, "no bias; logits: equal rows")),
    ):
        report = Report(*operations, (OperationVerdict(Key("Qcur", 0), Verdict.FLIPS),)).with_logits(Judgement(*logits))
        assert (report.verdict, report.reason) == expected
        assert report.operations


def test_the_heat_map_has_a_sign_for_every_tensor():
    """Layers down and operations across; the names of operations stand on end."""
    verdicts = {Key("Qcur", 0): Verdict.SAME_BITS, Key("l_out", 0): Verdict.ROUNDING, Key("l_out", 2): Verdict.INVALID}
    verdicts[Key("result_output", None)] = Verdict.FLIPS
    report = Report(Verdict.INVALID, "", tuple(OperationVerdict(key, verdict) for key, verdict in verdicts.items()))
    assert heat_map(report).splitlines() == [
        "           l",
        "         Q _",
        "         c o",
        "         u u",
        "         r t",
        "layer  0 = .",
        "layer  2   !",
        "",
        "result_output ~",
        "",
        LEGEND,
    ]


def test_a_heat_map_fits_a_terminal():
    """Columns that do not fit go below, with their own names."""
    keys = [Key(name, n) for name in ("Qcur", "Kcur", "Vcur", "l_out") for n in (0, 12)]
    lines = heat_map(Report(Verdict.WRONG, "", tuple(OperationVerdict(key, Verdict.WRONG) for key in keys)), 14).splitlines()[:-2]
    assert max(map(len, lines)) <= 14
    assert [line for line in lines if line.startswith("layer")] == ["layer  0 X X X", "layer 12 X X X", "layer  0 X", "layer 12 X"]


def test_a_wrong_dump_without_a_cause_says_what_to_do_next():
    def step(*operations, missing=(), **fields):
        first = next((o for o in operations if o.verdict == Verdict.WRONG), None)
        return next_step(Report(fields.pop("verdict", Verdict.WRONG), "", operations, first, missing, **fields))

    def wrong(name, **fields):
        key = Key(name, 1)
        return OperationVerdict(key, Verdict.WRONG, **{"across": (key,), "worst": (0, 0)} | fields)

    right = OperationVerdict(Key("kq", 1), Verdict.ROUNDING)
    assert step() == "dump l_out of the middle layer too: it tells which half of the layers is wrong"
    missing = tuple(Key(name, n) for n in range(9) for name in ("ffn_out", "l_out"))
    assert step(right, missing=missing).startswith("dump l_out-4 too")
    assert step(right, missing=missing[:1]).startswith("dump ffn_out-0 too")
    between = (*[Key(name, 1) for name in ("attn_norm", "attn_norm_codes", "attn_norm_scale", "Qcur", "Kcur")], Key("Kcur_rope", 1))
    assert step(wrong("Kcur_rope", across=between)) == "dump Qcur-1 too: it tells which half of the 6 operations is wrong"
    assert step(wrong("l_out", across=(*missing, Key("ffn_norm", 9)))).startswith("dump l_out-4 too")
    assert step(wrong("kqv_out")).startswith("dump kq-1 and kq_soft_max-1 too")
    assert step(wrong("kqv_out"), right).startswith("every input of layer 1 kqv_out is in the dump")
    assert step(wrong("Qcur", worst=None)).startswith("dump whole tensors")
    assert step(wrong("Qcur", hypothesis="transposed")) == step(wrong("Qcur", across=())) == step(verdict=Verdict.INVALID) == ""
    assert step(logits=Judgement(Verdict.WRONG, "", explanation="the mask is missing")) == ""


def test_reprs_are_short():
    """A report of many tensors, on a notebook's line or in a failed assertion."""
    dump, ids = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    report = check(MODEL, ids, trace(dump))
    reason = "WRONG at layer 1 ffn_out: SiLU(gate) * up instead of relu(gate)^2 * up"
    assert repr(report) == f"Report(WRONG: {reason}; 54 tensors and logits)"
    assert repr(report.first_wrong) == f"OperationVerdict(layer 1 ffn_out: WRONG, {report.first_wrong.hypothesis})"
    assert repr(report.logits) == f"Judgement(WRONG: {report.logits.reason}; 17 positions)"
    assert repr(trace(dump, ids)) == "Trace(dump: 54 tensors of 17 tokens)"
    long = replace(report, reason="x" * 9999, first_wrong=replace(report.first_wrong, hypothesis=None, reason="x" * 9999))
    assert max(len(repr(x)) for x in (long, long.first_wrong, replace(report.logits, reason="x" * 9999))) < 300
    assert repr(Report(Verdict.INVALID, "other tokens")) == "Report(INVALID: other tokens)"


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn in a test."""
    pyplot, figures = pytest.importorskip("matplotlib.pyplot"), []
    monkeypatch.setattr(pyplot, "close", figures.append)
    return figures


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("heat map of one tensor", text) for text in ("short", "a" * 500)] + [("heat map", "word " * 300), ("logits", "word " * 30)],
)
def test_no_picture_clips_its_title(tmp_path, drawn, kind, reason):
    """The box that the title's letters take lies within the picture."""
    names = {"heat map of one tensor": ["l_out"], "heat map": LAYER_NAMES, "logits": []}[kind]
    operations = tuple(OperationVerdict(Key(name, n), Verdict.WRONG, bound_ratio=3.0) for name in names for n in range(2))
    details = Details()
    details.of_logits(np.eye(300, 5), np.eye(300, 5) * 1.1, np.full(300, 1e-2))
    plot(Report(Verdict.WRONG, reason, operations), tmp_path / "x.png", details)
    (figure,) = drawn
    figure.canvas.draw()  # at its own resolution
    (title,) = [text for text in figure.texts if text.get_text()]
    box, whole = title.get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert whole.y0 <= box.y0 < box.y1 <= whole.y1
    assert title.get_text().startswith(f"WRONG: {reason[:20]}".strip()[:12])
    assert title.get_text().count("\n") < 4
    assert all(box.y0 >= axes.get_window_extent().y1 for axes in figure.axes)


def test_the_picture_has_every_tensor_and_plain_numbers(tmp_path, drawn):
    """Tensors of the whole model too, a column each; the sign of a wrong one stands once."""
    ratios = {Key("result_norm", None): 9.0, Key("l_out", 0): 0.5, Key("l_out", 1): 0.25, Key("inp_embd", None): 0.0}
    operations = (OperationVerdict(key, Verdict.WRONG if x > 1 else Verdict.ROUNDING, bound_ratio=x) for key, x in ratios.items())
    plot(Report(Verdict.WRONG, "", tuple(operations)), tmp_path / "x.png")
    axes, scale = drawn[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["inp_embd", "l_out", "result_norm"]
    np.testing.assert_array_equal(axes.images[0].get_array(), [[1e-4, 0.5, 9.0], [1e-4, 0.25, 9.0]])
    assert [(text.get_text(), text.get_position()) for text in axes.texts] == [("X", (2, 1))]
    assert {"0.0001", "0.01", "1", "100", "10000"} <= {label.get_text() for label in scale.get_yticklabels()}


def test_logits_alone_are_drawn_against_their_limit(tmp_path, drawn):
    details = Details()
    ours = np.random.default_rng(0).normal(size=(6, 40))
    details.of_logits(ours, ours * 1.2, np.full(6, 1e-2), np.array([0, 1, 2, 3, 4, 9]))
    plot(Report(Verdict.WRONG, "NMSE"), tmp_path / "x.png", details)
    errors, limit = drawn[0].axes[0].lines
    np.testing.assert_array_equal(errors.get_xdata(), [0, 1, 2, 3, 4, 9])
    np.testing.assert_allclose(errors.get_ydata(), np.sqrt((0.2 * ours**2).mean(axis=1) * 0.2 / ours.var(axis=1)) * 10, rtol=1e-6)
    assert list(limit.get_ydata()) == [1.0, 1.0]
    assert [label.get_text() for label in drawn[0].axes[0].get_yticklabels()] == ["0.01", "0.1", "1", "10", "100"]


def test_what_cannot_be_drawn_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(OptionError, match=r"x\.png: nothing to draw, INVALID: other tokens$"):
        plot(Report(Verdict.INVALID, "other tokens"), tmp_path / "x.png", Details())
    assert list(tmp_path.iterdir()) == []
    for name in ("x.foo", "x"):
        with pytest.raises(OptionError, match=rf"^{name}: expected a name that ends in one of .*\.png"):
            check_plot(Path(name))
