"""Two dumps without a model."""

import dataclasses

import numpy as np
from dumps import FAULTS, LOGITS, MODEL, TOKENS, recorded, trace

from bitnet_np import BITNET_CPP
from bitnet_np.judge.two_dumps import compare_traces
from bitnet_np.judge.verdict import Verdict


def test_compare_two_dumps():
    ours, dialect = trace(recorded(), TOKENS), trace(recorded(dialect=BITNET_CPP), TOKENS)
    assert compare_traces(ours, ours).verdict is Verdict.SAME_BITS
    assert compare_traces(ours, dialect).verdict is Verdict.FLIPS
    bad, _ = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    report = compare_traces(ours, trace(bad), partial=True)
    assert report.verdict is Verdict.WRONG
    assert report.first_wrong.key.layer == 1


def test_compare_refuses_what_cannot_be_compared():
    ours = trace(recorded(), TOKENS)
    part = trace({LOGITS: ours.points[LOGITS]}, TOKENS)
    assert compare_traces(ours, part).verdict is Verdict.INVALID
    assert compare_traces(ours, part, partial=True).verdict is Verdict.SAME_BITS
    assert compare_traces(ours, trace({}, TOKENS), partial=True).verdict is Verdict.INVALID
    assert compare_traces(ours, dataclasses.replace(ours, tokens=TOKENS[::-1])).verdict is Verdict.INVALID
    nan = {**ours.points, LOGITS: np.full_like(ours.points[LOGITS], np.nan)}
    assert compare_traces(ours, trace(nan)).verdict is Verdict.INVALID
    assert compare_traces(trace(nan), trace(nan)).verdict is Verdict.INVALID
