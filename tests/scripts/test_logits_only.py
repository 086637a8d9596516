"""The script that measures what verdicts on logits alone are worth."""

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.delitem(sys.modules, "logits_only", raising=False)
    import logits_only

    monkeypatch.setattr(logits_only, "SHAPES", ((2, 64, 9),))
    monkeypatch.setattr(logits_only, "faults", list)
    return logits_only


def test_it_counts_faults_found_and_false_alarms(script, capsys, monkeypatch):
    assert script.main(["--seed", "3"]) == 0
    rows = dict(line.strip("| ").split(" | ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("| "))
    assert all(counts.split(" | ")[1] == "0" for name, counts in rows.items() if name in dict(script.honest()))
    assert rows["SiLU for relu squared"] == "1 | 1 | 0"
    assert rows["activations not quantised, float16 engine"] == "0 | 1 | 0"
    assert set(rows) >= set(dict(script.faulty()))
    monkeypatch.setattr(script, "honest", lambda: [case for case in script.faulty() if case[0] == "logits times 1.01"])
    assert script.main([]) == 1
