"""Logits of forward passes with one fault each, judged without a model to measure roundings with."""

import pytest
from spec_faults import FAULTS, SMALL_FAULTS, definition, model, ours, tokens

from bitnet_np.engine.dialects import BITNET_CPP
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files import embedded
from bitnet_np.judge.logits import judge
from bitnet_np.judge.verdict import Verdict

SAME_BITS, ROUNDING, FLIPS, NARROW, WRONG, INVALID = Verdict


def test_one_token_again_and_again_is_no_fault():
    ids = [7] * 8
    assert judge(forward_full(model(), [ids])[0], definition(ids)).verdict <= FLIPS


@pytest.mark.parametrize(("n", "verdict"), [(1, ROUNDING), (2, ROUNDING), (17, ROUNDING), (64, FLIPS)])
def test_the_definition_agrees(n, verdict):
    found = judge(ours(n), definition(tokens(n)))
    assert found.verdict is verdict
    assert found.nmse < 1e-3


@pytest.mark.parametrize("n", embedded.LENGTHS)
def test_float16_roundings_are_no_fault(n):
    assert judge(ours(n), forward_full(model(), tokens(n)[None], dialect=BITNET_CPP)[0]).verdict is FLIPS


def judged(old, new):
    return [judge(ours(n), definition(tokens(n), old, new)) for n in (1, 17, 64)]


def nearly(expected):
    return [ROUNDING if nmse == 0 else pytest.approx(nmse, rel=0.3) for nmse in expected]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    old, new, expected = FAULTS[name]
    found = judged(old, new)
    assert [j.nmse if nmse else j.verdict for j, nmse in zip(found, expected, strict=True)] == nearly(expected)
    assert [j.verdict for j in found] == [WRONG if nmse else ROUNDING for nmse in expected]


@pytest.mark.parametrize("name", SMALL_FAULTS)
def test_a_fault_as_small_as_roundings_is_not(name):
    old, new, expected = SMALL_FAULTS[name]
    found = judged(old, new)
    assert [j.nmse if nmse else j.verdict for j, nmse in zip(found, expected, strict=True)] == nearly(expected)
    assert [j.verdict for j in found] == [FLIPS if nmse else ROUNDING for nmse in expected]
