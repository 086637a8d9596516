"""The tokenizer: special tokens, decoding, and streams of it."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_models import OURS, small, texts, tokenizer

from bitnet_np.base.errors import FileFormatError, OptionError, TokenRangeError, UnsupportedError
from bitnet_np.text.byte_level import BYTE_CHARACTERS
from bitnet_np.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED


def test_bos_is_added_as_the_file_says_the_caller_before_the_file():
    assert tokenizer().encode("a") == [97]
    assert tokenizer(pre="llama-bpe").encode("a") == [258, 97]
    assert tokenizer(pre="llama-bpe", add_bos_token=False).encode("a") == [97]
    assert tokenizer(pre="llama-bpe", bos_token_id=None).encode("a") == [97]
    ours = tokenizer(add_bos_token=True)
    assert (ours.bos, ours.eos) == (258, 259)
    assert ours.encode("a") == [258, 97]
    assert ours.encode("") == [258]
    assert ours.encode("a", add_bos=False) == [97]
    assert tokenizer().encode("a", add_bos=True) == [258, 97]
    with pytest.raises(OptionError, match=r"small\.gguf has no tokenizer\.ggml\.bos_token_id"):
        tokenizer(bos_token_id=None).encode("a", add_bos=True)


def test_generation_stops_at_the_end_of_text_and_of_turn():
    assert tokenizer().stops == (259,)
    assert tokenizer(eot_token_id=258).stops == (258, 259)
    assert tokenizer(eos_token_id=None).stops == ()
    ours = OURS["llama-bpe"]
    assert ours.stops == (ours.eos, ours.tokens.index("<|eot_id|>"))


def test_decoding_knows_every_type_of_token():
    names = {"<unk>": UNKNOWN, "é": USER_DEFINED, "<0xC3>": BYTE, "<0xA9>": BYTE, "spare": UNUSED}
    tokens = [character for character in BYTE_CHARACTERS if character != "é"] + list(names)
    ours = tokenizer(tokens=tokens, token_type=[NORMAL] * 255 + list(names.values()), merges=None, bos_token_id=None, eos_token_id=None)
    assert ours.decode(range(255, 260)) == "éé"
    assert ours.decode(range(255, 260), skip_special=False) == "<unk>ééspare"
    assert ours.encode("é<unk><0xC3>spare", special=True) == [256, 255, *map(tokens.index, "<0xC3>spare")]
    assert ours.encode("<unk>") == [*map(tokens.index, "<unk>")]


@given(data=st.data(), skip_special=st.booleans())
@settings(deadline=None, max_examples=300)
def test_a_stream_says_what_the_whole_says(data, skip_special):
    ours = OURS["llama-bpe"]
    text_ids = texts.map(lambda text: ours.encode(text, special=True))
    ids = data.draw(st.one_of(text_ids, st.lists(st.integers(0, len(ours.tokens) - 1)), st.lists(st.integers(0, 255))))
    stream = ours.decode_stream(skip_special=skip_special)
    pieces = [stream.feed(i) for i in ids]
    assert "".join(pieces) + stream.finish() == ours.decode(ids, skip_special=skip_special)


def test_a_stream_holds_back_an_unfinished_character():
    ours, stream = tokenizer(), tokenizer().decode_stream()
    assert [stream.feed(byte) for byte in "a🙂".encode()] == ["a", "", "", "", "🙂"]
    assert stream.feed(0xF0) == ""
    assert stream.feed(ord("b")) == "\ufffdb"
    assert stream.feed(0xC3) == ""
    assert stream.finish() == "\ufffd" == ours.decode([0xC3])


def test_ids_of_any_integer_type_decode_and_others_are_refused():
    ours = tokenizer()
    assert ours.decode(np.array([97, 256], np.uint32)) == "aab"
    for bad in (-1, 260):
        with pytest.raises(TokenRangeError, match=rf"small\.gguf: token id is {bad}, expected 0 to 259"):
            ours.decode([97, bad])
    with pytest.raises(TokenRangeError, match=r"token id is 1\.5, expected an integer"):
        ours.decode([1.5])


def test_text_that_cannot_be_encoded_is_refused():
    with pytest.raises(OptionError, match=r"lone surrogate '\\ud800' at 2"):
        tokenizer().encode("ab\ud800")
    tokens = ["a", "b", "ab", "<s>"]
    ours = tokenizer(tokens=tokens, token_type=[NORMAL] * 3 + [CONTROL], merges=["a b"], bos_token_id=3, eos_token_id=3)
    assert ours.encode("ab<s>", special=True) == [2, 3]
    with pytest.raises(UnsupportedError, match=r"small\.gguf: no token spells the byte 0x63 of 'abc'"):
        ours.encode("abc")


@pytest.mark.parametrize("module", ["tokenizers", "jinja2.sandbox"])
def test_a_missing_extra_says_how_to_install_it(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=rf"text needs {module.split('.')[0]}: pip install 'bitnet_np\[text\]'"):
        tokenizer(**{"tokenizer.chat_template": "x"}).chat([])


@pytest.mark.parametrize("text", [None, b"abc", 5, ["a"]])
def test_only_text_is_encoded(text):
    with pytest.raises(OptionError, match="expected a str"):
        tokenizer().encode(text)


# --- the file's keys: none of them is trusted ----------------------------------------------------------------------------------------


TOKENS = small()["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (UnsupportedError, r"tokenizer\.ggml\.model is 'missing'", {"model": None}),
        (UnsupportedError, r"tokenizer\.ggml\.model is 't5', expected 'gpt2'", {"model": "t5"}),
        (FileFormatError, r"tokenizer\.ggml\.model is 3, expected str", {"model": 3}),
        (UnsupportedError, r"tokenizer\.ggml\.pre is 'superbpe', expected one of llama-bpe, .*gpt-2", {"pre": "superbpe"}),
        (FileFormatError, r"tokenizer\.ggml\.tokens is missing or empty", {"tokens": None, "token_type": []}),
        (FileFormatError, r"tokenizer\.ggml\.tokens is 'abc', expected an array of strings", {"tokens": "abc"}),
        (FileFormatError, r"tokenizer\.ggml\.tokens is \[1, 2\], expected an array of strings", {"tokens": [1, 2]}),
        (FileFormatError, r"tokenizer\.ggml\.token_type has the shape \(259,\), but there are 260 tokens", {"token_type": [1] * 259}),
        (FileFormatError, r"tokenizer\.ggml\.token_type is 7 for token 1, expected 1 to 6", {"token_type": [1, 7] + [0] * 258}),
        (FileFormatError, r"tokens has 'Ā' twice, as token 0 and as token 260", {"tokens": [*TOKENS, "Ā"], "token_type": [1] * 261}),
        (FileFormatError, r"tokens has an empty string", {"tokens": [*TOKENS, ""], "token_type": [1] * 261}),
        (FileFormatError, r"tokens has 'a b' of type normal, but ' ' is none", {"tokens": [*TOKENS, "a b"], "token_type": [1] * 261}),
        (FileFormatError, r"tokens has '<s>' of type byte, expected <0x00> to", {"token_type": [1] * 258 + [6, 6]}),
        (FileFormatError, r"merges has 'abc' as merge 1, expected two tokens and a space", {"merges": ["a b", "abc"]}),
        (FileFormatError, r"merges has 'ab q' as merge 1, but 'abq' is no token of type normal", {"merges": ["a b", "ab q"]}),
        (FileFormatError, r"merges has the same merge twice", {"merges": ["a b", "ab c", "a b"]}),
        (FileFormatError, r"tokenizer\.ggml\.bos_token_id is 260, but there are 260 tokens", {"bos_token_id": 260}),
        (FileFormatError, r"tokenizer\.ggml\.eos_token_id is -1, but there are 260 tokens", {"eos_token_id": -1}),
        (FileFormatError, r"tokenizer\.ggml\.padding_token_id is 1\.0, expected int", {"padding_token_id": 1.0}),
        (FileFormatError, r"tokenizer\.ggml\.add_bos_token is 1, expected bool", {"add_bos_token": 1}),
        (FileFormatError, r"add_bos_token is True, but there is no", {"add_bos_token": True, "bos_token_id": None}),
        (FileFormatError, r"tokenizer\.chat_template is b'x', expected str", {"tokenizer.chat_template": b"x"}),
    ],
)
def test_a_bad_tokenizer_is_refused_by_file_key_and_value(error, match, changes):
    with pytest.raises(error, match=r"small\.gguf: " + ".*" + match):
        tokenizer(**changes)
