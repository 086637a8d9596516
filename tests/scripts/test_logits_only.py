"""The script that measures what verdicts on logits alone are worth."""

import logits_only as script
import pytest

FAULTY = {"SiLU for relu squared", "activations not quantised, float16 engine", "logits times 1.01"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(script, "SHAPES", ((2, 64, 9),))
    monkeypatch.setattr(script, "faults", list)
    some = [case for case in script.faulty() if case[0] in FAULTY]
    monkeypatch.setattr(script, "faulty", lambda: some)
    script.models.cache_clear()


def test_it_counts_faults_found_and_false_alarms(capsys, monkeypatch):
    assert script.main(["--seed", "3"]) == 0
    rows = dict(line.strip("| ").split(" | ", 1) for line in capsys.readouterr().out.splitlines() if line.startswith("| "))
    assert all(counts.split(" | ")[1] == "0" for name, counts in rows.items() if name in dict(script.honest()))
    assert rows["SiLU for relu squared"] == "1 | 1 | 0"
    assert rows["activations not quantised, float16 engine"] == "0 | 1 | 0"
    assert set(rows) >= FAULTY
    monkeypatch.setattr(script, "honest", lambda: [case for case in script.faulty() if case[0] == "logits times 1.01"])
    assert script.main([]) == 1
