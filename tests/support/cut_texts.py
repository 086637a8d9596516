"""Texts and vocabularies that tell pre-tokenizers apart: n-grams of the texts themselves, so a cut in another place gives other tokens."""

from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

import numpy as np

from bitnet_np.text.byte_level import BYTE_CHARACTERS, PRE_TOKENIZERS
from bitnet_np.text.spm import SPACE
from bitnet_np.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

TEXTS = [
    "",
    " ",
    "Hello world",
    " Hello  World   !",
    "Don't we'll I'M THEY'VE he'd it's 'tis rock'n'roll",
    "camelCaseWords and HTTPServer XMLHttpRequest iPhone",
    "1 12 123 1234 12345 123456 3.14159 1,000,000 x1y22z333",
    "line\nbreaks\n\nand\r\nmore\n \n  \n\t\n",
    "tabs\tand\t\tspaces   \t  end   ",
    "    def f(x):\n        return x**2 + y[3]  # comment!!\n",
    "punctuation... --- ??!! (a) [b] {c} <d> \"e\" 'f' `g` ~h^ |i| $5 50% a&b @user #tag a_b c/d e\\f",
    "!abc .def ,ghi;jkl:mno",
    "naïve café Größe Straße ŝipo ÀÉÎ ångström",
    "привет мир ПРИВЕТ Мир",
    "Ελληνικά γλώσσα",
    "你好世界 中文字符 一二三",
    "こんにちは世界 カタカナ",
    "안녕하세요 세계",
    "שלום עולם",
    "مرحبا بالعالم",
    "emoji 🙂🙃 👍🏽 end",
    "€100 £50 ¥1000 → ← ≠ ± ×",
    "fullwidth ！？ＡＢＣ １２３",
    "a\u00a0b\u3000c\u2028d",
    "<s>user</s><|im_start|> [INST] text",
    "x = {'key': \"value\", 'n': [1, 2, 3]};",
    "https://example.com/path?query=1&b=2#frag",
    "mixed日本語とEnglish混在123テスト",
    "........!!!!!!!!--------",
    "ab" * 20,
    "\n",
    "\u2581 is no space",
    "नमस्ते दुनिया किताबें বাংলা ไทย",
    "1234567 7654321 ١٢٣٤ Ⅷ ½ ²³",
]
MESSAGE = "<begin>one<tool> two<end> three<tool><tool>four <begin> "


def ngrams(texts: Iterable[str], longest: int) -> list[str]:
    """All n-grams of two characters or more, in an arbitrary order: pairs on both sides of a cut and across it come first."""
    grams = {text[i : i + n] for text in texts for n in range(2, longest + 1) for i in range(len(text) - n + 1)}
    return sorted(grams, key=lambda gram: (len(gram), crc32(gram.encode())))


def byte_level(pre: str) -> dict[str, Any]:
    """Metadata of a byte-level BPE. A merge makes each n-gram of the shorter one and its last byte; no merge makes words of eight bytes."""
    spelled = [text.encode().decode("latin-1").translate(dict(enumerate(BYTE_CHARACTERS))) for text in TEXTS]
    merged = ngrams(spelled, 5)
    whole = sorted({text[i : i + 8] for text in spelled for i in range(len(text) - 7)})
    tokens = [*BYTE_CHARACTERS, *merged, *whole, "<begin>", "<end>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED], np.int32),
        "tokenizer.ggml.merges": [f"{gram[:-1]} {gram[-1]}" for gram in merged],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def scored() -> dict[str, Any]:
    """Metadata of a tokenizer by scores. Many scores are equal, and longer pieces may have higher ones."""
    escaped = [SPACE + text.replace(" ", SPACE) for text in TEXTS[:16]]
    pieces = [*sorted(set("".join(escaped))), *ngrams(escaped, 4)]
    tokens = ["<unk>", "<begin>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<tool>"]
    pieces_scores = [-float((7 * i * i + len(piece)) % 31) for i, piece in enumerate(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + pieces_scores + [0.0], np.float32),
        "tokenizer.ggml.token_type": np.array(
            [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [USER_DEFINED], np.int32
        ),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def tokenizers() -> dict[str, Callable[[], dict[str, Any]]]:
    return {"spm": scored} | {pre: lambda pre=pre: byte_level(pre) for pre in PRE_TOKENIZERS}
