"""Tokenizers for tests: some that the library has trained, and one small enough to check by hand."""

import json

import pytest
from corpus import CORPUS
from hypothesis import strategies as st
from tokenizer_files import from_json

tokenizers = pytest.importorskip("tokenizers")
jinja2 = pytest.importorskip("jinja2")

from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors, trainers  # noqa: E402

from bitnet_np.text.byte_level import BYTE_CHARACTERS  # noqa: E402
from bitnet_np.text.tokenizer import tokenizer_from  # noqa: E402
from bitnet_np.text.vocabulary import CONTROL, NORMAL  # noqa: E402

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eot|>", "<|eot|>s"]
USER = ["<tool>", "    "]
WHOLE_WORD = "Ġinternationally"  # a token that no merge makes: only a rule for whole words finds it
# The pattern of Llama 3's published tokenizer.json.
LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
STYLES = {
    "gpt-2": BYTES,
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    ),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES]),
}
"""How text is cut into words, by the name that GGUF has for it."""


def trained(style):
    """A tokenizer that the library has trained, whose texts begin with the first of SPECIAL."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = STYLES[style]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(found.to_str())["model"]
    vocab = {**model["vocab"], WHOLE_WORD: len(model["vocab"])}
    found.model = models.BPE(vocab, [tuple(pair) for pair in model["merges"]], ignore_merges=style == "llama-bpe")
    found.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    found.add_tokens([AddedToken(token, normalized=False) for token in USER])
    found.post_processor = processors.TemplateProcessing(f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], found.token_to_id(SPECIAL[0]))])
    return found


TRAINED = {style: trained(style) for style in STYLES}
TOLD = {style: json.loads(found.to_str()) for style, found in TRAINED.items()}
"""tokenizer.json of each; that of GPT-2's style as older files have merges."""
TOLD["gpt-2"]["model"]["merges"] = [" ".join(pair) for pair in TOLD["gpt-2"]["model"]["merges"]]
CONFIG = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[1]}}
OURS = {style: from_json(told, CONFIG) for style, told in TOLD.items()}
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
