"""Token ids of a call: checked once, then cut into blocks and laid end to end in rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ContextLimitError, EmptyInputError, ShapeError, TokenRangeError, shown
from ..base.validate import array_of, integers, items_of
from ..model.records import Config

Ints = NDArray[np.int64]


class Tokens(NamedTuple):
    """Ids of some sequences, checked: every one of the first lengths[i] of row i is an id of the
    vocabulary."""

    ids: Ints  # [B, T]
    lengths: Ints  # [B], at least 1 each

    @classmethod
    def whole(cls, ids: Ints) -> "Tokens":
        """Checked ids [B, T] without padding."""
        return cls(ids, np.full(len(ids), ids.shape[1]))

    def blocks(self, size: int) -> Iterator["Block"]:
        """Yields at most `size` tokens of each sequence at a time, of those sequences that have some left."""
        longest = int(self.lengths.max())
        for begin in range(0, longest, size):
            end = min(begin + size, longest)
            active = np.flatnonzero(self.lengths > begin)
            lengths = self.lengths[active]
            tokens = Tokens(self.ids[active, begin:end], np.minimum(lengths, end) - begin)
            yield Block(begin, end, active, lengths <= end, tokens)


class Block(NamedTuple):
    """Tokens begin..end of some sequences."""

    begin: int
    end: int
    active: NDArray[np.intp]  # which sequences
    last: NDArray[np.bool_]  # whether it is the last block of each of them
    tokens: Tokens


@dataclass(frozen=True)
class Rows:
    """New tokens of some sequences, end to end."""

    tokens: Ints  # [R]
    sequence: Ints  # [R] which of the call's sequences the row belongs to
    slot: Ints  # [R] where that sequence's keys and values are
    position: Ints  # [R]
    last: Ints  # [B] the row of each sequence's last token

    @classmethod
    def of(cls, config: Config, tokens: Tokens, slots: Ints, start: Ints) -> "Rows":
        """Rows of tokens; slots [B]: each sequence's slot; start [B]: the position of its first new token.
        Raises ContextLimitError."""
        ids, lengths = tokens
        check_context(config, start + lengths)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        offset = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        position, last = start[sequence] + offset, lengths.cumsum() - 1
        return cls(ids[sequence, offset], sequence, slots[sequence], position, last)

    def padded(self, values: NDArray[np.float32], shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Values of rows [R, V], in the shape [B, T, V] with zeros for padding."""
        if len(self.tokens) == shape[0] * shape[1]:
            return values.reshape(*shape, -1)
        out = np.zeros((*shape, values.shape[1]), np.float32)
        starts = np.concatenate([[0], self.last + 1])
        column = np.arange(len(self.sequence)) - starts[self.sequence]
        out[self.sequence, column] = values
        return out


def check_tokens(config: Config, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Tokens:
    """Tokens [B, T] and lengths [B] (None: T each) as int64, with every real token an id of the vocabulary.

    Raises EmptyInputError, ShapeError or TokenRangeError.
    """
    refuse_text("tokens", tokens)
    given = array_of("tokens", tokens, ShapeError, "2 axes; pad it and give the lengths")
    if given.shape[:1] == (0,):
        raise EmptyInputError("Empty batch provided")
    if given.ndim == 1:
        expected = "expected 2 axes: a sequence is a row, as in [[1, 2, 3]]"
        raise ShapeError(f"tokens has shape {given.shape}, {expected}")
    ids = integers("tokens", given, 2, TokenRangeError)
    batch, length = ids.shape
    if length == 0:
        raise EmptyInputError("Tokens cannot be empty")
    counts = np.full(batch, length) if lengths is None else integers("lengths", lengths, 1)
    if counts.shape != (batch,):
        raise ShapeError(f"lengths has shape {counts.shape}, expected ({batch},): one for each sequence")
    for i, count in enumerate(counts):
        if count < 1:
            raise EmptyInputError(f"Tokens cannot be empty: sequence {i} of the batch has length {count}")
        if count > length:
            raise ShapeError(f"lengths[{i}] is {count}, but tokens has shape {ids.shape}")
    wrong = ((ids < 0) | (ids >= config.vocab)) & (np.arange(length) < counts[:, None])
    if wrong.any():
        b, t = np.argwhere(wrong)[0]
        where, known = f"position {t} of sequence {b}", f"0..{config.vocab - 1}"
        raise TokenRangeError(f"token {ids[b, t]} at {where} is not an id of the vocabulary, {known}")
    return Tokens(ids, counts)


def refuse_text(name: str, values: object) -> None:
    """Raises ShapeError for a text in place of its token ids."""
    if isinstance(values, str):
        raise ShapeError(f"{name} is the text {shown(values)}, expected token ids, as a tokenizer gives them")


def check_context(config: Config, end: Ints) -> None:
    """Raises ContextLimitError if a sequence would have more positions, end [B], than the model's context."""
    if end.max() > config.context:
        i = int(end.argmax())
        context = f"the model's context is {config.context}"
        raise ContextLimitError(f"sequence {i} would have {end[i]} positions, {context}")


def pad(sequences: Sequence[Sequence[int] | NDArray]) -> tuple[Ints, Ints]:
    """Sequences of any lengths as tokens int64 [B, T], padded with zeros, and lengths [B].

    Raises ShapeError or TokenRangeError for values that are no integers of 64 bits;
    check_tokens compares them with a vocabulary.
    """
    given = items_of("tokens", sequences, ShapeError)
    rows = [integers("tokens", sequence, 1, TokenRangeError) for sequence in given]
    lengths = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(lengths), lengths.max(initial=0)), np.int64)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths
