"""Verdicts: their order, their words and their exit codes."""

from bitnet_np.judge.verdict import Verdict


def test_exit_codes_and_order():
    assert [verdict.exit_code for verdict in Verdict] == [0, 0, 0, 0, 1, 2]
    assert [verdict.outcome for verdict in Verdict] == ["PASS"] * 4 + ["FAIL"] * 2
    assert sorted(Verdict) == list(Verdict)
    assert len({verdict.text for verdict in Verdict}) == len(Verdict)


def test_a_verdict_prints_by_its_name():
    for verdict in Verdict:
        assert str(verdict) == f"{verdict}" == "{}".format(verdict) == verdict.name  # noqa: UP032
        assert f"{verdict:>10}" == verdict.name.rjust(10)
