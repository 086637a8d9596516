"""What a prompt is continued by, checked: its tokens, its end, and the head that computes its logits."""

from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from ..base.errors import ContextLimitError, EmptyInputError, OptionError, TokenRangeError, shown
from ..base.validate import instance, integer, integers
from ..engine.tokens import Tokens, check_tokens
from ..model.records import Model
from .certified import LARGEST_K, MOST_COLUMNS, CertifiedHead, certify
from .sampling import Sampling


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


HeadChoice = Literal["auto", "exact", "certified"]

_PAYS_FROM = 1 << 24, 48  # weights of the head, and tokens: making the copy takes as long as some 30 tokens save


def certified_for(model: Model, sampling: Sampling, n: int, head: CertifiedHead | HeadChoice = "auto") -> CertifiedHead | None:
    """The head that computes the logits `sampling` needs for `n` tokens; None if all logits are to be computed.

    Raises OptionError for "certified" or a head that cannot be used: more logits are needed than it gives, or the output has a bias or is
    no float table, or logits are scaled or capped.
    """
    table, k = model.head, 1 if instance("sampling", sampling, Sampling).greedy else sampling.top_k
    if not isinstance(head, CertifiedHead) and not (isinstance(head, str) and head in get_args(HeadChoice)):
        raise OptionError(f"head is {shown(head)}, expected a CertifiedHead or one of {', '.join(get_args(HeadChoice))}")
    if head == "exact" or (head == "auto" and (table.shape[0] * table.shape[1] < _PAYS_FROM[0] or n < _PAYS_FROM[1])):
        return None
    if not 1 <= k <= LARGEST_K:
        why_not = f"sampling needs {k or 'all'} logits, not just the {LARGEST_K} largest"
    elif model.output_bias is not None or not isinstance(table, np.ndarray):
        why_not = "the model's output is no plain float table"
    elif not model.config.plain_logits:
        why_not = "the model's logits are scaled or capped, so that rounding may make two of them equal"
    elif table.shape[1] > MOST_COLUMNS:
        why_not = f"the output has rows of {table.shape[1]} numbers, more than {MOST_COLUMNS}"
    elif not isinstance(head, CertifiedHead):
        return certify(table, min(k, len(table)))
    elif head.table is not table:
        why_not = "the head given is another model's"
    elif head.k < min(k, len(table)):
        why_not = f"sampling needs the {k} largest logits, the head gives {head.k}"
    else:
        return head
    if head == "auto":
        return None
    raise OptionError(f"no certified head: {why_not}")
