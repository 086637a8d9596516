"""Generation: one forward pass for each token, and no token more or less than was asked for. Which tokens: properties/test_batches.py."""

import numpy as np
import pytest
from models import random_model

from bitnet_np.base.errors import ContextLimitError, EmptyInputError, OptionError, ShapeError, TokenRangeError
from bitnet_np.generation.generate import generate, stream
from bitnet_np.generation.sampling import GREEDY, Sampling

ANY = Sampling(temperature=20.0)  # flat enough that a random model says something new with nearly every token


@pytest.fixture(scope="module")
def model():
    return random_model(1, context=40, tied=False)


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_one_pass_for_the_prompt_and_one_for_each_token_but_the_last(model, passes, n):
    prompt = [3, 1, 4, 1]
    tokens = generate(model, prompt, n)
    assert passes == [(4,)] + [(1,)] * (n - 1)
    assert (tokens[:4], len(tokens)) == (prompt, 4 + n)
    for same in (np.array(prompt), tuple(prompt)):
        assert generate(model, same, n) == [*prompt, *stream(model, prompt, n)] == tokens
    assert prompt == [3, 1, 4, 1]


def test_a_token_is_there_before_the_next_is_computed(model, passes):
    tokens = stream(model, [1, 2], 3)
    for done in range(3):
        assert len(passes) == done
        next(tokens)
    with pytest.raises(StopIteration):
        next(tokens)
    assert len(passes) == 3


def test_a_stop_token_ends_and_is_left_out(model, passes):
    whole = list(stream(model, [9], 12, sampling=ANY))
    assert 9 not in whole
    for i in (0, 3, 11):
        first = whole.index(whole[i])
        passes.clear()
        assert generate(model, [9], 12, sampling=ANY, stop=[whole[i]]) == [9, *whole[:first]]
        assert len(passes) == 1 + first


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
        ([], 0, {}, EmptyInputError, "^Prompt cannot be empty$"),
        ("Once upon", 1, {}, ShapeError, "prompt is the text 'Once upon', expected token ids"),
        ([1], 1, {"dialect": "llama.cpp"}, OptionError, "dialect is 'llama.cpp', expected a Dialect such as bitnet_np.LLAMA_CPP"),
        ([1], -1, {}, OptionError, "generate is -1"),
        ([50], 3, {}, TokenRangeError, "token 50 "),
        ([1], 3, {"stop": [50]}, OptionError, "stop token is 50, expected 0 to 49"),
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
