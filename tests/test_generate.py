"""Generation: the choice of a token against its rules written out, and a loop that does no more and no less than it says."""

from importlib import import_module
from itertools import accumulate, islice
from math import exp, inf, nan
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import assert_same_bits, random_model, random_tokens, seeds, shapes

from bitnet_np import forward_pass
from bitnet_np.dialects import DIALECTS
from bitnet_np.errors import ContextLimitError, EmptyInputError, NonFiniteError, OptionError, ShapeError, TokenRangeError
from bitnet_np.forward_pass import forward_full
from bitnet_np.generate import generate, stream
from bitnet_np.sampling import GREEDY, Sampling, choose, uniforms

module = import_module("bitnet_np.generate")  # the package's attribute of this name is the function
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


@pytest.mark.filterwarnings("error")
def test_temperatures_at_the_ends_of_float32():
    logits = floats(0, 3, -inf, 2.9)
    assert choose(logits, Sampling(2.0**-126), 0.999) == 1
    assert [choose(logits, Sampling(3.4e38), uniform) for uniform in (0.1, 0.5, 0.9)] == [1, 3, 0]
    for temperature in (1e-50, 1e-40, 1e39, inf, -1):
        with pytest.raises(OptionError, match="temperature is"):
            Sampling(temperature)


FOUR_EQUAL = floats(0, 0, 0, 0)  # probabilities of exactly a quarter: the edges themselves


@pytest.mark.parametrize(
    ("logits", "options", "uniform", "token"),
    [
        (FOUR_EQUAL, {}, 0.0, 0),
        (FOUR_EQUAL, {}, np.nextafter(0.25, 0), 0),
        (FOUR_EQUAL, {}, 0.25, 1),  # the cumulative probability must exceed the number
        (FOUR_EQUAL, {}, BELOW_ONE, 3),
        (FOUR_EQUAL, {"top_k": 3}, BELOW_ONE, 2),  # of equals the lowest ids stay
        (FOUR_EQUAL, {"top_k": 1}, BELOW_ONE, 0),
        (FOUR_EQUAL, {"top_k": 4}, BELOW_ONE, 3),
        (FOUR_EQUAL, {"top_k": 9}, BELOW_ONE, 3),
        (FOUR_EQUAL, {"top_p": 0.5}, BELOW_ONE, 1),  # two hold a half
        (FOUR_EQUAL, {"top_p": np.nextafter(0.5, 1)}, BELOW_ONE, 2),
        (FOUR_EQUAL, {"top_p": 0.5}, 0.5, 1),  # of the two that are left
        (FOUR_EQUAL, {"top_p": 1e-300}, BELOW_ONE, 0),  # at least one
        (FOUR_EQUAL, {"top_k": 2, "top_p": 0.5}, BELOW_ONE, 0),  # a half of what top_k left
        (floats(1, 3, 2, 3), {"top_k": 2}, 0.0, 1),
        (floats(1, 3, 2, 3), {"top_k": 2}, 0.5, 3),
        (floats(1, 3, 2, 3), {"top_k": 3}, BELOW_ONE, 2),
        (floats(-inf, 1, -inf), {}, BELOW_ONE, 1),  # never one that is excluded
        (floats(0, 1, -inf), {"top_k": 3}, BELOW_ONE, 0),
        (floats(0, 200), {}, BELOW_ONE, 1),  # nor one whose probability is 0 in float32
        (floats(0, 1), {"temperature": 1e-30}, BELOW_ONE, 1),
        (floats(0, 1), {"temperature": 1e30}, 0.5, 0),
    ],
)
def test_the_edges_of_sampling(logits, options, uniform, token):
    assert choose(logits, Sampling(**{"temperature": 1.0, **options}), float(uniform)) == token


def test_tokens_come_as_often_as_their_probability_says():
    logits = np.random.default_rng(3).normal(0, 2, 40).astype(np.float32)
    probability = np.exp(logits.astype(np.float64) / 0.7)
    probability /= probability.sum()
    n = 4000
    chosen = [choose(logits, Sampling(temperature=0.7), (i + 0.5) / n) for i in range(n)]
    np.testing.assert_allclose(np.bincount(chosen, minlength=40) / n, probability, atol=1 / n)


@pytest.mark.parametrize("sampling", [GREEDY, ANY, Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5)])
@pytest.mark.parametrize("logits", [(1, nan, 2), (nan, nan), (1, inf), (inf, inf), (-inf, nan), (-inf, -inf)])
def test_what_is_no_number_is_an_error(logits, sampling):
    with pytest.raises(NonFiniteError, match="nothing can be chosen"):
        choose(floats(*logits), sampling, 0.5)


@pytest.mark.parametrize("logits", [floats(), np.zeros((1, 3), np.float32), np.float32(1).reshape(())])
def test_logits_are_those_of_one_position(logits):
    with pytest.raises(ShapeError, match="expected \\[V\\]"):
        choose(logits)


@pytest.mark.parametrize("uniform", [1.0, -1e-9, nan, inf])
def test_a_number_to_sample_with_is_from_0_to_1(uniform):
    with pytest.raises(OptionError, match="uniform number"):
        choose(FOUR_EQUAL, ANY, uniform)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": nan},
        {"temperature": inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.0000001},
        {"top_p": -1.0},
        {"top_p": nan},
    ],
)
def test_options_out_of_range(options):
    with pytest.raises(OptionError, match=f"{next(iter(options))} is "):
        Sampling(**options)


# --- the numbers of a seed ------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**64 - 1))
def test_the_numbers_of_a_seed_are_numpys(seed):
    theirs = np.random.Generator(np.random.Philox(key=seed)).random(9)
    assert list(islice(uniforms(seed), 9)) == theirs.tolist()


def test_the_numbers_of_a_seed_stay_what_they_are():
    assert list(islice(uniforms(0), 3)) == [0.011546754286331562, 0.24154919656271812, 0.11142585551493822]
    assert list(islice(uniforms(2**64 - 1), 2)) == [0.23494158814525556, 0.7173107484541781]


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_has_64_bits(seed):
    with pytest.raises(OptionError, match="seed is"):
        next(uniforms(seed))


# --- the loop -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return random_model(1, context=40, tied=False)


@pytest.fixture
def passes(monkeypatch):
    """Tokens of each forward pass that generation makes."""
    counted, run_cached = [], forward_pass.run_cached

    def counting(runtime, tokens, *args, **options):
        assert options["last_only"]
        counted.append(tokens.ids.shape)
        return run_cached(runtime, tokens, *args, **options)

    for user in (module, forward_pass):  # a prompt goes through `run_prefill`
        monkeypatch.setattr(user, "run_cached", counting)
    return counted


@settings(max_examples=25)
@given(
    shape=shapes(),
    seed=seeds,
    length=st.integers(1, 70),
    n=st.integers(0, 6),
    sampling=st.sampled_from([GREEDY, ANY, Sampling(9.0, top_k=5), Sampling(15.0, top_p=0.8)]),
    dialect=st.sampled_from(list(DIALECTS.values())),
)
def test_each_token_is_chosen_from_a_forward_pass_of_all_before_it(shape, seed, length, n, sampling, dialect):
    model = random_model(seed, **shape)
    rng = np.random.default_rng(seed)
    prompt, numbers = random_tokens(rng, model, length).tolist(), rng.random(n).tolist()
    with mock.patch.object(module, "choose", mock.Mock(wraps=choose)) as chosen:
        tokens = generate(model, prompt, n, sampling=sampling, numbers=numbers, dialect=dialect)
    expected = list(prompt)
    for call, number in zip(chosen.call_args_list, numbers, strict=True):
        logits = forward_full(model, [expected], dialect=dialect)[0, -1]
        assert_same_bits(call.args[0], logits)
        expected.append(choose(logits, sampling, number))
    assert tokens == expected


def test_the_prompt_comes_first_and_is_left_alone(model):
    prompt = [3, 1, 4]
    new = list(stream(model, prompt, 5))
    assert generate(model, prompt, 5) == [3, 1, 4, *new]
    assert generate(model, (3, 1, 4), 5) == generate(model, np.array(prompt), 5) == [3, 1, 4, *new]
    assert len(new) == 5
    assert prompt == [3, 1, 4]


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_one_pass_for_the_prompt_and_one_for_each_token_but_the_last(model, passes, n):
    assert len(generate(model, [1, 2, 3, 4], n)) == 4 + n
    assert passes == [(1, 4)] + [(1, 1)] * (n - 1)


def test_a_token_is_there_before_the_next_is_computed(model, passes):
    tokens = stream(model, [1, 2], 3)
    for done in range(3):
        assert len(passes) == done
        next(tokens)
    with pytest.raises(StopIteration):
        next(tokens)
    assert len(passes) == 3


def test_a_seed_says_every_token(model):
    def of(seed):
        return generate(model, [7, 8], 20, sampling=ANY, seed=seed)

    assert of(5) == of(5) == generate(model, [7, 8], 20, sampling=ANY, numbers=uniforms(5))
    assert of(0) == generate(model, [7, 8], 20, sampling=ANY)
    assert len({tuple(of(seed)) for seed in range(8)}) == 8


def test_generation_goes_on_where_it_was(model):
    numbers = list(islice(uniforms(1), 12))
    whole = generate(model, [7], 12, sampling=ANY, numbers=numbers)
    first = generate(model, [7], 5, sampling=ANY, numbers=numbers[:5])
    assert generate(model, first, 7, sampling=ANY, numbers=numbers[5:]) == whole


def test_a_stop_token_ends_and_is_left_out(model, passes):
    whole = list(stream(model, [9], 12, sampling=ANY))
    for i in (0, 3, 11):
        first = whole.index(whole[i])
        passes.clear()
        assert generate(model, [9], 12, sampling=ANY, stop=[whole[i]]) == [9, *whole[:first]]
        assert len(passes) == 1 + first
    others = set(range(model.config.vocab)) - set(whole)
    assert list(stream(model, [9], 12, sampling=ANY, stop=others)) == whole
    assert list(stream(model, [9], 12, sampling=ANY, stop={*others, whole[5], whole[7]})) == whole[: min(map(whole.index, whole[5:8:2]))]


def test_the_prompt_may_hold_a_stop_token(model):
    prompt = next([token] for token in range(50) if token not in stream(model, [token], 4))
    assert generate(model, prompt, 4, stop=prompt) == generate(model, prompt, 4)


def test_the_context_may_be_filled_but_not_exceeded(passes):
    small = random_model(2, context=8)
    assert len(generate(small, [1] * 5, 3)) == 8
    assert len(generate(small, [1] * 8, 0)) == 8
    passes.clear()
    for length, n in ((5, 4), (8, 1), (9, 0), (1, 10**9)):
        with pytest.raises(ContextLimitError, match=f"{length} and {n} new tokens exceed the model's context of 8"):
            stream(small, [1] * length, n)
    assert passes == []


@pytest.mark.parametrize(
    ("prompt", "n", "options", "error", "message"),
    [
        ([], 3, {}, EmptyInputError, "^Prompt cannot be empty$"),
        ([], 0, {}, EmptyInputError, "^Prompt cannot be empty$"),
        (np.array([], np.int64), 3, {}, EmptyInputError, "^Prompt cannot be empty$"),
        ([1], -1, {}, OptionError, "generate is -1"),
        ([50], 3, {}, TokenRangeError, "token 50 "),
        ([1, -1], 3, {}, TokenRangeError, "token -1 at position 1"),
        ([1.5], 3, {}, ShapeError, "integers"),
        ([[1, 2]], 3, {}, ShapeError, "axes"),
        ([1], 3, {"stop": [50]}, OptionError, "stop token 50"),
        ([1], 3, {"stop": {3, -1}}, OptionError, "stop token -1"),
        ([1], 3, {"sampling": ANY, "seed": -1}, OptionError, "seed is -1"),
    ],
)
def test_wrong_arguments_are_refused_on_the_call_itself(model, passes, prompt, n, options, error, message):
    with pytest.raises(error, match=message):
        stream(model, prompt, n, **options)
    with pytest.raises(error, match=message):
        generate(model, prompt, n, **options)
    assert passes == []


def test_one_number_for_each_token(model):
    numbers = iter(np.linspace(0, 0.9, 10).tolist())
    generate(model, [1], 4, sampling=ANY, numbers=numbers)
    assert len(list(numbers)) == 6
    numbers = iter([])
    for greedy in (GREEDY, Sampling(1.0, top_k=1)):  # takes none
        generate(model, [1], 4, sampling=greedy, numbers=numbers)
    tokens = stream(model, [1], 4, sampling=ANY, numbers=[0.1, 0.2])
    assert [next(tokens), next(tokens)] == generate(model, [1], 2, sampling=ANY, numbers=[0.1, 0.2])[1:]
    with pytest.raises(OptionError, match="ran out before the tokens did"):
        next(tokens)
    with pytest.raises(OptionError, match=r"uniform number is 1\.0"):
        generate(model, [1], 1, sampling=ANY, numbers=[1.0])
