"""Forward passes cost what is recorded, and a change of costs is seen."""

import json

import costs
import pytest

from bitnet_np.engine import network


@pytest.fixture(scope="module")
def counted():
    return costs.costs()


def test_forward_passes_cost_what_is_recorded(counted):
    """Where a change is meant: `python scripts/costs.py --record "why"`."""
    assert costs.differences(costs.read()[-1]["costs"], counted) == []


def test_the_history_is_in_the_documentation():
    """`python scripts/costs.py --history` prints what belongs there."""
    table = "\n".join(costs.history(costs.read()))
    assert table in (costs.RECORD.parents[1] / "docs" / "performance.md").read_text("utf-8")


def test_a_second_reading_of_weights_is_seen(counted, monkeypatch):
    product = network._product

    def twice(*arguments):
        product(*arguments)
        return product(*arguments)

    monkeypatch.setattr(network, "_product", twice)
    lines = costs.differences(counted, costs.costs())
    for what in ("launches of few_tokens", "calls of ternary_matmul", "bytes of ternary_matmul"):
        assert any(line.startswith(f"bitnet: a step after 100 tokens: {what}: ") for line in lines)


def test_entries_are_added_with_their_reason(counted, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(costs, "RECORD", tmp_path / "costs.json")
    monkeypatch.setattr(costs, "costs", lambda: counted)
    assert costs.main([]) == 1
    assert costs.main(["--record", "the first"]) == 0
    assert costs.main(["--record", "nothing changed"]) == 0  # and nothing is added
    assert [entry["reason"] for entry in json.loads(costs.RECORD.read_text("utf-8"))] == ["the first"]
    capsys.readouterr()
    assert costs.main([]) == 0
    assert capsys.readouterr().out == "as recorded\n"
    fewer = {name: kinds | {"launches": {}} for name, kinds in counted.items()}
    monkeypatch.setattr(costs, "costs", lambda: fewer)
    assert costs.main([]) == 1
    assert "launches of few_tokens: 0, recorded " in capsys.readouterr().out
    assert costs.main(["--record", "launch nothing"]) == 0
    capsys.readouterr()
    assert costs.main(["--history"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| workload | 1. the first | 2. launch nothing |"
    assert len(table) == 2 + len(counted)
    assert all(" 0 launches, " in row for row in table[2:])
