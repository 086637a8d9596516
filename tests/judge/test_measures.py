"""Verdicts on logits that are made up: nothing wrong passes and nothing right fails."""

import json
import re
import tracemalloc
from itertools import count
from math import inf, nan

import numpy as np
import pytest

from bitnet_np.judge import measures as comparing
from bitnet_np.judge.law.roundings import to_bfloat16
from bitnet_np.judge.measures import FLIPS_LIMIT, ROUNDING_LIMIT, SCALE_LIMIT, Reach, judge, limits
from bitnet_np.judge.verdict import Verdict

SAME_BITS, ROUNDING, FLIPS, NARROW, WRONG, INVALID = Verdict


def logits(*shape, seed=0):
    values = np.random.default_rng(seed).normal(0, 3, shape)
    return (values - values.mean(axis=-1, keepdims=True)).astype(np.float32)


def floats(*values):
    return np.array(values, np.float32)


def with_value(array, index, value):
    changed = array.copy()
    changed[index] = value
    return changed


OURS = logits(6, 200)
NOISE = logits(6, 200, seed=1) / 3  # as large as one standard deviation of OURS where multiplied by 3
SHAPES = [(200,), (1, 200), (6, 200), (1, 6, 200), (3, 2, 200)]


def noisy(nmse):
    """OURS with noise, so that each position has this NMSE."""
    unit = NOISE / np.sqrt((NOISE**2).sum(axis=1, keepdims=True)) * np.sqrt((OURS**2).sum(axis=1, keepdims=True))
    return OURS.astype(np.float64) + np.sqrt(nmse) * unit


# --- verdicts -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_in_any_shape(shape):
    ours = logits(*shape)
    judgement = judge(ours, ours.copy())
    assert judgement.verdict is SAME_BITS
    assert judgement.positions == ours.size // 200
    assert (judgement.max_error, judgement.mean_error, judgement.nmse, judgement.kl) == (0, 0, 0, 0)
    assert (judgement.top1, judgement.top5) == (1, 1)
    assert judgement.scale == pytest.approx(1, abs=1e-15)
    assert judge(ours, np.asfortranarray(ours)).verdict is SAME_BITS
    assert judge(ours[..., ::2], ours[..., ::2].copy()).verdict is SAME_BITS
    assert judge(ours, ours.tolist()).verdict is ROUNDING  # the same numbers, but in float64


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [
        (np.nextafter(OURS, np.float32(inf)), ROUNDING),
        (with_value(OURS, (3, 5), np.nextafter(OURS[3, 5], np.float32(inf))), ROUNDING),
        (OURS + 0.99 * ROUNDING_LIMIT * OURS.astype(np.float64).std(axis=1, keepdims=True), ROUNDING),
        (with_value(OURS, (3, 5), OURS[3, 5] + 1.01 * ROUNDING_LIMIT * OURS[3].std()), WRONG),  # no flip moves one logit alone
        (OURS + 1.01 * ROUNDING_LIMIT * OURS.astype(np.float64).std(axis=1, keepdims=True), WRONG),  # no rounding adds a constant
        (OURS.astype(np.float16), FLIPS),
        (noisy(0.99 * FLIPS_LIMIT), FLIPS),
        (noisy(1.01 * FLIPS_LIMIT), WRONG),
        (OURS * (1 + 0.95 * SCALE_LIMIT) + noisy(1e-4) - OURS, FLIPS),
        (OURS * (1 + 1.05 * SCALE_LIMIT) + noisy(1e-4) - OURS, WRONG),
        (OURS * np.float32(1.001), WRONG),  # no rounding multiplies all by one factor
        (OURS * (1 + 1.01 * SCALE_LIMIT), WRONG),
        (OURS * (1 - 1.01 * SCALE_LIMIT), WRONG),
        (OURS * 1e30, WRONG),
        (OURS / 1e30, WRONG),
        (-OURS, WRONG),
        (np.roll(OURS, 1, axis=0), WRONG),  # one position late
        (np.exp(OURS) / np.exp(OURS).sum(axis=1, keepdims=True), WRONG),  # probabilities
    ],
)
def test_verdicts(theirs, verdict):
    judgement = judge(OURS, theirs)
    assert judgement.verdict is verdict, judgement
    assert json.loads(json.dumps(judgement.as_dict(), allow_nan=False))["verdict"] == verdict.name


@pytest.mark.parametrize(
    ("shape", "position", "named"), [((100, 60), (77,), "77"), ((5, 20, 60), (3, 17), "17 of sequence 3"), ((60,), (), "0")]
)
@pytest.mark.parametrize(("fault", "said"), [(lambda x: x[::-1], "NMSE is"), (lambda x: x * np.float32(1.03), "logits are 1.03 times")])
def test_one_bad_position_spoils_all_and_is_named(shape, position, named, fault, said):
    ours = logits(*shape)
    theirs = ours.copy()
    theirs[position] = fault(ours[position])
    judgement = judge(ours, theirs)
    assert judgement.verdict is WRONG
    assert judgement.reason.startswith(said)
    assert f"at position {named}" in judgement.reason
    assert judgement.worst[:-1] == position


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (with_value(OURS, (4, 9), nan), "logit at 4, 9 is nan; 1 in all"),
        (with_value(OURS, (5, 199), -inf), "logit at 5, 199 is -inf"),
        (np.full_like(OURS, nan), "1200 in all are not finite"),
        (OURS[0], r"shape is \[200\], expected \[6, 200\]"),
        (np.float32(1), "shape"),
        (OURS[:0], "shape"),
        (OURS.astype(np.int32), "dtype is int32, expected a float type"),
        (None, "dtype"),
        (with_value(OURS, 4, -1.5), r"position 4 are all -1\.5"),
        (with_value(OURS, 3, OURS[2]), "positions 2 and 3 are the same numbers, ours are not"),
    ],
)
def test_nothing_that_says_nothing_passes(theirs, reason):
    judgement = judge(OURS, theirs)
    assert judgement.verdict is INVALID
    assert re.search(reason, judgement.reason), judgement.reason
    assert judgement.positions == 0
    assert judgement.max_error is judgement.worst is judgement.nmse is judgement.kl is judgement.top1 is None
    json.dumps(judgement.as_dict(), allow_nan=False)


@pytest.mark.parametrize("positions", [1, 4, 100])
def test_a_measured_reach_sets_the_limits(positions):
    ours = logits(positions, 200)
    noise = logits(positions, 200, seed=1)
    unit = noise * np.sqrt((ours**2).sum(axis=1, keepdims=True) / (noise**2).sum(axis=1, keepdims=True))
    reach = Reach(1e-3, np.full(1, 1e-3))
    (worst, *_), mean = limits(reach, positions)
    assert (worst, mean) == (5e-3, pytest.approx((2 + 3 / positions**0.5) * 1e-3))
    for nmse, verdict in ((0.99 * mean, FLIPS), (1.01 * mean, WRONG)):
        judgement = judge(ours, ours + np.sqrt(nmse) * unit, reach)
        assert judgement.verdict is verdict, judgement
        assert (judgement.reach, judgement.mean_nmse) == (1e-3, pytest.approx(nmse))
    one = ours + np.where(np.arange(positions) == positions - 1, np.sqrt(1.01 * worst), 1e-3)[:, None] * unit
    judgement = judge(ours, one, reach, np.arange(50, 50 + positions))
    assert judgement.verdict is WRONG
    assert f"at position {49 + positions}" in judgement.reason
    deep = Reach(2e-2, np.full(positions, 3e-2), 3e-2)
    assert judge(ours, ours + np.sqrt(4e-2) * unit, deep).verdict is FLIPS  # as 30 layers reach: beyond the limit that holds without


def test_a_position_where_roundings_reach_far_has_a_limit_of_its_own():
    worst, mean = limits(reach := Reach(1e-3, np.array([1e-4, 2e-3])), 3)
    assert worst.tolist() == [5e-3, 8e-3, 5e-3]
    assert mean == pytest.approx((2 + 3**0.5) * 1e-3)
    for measured, said in ((None, "rounding alone reaches 0.01"), (reach, "float16 rounding alone reaches 0.008")):
        assert judge(OURS, with_value(OURS, 1, noisy(1e-3)[1]), measured).reason == f"worst NMSE 0.001; {said}; scales agree"


@pytest.mark.parametrize(("by_chance", "verdict"), [(0.0, WRONG), (0.03, FLIPS)])
def test_factors_that_roundings_make_by_chance_are_no_fault(by_chance, verdict):
    noise = noisy(1e-3) - OURS
    assert judge(OURS, OURS * 1.05 + noise, Reach(1e-2, np.full(6, 1e-2), by_chance)).verdict is verdict


@pytest.mark.parametrize(("one_scale", "verdict"), [(False, WRONG), (True, FLIPS)])
def test_a_factor_is_a_rounding_where_the_heads_input_has_one_scale(one_scale, verdict):
    reach = Reach(1e-4, np.full(6, 1e-4), one_scale=one_scale)
    assert judge(OURS, OURS * np.float32(1.001), reach).verdict is verdict
    assert judge(OURS, OURS * np.float32(1.03), reach).verdict is WRONG


def test_positions_are_judged_in_blocks(monkeypatch):
    """Blocks of any size give the same numbers, and take no more memory than a block does."""
    ours, theirs = logits(7, 200), logits(7, 200) + logits(7, 200, seed=1) / 100
    cases = [theirs, ours, with_value(theirs, (5, 3), nan), with_value(theirs, 4, theirs[3]), with_value(theirs, 6, 1.0)]
    whole = [judge(ours, case).as_dict() for case in cases]
    for block in (1, 400, 1000):
        monkeypatch.setattr(comparing, "BLOCK", block)
        assert [judge(ours, case).as_dict() for case in cases] == whole
    long = logits(2000, 1000)
    other = long + np.float32(1e-3) * logits(2000, 1000, seed=1)
    monkeypatch.setattr(comparing, "BLOCK", 100_000)
    tracemalloc.start()
    assert judge(long, other).verdict is FLIPS
    assert tracemalloc.get_traced_memory()[1] < 20 * 8 * 100_000  # 20 arrays of a block; one of all would be 16 MB
    tracemalloc.stop()


# --- numbers --------------------------------------------------------------------------------------------------------------------------


def by_formula(ours, theirs):
    """Each number of a judgement by its definition; `ours` have a mean of 0 at each position."""
    a, b = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (ours, theirs))
    error, square = np.abs(b - a), (a**2).sum(axis=1)
    log_p, log_q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (a, b))
    largest = [np.argsort(-x, axis=1, kind="stable")[:, :5] for x in (a, b)]
    return {
        "positions": len(a),
        "max_error": error.max(),
        "mean_error": error.mean(),
        "worst": np.unravel_index(error.argmax(), ours.shape),
        "nmse": ((error**2).sum(axis=1) / square).max(),
        "scale": max((a * b).sum(axis=1) / square, key=lambda scale: abs(scale - 1)),
        "kl": (np.exp(log_p) * (log_p - log_q)).sum(axis=1).max(),
        "top1": (a.argmax(axis=1) == b.argmax(axis=1)).mean(),
        "top5": np.mean([len(set(x) & set(y)) / 5 for x, y in zip(*largest, strict=True)]),
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("noise", [1e-6, 0.1, 3])
def test_the_numbers_are_what_their_names_say(shape, noise):
    ours = logits(*shape)
    theirs = ours + np.random.default_rng(4).normal(0, noise, shape)
    judgement = judge(ours, theirs).as_dict()
    for name, value in by_formula(ours, theirs).items():
        assert judgement[name] == pytest.approx(value, rel=1e-6, abs=1e-13), name


def test_ties_count_as_agreement():
    assert judge(floats(1, 5, 4.9), floats(1, 5, 5)).top1 == 1
    assert judge(floats(1, 5, 4.9), floats(5, 5, 4)).top1 == 1
    assert judge(floats(1, 5, 4.9), floats(1, 4.9, 5)).top1 == 0
    assert judge(floats(1, 5, 5), floats(1, 4.9, 5)).top1 == 1
    assert judge(floats(1, 2, 4), floats(1, 2, 4.01)).top5 == 1  # of three


# --- what would pass, or fail, for a wrong reason -------------------------------------------------------------------------------------

ZERO, EQUAL, LONG = with_value(OURS, (2, 7), 0.0), with_value(OURS, 3, OURS[2]), logits(2, 128_256)
BYTES = np.random.default_rng(3).integers(1, 64, (6, 800), np.uint8).view("<f4")  # finite, whichever byte is the first
SURE = LONG + 60 * (np.arange(128_256) == 5)  # as sure as a trained model is of a token
HEAD = np.random.default_rng(9).normal(0, 1, (64, 30_000)) * np.exp(np.random.default_rng(8).normal(0, 0.5, 30_000))  # of unequal rows
HIDDEN = np.random.default_rng(7).normal(0, 1, (2, 2, 64))


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (ZERO, with_value(ZERO, (2, 7), -0.0), ROUNDING),
        (ZERO, ZERO.astype(">f4"), ROUNDING),
        (BYTES, BYTES.view(">f4"), WRONG),
        (EQUAL, EQUAL.copy(), SAME_BITS),
        (OURS - 100, logits(6, 200, seed=5) - 100, WRONG),  # unrelated, and far from zero
        (OURS - 300, OURS * np.float32(1.05) - 300, WRONG),
        (LONG, with_value(LONG, (1, 77), 100), WRONG),  # a few of many
        (SURE.astype(np.float32), SURE.astype(np.float16), FLIPS),
        (SURE.astype(np.float32), to_bfloat16(SURE), FLIPS),
        ((HIDDEN[0] @ HEAD).astype(np.float32), (HIDDEN[0] + 0.03 * HIDDEN[1]) @ HEAD, FLIPS),
        (floats(1.5), floats(1.6), WRONG),
    ],
    ids=count(),
)
def test_verdicts_of_other_logits_of_ours(ours, theirs, verdict):
    assert judge(ours, theirs).verdict is verdict


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (with_value(OURS, (1, 2), nan), OURS),
        *((np.zeros(shape, np.float32),) * 2 for shape in ((0, 200), (3, 0), (0,))),
        (OURS, with_value(with_value(OURS.astype(np.float64), (0, 0), 1e308), (0, 1), -1e308)),
        (np.ones((2, 50), np.float32), logits(2, 50)),
    ],
    ids=count(),
)
def test_numbers_that_cannot_be_compared_are_no_agreement_and_leave_finite_numbers(ours, theirs):
    judgement = judge(ours, theirs)
    assert judgement.verdict >= WRONG
    json.dumps(judgement.as_dict(), allow_nan=False)
