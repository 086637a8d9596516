"""Text to token ids and back, by the tokenizer keys of a GGUF file. Byte-level BPE and chat templates need the extra `text`.

byte_level.py or spm.py encodes ordinary text, as the file says. Special tokens and decoding are handled here: each token has a type;
normal tokens are spelled in the way of their tokenizer, all others in plain text. Text becomes special tokens as in llama.cpp
(llama-vocab.cpp): user-defined tokens are always found in a text, control tokens only if the caller allows it.
"""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np

from ..base.errors import OptionError, TokenRangeError, UnsupportedError, shown
from ..base.validate import instance, integer
from .byte_level import ByteLevelBpe, byte_level_bpe, pre_tokenizer
from .chat_template import render
from .spm import SPACE, ScoredPieces, scored_pieces
from .vocabulary import BYTE, CONTROL, NFC, NORMAL, SPECIAL, UNKNOWN, USER_DEFINED, Keys, read_vocabulary

_NAMED = ("bos", "eos", "eot", "padding", "unknown")
_SPM_NAMED = {"bos": 1, "eos": 2, "unknown": 0}  # the ids where a file with the tokenizer "llama" does not say


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back, as one GGUF file has it. Made by `tokenizer_from`."""

    path: Path
    bos: int | None
    eos: int | None
    stops: tuple[int, ...]  # generation ends at any of these: end of text, end of turn
    add_bos: bool  # whether the file wants its bos before a text
    add_eos: bool  # whether the file wants its eos after a text
    template: str | None = field(repr=False)
    tokens: Sequence[str] = field(repr=False)  # as spelled in the file
    types: np.ndarray = field(repr=False)  # int [len(tokens)]
    _nfc: bool = field(repr=False)  # text is brought to Unicode's form C before it is cut
    _ordinary: ByteLevelBpe | ScoredPieces = field(repr=False)
    _bytes: Mapping[int, int] = field(repr=False)  # of tokens of type byte
    _ids: Mapping[str, int] = field(repr=False)  # tokens that are found in a text before it is cut
    _matched: frozenset[int] = field(repr=False)  # the ids of those tokens
    _user_defined: re.Pattern[str] = field(repr=False)
    _any_special: re.Pattern[str] = field(repr=False)

    def encode(self, text: str, *, add_bos: bool | None = None, add_eos: bool | None = None, special: bool = False) -> list[int]:
        """Token ids of `text`.

        With `special`, the spelling of a control token in the text becomes that token; without, it stays text. Leave it off for text from
        others.

        Raises OptionError for a lone surrogate, or for a bos or eos that is to be added but does not exist; UnsupportedError for a byte
        that no token spells.
        """
        instance("text", text, str)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OptionError(f"text has the lone surrogate {text[error.start]!r} at {error.start}, which UTF-8 cannot hold") from None
        ids = self._named("bos", self.bos, self.add_bos if add_bos is None else add_bos)
        pieces = (self._any_special if special else self._user_defined).split(text)
        for i, piece in enumerate(pieces):  # split leaves what it matched at odd places
            if piece:
                ids += [self._ids[piece]] if i % 2 else self._ordinary.encode(normalize("NFC", piece) if self._nfc else piece)
        return ids + self._named("eos", self.eos, self.add_eos if add_eos is None else add_eos)

    def decode(self, ids: Iterable[int], *, after: Sequence[int] = (), skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD. Special tokens are left out, or else spelled as in the file.

        `after` are the ids that come before these in a text. At the start of a text, a first space may be the tokenizer's own: it is left
        out.

        Raises TokenRangeError for a number that is no id.
        """
        stream = self.decode_stream(after=after, skip_special=skip_special)
        return "".join([stream.feed(token) for token in ids]) + stream.finish()

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """The UTF-8 that one token stands for. It may begin or end inside a character."""
        token = self._checked(token)
        kind, spelling = self.types[token], self.tokens[token]
        if kind in SPECIAL and skip_special:
            return b""
        if kind == BYTE:
            return bytes([self._bytes[token]])
        ordinary = kind == NORMAL or (kind == USER_DEFINED and token not in self._matched)
        return self._ordinary.decode(spelling) if ordinary else spelling.encode()

    def decode_stream(self, *, after: Sequence[int] = (), skip_special: bool = True) -> "DecodeStream":
        """A decoder that takes one id at a time; `after` as in `decode`."""
        return DecodeStream(self, self.cuts(after[-1]) if len(after) else True, skip_special)

    def cuts(self, token: int) -> bool:
        """Whether the text after this token is encoded as if it were the first."""
        return self._checked(token) in self._matched

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, as the file's template renders it.

        The template spells its control tokens in the same text as the messages, so the spelling of one in a message becomes that token,
        too: keep such text out of messages from others. The bos comes once: from the template, or if that has none, as the file says.
        """
        ids = self.encode(self.chat_text(messages, add_generation_prompt), add_bos=False, add_eos=False, special=True)
        return ids if ids[:1] == [self.bos] else self._named("bos", self.bos, self.add_bos) + ids

    def chat_text(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one text. Raises UnsupportedError without a template, and the errors of `chat_template.render`."""
        if self.template is None:
            raise UnsupportedError(f"{self.path}: the file has no tokenizer.chat_template")
        names = {"bos_token": self.bos, "eos_token": self.eos}
        spelled = {name: "" if token is None else self.tokens[token] for name, token in names.items()}
        return render(self.path, self.template, {"messages": messages, "add_generation_prompt": add_generation_prompt, **spelled})

    def _named(self, name: str, token: int | None, adds: bool) -> list[int]:
        if not adds:
            return []
        if token is None:
            raise OptionError(f"add_{name} is True, but {self.path} has no tokenizer.ggml.{name}_token_id")
        return [token]

    def _checked(self, token: int) -> int:
        return integer(f"{self.path}: token id", token, 0, len(self.tokens) - 1, TokenRangeError)


class DecodeStream:
    """Text from ids that come one by one. The texts of all `feed` calls and of `finish` together are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, at_start: bool, skip_special: bool) -> None:
        self._tokenizer, self._at_start, self._skip_special = tokenizer, at_start, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that is certain with this token: the bytes of an incomplete character wait for the next token."""
        tokenizer = self._tokenizer
        text, cuts = tokenizer.token_bytes(token, skip_special=self._skip_special), tokenizer.cuts(token)
        if self._at_start and tokenizer._ordinary.space_prefix and not cuts and tokenizer.types[token] != BYTE:
            text = text.removeprefix(b" ")  # the tokenizer's own
        self._at_start = cuts
        return self._decoder.decode(text)

    def finish(self) -> str:
        """The text of the bytes that still wait, when nothing follows."""
        return self._decoder.decode(b"", final=True)


def tokenizer_from(metadata: Mapping[str, Any], path: str | PathLike[str]) -> Tokenizer:
    """Check the tokenizer of a GGUF file and build it. `path` is for messages. 128,256 tokens with 280,147 merges take 0.8 s.

    Raises FileFormatError, or UnsupportedError, also where the extra `text` is missing.
    """
    keys = Keys(metadata, Path(path))
    model = keys.get("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{path}: tokenizer.ggml.model is {shown(model or 'missing')}, expected 'gpt2' (BPE of bytes) or 'llama' (SentencePiece's BPE)"
        )
    vocabulary = read_vocabulary(keys)
    size, user_defined = len(vocabulary.tokens), vocabulary.ids[USER_DEFINED]
    named = {name: keys.token_id(f"tokenizer.ggml.{name}_token_id", size) for name in _NAMED}
    ordinary: ByteLevelBpe | ScoredPieces
    if model == "llama":
        named |= {name: token for name, token in _SPM_NAMED.items() if named[name] is None and token < size}
        # those that are spelled like its ordinary tokens are made like them
        user_defined = {spelling: token for spelling, token in user_defined.items() if SPACE not in spelling}
        ordinary, add_bos = scored_pieces(keys, vocabulary), True
    else:
        pre = pre_tokenizer(keys, vocabulary, named["bos"])
        ordinary, add_bos = byte_level_bpe(keys, vocabulary, pre), pre.add_bos
    control = {**vocabulary.ids[CONTROL], **vocabulary.ids[UNKNOWN]}
    stops = {named["eos"], named["eot"], control.get("<|eot_id|>")}  # Llama 3's files name their end of turn by its spelling only
    return Tokenizer(
        path=keys.path,
        bos=named["bos"],
        eos=named["eos"],
        stops=tuple(sorted(stop for stop in stops if stop is not None)),
        add_bos=_adds(keys, "bos", named, add_bos),
        add_eos=_adds(keys, "eos", named, False),
        template=keys.get("tokenizer.chat_template", str),
        tokens=vocabulary.tokens,
        types=vocabulary.types,
        _nfc=keys.get(NFC, bool) is True,
        _ordinary=ordinary,
        _bytes=vocabulary.bytes,
        _ids={**user_defined, **control},
        _matched=frozenset({*user_defined.values(), *control.values()}),
        _user_defined=_any_of(user_defined),
        _any_special=_any_of({**user_defined, **control}),
    )


def _adds(keys: Keys, name: str, named: Mapping[str, int | None], default: bool) -> bool:
    """Whether texts get that token by default: as the file says, or else `default`."""
    key = f"tokenizer.ggml.add_{name}_token"
    stated = keys.get(key, bool)
    keys.check(not stated or named[name] is not None, key, f"is True, but there is no tokenizer.ggml.{name}_token_id")
    return default and named[name] is not None if stated is None else stated


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost of `spellings`, and of those the longest, as `tokenizers` does; without any it finds nothing."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")
