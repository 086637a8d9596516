"""Reports, for people and for machines."""

import json

import pytest
from dumps import FAULTS, MODEL, TOKENS, trace

from bitnet_np.judge.report import heat_map, plot
from bitnet_np.judge.trace import judge_trace
from bitnet_np.traces.points import key_of


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
