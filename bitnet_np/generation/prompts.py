"""Prompts and what they are continued by, checked."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ..base.errors import ContextLimitError, EmptyInputError, OptionError, TokenRangeError, shown
from ..base.validate import integer, integers
from ..engine.tokens import Tokens, check_tokens
from ..model.records import Model


class Prompt(NamedTuple):
    """A prompt and the limits of its continuation, checked."""

    tokens: Tokens  # [1, T]
    n: int  # new tokens at most
    stop: frozenset[int]  # tokens that end it


def check_prompt(model: Model, prompt: Sequence[int], n: int, stop: Collection[int]) -> Prompt:
    """Check a prompt, the number of tokens to continue it by, and those that end it. Raises what `stream` raises on the call itself."""
    ids = integers("prompt", prompt, 1, TokenRangeError)
    if ids.size == 0:
        raise EmptyInputError("Prompt cannot be empty")
    n = integer("number of tokens to generate", n, 0)
    tokens = check_tokens(model.config, ids[None])
    if ids.size + n > model.config.context:
        raise ContextLimitError(f"a prompt of {ids.size} and {n} new tokens exceed the model's context of {model.config.context}")
    return Prompt(tokens, n, frozenset(_stops(model, stop)))


def _stops(model: Model, stop: Collection[int]) -> Iterator[int]:
    if not isinstance(stop, Collection):  # an iterator would be used up here, and stop nothing
        raise OptionError(f"stop is {shown(stop)}, expected a collection of token ids")
    for value in stop:
        token = integer("stop token", value, -(2**63))
        if not 0 <= token < model.config.vocab:
            raise OptionError(f"stop token {token} is not an id of the vocabulary, 0..{model.config.vocab - 1}")
        yield token
