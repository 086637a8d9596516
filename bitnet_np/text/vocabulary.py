"""The tokens of a GGUF file: spellings, types and scores, all of them checked, because a file is not trusted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..base.errors import FileFormatError, shown

T = TypeVar("T")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = TYPES = range(1, 7)  # llama_token_type
SPECIAL = (UNKNOWN, CONTROL, UNUSED)  # tokens for the model, which a reader does not see

NFC = "tokenizer.bitnet_np.nfc"  # a key of our own: GGUF has none for text that is normalised before it is cut

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
"""The spelling of each token of type byte."""


@dataclass(frozen=True)
class Keys:
    """The metadata keys of a file, and checks that name the file and the key."""

    metadata: Mapping[str, Any]
    path: Path

    def check(self, holds: bool, key: str, otherwise: str) -> None:
        if not holds:
            raise FileFormatError(f"{self.path}: {key} {otherwise}")

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, None where it is missing."""
        value: T | None = self.metadata.get(key)
        self.check(value is None or type(value) is kind, key, f"is {shown(value)}, expected {kind.__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(key, ())
        texts = list(value) if isinstance(value, Sequence) else []
        array = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(text, str) for text in texts)
        self.check(array, key, f"is {shown(value)}, expected an array of strings")
        return texts

    def numbers(self, key: str, size: int) -> np.ndarray:
        numbers = np.asarray(self.metadata.get(key, ()))
        self.check(numbers.shape == (size,), key, f"has the shape {numbers.shape}, but there are {size} tokens")
        return numbers

    def token_id(self, key: str, vocabulary: int) -> int | None:
        token = self.get(key, int)
        self.check(token is None or 0 <= token < vocabulary, key, f"is {token}, but there are {vocabulary} tokens")
        return token


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a model. No two are spelled alike."""

    tokens: Sequence[str] = field(repr=False)  # as spelled in the file
    types: np.ndarray = field(repr=False)  # int [len(tokens)], each one of TYPES
    ids: Mapping[int, Mapping[str, int]] = field(repr=False)  # by type: spelling -> token
    bytes: Mapping[int, int] = field(repr=False)  # of tokens of type byte: token -> byte


def read_vocabulary(keys: Keys) -> Vocabulary:
    """Tokens and their types. Raises FileFormatError."""
    key, key_of_types = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    tokens = keys.strings(key)
    types = keys.numbers(key_of_types, len(tokens))
    keys.check(bool(tokens), key, "is missing or empty")
    known = np.isin(types, TYPES)
    wrong = known.argmin()
    expected = f"expected {TYPES[0]} to {TYPES[-1]}"
    keys.check(bool(known.all()), key_of_types, f"is {types[wrong]} for token {wrong}, {expected}")
    if len(set(tokens)) < len(tokens):  # the whole list is checked first, because it is long and seldom wrong
        first: dict[str, int] = {}
        for i, token in enumerate(tokens):
            keys.check(first.setdefault(token, i) == i, key, f"has {shown(token)} twice, as token {first[token]} and as token {i}")
    keys.check("" not in tokens, key, "has an empty string")
    ids = {kind: {tokens[i]: i for i in np.flatnonzero(types == kind).tolist()} for kind in TYPES}
    for spelling in ids[BYTE]:
        keys.check(spelling in BYTES, key, f"has {shown(spelling)} of type byte, expected <0x00> to <0xFF>")
    return Vocabulary(tokens, types, ids, {token: BYTES[spelling] for spelling, token in ids[BYTE].items()})
