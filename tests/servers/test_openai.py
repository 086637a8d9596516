"""OpenAI-style completions: what is asked, which answers are understood, and what of them is believed."""

import re

import pytest
from completions import assert_same, changed, completions_by, vllm_answer
from fake_server import serving, table_logits, vllm

from bitnet_np.base.errors import ServerError, UnsupportedError
from bitnet_np.servers.client import RefusedError, client_of
from bitnet_np.servers.openai import OpenAiServer, parse

IDS = [1, 7, 3, 9]
ENGINE = table_logits()
MADE = completions_by(ENGINE, IDS, predict=6, k=5)
WITH_PROMPT = completions_by(ENGINE, IDS, predict=6, k=5, first=0)


def complete(answers):
    with serving(answers) as (url, requests):
        record = OpenAiServer(client_of(url, 5), "tiny").complete(IDS, 6, 5)
    return record, [body for _, _, body in requests]


def test_vllm_gives_the_positions_of_the_prompt():
    record, asked = complete(vllm(ENGINE))
    assert_same(record, WITH_PROMPT)
    (request,) = asked
    assert request["prompt"] == IDS
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("tiny", 6, 0)
    assert (request["logprobs"], request["prompt_logprobs"], request["return_tokens_as_token_ids"]) == (5, 5, True)
    assert request["repetition_penalty"] == 1  # else the model's own default, which changes what is chosen


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


def test_echo_gives_them_too():
    record, asked = complete(strict({"echo", "return_tokens_as_token_ids"}, echoed(WITH_PROMPT)))
    assert_same(record, WITH_PROMPT)
    assert len(asked) == 2


def test_a_server_without_either_gives_the_generated_positions():
    for answers in (strict(set(), vllm_answer(MADE)), {"/v1/completions": vllm_answer(MADE)}):
        record, asked = complete(answers)
        assert_same(record, MADE)
        assert len(asked) in (2, 3)


def test_the_form_of_chat_completions():
    """llama-server and mlx-lm use it for plain completions, too."""
    answer = vllm_answer(MADE)
    content = [
        {"id": int(row.ids[0]), "top_logprobs": [{"id": int(i), "logprob": float(x)} for i, x in zip(row.ids, row.logprobs, strict=True)]}
        for row in MADE.top
    ]
    answer["choices"][0]["logprobs"] = {"content": content}
    assert_same(parse(answer, IDS, 6, 5), MADE)


def test_a_refusal_of_everything_is_passed_on():
    with pytest.raises(RefusedError, match=r"HTTP status 400: 'no such model'; expected a server that takes token ids as a prompt"):
        complete({"/v1/completions": (400, {"error": {"message": "no such model"}}, {})})
    with pytest.raises(RefusedError, match="HTTP status 500"):
        complete({"/v1/completions": (500, {}, {})})


def test_tokenize_is_vllms():
    with serving(vllm(ENGINE, tokenize=lambda text: [1, len(text)])) as (url, requests):
        assert OpenAiServer(client_of(url, 5), "tiny").tokenize("abc") == [1, 3]
        assert requests[0][2] == {"model": "tiny", "prompt": "abc", "add_special_tokens": True}
    with serving(vllm(ENGINE)) as (url, _):
        assert OpenAiServer(client_of(url, 5), "tiny").tokenize("abc") is None
    with serving({"/tokenize": (500, {}, {})}) as (url, _), pytest.raises(ServerError, match="500"):
        OpenAiServer(client_of(url, 5), "tiny").tokenize("abc")


CHOICE = ("choices", 0)
LOGPROBS = (*CHOICE, "logprobs")
WRONG = [
    (("choices",), None, "/v1/completions.choices is None, expected an array"),
    (("choices",), [], "choices has 0 items, expected 1"),
    (CHOICE, 1, "choices[0] is 1, expected an object"),
    (("usage", "prompt_tokens"), 5, "usage.prompt_tokens is 5, but 4 token ids were sent: it puts a BOS in front of token ids"),
    (("usage", "prompt_tokens"), "4", "prompt_tokens is '4', expected an integer"),
    ((*LOGPROBS, "top_logprobs"), [], "top_logprobs has 0 items for 6 tokens"),
    ((*LOGPROBS, "top_logprobs", 0), None, "top_logprobs[0] is None, expected an object"),
    ((*LOGPROBS, "top_logprobs", 0), {"token_id:1": "x"}, "is 'x', expected a number"),
    ((*LOGPROBS, "top_logprobs", 0), {"token_id:9999999999": 1}, "key is 9999999999, expected a token id"),
    ((*LOGPROBS, "tokens", 0), " the", "tokens[0] is ' the': the server names tokens by their texts"),
    ((*CHOICE, "prompt_logprobs"), [None], "prompt_logprobs has 1 items, but 4 token ids were sent"),
    ((*CHOICE, "prompt_logprobs", 2), None, "prompt_logprobs[2] is None, expected an object"),
    ((*CHOICE, "prompt_logprobs", 2), {"5": -1.0}, "5 is -1.0, expected an object"),
    ((*CHOICE, "prompt_logprobs", 2), {"five": {"logprob": -1.0}}, "key is 'five'"),
]


@pytest.mark.parametrize(("path", "value", "said"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_answer_is_refused_by_name(path, value, said):
    with pytest.raises((ServerError, UnsupportedError), match=re.escape(said)):
        parse(changed(vllm_answer(WITH_PROMPT), path, value), IDS, 6, 5)


def test_more_tokens_than_asked_for_are_refused():
    with pytest.raises(ServerError, match="has 6 generated tokens, expected at most 5"):
        parse(vllm_answer(MADE), IDS, 5, 5)
