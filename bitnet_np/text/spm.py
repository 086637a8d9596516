"""The BPE of SentencePiece, by the scores of tokens. GGUF files call it the tokenizer "llama".

A text starts as its characters, with U+2581 for spaces. Among all neighbours that together spell a token, the pair with the highest score
is joined, the leftmost first among equals, until no pair can be joined. Unused tokens are then taken apart again, and a piece that is no
token becomes the tokens of its UTF-8 bytes. (Byte-level BPE ranks pairs; this one ranks the token that a pair makes. No list of ranked
pairs gives the same answers if two overlapping pairs make one token.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from ..base.errors import UnsupportedError, shown
from .vocabulary import NORMAL, UNUSED, USER_DEFINED, Keys, Vocabulary

SPACE = "\u2581"
_IGNORED = ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap")  # these change a text before it is cut


@dataclass(frozen=True, eq=False)
class ScoredPieces:
    """Encodes ordinary text. Made by `scored_pieces`."""

    path: Path
    space_prefix: bool  # whether a text starts with a space that is not in it
    _ids: Mapping[str, int] = field(repr=False)  # tokens that can be made by joining
    _scores: Sequence[float] = field(repr=False)  # by token
    _unused: frozenset[int] = field(repr=False)  # tokens that are made only on the way to others
    _bytes: Mapping[int, int] = field(repr=False)  # byte -> token

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that is not empty. Raises UnsupportedError for a character that no token spells."""
        joined, parts = self._joined((" " + text if self.space_prefix else text).replace(" ", SPACE))
        ids: list[int] = []
        waiting = joined[::-1]
        while waiting:
            piece = waiting.pop()
            token = self._ids.get(piece)
            if token is not None and token not in self._unused:
                ids.append(token)
            elif piece in parts:
                waiting += parts[piece][::-1]
            else:
                try:
                    ids += [self._bytes[byte] for byte in piece.encode()]
                except KeyError:
                    raise UnsupportedError(f"{self.path}: no token spells {shown(piece)}, nor its bytes") from None
        return ids

    def decode(self, spelling: str) -> bytes:
        """The bytes of the text that a normal token stands for."""
        return spelling.replace(SPACE, " ").encode()

    def _joined(self, text: str) -> tuple[list[str], dict[str, tuple[str, str]]]:
        """The pieces that `text` is joined to, and the two parts of each unused piece, as they were last joined."""
        pieces = list(text)
        end = len(pieces)
        before, after = list(range(-1, end - 1)), list(range(1, end + 1))
        candidates: list[tuple[float, int, int, int]] = []
        parts: dict[str, tuple[str, str]] = {}

        def consider(left: int, right: int) -> None:
            if left < 0 or right == end:
                return
            token = self._ids.get(pieces[left] + pieces[right])
            if token is not None:
                heappush(candidates, (-self._scores[token], left, right, len(pieces[left]) + len(pieces[right])))
                if token in self._unused:
                    parts[pieces[left] + pieces[right]] = pieces[left], pieces[right]

        for right in range(1, end):
            consider(right - 1, right)
        while candidates:
            _, left, right, size = heappop(candidates)
            if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != size:
                continue  # one of the two has been joined to another
            pieces[left] += pieces[right]
            pieces[right] = ""
            after[left] = after[right]
            if after[left] < end:
                before[after[left]] = left
            consider(before[left], left)
            consider(left, after[left])
        return [piece for piece in pieces if piece], parts


def scored_pieces(keys: Keys, vocabulary: Vocabulary) -> ScoredPieces:
    """From a file whose tokenizer.ggml.model is "llama". Raises FileFormatError or UnsupportedError."""
    for key in _IGNORED:
        value = keys.metadata.get(key)
        if value is not None and value is not False and np.size(value):
            raise UnsupportedError(f"{keys.path}: {key} is {shown(value)}, which is not supported with tokenizer.ggml.model 'llama'")
    prefix, ids, key = keys.get("tokenizer.ggml.add_space_prefix", bool), vocabulary.ids, "tokenizer.ggml.scores"
    scores = keys.numbers(key, len(vocabulary.tokens))
    keys.check(scores.dtype.kind in "fiu", key, f"are of type {scores.dtype}, expected numbers")
    unknown = np.isnan(scores)
    keys.check(not unknown.any(), key, f"is NaN for token {unknown.argmax()}, expected a number")
    return ScoredPieces(
        path=keys.path,
        space_prefix=prefix is not False,
        _ids={**ids[NORMAL], **ids[USER_DEFINED], **ids[UNUSED]},
        _scores=scores.astype(np.float64).tolist(),
        _unused=frozenset(ids[UNUSED].values()),
        _bytes={byte: token for token, byte in vocabulary.bytes.items()},
    )
