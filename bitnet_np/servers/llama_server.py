"""llama.cpp's server, by its native API: `/completion` with `n_probs`, and `/tokenize`.

Source: tools/server/README.md of llama.cpp, and its server of 2026, which the tests run. Log-probabilities are those of the raw logits,
before temperature and samplers (`post_sampling_probs` is false).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.errors import ServerError
from .client import Client, most_bytes
from .completions import Completions, completions, listed, member, of_type, prompt_length, token, tokens


@dataclass(frozen=True)
class LlamaServer:
    """A llama-server."""

    client: Client
    name: str = "llama-server"
    dialect: str = "llama.cpp"  # whose roundings it has
    names: tuple[str, ...] = ()  # it computes in its dialect, whatever its model is called

    def tokenize(self, text: str) -> list[int]:
        """The server's token ids of a text, with BOS and EOS as the server adds them; control tokens that the text spells stay text."""
        return self.client.tokenize({"content": text, "add_special": True, "parse_special": False}, text)

    def complete(self, ids: Sequence[int], predict: int, k: int) -> Completions:
        """A greedy completion of the prompt `ids` by at most `predict` tokens, with k log-probabilities at each. Raises ServerError."""
        request = {
            "prompt": list(ids),
            "n_predict": predict,
            "n_probs": k,
            "post_sampling_probs": False,
            "temperature": 0,
            "samplers": ["temperature"],  # no penalty that the server was started with
            "cache_prompt": False,
            "return_tokens": True,
            "stream": False,
        }
        answer = self.client.post("/completion", request, most_bytes(len(ids) + predict * (k + 1)))
        return parse(answer, ids, predict, k)


def parse(answer: Any, ids: Sequence[int], predict: int, k: int) -> Completions:
    """The record of an answer of `/completion`. Raises ServerError for a field that is missing or of a wrong type."""
    where = "/completion"
    prompt_length(f"{where}: tokens_evaluated", member(where, answer, "tokens_evaluated", int), len(ids))
    if answer.get("truncated", False) is not False:
        raise ServerError(f"{where}: the prompt was truncated; the server's context is too small for {len(ids)} + {predict} tokens")
    generated = tokens(f"{where}: tokens", answer.get("tokens"))
    entries = member(where, answer, "completion_probabilities", list) if "completion_probabilities" in answer else []  # none of any token
    chosen, tops = [], []
    for i, entry in enumerate(entries):
        here = f"{where}: completion_probabilities[{i}]"
        if "probs" in of_type(here, entry, dict):
            raise ServerError(f"{here} has `probs` without token ids, as llama-server sent them until 2024; a newer one is needed")
        chosen.append(token(f"{here}.id", entry.get("id")))
        tops.append(listed(f"{here}.top_logprobs", entry.get("top_logprobs")))
    places = aligned(generated, chosen)
    if places is None:
        raise ServerError(f"{where}: completion_probabilities are of the tokens {chosen[:8]}..., not of {generated[:8]}...")
    rows = {len(ids) - 1 + place: top for top, place in zip(tops, places, strict=True) if place is not None}
    record, left_out = completions(where, ids, generated, predict, k, rows), len(generated) - len(rows)
    held = len(generated) - len(chosen)
    note = f"the server has no log-probabilities for {held} of {len(generated)} tokens, which end within a character"
    note += f", and {left_out - held} that are not judged: several tokens may be those that they are of" * (left_out > held)
    return replace(record, notes=(note,)) if left_out else record


def aligned(tokens: Sequence[int], chosen: Sequence[int]) -> list[int | None] | None:
    """The place in `tokens` of each of `chosen`, which are some of them in order; None where several places are possible.

    llama-server holds a token back whose text ends within a UTF-8 character, and sends no log-probabilities for it. The place is certain
    if the leftmost and the rightmost way to choose agree. Returns None if there is no way.
    """
    first = _leftmost(tokens, chosen)
    last = _leftmost(tokens[::-1], chosen[::-1])
    if first is None or last is None:
        return None
    return [a if a == len(tokens) - 1 - b else None for a, b in zip(first, reversed(last), strict=True)]


def _leftmost(tokens: Sequence[int], chosen: Sequence[int]) -> list[int] | None:
    places: list[int] = []
    at = 0
    for identifier in chosen:
        while at < len(tokens) and tokens[at] != identifier:
            at += 1
        if at == len(tokens):
            return None
        places.append(at)
        at += 1
    return places
