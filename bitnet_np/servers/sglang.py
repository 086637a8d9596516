"""SGLang's server, by its native API: `/generate` with token ids, and `/tokenize`.

Source: SGLang's pages on its native API and on sampling parameters, and its tokenizer_manager.py. An entry of log-probabilities is
[logprob, id, text]; the item for a token is what the position before it predicts, and the first of the prompt is null.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.errors import ServerError, shown
from .client import most_bytes
from .completions import Completions, top_logprobs
from .fields import logprob, member, of_type, prompt_length, token
from .openai import OpenAiServer

_WHERE = "/generate"


@dataclass(frozen=True)
class SglangServer(OpenAiServer):
    """An SGLang server. Its OpenAI-style completions name tokens by their texts."""

    name: str = "SGLang"

    def complete(self, ids: Sequence[int], predict: int, k: int) -> Completions:
        """A greedy completion of the prompt `ids` by at most `predict` tokens, with k log-probabilities at each position of both.

        Raises ServerError.
        """
        plain = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}  # no penalty that the server has as default
        request = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": predict, **plain},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
            "stream": False,
        }
        answer = self.client.post(_WHERE, request, most_bytes((len(ids) + predict + 1) * (k + 2)))
        return parse(answer, ids, predict, k)


def parse(answer: Any, ids: Sequence[int], predict: int, k: int) -> Completions:
    """The record of an answer of `/generate`. Raises ServerError for what is missing or of a wrong type."""
    meta = member(_WHERE, answer, "meta_info", dict)
    where = f"{_WHERE}: meta_info"
    prompt_length(f"{where}.prompt_tokens", member(where, meta, "prompt_tokens", int), len(ids))
    chosen = member(where, meta, "output_token_logprobs", list)
    generated = [_entry(f"{where}.output_token_logprobs[{i}]", item)[0] for i, item in enumerate(chosen)]
    if len(generated) > predict:
        raise ServerError(f"{where}.output_token_logprobs has {len(generated)} tokens, expected at most {predict}")
    top = []
    for name, start, count in (("input_top_logprobs", -1, len(ids)), ("output_top_logprobs", len(ids) - 1, len(generated))):
        items = member(where, meta, name, list)
        if len(items) != count:
            raise ServerError(f"{where}.{name} has {len(items)} items for {count} tokens")
        for i, item in enumerate(items):
            if start + i >= 0:  # nothing predicts the first token
                top.append(top_logprobs(start + i, _entries(f"{where}.{name}[{i}]", item)))
    return Completions(np.array([*ids, *generated], np.int64), len(ids), k, tuple(top))


def _entries(where: str, value: Any) -> dict[int, float]:
    """The log-probabilities of a position by token id."""
    pairs = [_entry(f"{where}[{i}]", item) for i, item in enumerate(of_type(where, value, list))]
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ServerError(f"{where} has the ids {shown([pair[0] for pair in pairs])}, expected no two alike")
    return entries


def _entry(where: str, value: Any) -> tuple[int, float]:
    """The id and the log-probability of [logprob, id, text]."""
    if len(of_type(where, value, list)) < 2:
        raise ServerError(f"{where} is {shown(value)}, expected a log-probability and a token id")
    return token(f"{where}[1]", value[1]), logprob(f"{where}[0]", value[0])
