"""Verdicts: their order, their words and their exit codes."""

from bitnet_np.judge.verdict import Verdict


def test_exit_codes_and_order():
    assert [verdict.exit_code for verdict in Verdict] == [0, 0, 0, 0, 1, 2]
    assert sorted(Verdict) == list(Verdict)
    assert len({verdict.text for verdict in Verdict}) == len(Verdict)
