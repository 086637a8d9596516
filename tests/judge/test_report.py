"""Reports on a dump, as people and as machines read them."""

import json
from pathlib import Path

import pytest
from dumps import FAULTS, MODEL, TOKENS, trace

from bitnet_np.errors import OptionError
from bitnet_np.judge.logits import Judgement
from bitnet_np.judge.report import LEGEND, OperationVerdict, Report, check_plot, heat_map, plot
from bitnet_np.judge.trace import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import Key, key_of


def test_report_for_people_and_machines(tmp_path):
    dump, ids = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    report = judge_trace(MODEL, trace(dump), ids)
    picture = heat_map(report)
    rows = {line.split()[1]: line for line in picture.splitlines() if line.startswith("layer")}
    assert "X" in rows["1"]
    assert "X" not in rows["0"] + rows["2"]
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert plain["first_wrong"]["tensor"] == "ffn_out"
    assert plain["first_wrong"]["layer"] == 1
    assert "key" not in plain["first_wrong"]
    assert all(key_of(label) for o in plain["operations"] for label in o["across"])
    assert plain["verdict"] == "WRONG"
    pytest.importorskip("matplotlib")
    plot(report, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("ours", "theirs", "closer"),
    [(1.0, 2.0, "ours"), (2.0, 1.0, "theirs"), (1.0, 1.04, "alike"), (1.04, 1.0, "alike"), (0.0, 0.0, "alike"), (None, 1.0, None)],
)
def test_whose_errors_are_smaller_by_more_than_5_percent_is_closer(ours, theirs, closer):
    assert OperationVerdict(Key("Qcur", 0), Verdict.ROUNDING, ours_rms=ours, theirs_rms=theirs).closer == closer


def test_logits_are_the_reason_where_they_are_worse_than_every_operation():
    operations = Report(Verdict.FLIPS, "3 tensors", (OperationVerdict(Key("Qcur", 0), Verdict.FLIPS),))
    wrong, fine = Judgement(Verdict.WRONG, "NMSE is 1"), Judgement(Verdict.FLIPS, "close")
    with_wrong = operations.with_logits(wrong)
    assert (with_wrong.verdict, with_wrong.reason, with_wrong.logits) == (Verdict.WRONG, "logits: NMSE is 1", wrong)
    with_fine = operations.with_logits(fine)
    assert (with_fine.verdict, with_fine.reason, with_fine.logits) == (Verdict.FLIPS, "3 tensors", fine)
    assert with_wrong.operations == with_fine.operations == operations.operations


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


@pytest.mark.parametrize("name", ["x.foo", "x"])
def test_a_picture_of_no_known_kind_is_refused(name):
    pytest.importorskip("matplotlib")
    with pytest.raises(OptionError, match=rf"^{name}: expected a name that ends in one of .*\.png"):
        check_plot(Path(name))
