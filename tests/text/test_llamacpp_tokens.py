"""Every tokenizer cuts texts into the tokens that llama.cpp cuts them into, as scripts/recorders/record_llamacpp_tokens.py has recorded."""

import json
from pathlib import Path

import pytest
from cut_texts import MESSAGE, TEXTS, tokenizers

from bitnet_np.text.tokenizer import tokenizer_from

pytest.importorskip("tokenizers")

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "llamacpp" / "tokens.json").read_text())
NOT_THE_JUDGE = {
    # its \s is a space of ASCII in patterns that it has no code of its own for; theirs is Unicode's
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), "a\u00a0b\u3000c\u2028d"),
    # it leaves \p{M}, the marks of letters, out of their patterns
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "minimax-m2"), "नमस्ते दुनिया किताबें বাংলা ไทย"),
}
"""Where llama.cpp's pattern is another than the one that a model was published with."""


def test_everything_is_recorded():
    assert list(RECORDED["answer"]) == list(tokenizers())
    assert len(RECORDED["ids"]) == 17  # which one it is can be seen


@pytest.mark.parametrize("name", tokenizers())
def test_tokens_are_llamacpps(name):
    ours = tokenizer_from(tokenizers()[name](), "t.gguf")
    *theirs, message = RECORDED["ids"][RECORDED["answer"][name]]
    for text, ids in zip(TEXTS, theirs, strict=True):
        found = ours.encode(text)
        assert (found == ids) == (text != NOT_THE_JUDGE.get(name)), text
        assert ours.decode(found) == (text.replace("\u2581", " ") if name == "spm" else text)
    assert ours.encode(MESSAGE, special=True) == message
    assert ours.decode(message, skip_special=False) == MESSAGE
