"""Servers with the OpenAI-style `/v1/completions`: vLLM, and others that name tokens by their ids.

Sources: vLLM's OpenAI-compatible server (`prompt_logprobs`, `return_tokens_as_token_ids`, `/tokenize`) and OpenAI's legacy completions
(`logprobs`, `echo`). Log-probabilities by the text of a token are refused: several tokens may have one text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import ServerError, UnsupportedError, shown
from .client import Client, RefusedError, most_bytes
from .completions import Completions, Entries, completions, listed, logprob, member, of_type, prompt_length, rows, token, tokens

_WHERE = "/v1/completions"
_REFUSALS = (400, 422)  # of a request that has a field the server does not know
_AS_IDS = {"return_tokens_as_token_ids": True}
_NO_PENALTY = {"repetition_penalty": 1.0}  # vLLM takes the one of the model's generation_config.json otherwise
_TAKES_TEXTS = "expected a server that takes token ids as a prompt, as llama-server, vLLM and SGLang do"


@dataclass(frozen=True)
class OpenAiServer:
    """A server with OpenAI-style completions."""

    client: Client
    model: str  # the id of the model that requests name
    name: str = "OpenAI-style server"
    dialect: str | None = None  # whose roundings it has: not known
    names: tuple[str, ...] = ()  # what it calls its model and itself

    def tokenize(self, text: str) -> list[int] | None:
        """The server's token ids of a text, with the special tokens that it adds; None from a server without vLLM's `/tokenize`."""
        try:
            return self.client.tokenize({"model": self.model, "prompt": text, "add_special_tokens": True}, text)
        except RefusedError as refusal:
            if refusal.status in (404, 405, 501):
                return None
            raise

    def complete(self, ids: Sequence[int], predict: int, k: int) -> Completions:
        """A greedy completion of the prompt `ids` by at most `predict` tokens, with k log-probabilities at each position.

        Positions of the prompt come from `prompt_logprobs`, or from `echo`, where the server has one of them. Raises ServerError, or
        UnsupportedError where tokens are named by their texts.
        """
        plain = {"model": self.model, "prompt": list(ids), "max_tokens": predict, "temperature": 0, "logprobs": k, "stream": False}
        most = most_bytes((len(ids) + predict + 1) * (k + 2))
        records: list[Completions] = []
        for extra in ({**_AS_IDS, **_NO_PENALTY, "prompt_logprobs": k}, {**_AS_IDS, "echo": True}, {}):
            if records and not extra:
                break  # nothing is left to ask for the prompt's positions
            try:
                record = parse(self.client.post(_WHERE, {**plain, **extra}, most), ids, predict, k)
            except RefusedError as refusal:
                if refusal.status not in _REFUSALS:
                    raise
                if not extra:
                    raise RefusedError(f"{refusal}; {_TAKES_TEXTS}", refusal.status) from None
                continue
            if record.top[:1] and record.top[0].position < len(ids) - 1:
                return record
            records.append(record)
        return max(records, key=lambda record: len(record.top))


def parse(answer: Any, ids: Sequence[int], predict: int, k: int) -> Completions:
    """The record of an answer of `/v1/completions`. Raises ServerError for a field that is missing or of a wrong type."""
    choices = member(_WHERE, answer, "choices", list)
    if len(choices) != 1:
        raise ServerError(f"{_WHERE}: choices has {len(choices)} items, expected 1")
    where = f"{_WHERE}: choices[0]"
    choice = of_type(where, choices[0], dict)
    usage = answer.get("usage")
    if usage is not None:
        prompt_length(f"{_WHERE}: usage.prompt_tokens", member(f"{_WHERE}: usage", usage, "prompt_tokens", int), len(ids))
    by_position = _of_prompt(f"{where}.prompt_logprobs", choice.get("prompt_logprobs"), ids)
    logprobs = choice.get("logprobs")
    if logprobs is None:
        raise UnsupportedError(f"{where}.logprobs is null: the server returns no log-probabilities of completions")
    generated, later = _of_choice(f"{where}.logprobs", of_type(f"{where}.logprobs", logprobs, dict), ids)
    return completions(f"{where}.logprobs", ids, generated, predict, k, by_position | later)


def _of_prompt(where: str, value: Any, ids: Sequence[int]) -> dict[int, Entries]:
    """vLLM's prompt_logprobs, by the position whose logits they are: the item for a token is what the position before it predicts."""
    if value is None:
        return {}
    items = of_type(where, value, list)
    if len(items) != len(ids):
        raise ServerError(f"{where} has {len(items)} items, but {len(ids)} token ids were sent")
    return rows(where, items, -1, lambda here, item: _named(here, item, lambda name, x: of_type(name, x, dict).get("logprob")))


def _of_choice(where: str, value: dict[str, Any], ids: Sequence[int]) -> tuple[list[int], dict[int, Entries]]:
    """The generated ids, and log-probabilities by position."""
    start = len(ids) - 1
    if "content" in value:  # the form of chat completions, which llama-server and mlx-lm use here too
        items = member(where, value, "content", list)
        names = [member(f"{where}.content[{i}]", item, "id", int) for i, item in enumerate(items)]
        tops = rows(f"{where}.content", items, start, lambda here, item: listed(f"{here}.top_logprobs", item.get("top_logprobs")))
        return tokens(f"{where}.content, id", names), tops
    named = [_id(f"{where}.tokens[{i}]", name) for i, name in enumerate(member(where, value, "tokens", list))]
    top = member(where, value, "top_logprobs", list)
    if len(top) != len(named):
        raise ServerError(f"{where}.top_logprobs has {len(top)} items for {len(named)} tokens")
    echoed = len(named) >= len(ids) and named[: len(ids)] == list(ids) and top[:1] == [None]
    return named[len(ids) :] if echoed else named, rows(f"{where}.top_logprobs", top, -1 if echoed else start, _named)


def _named(where: str, value: Any, number: Callable[[str, Any], Any] = lambda name, x: x) -> Entries:
    """The log-probabilities of an object whose keys are ids. number: what a value has of it."""
    entries = of_type(where, value, dict).items()
    return {_id(f"{where}, key", key): logprob(f"{where}[{shown(key)}]", number(f"{where}.{key}", x)) for key, x in entries}


def _id(where: str, value: Any) -> int:
    """A token id as an integer, as its digits, or as vLLM's `token_id:N`."""
    if type(value) is int:
        return token(where, value)
    match = re.fullmatch(r"(?:token_id:)?(\d{1,10})", value, re.ASCII) if isinstance(value, str) else None
    if match is None:
        raise UnsupportedError(
            f"{where} is {shown(value)}: the server names tokens by their texts, expected ids, as vLLM and llama-server send"
        )
    return token(where, int(match[1]))
