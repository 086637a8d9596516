"""llama-server's native API: what is asked, and what of an answer is believed."""

import math
import re

import pytest
from completions import assert_same, changed, completions_by, llama_answer
from fake_server import llama_server, serving, table_logits
from hypothesis import given
from hypothesis import strategies as st

from bitnet_np.base.errors import ServerError
from bitnet_np.servers.client import client_of
from bitnet_np.servers.llama_server import LlamaServer, aligned, parse

IDS = [1, 7, 3]
MADE = completions_by(table_logits(), IDS, predict=6, k=5)


def test_what_is_asked_and_what_comes_back():
    with serving(llama_server(table_logits(), tokenize=lambda text: [len(text)])) as (url, requests):
        server = LlamaServer(client_of(url, 5))
        assert_same(server.complete(IDS, 6, 5), MADE)
        assert server.tokenize("héllo") == [5]
    (_, path, asked), (_, _, text) = requests
    assert path == "/completion"
    assert asked["prompt"] == IDS
    assert (asked["n_predict"], asked["n_probs"], asked["temperature"]) == (6, 5, 0)
    assert (asked["samplers"], asked["post_sampling_probs"], asked["return_tokens"]) == (["temperature"], False, True)
    assert text == {"content": "héllo", "add_special": True, "parse_special": False}


def test_a_token_that_ends_within_a_character_has_no_log_probabilities():
    answer = llama_answer(MADE)
    del answer["completion_probabilities"][2]
    record = parse(answer, IDS, 6, 5)
    assert [row.position for row in record.top] == [2, 3, 5, 6, 7]
    assert record.notes == ("the server has no log-probabilities for 1 of 6 tokens, which end within a character",)
    assert record.tokens.tolist() == MADE.tokens.tolist()


def test_no_log_probabilities_at_all():
    answer = llama_answer(MADE)
    del answer["completion_probabilities"]
    assert parse(answer, IDS, 6, 5).top == ()


ENTRY = ("completion_probabilities", 1)
TOP = (*ENTRY, "top_logprobs", 0)
WRONG = [
    (("tokens",), ..., "/completion: tokens is None, expected an array"),
    (("tokens", 1), 1.0, "/completion: tokens[1] is 1.0, expected an integer"),
    (("tokens", 1), 2**31, "/completion: tokens[1] is 2147483648, expected a token id"),
    (("tokens",), [1] * 7, "/completion: tokens has 7 ids, expected at most 6"),
    (("tokens_evaluated",), ..., "/completion.tokens_evaluated is None, expected an integer"),
    (("tokens_evaluated",), 4, "tokens_evaluated is 4, but 3 token ids were sent: it puts a BOS in front of token ids"),
    (("truncated",), True, "the prompt was truncated"),
    (("completion_probabilities",), {}, "/completion.completion_probabilities is {}, expected an array"),
    (ENTRY, 5, "/completion: completion_probabilities[1] is 5, expected an object"),
    ((*ENTRY, "probs"), [], "has `probs` without token ids, as llama-server sent them until 2024"),
    ((*ENTRY, "id"), ..., "completion_probabilities[1].id is None, expected an integer"),
    ((*ENTRY, "id"), 999, "completion_probabilities are of the tokens"),
    (TOP, [], "top_logprobs[0] is [], expected an object"),
    ((*TOP, "id"), "1", "top_logprobs[0].id is '1', expected an integer"),
    ((*TOP, "id"), int(MADE.top[1].ids[3]), "which is there twice"),
    ((*TOP, "logprob"), "-1", "logprob is '-1', expected a number"),
]


@pytest.mark.parametrize(("path", "value", "said"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_answer_is_refused_by_name(path, value, said):
    with pytest.raises(ServerError, match=re.escape(said)):
        parse(changed(llama_answer(MADE), path, value), IDS, 6, 5)


@pytest.mark.parametrize("answer", [None, [], "x", 5, {}])
def test_an_answer_of_another_kind_is_refused(answer):
    with pytest.raises(ServerError, match=r"^/completion"):
        parse(answer, IDS, 6, 5)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 10**400, -(10**400)])
def test_log_probabilities_that_make_no_sense_are_left_to_the_judge(value):
    row = parse(changed(llama_answer(MADE), (*TOP, "logprob"), value), IDS, 6, 5).top[1]
    assert sum(not math.isfinite(x) for x in row.logprobs) == 1


def test_places_are_certain_or_not_known():
    assert aligned([1, 2, 3], [1, 2, 3]) == [0, 1, 2]
    assert aligned([1, 2, 3], [1, 3]) == [0, 2]
    assert aligned([1, 2, 2, 3], [1, 2, 3]) == [0, None, 3]
    assert aligned([1, 2, 3], []) == []
    assert aligned([1, 2, 3], [3, 1]) is None
    assert aligned([1], [1, 1]) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_a_place_that_is_given_is_the_right_one(drawn):
    tokens = [token for token, _ in drawn]
    places = [i for i, (_, sent) in enumerate(drawn) if sent]
    found = aligned(tokens, [tokens[i] for i in places])
    assert [x if x is None else y for x, y in zip(found, places, strict=True)] == found
    if len(places) == len(tokens) or len(set(tokens)) == len(tokens):
        assert found == places
