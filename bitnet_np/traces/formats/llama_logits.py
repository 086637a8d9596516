"""The file that llama.cpp's perplexity tool writes with --save-all-logits or --kl-divergence-base, read and written.

b"_logits_", int32 n_ctx, n_vocab and n_chunk, int32 tokens [n_chunk, n_ctx], then for each chunk the rows of positions n_ctx/2 to n_ctx-2.
A row is 2*ceil(n_vocab/2) + 4 uint16: float32 step, float32 least, and a code for each token of the vocabulary, whose log-probability is
least + step * code. Nothing below the largest minus 16 can be told apart, and nothing finer than step, which is at most 16 / 65535.

Where a vocabulary wants a beginning-of-sequence token, the tool puts it in place of the first token of each chunk when it computes, but
the file keeps the token of the text.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError, OptionError, ShapeError
from ..normal_form import checked_tokens
from ..points import Entry, Key, Points, Trace
from .arrays import Header, check_size
from .output import Writer

MAGIC = b"_logits_"
RANGE = np.float32(16)
_HEADER = 20


def read(path: str | os.PathLike[str], chunk: int = 0) -> Trace:
    """Log-probabilities [P, V] of one chunk: the point log_probs, at `positions`."""
    path = Path(path)
    with open(path, "rb") as file:
        head, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
    if head[:8] != MAGIC or len(head) < _HEADER:
        raise FileFormatError(f"{path}: starts with {head[:8]!r}, expected {MAGIC!r} and three numbers")
    context, vocab, chunks = (int(n) for n in np.frombuffer(head, "<i4", 3, 8))
    if context < 3 or vocab < 1 or chunks < 1:
        raise FileFormatError(f"{path}: n_ctx {context}, n_vocab {vocab}, n_chunk {chunks}, expected at least 3, 1 and 1")
    first, width = context // 2, _row_width(vocab)
    rows = context - 1 - first
    expected = _HEADER + 4 * context * chunks + 2 * chunks * rows * width
    check_size(path, size, expected, f"n_ctx {context}, n_vocab {vocab}, n_chunk {chunks}")
    if not 0 <= chunk < chunks:
        raise OptionError(f"{path}: chunk is {chunk}, the file has chunks 0 to {chunks - 1}")
    start = _HEADER + 4 * context * chunks + 2 * chunk * rows * width
    ids_header = Header((context,), np.dtype("<i4"), False, _HEADER + 4 * context * chunk)
    rows_header = Header((rows, width), np.dtype("<u2"), False, start)
    ids = checked_tokens(ids_header.mapped(path), str(path))
    if ids.max() >= vocab:
        raise FileFormatError(f"{path}: token {ids.max()} in chunk {chunk}, expected less than n_vocab {vocab}")
    entry = Entry((rows, vocab), np.dtype(np.float32), lambda: decode(rows_header.mapped(path), vocab))
    return Trace(
        Points({Key("log_probs", None): entry}),
        ids,
        f"{path} (llama-logits, chunk {chunk})",
        np.arange(first, context - 1),
        notes={"chunk": chunk, "chunks": chunks},
        log_probs=as_stored,
    )


def _row_width(vocab: int) -> int:
    return 2 * ((vocab + 1) // 2) + 4


def encode(logits: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rows of the file for logits [P, V], by the float32 steps that llama.cpp takes."""
    x = np.asarray(logits, np.float32)
    most = x.max(axis=1, keepdims=True)
    least = np.maximum(x.min(axis=1, keepdims=True), most - RANGE)
    log_sum = np.log(np.exp(x - most).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    step = (most - least) / np.float32(65535)
    out = np.zeros((len(x), _row_width(x.shape[1])), "<u2")
    out[:, :4] = np.hstack([step, least - most - log_sum]).astype("<f4").view("<u2")
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.rint((1 / step) * (x - least))
    out[:, 4 : 4 + x.shape[1]] = np.where((x > least) & (step > 0), codes, 0)
    return out


def decode(rows: NDArray[np.uint16], vocab: int) -> NDArray[np.float32]:
    """Log-probabilities [P, V] of rows of the file, unchecked: a file can make them NaN or infinity."""
    scales = np.ascontiguousarray(rows[:, :4]).view("<f4")
    with np.errstate(over="ignore", invalid="ignore"):
        return scales[:, :1] * rows[:, 4 : 4 + vocab] + scales[:, 1:]


def as_stored(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-probabilities of logits [P, V], rounded as the file rounds them."""
    return decode(encode(logits), logits.shape[1])


class LlamaLogitsWriter(Writer):
    """Logits of one sequence as one chunk; needs the tokens, and all their logits."""

    names = frozenset({"result_output"})

    def begin(self) -> None:
        if self.tokens is None:
            raise OptionError(f"{self.path}: this format holds token ids, give them")

    def put(self, key: Key, array: NDArray) -> None:
        assert self.tokens is not None
        context = len(self.tokens)
        if len(array) != context or context < 3 or array.dtype.kind != "f":
            raise ShapeError(f"{self.path}: {array.dtype} logits {list(array.shape)} of {context} tokens, expected [tokens, V], 3 at least")
        if not np.isfinite(array).all():
            raise ShapeError(f"{self.path}: logits have NaN or infinity in them, which this format cannot hold")
        with open(self.part, "xb") as file:
            file.write(MAGIC + np.array([context, array.shape[1], 1, *self.tokens], "<i4").tobytes())
            encode(array[context // 2 : context - 1]).tofile(file)
