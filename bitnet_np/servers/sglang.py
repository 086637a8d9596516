"""SGLang's server, by its native API: `/generate` with token ids, and `/tokenize`.

Source: SGLang's pages on its native API and on sampling parameters, and its tokenizer_manager.py. An entry of log-probabilities is
[logprob, id, text]; the item for a token is what the position before it predicts, and the item for the first token of the prompt is null.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import ServerError, shown
from .client import most_bytes
from .completions import Completions, Entries, completions, listed, logprob, member, of_type, prompt_length, rows, token
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
    """The record of an answer of `/generate`. Raises ServerError for a field that is missing or of a wrong type."""
    meta = member(_WHERE, answer, "meta_info", dict)
    where = f"{_WHERE}: meta_info"
    prompt_length(f"{where}.prompt_tokens", member(where, meta, "prompt_tokens", int), len(ids))
    chosen = member(where, meta, "output_token_logprobs", list)
    generated = [_entry(f"{where}.output_token_logprobs[{i}]", item)[0] for i, item in enumerate(chosen)]
    by_position: dict[int, Entries] = {}
    for name, start, count in (("input_top_logprobs", -1, len(ids)), ("output_top_logprobs", len(ids) - 1, len(generated))):
        items = member(where, meta, name, list)
        if len(items) != count:
            raise ServerError(f"{where}.{name} has {len(items)} items for {count} tokens")
        by_position |= rows(f"{where}.{name}", items, start, lambda here, item: listed(here, item, _entry))
    return completions(f"{where}.output_token_logprobs", ids, generated, predict, k, by_position)


def _entry(where: str, value: Any) -> tuple[int, float]:
    """The id and the log-probability of [logprob, id, text]."""
    if len(of_type(where, value, list)) < 2:
        raise ServerError(f"{where} is {shown(value)}, expected a log-probability and a token id")
    return token(f"{where}[1]", value[1]), logprob(f"{where}[0]", value[0])
