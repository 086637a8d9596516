"""What is collected of a tensor for reports: worst numbers, errors by position."""

import numpy as np
import pytest
from dumps import FAULTS, LOGITS, MODEL, TOKENS, only, recorded, trace

from bitnet_np import check
from bitnet_np.judge.bounds import position_errors
from bitnet_np.judge.detail import MOST_POSITIONS, MOST_WORST, Details, Element
from bitnet_np.judge.dump import compare_traces
from bitnet_np.judge.law.precision import FLOAT32
from bitnet_np.judge.measures import FLIPS_LIMIT, position_nmse
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.dense import dense_view
from bitnet_np.traces.points import Key

KEY = Key("l_out", 0)


def collected(value, theirs, bound):
    details = Details()
    details.numbers(KEY, value, theirs, lambda rows: np.broadcast_to(bound, value.shape)[rows])
    return details.tensors[KEY]


def test_the_worst_numbers_come_first_and_each_has_its_bound():
    value = np.zeros((5, 7))
    theirs = value.copy()
    theirs[3, 2], theirs[1, 6], theirs[4, 0] = -4.0, 1.0, 3.0
    bound = np.full((5, 7), 2.0)
    bound[1, 6] = 0.25
    detail = collected(value, theirs, bound)
    assert detail.worst == (Element(1, 6, 0.0, 1.0, 0.25), Element(3, 2, 0.0, -4.0, 2.0), Element(4, 0, 0.0, 3.0, 2.0))
    assert detail.errors == (0.0, 4.0, 0.0, 2.0, 1.5)
    assert len(collected(value, value + 1, bound).worst) == MOST_WORST


def test_where_the_bound_is_nearly_zero_the_largest_error_is_the_worst():
    value, theirs = np.zeros((2, 3)), np.array([[1.0, 5.0, 2.0], [0.0, 0.0, 7.0]])
    detail = collected(value, theirs, np.array([[1e-38, 1e-36, 1e-30], [1e-38, 1e-38, 1e-20]]))
    assert [e.theirs for e in detail.worst] == [7.0, 5.0, 2.0, 1.0]


def test_many_positions_are_put_together_and_the_largest_error_of_each_group_stays():
    value = np.zeros((1000, 3))
    theirs = value.copy()
    theirs[777, 1] = 5.0
    detail = collected(value, theirs, 1.0)
    assert len(detail.positions) == len(detail.errors) == 250 <= MOST_POSITIONS
    assert detail.positions[:3] == (0, 4, 8)
    assert {p: e for p, e in zip(detail.positions, detail.errors, strict=True) if e} == {776: 5.0}


WRONG, IDS = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
WAYS = {
    "each operation": lambda details: check(MODEL, IDS, trace(WRONG), details=details, budget=0),
    "several operations": lambda details: check(MODEL, IDS, only(WRONG, "l_out"), precision=FLOAT32, details=details, budget=0),
    "no model": lambda details: compare_traces(trace(recorded()), trace(WRONG), partial=True, details=details),
}


@pytest.mark.parametrize("way", WAYS)
def test_errors_are_beyond_limits_where_the_verdicts_are(way):
    """And no larger: limits of nearly 0 count where no others are passed, and across operations the mean has a limit, too."""
    details = Details()
    report = WAYS[way](details)
    assert report == WAYS[way](None)
    wrong = details.tensors[report.first_wrong.key]
    assert wrong.each == (way == "each operation")
    for o in report.operations:
        if o.bound_ratio:
            largest = max(details.tensors[o.key].errors)
            assert (largest > 1) == (o.bound_ratio > 1)
            assert largest <= o.bound_ratio * (1 + 1e-6)
            assert way != "each operation" or largest == pytest.approx(o.bound_ratio, rel=1e-6) or 1 < largest < 1e10
        assert o.key not in details.tensors or details.tensors[o.key].shape[0] == len(TOKENS)
    if way == "each operation":
        (worst,) = (e for e in wrong.worst if abs(e.theirs - e.ours) == pytest.approx(report.first_wrong.max_error))
        assert (worst.position, worst.element) == report.first_wrong.worst
    if way == "no model":
        nmse = position_errors(*(points[Key("ffn_out", 1)].astype(np.float64) for points in (recorded(), WRONG)))
        np.testing.assert_allclose(wrong.errors, np.sqrt(nmse / FLIPS_LIMIT), rtol=1e-6)


def test_the_limit_of_a_number_has_room_for_the_codes_that_may_flip():
    """An input halfway between two codes, and an engine that rounds it to the other one."""
    linear, norm, query = dense_view(MODEL).layers[0].attn_q, Key("attn_norm", 0), Key("Qcur", 0)
    x = recorded()[norm].astype(np.float64)
    step = 127 / np.abs(x).max(axis=1, keepdims=True)
    j = int(np.abs(x[3]).argmin())
    x[3, j] = 0.5 / step[3, 0]
    codes = np.rint(x * step)
    codes[3, j] = 1 - codes[3, j]
    details = Details()
    product = (codes @ linear.matrix.T / step * linear.scale).astype(np.float32)
    report = check(MODEL, TOKENS, trace({norm: x.astype(np.float32), query: product}), details=details)
    assert report.operations[-1].verdict == Verdict.FLIPS
    assert {e.position for e in details.tensors[query].worst} == {3}
    assert 0.1 < max(details.tensors[query].errors) <= 1


def test_logits_are_measured_as_they_are_judged():
    dump, ids = FAULTS["SiLU for relu squared, every layer"].make(MODEL, TOKENS)
    details = Details()
    report = check(MODEL, ids, only(dump, "result_output"), details=details, budget=0)
    ours = recorded()[LOGITS]
    ratio = np.array(details.logits.errors) ** 2 / position_nmse(ours, dump[LOGITS])
    assert 1 / ratio.max() > 2 * report.logits.reach
    assert details.logits.positions == tuple(range(len(ids)))
    batch = Details()
    check(MODEL, np.stack([ids, ids]), np.stack([ours, dump[LOGITS]]), details=batch, budget=0)
    assert batch == details
