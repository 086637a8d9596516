"""The file that llama.cpp's perplexity tool writes with --save-all-logits or --kl-divergence-base, read and written.

b"_logits_", int32 n_ctx, n_vocab and n_chunk, int32 tokens [n_chunk, n_ctx], then for each chunk the rows of positions n_ctx/2 to n_ctx-2.
A row is 2*ceil(n_vocab/2) + 4 uint16: float32 step, float32 least, and a code for each token of the vocabulary, whose log-probability is
least + step * code. Nothing below the largest minus 16 can be told apart, and nothing finer than step, which is at most 16 / 65535.

If a vocabulary wants a beginning-of-sequence token, the tool puts it in place of the first token of each chunk when it computes, but
the file keeps the token of the text.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError, OptionError, ShapeError
from ...base.validate import integer
from ..normal_form import agreed_tokens, checked_tokens
from ..points import Entry, Key, Points, Trace
from .arrays import Header, check_size, head_of
from .output import Put, Writer

MAGIC = b"_logits_"
RANGE = np.float32(16)
_HEADER = 20


class Chunks(NamedTuple):
    """What the head of such a file says is in it. The size of the file agrees."""

    path: Path
    context: int
    vocab: int
    chunks: int

    @property
    def positions(self) -> NDArray[np.int64]:
        """The positions of a chunk that it has rows of."""
        return np.arange(self.context // 2, self.context - 1)

    def tokens(self, chunk: int) -> NDArray[np.int64]:
        """The token ids of a chunk, [n_ctx]. Raises FileFormatError for those that are not in the vocabulary."""
        ids = checked_tokens(
            Header((self.context,), np.dtype("<i4"), False, _HEADER + 4 * self.context * chunk).map_from(self.path), str(self.path)
        )
        if ids.max() >= self.vocab:
            raise FileFormatError(f"{self.path}: token {ids.max()} in chunk {chunk}, expected less than n_vocab {self.vocab}")
        return ids

    def rows(self, chunk: int) -> NDArray[np.uint16]:
        """The rows of a chunk, mapped from the file."""
        shape = len(self.positions), _row_width(self.vocab)
        before = _HEADER + 4 * self.context * self.chunks + 2 * chunk * shape[0] * shape[1]
        return Header(shape, np.dtype("<u2"), False, before).map_from(self.path)


def open_chunks(path: Path) -> Chunks:
    """The head of a file. Raises FileFormatError if it is damaged, or the file has another size."""
    head, size = head_of(path, _HEADER)
    if head[:8] != MAGIC or len(head) < _HEADER:
        raise FileFormatError(f"{path}: starts with {head[:8]!r}, expected {MAGIC!r} and three numbers")
    context, vocab, chunks = (int(n) for n in np.frombuffer(head, "<i4", 3, 8))
    if context < 3 or vocab < 1 or chunks < 1:
        raise FileFormatError(f"{path}: n_ctx {context}, n_vocab {vocab}, n_chunk {chunks}, expected at least 3, 1 and 1")
    rows = context - 1 - context // 2
    expected = _HEADER + 4 * context * chunks + 2 * chunks * rows * _row_width(vocab)
    check_size(path, size, expected, f"n_ctx {context}, n_vocab {vocab}, n_chunk {chunks}")
    return Chunks(path, context, vocab, chunks)


def read(path: Path, tokens: NDArray | None = None, chunk: int = 0) -> Trace:
    """Log-probabilities [P, V] of one chunk: the point log_probs, at `positions`. It has its own tokens; `tokens` must be the same."""
    of = open_chunks(path)
    integer(f"{path}: chunk", chunk, 0, of.chunks - 1)
    entry = Entry((len(of.positions), of.vocab), np.dtype(np.float32), lambda: decode(of.rows(chunk), of.vocab))
    return Trace(
        Points({Key("log_probs", None): entry}),
        agreed_tokens(of.tokens(chunk), tokens, str(path)),
        f"{path} (llama-logits, chunk {chunk})",
        of.positions,
        log_probs=as_stored,
    )


def head(tokens: NDArray[np.int64], vocab: int) -> bytes:
    """The beginning of a file of chunks of tokens [chunks, n_ctx], up to the first row."""
    return MAGIC + np.array([tokens.shape[1], vocab, len(tokens), *tokens.ravel()], "<i4").tobytes()


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


def write(out: Writer) -> Iterator[Put]:
    """Logits of one sequence as one chunk; needs the tokens, and all their logits."""
    if out.tokens is None:
        raise OptionError(f"{out.path}: this format holds token ids, give them")
    tokens, context = out.tokens, len(out.tokens)

    def put(key: Key, array: NDArray) -> None:
        if len(array) != context or context < 3 or array.dtype.kind != "f":
            raise ShapeError(f"{out.path}: {array.dtype} logits {list(array.shape)} of {context} tokens, expected [tokens, V], 3 at least")
        if not np.isfinite(array).all():
            raise ShapeError(f"{out.path}: logits have NaN or infinity in them, which this format cannot hold")
        file.write(head(tokens[None], array.shape[1]))
        encode(array[context // 2 : context - 1]).tofile(file)

    with open(out.part, "xb") as file:
        yield put
