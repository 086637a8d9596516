"""What a server returns for a prompt, whatever API it speaks."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The most probable next tokens after one position, as the server returned them."""

    position: int  # of the token that they follow
    ids: NDArray[np.int64]  # [n], no two alike, the most probable first
    logprobs: NDArray[np.float64]  # [n] natural logarithms, NaN where the server sent none; nothing else is checked


@dataclass(frozen=True, eq=False)
class Completions:
    """A greedy completion with log-probabilities."""

    tokens: NDArray[np.int64] = field(repr=False)  # [N] the prompt, and what the server continued it with
    prompt: int  # number of tokens of the prompt, at least 1
    k: int  # log-probabilities asked for at each position: no token that is not listed may be more probable than the k-th
    top: tuple[TopLogprobs, ...] = field(repr=False)  # by position, ascending; positions may be missing
    notes: tuple[str, ...] = ()  # what the server left out


def top_logprobs(position: int, entries: dict[int, float]) -> TopLogprobs:
    """The record of log-probabilities by token id, sorted. NaN comes last."""
    ids, values = np.array(list(entries), np.int64), np.array(list(entries.values()), np.float64)
    order = np.argsort(-values, kind="stable")
    return TopLogprobs(position, ids[order], values[order])
