"""llama-server's and SGLang's native APIs, and OpenAI-style completions: what is asked, and what of an answer is believed."""

import math
import re

import pytest
from completions import assert_same, changed, completions_by, llama_answer, sglang_answer, vllm_answer
from fake_server import llama_server, serving, sglang, table_logits, vllm
from hypothesis import given
from hypothesis import strategies as st

from bitnet_np.base.errors import ServerError, UnsupportedError
from bitnet_np.servers import openai
from bitnet_np.servers import sglang as sglang_api
from bitnet_np.servers.client import RefusedError, client_of
from bitnet_np.servers.llama_server import LlamaServer, aligned, parse

IDS = [1, 7, 3, 9]
ENGINE = table_logits()
MADE = completions_by(ENGINE, IDS, predict=6, k=5)
WITH_PROMPT = completions_by(ENGINE, IDS, predict=6, k=5, first=0)


def complete(answers, server=lambda client: openai.OpenAiServer(client, "tiny")):
    """The completion of IDS, and the requests for it."""
    with serving(answers) as (url, requests):
        record = server(client_of(url, 5)).complete(IDS, 6, 5)
    return record, [body for _, _, body in requests]


# --- what is asked --------------------------------------------------------------------------------------------------------------------


def test_a_llama_server_is_asked_for_raw_numbers():
    record, (asked,) = complete(llama_server(ENGINE), LlamaServer)
    assert_same(record, MADE)
    assert (asked["prompt"], asked["n_predict"], asked["n_probs"], asked["temperature"]) == (IDS, 6, 5, 0)
    assert (asked["samplers"], asked["post_sampling_probs"], asked["return_tokens"]) == (["temperature"], False, True)


def test_sglang_is_asked_for_every_position():
    record, (asked,) = complete(sglang(ENGINE), lambda client: sglang_api.SglangServer(client, "tiny"))
    assert_same(record, WITH_PROMPT)
    assert (asked["input_ids"], asked["top_logprobs_num"], asked["logprob_start_len"]) == (IDS, 5, 0)
    assert (asked["sampling_params"]["temperature"], asked["sampling_params"]["repetition_penalty"]) == (0, 1)


def test_vllm_is_asked_for_the_positions_of_the_prompt():
    record, (asked,) = complete(vllm(ENGINE))
    assert_same(record, WITH_PROMPT)
    assert (asked["model"], asked["prompt"], asked["max_tokens"], asked["temperature"]) == ("tiny", IDS, 6, 0)
    assert (asked["logprobs"], asked["prompt_logprobs"], asked["return_tokens_as_token_ids"]) == (5, 5, True)
    assert asked["repetition_penalty"] == 1  # else the model's own default, which changes what is chosen


def strict(known, answer):
    """A server that refuses fields it does not know."""

    def route(body):
        extra = set(body) - {"model", "prompt", "max_tokens", "temperature", "logprobs", "stream", *known}
        return (422, {"detail": f"unknown {extra}"}, {}) if extra else answer

    return {"/v1/completions": route}


def echoed(made):
    """The answer of a server with `echo`: the prompt's tokens come first, the very first without log-probabilities."""
    answer = vllm_answer(made)
    choice = answer["choices"][0]
    pairs = [{str(i): x for i, x in zip(row.ids.tolist(), row.logprobs.tolist(), strict=True)} for row in made.top]
    choice["logprobs"] = {"tokens": [str(i) for i in made.tokens], "token_logprobs": [None], "top_logprobs": [None, *pairs]}
    choice["prompt_logprobs"] = None
    return answer


def test_other_servers_are_asked_for_echo_or_the_generated_positions():
    record, asked = complete(strict({"echo", "return_tokens_as_token_ids"}, echoed(WITH_PROMPT)))
    assert_same(record, WITH_PROMPT)
    assert len(asked) == 2
    for answers in (strict(set(), vllm_answer(MADE)), {"/v1/completions": vllm_answer(MADE)}):
        record, asked = complete(answers)
        assert_same(record, MADE)
        assert len(asked) in (2, 3)


def test_a_refusal_of_everything_is_passed_on():
    with pytest.raises(RefusedError, match=r"HTTP status 400: 'no such model'; expected a server that takes token ids as a prompt"):
        complete({"/v1/completions": (400, {"error": {"message": "no such model"}}, {})})
    with pytest.raises(RefusedError, match="HTTP status 500"):
        complete({"/v1/completions": (500, {}, {})})


def test_texts_are_tokenised_with_special_tokens():
    with serving(llama_server(ENGINE, tokenize=lambda text: [len(text)])) as (url, requests):
        assert LlamaServer(client_of(url, 5)).tokenize("héllo") == [5]
        assert requests[0][2] == {"content": "héllo", "add_special": True, "parse_special": False}
    with serving(vllm(ENGINE, tokenize=lambda text: [1, len(text)])) as (url, requests):
        assert openai.OpenAiServer(client_of(url, 5), "tiny").tokenize("abc") == [1, 3]
        assert requests[0][2] == {"model": "tiny", "prompt": "abc", "add_special_tokens": True}
    with serving({"/tokenize": (500, {}, {})}) as (url, _), pytest.raises(ServerError, match="500"):
        openai.OpenAiServer(client_of(url, 5), "tiny").tokenize("abc")


# --- what is believed -----------------------------------------------------------------------------------------------------------------


def test_the_form_of_chat_completions():
    """llama-server and mlx-lm use it for plain completions, too."""
    content = [
        {"id": int(row.ids[0]), "top_logprobs": [{"id": int(i), "logprob": float(x)} for i, x in zip(row.ids, row.logprobs, strict=True)]}
        for row in MADE.top
    ]
    assert_same(openai.parse(changed(vllm_answer(MADE), LOGPROBS, {"content": content}), IDS, 6, 5), MADE)
    for wrong, said in (([5], r"content\[0\] is 5, expected an object"), ([{"id": -1}], r"expected a token id|top_logprobs is None")):
        with pytest.raises(ServerError, match=said):
            openai.parse(changed(vllm_answer(MADE), LOGPROBS, {"content": wrong}), IDS, 6, 5)


def test_a_token_that_ends_within_a_character_has_no_log_probabilities():
    answer = llama_answer(MADE)
    del answer["completion_probabilities"][2]
    record = parse(answer, IDS, 6, 5)
    assert [row.position for row in record.top] == [3, 4, 6, 7, 8]
    assert record.notes == ("the server has no log-probabilities for 1 of 6 tokens, which end within a character",)
    assert record.tokens.tolist() == MADE.tokens.tolist()
    del answer["completion_probabilities"]
    assert parse(answer, IDS, 6, 5).top == ()


def test_log_probabilities_that_may_be_of_several_tokens_are_not_judged():
    """The server held back one of two tokens that are alike: nothing says which."""
    answer = llama_answer(MADE)
    answer["tokens"][2] = answer["tokens"][1]
    del answer["completion_probabilities"][2]
    record = parse(answer, IDS, 6, 5)
    assert [row.position for row in record.top] == [3, 6, 7, 8]
    assert record.notes[0].endswith("a character, and 1 that are not judged: several tokens may be those that they are of")


CHOICE, ENTRY, META = ("choices", 0), ("completion_probabilities", 1), ("meta_info",)
LOGPROBS, TOP = (*CHOICE, "logprobs"), (*ENTRY, "top_logprobs", 0)
ANSWERS = {
    parse: (
        llama_answer(MADE),
        [
            (("tokens",), ..., "/completion: tokens is None, expected an array"),
            (("tokens", 1), 1.0, "/completion: tokens[1] is 1.0, expected an integer"),
            (("tokens", 1), 2**31, "/completion: tokens[1] is 2147483648, expected a token id"),
            (("tokens_evaluated",), ..., "/completion.tokens_evaluated is None, expected an integer"),
            (("tokens_evaluated",), 5, "tokens_evaluated is 5, but 4 token ids were sent: it puts a BOS in front of token ids"),
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
        ],
    ),
    openai.parse: (
        vllm_answer(WITH_PROMPT),
        [
            (("choices",), None, "/v1/completions.choices is None, expected an array"),
            (("choices",), [], "choices has 0 items, expected 1"),
            (CHOICE, 1, "choices[0] is 1, expected an object"),
            (("usage", "prompt_tokens"), 5, "usage.prompt_tokens is 5, but 4 token ids were sent"),
            ((*LOGPROBS, "top_logprobs"), [], "top_logprobs has 0 items for 6 tokens"),
            ((*LOGPROBS, "top_logprobs", 0), None, "top_logprobs[0] is None, expected an object"),
            ((*LOGPROBS, "top_logprobs", 0), {"token_id:1": "x"}, "is 'x', expected a number"),
            ((*LOGPROBS, "top_logprobs", 0), {"token_id:9999999999": 1}, "key is 9999999999, expected a token id"),
            ((*LOGPROBS, "tokens", 0), " the", "tokens[0] is ' the': the server names tokens by their texts"),
            ((*CHOICE, "prompt_logprobs"), [None], "prompt_logprobs has 1 items, but 4 token ids were sent"),
            ((*CHOICE, "prompt_logprobs", 2), None, "prompt_logprobs[2] is None, expected an object"),
            ((*CHOICE, "prompt_logprobs", 2), {"5": -1.0}, "5 is -1.0, expected an object"),
        ],
    ),
    sglang_api.parse: (
        sglang_answer(WITH_PROMPT),
        [
            (META, None, "/generate.meta_info is None, expected an object"),
            ((*META, "prompt_tokens"), 5, "prompt_tokens is 5, but 4 token ids were sent"),
            ((*META, "output_token_logprobs"), ..., "output_token_logprobs is None, expected an array"),
            ((*META, "output_token_logprobs", 0), [-1.0], "output_token_logprobs[0] is [-1.0], expected a log-probability and a token id"),
            ((*META, "output_token_logprobs", 0, 1), "five", "output_token_logprobs[0][1] is 'five', expected an integer"),
            ((*META, "output_top_logprobs"), [], "output_top_logprobs has 0 items for 6 tokens"),
            ((*META, "input_top_logprobs"), [None], "input_top_logprobs has 1 items for 4 tokens"),
            ((*META, "input_top_logprobs", 2), None, "input_top_logprobs[2] is None, expected an array"),
            ((*META, "output_top_logprobs", 1, 0), -1.0, "output_top_logprobs[1][0] is -1.0, expected an array"),
            ((*META, "output_top_logprobs", 1), [[-1.0, 3, None]] * 2, "has the id 3, which is there twice"),
        ],
    ),
}


@pytest.mark.parametrize("read", ANSWERS, ids=lambda read: read.__module__.rpartition(".")[2])
def test_a_wrong_answer_is_refused_by_name(read):
    answer, wrong = ANSWERS[read]
    for path, value, said in wrong:
        with pytest.raises((ServerError, UnsupportedError), match=re.escape(said)):
            read(changed(answer, path, value), IDS, 6, 5)
    with pytest.raises(ServerError, match="6 tokens were generated, expected at most 5"):
        read(answer, IDS, 5, 5)
    for other in (None, [], "x", 5, {}):
        with pytest.raises(ServerError, match=r"^/"):
            read(other, IDS, 6, 5)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 10**400, -(10**400)])
def test_log_probabilities_that_make_no_sense_are_left_to_the_judge(value):
    row = parse(changed(llama_answer(MADE), (*TOP, "logprob"), value), IDS, 6, 5).top[1]
    assert sum(not math.isfinite(x) for x in row.logprobs) == 1


def test_places_are_certain_or_not_known():
    assert aligned([1, 2, 2, 3], [1, 2, 3]) == [0, None, 3]
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
