"""SGLang's native API: what is asked, and what of an answer is believed."""

import re

import pytest
from completions import assert_same, changed, completions_by, sglang_answer
from fake_server import serving, sglang, table_logits

from bitnet_np.base.errors import ServerError
from bitnet_np.servers.client import client_of
from bitnet_np.servers.sglang import SglangServer, parse

IDS = [1, 7, 3, 9]
ENGINE = table_logits()
MADE = completions_by(ENGINE, IDS, predict=6, k=5, first=0)


def test_ids_are_sent_and_every_position_comes_back():
    with serving(sglang(ENGINE)) as (url, requests):
        assert_same(SglangServer(client_of(url, 5), "tiny").complete(IDS, 6, 5), MADE)
    ((_, path, body),) = requests
    assert (path, body["input_ids"], body["top_logprobs_num"], body["logprob_start_len"]) == ("/generate", IDS, 5, 0)
    assert (body["sampling_params"]["temperature"], body["sampling_params"]["repetition_penalty"]) == (0, 1)


META = ("meta_info",)
WRONG = [
    (META, None, "/generate.meta_info is None, expected an object"),
    ((*META, "prompt_tokens"), 5, "prompt_tokens is 5, but 4 token ids were sent: it puts a BOS in front of token ids"),
    ((*META, "output_token_logprobs"), ..., "output_token_logprobs is None, expected an array"),
    ((*META, "output_token_logprobs", 0), [-1.0], "output_token_logprobs[0] is [-1.0], expected a log-probability and a token id"),
    ((*META, "output_token_logprobs", 0, 1), "five", "output_token_logprobs[0][1] is 'five', expected an integer"),
    ((*META, "output_top_logprobs"), [], "output_top_logprobs has 0 items for 6 tokens"),
    ((*META, "input_top_logprobs"), [None], "input_top_logprobs has 1 items for 4 tokens"),
    ((*META, "input_top_logprobs", 2), None, "input_top_logprobs[2] is None, expected an array"),
    ((*META, "output_top_logprobs", 1, 0), -1.0, "output_top_logprobs[1][0] is -1.0, expected an array"),
    ((*META, "output_top_logprobs", 1, 0, 0), "x", "output_top_logprobs[1][0][0] is 'x', expected a number"),
    ((*META, "output_top_logprobs", 1), [[-1.0, 3, None]] * 2, "has the ids [3, 3], expected no two alike"),
]


@pytest.mark.parametrize(("path", "value", "said"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_answer_is_refused_by_name(path, value, said):
    with pytest.raises(ServerError, match=re.escape(said)):
        parse(changed(sglang_answer(MADE), path, value), IDS, 6, 5)


def test_more_tokens_than_asked_for_are_refused():
    with pytest.raises(ServerError, match="has 6 tokens, expected at most 5"):
        parse(sglang_answer(MADE), IDS, 5, 5)
