"""Negative log-likelihood of a text: how surprised the model is by each token, given those before it."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .backend import Backend
from .cache import new_cache
from .dialects import EXACT, Dialect
from .errors import ContextLimitError, ShapeError, TokenRangeError
from .forward_pass import run_cached
from .kernels import cpu
from .model import Model
from .network import Runtime
from .progress import Progress, silent
from .tokens import Tokens, check_tokens
from .validate import integer, integers

CHUNK = 64
"""Tokens of one forward pass. It changes memory (CHUNK * V logits) and speed, not a bit of the result."""


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
    ids = integers("tokens", tokens, 1, TokenRangeError)
    if ids.size < 2:
        raise ShapeError(f"tokens have shape {ids.shape}, expected [T] with T at least 2: one to predict and one before it")
    runtime = Runtime(model, dialect, ops).checked()
    check_tokens(model.config, ids[None])
    if model.config.context < 2:
        raise ContextLimitError("the model's context is 1, expected at least 2: a token to predict and one before it")
    window = min(model.config.context, len(ids))
    step = model.config.context // 2 if stride is None else integer("stride", stride, 1, model.config.context - 1)  # less than the context
    chunk = integer("chunk", chunk, 1)
    out = np.empty(len(ids) - 1)
    cache = new_cache(model.config, 1, window, ops)
    slot = np.zeros(1, np.int64)
    known = 0  # tokens whose successors are judged
    begin = 0
    while known < len(out):
        end = min(begin + window, len(ids))
        cache.clear()
        for start in range(begin, end, chunk):
            part = ids[start : min(start + chunk, end)]
            logits = run_cached(runtime, Tokens.whole(part[None]), cache, slot)[0]
            fresh = np.arange(max(start, known), min(start + len(part), len(out), end - 1))
            out[fresh] = _nll(logits[fresh - start], ids[fresh + 1])
            progress(min(start + len(part), len(out)), len(out))
        known = end - 1
        begin += step
    return out


def _nll(logits: NDArray[np.float32], target: NDArray[np.int64]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(len(target)), target]
