"""The choice of a token from its logits, against its rules written out."""

from itertools import accumulate, islice
from math import exp, inf, nan
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bitnet_np.base.errors import NonFiniteError, OptionError, ShapeError
from bitnet_np.generation import sampling
from bitnet_np.generation.sampling import GREEDY, Sampling, choose, drawn, uniforms

ANY = Sampling(temperature=20.0)  # flat enough that a random model says something new with nearly every token
BELOW_ONE = float(np.nextafter(1.0, 0.0))


def floats(*values):
    return np.array(values, np.float32)


# --- one token ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "best"),
    [
        ((1, 3, 2), 1),
        ((2, 5, 5, 1, 5), 1),  # the lowest id of equals
        ((0.0, -0.0), 0),
        ((-0.0, 0.0), 0),  # equal, whatever their signs
        ((-inf, -7, -inf), 1),
        ((3,), 0),
    ],
)
def test_greedy_takes_the_largest(logits, best):
    assert choose(floats(*logits)) == best
    assert choose(floats(*logits), Sampling(temperature=1.0, top_k=1), 0.99) == best
    assert type(choose(floats(*logits))) is int


@settings(max_examples=300)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda n: n / 4) | st.just(-inf), min_size=1, max_size=30),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 32),
    top_p=st.floats(0.01, 1) | st.just(1.0),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_sampling_by_its_rules(logits, temperature, top_k, top_p, uniform):
    assume(max(logits) > -inf)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    weights = [exp((logits[token] - max(logits)) / temperature) for token in order]
    cumulative = [total / sum(weights) for total in accumulate(weights)]
    if top_p < 1:
        assume(min(abs(total - top_p) for total in cumulative) > 1e-5)  # at an edge, the last digits of exp decide
        cumulative = cumulative[: 1 + sum(total < top_p for total in cumulative)]
    cumulative = [total / cumulative[-1] for total in cumulative]
    assume(min(abs(total - uniform) for total in cumulative) > 1e-5)
    expected = next(token for token, total in zip(order, cumulative, strict=False) if total > uniform)
    assert choose(floats(*logits), Sampling(temperature, top_k, top_p), uniform) == expected


def drawn_by_sorting(logits, probabilities, top_p, uniform):
    """`drawn` by its definition."""
    order = sorted(range(logits.size), key=lambda token: (-logits[token], token))
    counts = [int(probabilities[token] * 2.0**40) for token in order]
    total = sum(counts)
    if top_p < 1:
        total = next(held for held in accumulate(counts) if held >= top_p * total)
    return next(token for token, held in zip(order, accumulate(counts), strict=True) if held > uniform * total)


EIGHTHS = st.integers(0, 8).map(lambda n: n / 8)


@settings(max_examples=300)
@given(
    data=st.data(),
    close=st.booleans(),
    likely=(st.integers(37, 40) | st.just(28)).map(lambda n: 1 << n),
    top_p=EIGHTHS.filter(bool) | st.floats(0.01, 1) | st.just(1e-300),
    uniform=EIGHTHS.filter(lambda n: n < 1) | st.just(BELOW_ONE),
)
def test_a_draw_from_the_likeliest_is_one_from_all(data, close, likely, top_p, uniform):
    """likely: what tokens have that are sorted first."""
    numbers = st.sampled_from([-inf, -1e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.0000001, 3e38])
    if close:  # keys that differ in their last bits, and ties
        numbers = st.integers(0, 3000).map(lambda n: 1 + n * 2.0**-23)
    logits = floats(*data.draw(st.lists(numbers, min_size=1, max_size=60)))
    assume(logits.max() > -inf)
    # powers of two, of which the largest logit has 1: eighths of their sums are exact
    fall = np.array(data.draw(st.lists(st.integers(0, 4) | st.integers(0, 45), min_size=logits.size, max_size=logits.size)))
    probabilities = floats(*2.0 ** -np.where(logits == logits.max(), 0, fall))
    with mock.patch.object(sampling, "_LIKELY", likely):
        assert drawn(logits, probabilities, top_p, uniform) == drawn_by_sorting(logits, probabilities, top_p, uniform)


def test_a_target_that_the_likeliest_just_hold_is_exceeded_by_the_next_token():
    with mock.patch.object(sampling, "_LIKELY", 1 << 40):
        assert drawn(floats(3, 2, 1), floats(1, 0.5, 0.5), 1.0, 0.5) == 1


def test_more_tokens_than_can_be_summed_are_refused():
    logits = np.broadcast_to(np.float32(0), 2**22 + 1)
    assert choose(logits) == 0
    with pytest.raises(ShapeError, match="at most 4,194,304 to sample from"):
        choose(logits, ANY, 0.5)
    assert choose(logits[1:], ANY, BELOW_ONE) == 2**22 - 1  # a sum of 2^62


@pytest.mark.filterwarnings("error")
def test_temperatures_at_the_ends_of_float32():
    logits = floats(0, 3, -inf, 2.9)
    assert choose(logits, Sampling(2.0**-126), 0.999) == 1
    assert [choose(logits, Sampling(3.4e38), uniform) for uniform in (0.1, 0.5, 0.9)] == [1, 3, 0]


@pytest.mark.parametrize("sampling", [GREEDY, ANY, Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5)])
@pytest.mark.parametrize("logits", [(1, nan, 2), (nan, nan), (1, inf), (inf, inf), (-inf, nan), (-inf, -inf)])
def test_what_is_no_number_is_an_error(logits, sampling):
    with pytest.raises(NonFiniteError, match="nothing can be chosen"):
        choose(floats(*logits), sampling, 0.5)


def test_logits_are_those_of_one_position_and_a_number_is_from_0_to_1():
    for logits in (floats(), np.zeros((1, 3), np.float32), np.float32(1).reshape(())):
        with pytest.raises(ShapeError, match=r"expected \[V\]"):
            choose(logits)
    for uniform in (1.0, -1e-9, nan, inf):
        with pytest.raises(OptionError, match="uniform number"):
            choose(floats(0, 0), ANY, uniform)


@pytest.mark.parametrize(
    ("option", "values"),
    [("temperature", (-0.1, nan, inf, 1e-50, 1e-40, 1e39)), ("top_k", (-1,)), ("top_p", (0.0, 1.0000001, -1.0, nan))],
)
def test_options_out_of_range(option, values):
    for value in values:
        with pytest.raises(OptionError, match=f"{option} is "):
            Sampling(**{option: value})


# --- the numbers of a seed ------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**64 - 1))
def test_the_numbers_of_a_seed_are_numpys(seed):
    theirs = np.random.Generator(np.random.Philox(key=seed)).random(9)
    assert list(islice(uniforms(seed), 9)) == theirs.tolist()


def test_the_numbers_of_a_seed_stay_what_they_are():
    assert list(islice(uniforms(0), 3)) == [0.011546754286331562, 0.24154919656271812, 0.11142585551493822]
    assert list(islice(uniforms(2**64 - 1), 2)) == [0.23494158814525556, 0.7173107484541781]
    for seed in (-1, 2**64):
        with pytest.raises(OptionError, match="seed is"):
            next(uniforms(seed))
