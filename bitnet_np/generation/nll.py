"""Negative log-likelihood of a text: how surprised the model is by each token, given those before it."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ContextLimitError, ShapeError, TokenRangeError
from ..base.progress import Progress, silent
from ..base.validate import integer, integers
from ..engine.backend import Backend
from ..engine.cache import new_cache
from ..engine.dialects import EXACT, Dialect
from ..engine.forward_pass import run_cached, run_prefill
from ..engine.network import Runtime
from ..engine.tokens import Tokens, check_tokens
from ..kernels import cpu
from ..kernels.float_state import steady
from ..model.records import Config, Model

CHUNK = 64
"""Tokens of one forward pass. It changes memory (CHUNK * V logits) and speed, not a bit of the result."""


@steady
def token_nll(
    model: Model,
    tokens: ArrayLike,
    *,
    stride: int | None = None,
    chunk: int = CHUNK,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    progress: Progress = silent,
) -> NDArray[np.float64]:
    """-ln p(token t | tokens before it) for t = 1..T-1: tokens [T] -> float64 [T - 1].

    A text longer than the context is read in windows of the context's length that start every `stride` tokens (default: half a
    context); a token is judged in the first window that has it, so all but the first window's have at least context - stride
    tokens before them. The sum over the vocabulary is in float64.

    Raises ShapeError for tokens that are not [T] with T at least 2, ContextLimitError for a context of 1, OptionError for an invalid stride
    or chunk, and what `forward` raises.
    """
    runtime = Runtime(model, dialect, ops).checked()
    ids, windows = check_windows(model.config, tokens, stride)
    chunk = integer("chunk", chunk, 1)
    values = []
    for begin, end, known in windows:
        part = ids[begin:end]
        for positions, logits in logits_from(runtime, part[:-1], known - begin, chunk):
            values.append(nll_of(logits, part[positions + 1]))
            progress(begin + int(positions[-1]) + 1, len(ids) - 1)
    return np.concatenate(values)


class Window(NamedTuple):
    """A part of a text that is read alone, and the tokens in it that no earlier window has judged."""

    begin: int
    end: int
    known: int  # the first token whose successor is judged here


def check_windows(config: Config, tokens: ArrayLike, stride: int | None = None) -> tuple[NDArray[np.int64], list[Window]]:
    """The token ids [T] of a text and its windows, in order. Windows do not depend on each other. Raises as `token_nll` does."""
    ids = integers("tokens", tokens, 1, TokenRangeError)
    if ids.size < 2:
        raise ShapeError(f"tokens have shape {ids.shape}, expected [T] with T at least 2: one to predict and one before it")
    check_tokens(config, ids[None])
    if config.context < 2:
        raise ContextLimitError("the model's context is 1, expected at least 2: a token to predict and one before it")
    step = config.context // 2 if stride is None else integer("stride", stride, 1, config.context - 1)  # less than the context
    windows = [Window(0, min(config.context, len(ids)), 0)]
    while windows[-1].end < len(ids):
        begin = windows[-1].begin + step
        windows.append(Window(begin, min(begin + config.context, len(ids)), windows[-1].end - 1))
    return ids, windows


def logits_from(
    runtime: Runtime, ids: NDArray[np.int64], first: int, chunk: int = CHUNK
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Yields positions [R] of a sequence [T], from `first` on, and their logits [R, V], `chunk` at a time. Arguments are checked."""
    cache, slot = new_cache(runtime.model.config, 1, len(ids), runtime.ops), np.zeros(1, np.int64)
    if first:
        run_prefill(runtime, Tokens.whole(ids[None, :first]), cache, slot)
    for start in range(first, len(ids), chunk):
        positions = np.arange(start, min(start + chunk, len(ids)))
        yield positions, run_cached(runtime, Tokens.whole(ids[None, positions]), cache, slot)[0]


def log_probabilities(logits: NDArray[np.floating]) -> NDArray[np.float64]:  # [.., V] -> [.., V]
    """The logarithm of the softmax."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def nll_of(logits: NDArray[np.float32], target: NDArray[np.int64]) -> NDArray[np.float64]:  # [R, V], [R] -> [R]
    return 0 - log_probabilities(logits)[np.arange(len(target)), target]  # 0, not -0, for a probability of 1
