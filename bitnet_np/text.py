"""Tokenizer and chat template from the metadata of a GGUF file; needs the extra `text`.

Encoding is the byte-level BPE of the `tokenizers` library, built from the file's own tokens and merges. Special tokens and decoding are
done here, because a GGUF file says more of them than that library can hold: each token has a type, normal ones are spelled in GPT-2's
byte characters, all others in plain text. Which text may become which token is as in llama.cpp (llama-vocab.cpp): user-defined tokens
are always found in a text, control tokens only where the caller allows it.
"""

import codecs
import operator
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import numpy as np

from .errors import FileFormatError, OptionError, TokenRangeError, UnsupportedError, shown

T = TypeVar("T")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = _TYPES = range(1, 7)  # llama_token_type
_SPECIAL = (UNKNOWN, CONTROL, UNUSED)  # say something to the model, nothing to a reader

_TEMPLATE_CHARACTERS = 1 << 18  # the longest published chat templates have some ten thousand
_CHAT_CHARACTERS = 1 << 22
_CHAT_SECONDS = 5.0


def _byte_characters() -> str:
    """GPT-2's bytes_to_unicode: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in their order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_CHARACTERS = _byte_characters()
_TO_LATIN1 = str.maketrans(BYTE_CHARACTERS, bytes(range(256)).decode("latin-1"))


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut into words before BPE. Each pattern in turn cuts what the ones before it left."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say ("ignore_merges")
    add_bos: bool = False  # where the file does not say


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = _PreTokenizer((_GPT2_WORDS,))
_LLAMA3 = _PreTokenizer((_LLAMA3_WORDS,), whole_words=True, add_bos=True)
_DEFAULT = _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9]{3}"))
# The names, and what stands behind each, are llama.cpp's; the patterns those of the published tokenizer.json files where there are any.
_PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA3),
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    "default": _DEFAULT,
}


def pre_tokenizer_name(patterns: tuple[str, ...] | None, whole_words: bool) -> str | None:
    """The first name of these rules, if they have one. None for the patterns are those of GPT-2."""
    wanted = patterns or _GPT2.patterns
    return next((name for name, pre in _PRE_TOKENIZERS.items() if (pre.patterns, pre.whole_words) == (wanted, whole_words)), None)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back, as one GGUF file has it. Made by `tokenizer_from`."""

    path: Path
    bos: int | None
    eos: int | None
    stops: tuple[int, ...]  # generation ends at any of these: end of text, end of turn
    add_bos: bool  # whether the file wants its bos before a text
    template: str | None = field(repr=False)
    tokens: Sequence[str] = field(repr=False)  # as spelled in the file
    types: np.ndarray = field(repr=False)  # int [len(tokens)]
    _bpe: Any = field(repr=False)
    _unspelled: frozenset[int] = field(repr=False)  # bytes that no token spells
    _ids: Mapping[str, int] = field(repr=False)  # of tokens that are found in a text before BPE
    _user_defined: re.Pattern[str] = field(repr=False)
    _any_special: re.Pattern[str] = field(repr=False)

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        """Token ids of `text`.

        With `special`, the spelling of a control token in the text is that token; without it, only text. Leave it off for text from others.
        """
        _check_encodable(text)
        ids = self._start(self.add_bos if add_bos is None else add_bos)
        pieces = (self._any_special if special else self._user_defined).split(text)
        for i, piece in enumerate(pieces):  # split leaves what it matched at odd places
            ids += [self._ids[piece]] if i % 2 else self._encode_ordinary(piece)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD. Special tokens are left out, or else spelled as in the file."""
        return b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int, *, skip_special: bool = True) -> bytes:
        """What one token says; it may begin or end inside a character."""
        token = operator.index(token)
        if not 0 <= token < len(self.tokens):
            raise TokenRangeError(f"token id {token}, but the vocabulary of {self.path} has the ids 0 to {len(self.tokens) - 1}")
        kind, spelling = self.types[token], self.tokens[token]
        if kind in _SPECIAL and skip_special:
            return b""
        if kind == BYTE:
            return bytes([int(spelling[1:-1], 16)])
        return spelling.translate(_TO_LATIN1).encode("latin-1") if kind == NORMAL else spelling.encode()

    def decode_stream(self, *, skip_special: bool = True) -> "DecodeStream":
        """A decoder that takes one id at a time."""
        return DecodeStream(self, skip_special)

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, as the file's template renders it.

        The template spells its control tokens out in the same text as the messages, so a message that spells one says it too: keep such
        text out of messages from others. The bos comes once: from the template, or where that has none, as the file wants it.
        """
        ids = self.encode(self.chat_text(messages, add_generation_prompt), add_bos=False, special=True)
        return ids if ids[:1] == [self.bos] else self._start(self.add_bos) + ids

    def chat_text(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one text."""
        if self.template is None:
            raise UnsupportedError(f"{self.path}: the file has no tokenizer.chat_template")
        names = {"bos_token": self.bos, "eos_token": self.eos}
        spelled = {name: "" if token is None else self.tokens[token] for name, token in names.items()}
        return _render(self.path, self.template, {"messages": messages, "add_generation_prompt": add_generation_prompt, **spelled})

    def _start(self, add_bos: bool) -> list[int]:
        if not add_bos:
            return []
        if self.bos is None:
            raise OptionError(f"add_bos is True, but {self.path} has no tokenizer.ggml.bos_token_id")
        return [self.bos]

    def _encode_ordinary(self, text: str) -> list[int]:
        if self._unspelled and (lost := self._unspelled.intersection(text.encode())):
            raise UnsupportedError(f"{self.path}: no token spells the byte {min(lost):#04x} of {text[:40]!r}")
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids


class DecodeStream:
    """Text from ids that come one by one. All that was fed and the finish together are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that is certain with this token: the bytes of a character that may go on wait for the next."""
        return self._decoder.decode(self._tokenizer.token_bytes(token, skip_special=self._skip_special))

    def finish(self) -> str:
        """What the waiting bytes are if nothing follows."""
        return self._decoder.decode(b"", final=True)


def tokenizer_from(metadata: Mapping[str, Any], path: str | PathLike[str]) -> Tokenizer:
    """Check the tokenizer of a GGUF file and build it. `path` is for messages. 128,256 tokens with 280,147 merges take 0.8 s."""
    file = _Keys(metadata, Path(path))
    model = file.get("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UnsupportedError(f"{path}: tokenizer.ggml.model is {shown(model or 'missing')}, expected 'gpt2' (byte-level BPE)")
    tokens = file.strings("tokenizer.ggml.tokens")
    types = _token_types(file, len(tokens))
    _check_tokens(file, tokens, types)
    ids = {kind: {tokens[i]: i for i in np.flatnonzero(types == kind).tolist()} for kind in _TYPES}
    user_defined, control = ids[USER_DEFINED], ids[CONTROL] | ids[UNKNOWN]
    named = {name: file.token_id(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot", "padding", "unknown")}
    stops = {named["eos"], named["eot"], control.get("<|eot_id|>")}  # Llama 3's files name their end of turn by its spelling only
    pre = _pre_tokenizer(file, tokens, named["bos"])
    return Tokenizer(
        path=file.path,
        bos=named["bos"],
        eos=named["eos"],
        stops=tuple(sorted(stop for stop in stops if stop is not None)),
        add_bos=_adds_bos(file, pre, named["bos"]),
        template=file.get("tokenizer.chat_template", str),
        tokens=tokens,
        types=types,
        _bpe=_byte_level_bpe(ids[NORMAL], _merges(file, ids[NORMAL]), pre),
        _unspelled=frozenset(byte for byte, character in enumerate(BYTE_CHARACTERS) if character not in ids[NORMAL]),
        _ids=user_defined | control,
        _user_defined=_any_of(user_defined),
        _any_special=_any_of(user_defined | control),
    )


@dataclass(frozen=True)
class _Keys:
    """The file's metadata, not yet trusted."""

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


def _token_types(file: _Keys, vocabulary: int) -> np.ndarray:
    """One of the six for each token. The scores are of no use here, but must be as many."""
    if "tokenizer.ggml.scores" in file.metadata:
        file.numbers("tokenizer.ggml.scores", vocabulary)
    key = "tokenizer.ggml.token_type"
    types = file.numbers(key, vocabulary)
    for i in np.flatnonzero(~np.isin(types, _TYPES))[:1].tolist():
        file.check(False, key, f"is {types[i]} for token {i}, expected {_TYPES[0]} to {_TYPES[-1]}")
    return types


def _check_tokens(file: _Keys, tokens: list[str], types: np.ndarray) -> None:
    """Each token has a spelling of its own, in the characters of its type. The whole list first, because it is long and seldom wrong."""
    key = "tokenizer.ggml.tokens"
    file.check(bool(tokens), key, "is missing or empty")
    first: dict[str, int] = {}
    if len(set(tokens)) < len(tokens):
        for i, token in enumerate(tokens):
            file.check(first.setdefault(token, i) == i, key, f"has {shown(token)} twice, as token {first[token]} and as token {i}")
    file.check("" not in tokens, key, "has an empty string")
    for byte in (tokens[i] for i in np.flatnonzero(types == BYTE)):
        file.check(bool(re.fullmatch("<0x[0-9A-F]{2}>", byte)), key, f"has {shown(byte)} of type byte, expected <0x00> to <0xFF>")
    normal = [tokens[i] for i in np.flatnonzero(types == NORMAL)]
    for character in set().union(*normal) - set(BYTE_CHARACTERS):
        token = next(token for token in normal if character in token)
        file.check(False, key, f"has {shown(token)} of type normal, but {character!r} is none of the 256 byte characters")


def _merges(file: _Keys, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a third."""
    key = "tokenizer.ggml.merges"
    pairs = [tuple(merge.split(" ")) for merge in file.strings(key)]
    for i, pair in enumerate(pairs):
        if len(pair) != 2 or "".join(pair) not in ids or pair[0] not in ids or pair[1] not in ids:
            file.check(len(pair) == 2, key, f"has {shown(' '.join(pair))} as merge {i}, expected two tokens and a space between them")
            unknown = next(part for part in (*pair, "".join(pair)) if part not in ids)
            file.check(False, key, f"has {shown(' '.join(pair))} as merge {i}, but {shown(unknown)} is no token of type normal")
    file.check(len(set(pairs)) == len(pairs), key, "has the same merge twice")
    return pairs  # type: ignore[return-value]


def _pre_tokenizer(file: _Keys, tokens: list[str], bos: int | None) -> _PreTokenizer:
    """By the name in the file. A file that names none (the released BitNet 2B is one) has Llama 3's if its vocabulary is Llama 3's:
    128,256 tokens and bos 128000, spelled <|begin_of_text|>. Else GPT-2's, the one that "gpt2" had before files named any."""
    name = file.get("tokenizer.ggml.pre", str)
    if name is None:
        return _LLAMA3 if len(tokens) == 128256 and bos == 128000 and tokens[bos] == "<|begin_of_text|>" else _GPT2
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedError(f"{file.path}: tokenizer.ggml.pre is {shown(name)}, expected one of {', '.join(_PRE_TOKENIZERS)}")
    return _PRE_TOKENIZERS[name]


def _adds_bos(file: _Keys, pre: _PreTokenizer, bos: int | None) -> bool:
    key = "tokenizer.ggml.add_bos_token"
    asked = file.get(key, bool)
    file.check(not asked or bos is not None, key, "is True, but there is no tokenizer.ggml.bos_token_id")
    return pre.add_bos and bos is not None if asked is None else asked


def _byte_level_bpe(ids: Mapping[str, int], merges: list[tuple[str, str]], pre: _PreTokenizer) -> Any:
    """The library's tokenizer of ordinary text."""
    tokenizers = _extra("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges, ignore_merges=pre.whole_words))
    cuts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cuts, to_bytes])
    return bpe


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Finds the leftmost and there the longest of `spellings`, as `tokenizers` does; nothing if there are none."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(f"text has the lone surrogate {text[error.start]!r} at {error.start}, which UTF-8 cannot hold") from None


def _extra(module: str) -> ModuleType:
    """A module of the extra `text`, imported when it is needed."""
    try:
        return import_module(module)
    except ImportError:
        raise UnsupportedError(f"text needs {module.partition('.')[0]}: pip install 'bitnet_np[text]'") from None


class _RefusedMessages(Exception):
    """What a template's raise_exception raises."""


def _render(path: Path, template: str, names: Mapping[str, Any]) -> str:
    """Render a chat template, which is a program written by whoever made the file.

    It runs in Jinja's immutable sandbox, as in transformers, and cannot reach files, modules or the messages' objects. The length of
    what it writes is bounded, and so is its time: checked at each turn of a loop and each call of a macro. Not bounded is the memory of
    one value: a template that doubles a string over and over can still ask for all there is.
    """
    key = f"{path}: tokenizer.chat_template"
    if len(template) > _TEMPLATE_CHARACTERS:
        raise UnsupportedError(f"{key} has {len(template)} characters, expected at most {_TEMPLATE_CHARACTERS}")
    environment = _environment(time.monotonic() + _CHAT_SECONDS)
    pieces, size = [], 0
    try:
        for piece in environment.from_string(_with_ticks(environment.parse(template))).generate(names):
            pieces.append(piece)
            size += len(piece)
            if size > _CHAT_CHARACTERS:
                raise OverflowError(f"it writes more than {_CHAT_CHARACTERS} characters")
    except _RefusedMessages as refused:
        raise OptionError(f"{key} refuses these messages: {shown(str(refused))}") from None
    except Exception as error:  # a template can raise anything: it can divide by zero
        raise FileFormatError(f"{key} does not work: {type(error).__name__}: {shown(str(error))}") from None
    return "".join(pieces)


def _environment(deadline: float) -> Any:
    """The settings and names that transformers gives to chat templates, without a clock, and without arithmetic on strings."""
    sandbox, exceptions = _extra("jinja2.sandbox"), _extra("jinja2.exceptions")

    class Environment(sandbox.ImmutableSandboxedEnvironment):  # type: ignore[name-defined]
        intercepted_binops = frozenset(("*", "**", "%"))  # a few characters of these can make a value of any size

        def call_binop(self, context: Any, symbol: str, left: Any, right: Any) -> Any:
            if symbol == "**" or not isinstance(left, int | float) or not isinstance(right, int | float):
                raise exceptions.SecurityError(f"{symbol} of {type(left).__name__} and {type(right).__name__} is not allowed")
            return super().call_binop(context, symbol, left, right)

        def tick(self) -> None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes longer than {_CHAT_SECONDS} s")

    def raise_exception(message: object) -> NoReturn:
        raise _RefusedMessages(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals = {name: environment.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
    environment.globals["raise_exception"] = raise_exception
    return environment


def _with_ticks(tree: Any) -> Any:
    """The parsed template with a look at the clock wherever something can repeat."""
    nodes = _extra("jinja2.nodes")
    for repeated in tree.find_all((nodes.For, nodes.Macro, nodes.Block)):
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)  # a name that no template can say or change
        repeated.body.insert(0, nodes.ExprStmt(tick).set_lineno(repeated.lineno))
    return tree
