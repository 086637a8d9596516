"""Tokenizers for tests: two that the library has trained, and one small enough to check by hand."""

import json

import numpy as np
import pytest
from corpus import CORPUS
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
jinja2 = pytest.importorskip("jinja2")

from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers  # noqa: E402

from bitnet_np.text.byte_level import BYTE_CHARACTERS  # noqa: E402
from bitnet_np.text.tokenizer import tokenizer_from  # noqa: E402
from bitnet_np.text.vocabulary import CONTROL, NORMAL, USER_DEFINED  # noqa: E402

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eot|>", "<|eot|>s"]
USER = ["<tool>", "    "]
WHOLE_WORD = "Ġinternationally"  # a token that no merge makes: only a rule for whole words finds it
# The pattern of Llama 3's published tokenizer.json.
LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def original(style):
    """A tokenizer trained by the library, in the style of Llama 3 or GPT-2, and the metadata of a GGUF file made from it."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
    }[style]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocab = {**model["vocab"], WHOLE_WORD: len(model["vocab"])}
    trained.model = models.BPE(vocab, [tuple(pair) for pair in model["merges"]], ignore_merges=style == "llama-bpe")
    trained.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    trained.add_tokens([AddedToken(token, normalized=False) for token in USER])
    ordinary = sorted(vocab, key=vocab.__getitem__)
    tokens = [*ordinary, *SPECIAL, *USER]
    assert [trained.token_to_id(token) for token in tokens] == list(range(len(tokens)))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": style,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([NORMAL] * len(ordinary) + [CONTROL] * len(SPECIAL) + [USER_DEFINED] * len(USER), np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(ordinary),
        "tokenizer.ggml.eos_token_id": len(ordinary) + 1,
    }
    return trained, metadata


ORIGINALS = {style: original(style) for style in ("llama-bpe", "gpt-2")}
OURS = {style: tokenizer_from(metadata, "model.gguf") for style, (_, metadata) in ORIGINALS.items()}
texts = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from([*CORPUS[:4], *SPECIAL, *USER, " internationally", "<|eo", "t_id|>", "ſ", "'ſ", "'RE", "é"]),
        st.text(" \t\n\r\u00a0\u3000\u0085", max_size=6),
        st.text("'sStTrReEvVmMlLdD xſ", max_size=8),
        st.text("0123456789٣Ⅷ²,. ", max_size=8),
    ),
    max_size=6,
).map("".join)


# A vocabulary small enough to check by hand.
def small(**changes):
    """Metadata of 256 bytes, the `words`, and <s>, </s>. Names of keys lack "tokenizer.ggml."; None removes one."""
    words = changes.pop("words", ["ab", "abc"])
    tokens = [*BYTE_CHARACTERS, *words, "<s>", "</s>"]
    keys = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2,
        "merges": ["a b", "ab c"],
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
        **changes,
    }
    return {name if "." in name else f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def tokenizer(**changes):
    return tokenizer_from(small(**changes), "small.gguf")


MESSAGES = [{"role": "user", "content": " abc? "}, {"role": "assistant", "content": "</s>"}]


def chatty(template, **changes):
    """The small tokenizer with a chat template."""
    return tokenizer(**{"tokenizer.chat_template": template, "add_bos_token": True, **changes})
