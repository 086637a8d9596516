"""Byte-level BPE, which GGUF files call the tokenizer "gpt2": text is split into words, and pairs in a word are joined by rank.

The `tokenizers` library (extra `text`) does the work, with the file's tokens and merges.
"""

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ..base.errors import UnsupportedError, shown
from ..base.extras import extra
from .vocabulary import NORMAL, Keys, Vocabulary

_PRINTABLE, _OTHERS = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}, count(0x100)
BYTE_CHARACTERS = "".join(chr(byte if byte in _PRINTABLE else next(_OTHERS)) for byte in range(256))
"""GPT-2's bytes_to_unicode: printable Latin-1 stands for itself, the other bytes for U+0100 and on, in their order."""
_TO_LATIN1 = str.maketrans(BYTE_CHARACTERS, bytes(range(256)).decode("latin-1"))


# --- words ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before BPE. Each pattern in turn cuts what the ones before it left."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say ("ignore_merges")
    add_bos: bool = False  # where the file does not say


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str, line_ends: str = r"[\r\n]*") -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{line_ends}|{_LINES}"


def _cased_words(contractions: str, numbers: str) -> str:
    """A pattern by which a word ends where a capital letter follows a small one."""
    capital, small, before = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}[{capital}]*[{small}]+{contractions}|{before}[{capital}]+[{small}]*{contractions}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    )


LLAMA3_WORDS = _words(r"\p{N}{1,3}")
_LLAMA3 = PreTokenizer((LLAMA3_WORDS,), whole_words=True, add_bos=True)
_GPT2 = PreTokenizer((GPT2_WORDS,))
_DIGITS_GPT2 = PreTokenizer((DIGITS, GPT2_WORDS))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_QWEN35 = PreTokenizer((rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",))
_GPT4O = PreTokenizer((_cased_words(_CONTRACTIONS + "?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LETTERS = (  # a separate list: most letters that are capital or small
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fecῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-\u212dℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮ\u2cf2\u2cf3Ꙁ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_BLOOM_WORDS = r" ?[^(\s|.,!?…。，、।۔،)]+"

# The names and their rules are llama.cpp's; the patterns are from the published tokenizer.json files, if there are any.
# If the same rules have several names, files are written with the first one.
PRE_TOKENIZERS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((LLAMA3_WORDS,))),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "trillion", "gigachat", "a.x-4.0", "mellum"), _GPT2),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, DIGITS)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "tekken": PreTokenizer((_cased_words("", r"\p{N}"),), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    "seed-coder": PreTokenizer((rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM_WORDS,))),
    "viking": PreTokenizer((_BLOOM_WORDS, DIGITS)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9]{3}")),
}

_SAME_IN_LINEAR_TIME = {r"\s+$": r"(?<!\s)\s+$"}
"""Patterns that try each place of a run of spaces, and others that find the same: 60,000 spaces in front of a digit took 15 s."""


def pre_tokenizer_name(patterns: tuple[str, ...], whole_words: bool) -> str | None:
    """The first name of these rules, if they have one."""
    return next((name for name, pre in PRE_TOKENIZERS.items() if (pre.patterns, pre.whole_words) == (patterns, whole_words)), None)


def pre_tokenizer(keys: Keys, tokens: Vocabulary, bos: int | None) -> PreTokenizer:
    """The rules that the file names.

    A file that names none (the released BitNet 2B is one) has Llama 3's if its vocabulary is Llama 3's: 128,256 tokens and bos 128000,
    spelled <|begin_of_text|>. Else it has GPT-2's, which "gpt2" stood for before files named any. Raises UnsupportedError.
    """
    name = keys.get("tokenizer.ggml.pre", str)
    if name is None:
        llama3 = len(tokens.tokens) == 128256 and bos == 128000 and tokens.tokens[bos] == "<|begin_of_text|>"
        return _LLAMA3 if llama3 else _GPT2
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(f"{keys.path}: tokenizer.ggml.pre is {shown(name)}, expected one of {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


# --- the tokenizer --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ByteLevelBpe:
    """Encodes ordinary text. Made by `byte_level_bpe`."""

    path: Path
    _bpe: Any = field(repr=False)
    _unspelled: frozenset[int] = field(repr=False)  # bytes that no token spells
    space_prefix = False

    def encode(self, text: str) -> list[int]:
        """Token ids. Raises UnsupportedError for a byte that no token spells."""
        if self._unspelled and (lost := self._unspelled.intersection(text.encode())):
            raise UnsupportedError(f"{self.path}: no token spells the byte {min(lost):#04x} of {text[:40]!r}")
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, spelling: str) -> bytes:
        """The bytes of the text that a normal token stands for."""
        return spelling.translate(_TO_LATIN1).encode("latin-1")


def byte_level_bpe(keys: Keys, vocabulary: Vocabulary, pre: PreTokenizer) -> ByteLevelBpe:
    """From a file whose tokenizer.ggml.model is "gpt2". Raises FileFormatError or UnsupportedError."""
    ids = vocabulary.ids[NORMAL]
    for character in sorted(set().union(*ids) - set(BYTE_CHARACTERS)):
        token = next(token for token in ids if character in token)
        wrong = f"has {shown(token)} of type normal, but {character!r} is none of the 256 byte characters"
        keys.check(False, "tokenizer.ggml.tokens", wrong)
    tokenizers, key = extra("tokenizers"), "tokenizer.ggml.merges"
    merges = [tuple(merge.split(" ")) for merge in keys.strings(key)]  # pairs of tokens that make a third
    for i, pair in enumerate(merges):
        if len(pair) != 2 or "".join(pair) not in ids or pair[0] not in ids or pair[1] not in ids:
            keys.check(len(pair) == 2, key, f"has {shown(' '.join(pair))} as merge {i}, expected two tokens and a space between them")
            unknown = next(part for part in (*pair, "".join(pair)) if part not in ids)
            keys.check(False, key, f"has {shown(' '.join(pair))} as merge {i}, but {shown(unknown)} is no token of type normal")
    keys.check(len(set(merges)) == len(merges), key, "has the same merge twice")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges, ignore_merges=pre.whole_words))
    patterns = (_SAME_IN_LINEAR_TIME.get(pattern, pattern) for pattern in pre.patterns)
    cuts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cuts, to_bytes])
    return ByteLevelBpe(keys.path, bpe, frozenset(byte for byte, character in enumerate(BYTE_CHARACTERS) if character not in ids))
