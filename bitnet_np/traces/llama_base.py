"""A model against the log-probabilities of another, in the file that llama.cpp's perplexity tool takes as its --kl-divergence-base.

The rules follow that tool (tools/perplexity/perplexity.cpp): a text is split into chunks of n_ctx tokens, each computed separately, and the
predictions in the second half of each chunk are compared. If a vocabulary wants a beginning-of-sequence token, the first token of each
chunk is replaced by it. Tokens that the base gives a log-probability of -16 or less are left out of the sum.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ContextLimitError, FileFormatError, ShapeError, TokenRangeError
from ..base.progress import Progress, silent
from ..base.validate import integer, integers, path_of
from ..base.whole_file import whole_file
from ..engine.backend import Backend
from ..engine.dialects import EXACT, Dialect
from ..engine.network import Runtime
from ..engine.tokens import check_context, check_tokens
from ..generation.nll import log_probabilities, logits_from, nll_of
from ..kernels import cpu
from ..kernels.float_state import steady
from ..model.records import Model
from .formats import llama_logits

Array = NDArray[np.float64]

CONTEXT = 512
"""Tokens of a chunk, unless another number is asked for: the tool's own default."""

_LEAST = -16.0  # log-probabilities of the base up to here do not count
_SUMS = 0.5, 1.01  # of the probabilities that count, in a row: small ones are missing, and steps are rounded


@dataclass(frozen=True)
class Divergence:
    """A model's predictions against those of a base, for each predicted token of all chunks, [P] each."""

    nll: Array  # -ln p of the token that follows
    base_nll: Array  # the base's
    kl: Array  # divergence of the model's prediction from the base's, in nats
    same_top: NDArray[np.bool_]  # whether the same token is the most likely


@steady
def save_base(
    model: Model,
    tokens: ArrayLike,
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    bos: int | None = None,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    progress: Progress = silent,
) -> Array:
    """Write the log-probabilities of a text, tokens [T], as a base; returns -ln p of each token that the file's rows predict.

    context: tokens of a chunk, by default 512, or as many as the model's context or the text has. What is left of the text behind the
    last whole chunk is not read. bos: the token that stands in the place of the first of each chunk.

    Raises ShapeError for a text of fewer tokens than a chunk, OptionError for a context below 3, and what `forward` raises. Then no file
    is left.
    """
    runtime = Runtime(model, dialect, ops).checked()
    ids = integers("tokens", tokens, 1, TokenRangeError)
    size = min(CONTEXT, model.config.context, max(3, len(ids))) if context is None else integer("context", context, 3)
    if len(ids) < size:
        raise ShapeError(f"there are {len(ids)} tokens, expected at least a chunk of {size}")
    check_tokens(model.config, ids[None])
    chunks = ids[: len(ids) // size * size].reshape(-1, size)
    values = []
    with whole_file(path_of(path)) as part, open(part, "wb") as file:
        file.write(llama_logits.head(chunks, model.config.vocab))
        for done, chunk in enumerate(chunks, 1):
            for positions, logits in _second_half(runtime, chunk, bos):
                llama_logits.encode(logits).tofile(file)
                values.append(nll_of(logits, chunk[positions + 1]))
            progress(done, len(chunks))
    return np.concatenate(values)


@steady
def divergence(
    model: Model,
    path: str | os.PathLike[str],
    *,
    bos: int | None = None,
    dialect: Dialect = EXACT,
    ops: Backend = cpu,
    progress: Progress = silent,
) -> Divergence:
    """What a model predicts for the tokens of a base, compared with the base. Takes the memory of a few rows of logits.

    bos: as in `save_base`; it has to be what the base was made with. Raises FileFormatError for a damaged file, or one whose rows are no
    probabilities, ShapeError or ContextLimitError for a base of another vocabulary or a longer context, and what `forward` raises.
    """
    runtime, base = Runtime(model, dialect, ops).checked(), llama_logits.open_chunks(path_of(path))
    if base.vocab != model.config.vocab:
        raise ShapeError(f"{path} has a vocabulary of {base.vocab} tokens, the model has {model.config.vocab}, expected the same")
    if base.context > model.config.context:
        raise ContextLimitError(f"{path} has chunks of {base.context} tokens, the model's context is {model.config.context}")
    parts = []
    for n in range(base.chunks):
        ids, rows = base.tokens(n), base.rows(n)
        for positions, logits in _second_half(runtime, ids, bos):
            stored = llama_logits.decode(rows[positions - base.positions[0]], base.vocab).astype(np.float64)
            parts.append(_compared(stored, logits, positions, ids[positions + 1], f"{path}: chunk {n}"))
        progress(n + 1, base.chunks)
    return Divergence(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _second_half(runtime: Runtime, ids: NDArray[np.int64], bos: int | None) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Positions [R] and their logits [R, V], some at a time: from the middle of a chunk to the last that predicts a token of it."""
    config = runtime.model.config
    if bos is not None:
        ids = np.concatenate([[integer("bos", bos, 0, config.vocab - 1, TokenRangeError)], ids[1:]])
    check_context(config, np.array([len(ids)]))
    return logits_from(runtime, ids[:-1], len(ids) // 2)


def _compared(
    stored: Array, logits: NDArray[np.float32], positions: NDArray[np.int64], target: NDArray[np.int64], where: str
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """The fields of Divergence for some rows [R, V], their positions and the tokens that follow, [R].

    Raises FileFormatError that names the first row of `stored` whose probabilities do not add up to about 1.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.where(stored > _LEAST, np.exp(stored), stored * 0).sum(axis=1)  # NaN where something is not finite
    sound = (sums >= _SUMS[0]) & (sums <= _SUMS[1])
    if not sound.all():
        i = sound.argmin()
        raise FileFormatError(f"{where}, position {positions[i]}: its probabilities add up to {sums[i]:.3g}, expected about 1")
    wide = log_probabilities(logits)
    kl = np.where(stored > _LEAST, np.exp(stored) * (stored - wide), 0).sum(axis=1)
    rows = np.arange(len(target))
    return -wide[rows, target], -stored[rows, target], kl, stored.argmax(axis=1) == logits.argmax(axis=1)
