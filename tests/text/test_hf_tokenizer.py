"""tokenizer.json -> the tokenizer that a GGUF file would have, judged by the tokenizers library on the same file."""

import json
import re
from pathlib import Path

import hf_models
import numpy as np
import pytest
from hf_models import bitnet_folder
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import bpe_json, changed, from_json

from bitnet_np.base.errors import FileFormatError, UnsupportedError
from bitnet_np.cli import main as cli
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.load import open_model
from bitnet_np.testing.released import CHAT_TEMPLATE, vocabulary
from bitnet_np.text.byte_level import LLAMA3_WORDS, PRE_TOKENIZERS
from bitnet_np.text.hf_tokenizer import tokenizer_metadata
from bitnet_np.text.tokenizer import tokenizer_from

tokenizers = pytest.importorskip("tokenizers")

SIZE = 600
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3_WORDS}, "behavior": "Isolated", "invert": False}
LLAMA3 = {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]}
GPT2 = BYTES | {"use_regex": True}


def tokenizer_json(pre=LLAMA3, whole_words=True, pairs=True):
    """Of testing_released's vocabulary: bytes, words, and special tokens at the end."""
    tokens, merges, special = vocabulary(SIZE)
    first = SIZE - special
    told = bpe_json(
        {token: i for i, token in enumerate(tokens[:first])},
        [merge.split(" ") for merge in merges] if pairs else merges,
        {token: first + i for i, token in enumerate(tokens[first:])},
        tokens[first],
        pre_tokenizer=pre,
        decoder=BYTES,
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=whole_words,
    )
    told["added_tokens"].append(told["added_tokens"][0] | {"id": SIZE, "content": "<tool>", "special": False})
    return told | {"post_processor": {"type": "Sequence", "processors": [BYTES, told["post_processor"]]}}


CONFIG = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}, "chat_template": CHAT_TEMPLATE}


def write(folder, told, config=CONFIG):
    for name, value in (("tokenizer", told), ("tokenizer_config", config)):
        (folder / f"{name}.json").write_text(json.dumps(value))


DIGITS_GPT2 = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}
STYLES = {"llama3": (LLAMA3, True), "gpt2": (GPT2, False, False), "digits": (DIGITS_GPT2, False)}


@pytest.fixture(scope="module", params=STYLES)
def both(request):
    told = tokenizer_json(*STYLES[request.param])
    return from_json(told, CONFIG, vocab_size=SIZE + 4), tokenizers.Tokenizer.from_str(json.dumps(told))


@given(st.text() | st.text("etaoin <|>begin_of_text tool\n0123456789'sé🙂"))
def test_the_library_gives_the_same_ids(both, text):
    ours, theirs = both
    assert ours.encode(text, special=True) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_patterns_have_the_name_that_stands_for_them(name):
    rules = PRE_TOKENIZERS[name]
    splits = [SPLIT | {"pattern": {"Regex": pattern}} for pattern in rules.patterns]
    told = tokenizer_json({"type": "Sequence", "pretokenizers": [*splits, BYTES]}, rules.whole_words)
    found = PRE_TOKENIZERS[tokenizer_metadata(Path("m"), told, CONFIG, {}, None)["tokenizer.ggml.pre"]]
    assert (found.patterns, found.whole_words) == (rules.patterns, rules.whole_words)


def test_special_tokens_and_the_chat_template(both):
    ours, _ = both
    assert (ours.bos, ours.eos, ours.add_bos) == (SIZE - 86, SIZE - 85, True)
    assert ours.tokens[ours.bos] == "<|begin_of_text|>"
    assert ours.encode("<|end_of_text|>")[-1] != ours.eos  # only text
    assert ours.encode("a<tool>", special=False)[-1] == SIZE  # user-defined: always found
    assert ours.tokens[SIZE + 1 :] == [f"[PAD{SIZE + i}]" for i in (1, 2, 3)]  # rows of the embedding without a token
    chat = ours.chat([{"role": "user", "content": "hi"}])
    assert ours.decode(chat, skip_special=False).startswith("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>")


@pytest.mark.parametrize(
    ("path", "value", "error", "message"),
    [
        ("model.type", "Unigram", UnsupportedError, "model.type is 'Unigram'"),
        ("model.byte_fallback", True, UnsupportedError, "model.ignore_merges is True"),
        ("model.fuse_unk", True, UnsupportedError, "model.fuse_unk is True"),
        ("model.end_of_word_suffix", "</w>", UnsupportedError, "model.end_of_word_suffix is '</w>'"),
        ("normalizer", {"type": "NFKC"}, UnsupportedError, "normalizer is {'type': 'NFKC'}"),
        ("pre_tokenizer", {"type": "Whitespace"}, UnsupportedError, "pre_tokenizer is"),
        ("pre_tokenizer.pretokenizers.0.pattern", {"Regex": r"\d"}, UnsupportedError, "pre_tokenizer is"),
        ("pre_tokenizer.pretokenizers.1.add_prefix_space", True, UnsupportedError, "pre_tokenizer is"),
        ("pre_tokenizer.pretokenizers.1.use_regex", True, UnsupportedError, "pre_tokenizer is"),
        ("added_tokens.0.lstrip", True, UnsupportedError, "has lstrip"),
        ("added_tokens.0.id", 3, FileFormatError, "as 3, expected an id of its own"),
        ("added_tokens.0.id", 2**40, FileFormatError, "expected at most 65536 more"),
        ("added_tokens", {}, UnsupportedError, "post_processor makes"),
        ("added_tokens", 7, FileFormatError, "added_tokens is 7"),
        ("model.vocab", [], FileFormatError, "model.vocab is []"),
        ("model.vocab.!", 1, FileFormatError, "as 1, expected an id of its own"),
        ("model.merges", {}, FileFormatError, "model.merges is {}"),
        ("model.merges", [["a", "b", "c"]], FileFormatError, "model.merges has ['a', 'b', 'c'], expected two tokens"),
        ("model.merges", ["! \u4e00"], FileFormatError, "is no token of type normal"),
    ],
)
def test_what_is_no_such_tokenizer_is_refused_by_name(path, value, error, message):
    with pytest.raises(error, match="^m.*" + re.escape(message)):
        from_json(changed(tokenizer_json(), path, value), CONFIG, vocab_size=SIZE + 4)


def test_where_bos_and_the_template_come_from(tmp_path):
    told = tokenizer_json()
    told["post_processor"] = None
    hf_models.write_folder(tmp_path, {"vocab_size": SIZE, "bos_token_id": 7, "eos_token_id": [8, 9]}, {})
    write(
        tmp_path, told, {"add_bos_token": True, "chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]}
    )
    found = tokenizer_from(open_model(tmp_path).metadata, tmp_path)
    assert (found.bos, found.eos, found.add_bos, found.template) == (7, 8, True, "y")
    (tmp_path / "chat_template.jinja").write_text("z")
    write(tmp_path, told, {})
    found = tokenizer_from(open_model(tmp_path).metadata, tmp_path)
    assert (found.add_bos, found.template) == (False, "z")


def test_text_is_normalised_where_the_file_says_so():
    told = tokenizer_json() | {"normalizer": {"type": "NFC"}}
    ours, theirs = from_json(told, CONFIG), tokenizers.Tokenizer.from_str(json.dumps(told))
    for text in ("e\u0301", "\u1100\u1161 <tool>e\u0301", "\u212b"):
        assert ours.encode(text, special=True) == theirs.encode(text).ids
    assert ours.decode(ours.encode("e\u0301")) == "\u00e9"


def test_a_folder_that_is_converted_keeps_its_tokenizer(tmp_path, capsys):
    folder, _ = bitnet_folder(tmp_path / "model", vocab=SIZE + 4)
    write(folder, tokenizer_json())

    def run(*arguments):
        assert cli.main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    told = json.loads(run("inspect", folder, "--json"))
    assert (told["supported"], told["kind"], told["config"]["architecture"]) == (True, "Hugging Face folder", "bitnet-b1.58")
    out = tmp_path / "out.gguf"
    run("convert", folder, out)
    one, other = (json.loads(run("generate", path, "--prompt", "hi é🙂", "--chat", "-n", "4", "--json")) for path in (folder, out))
    assert (one["prompt"], one["tokens"], one["text"]) == (other["prompt"], other["tokens"], other["text"])
    metadata = open_gguf(out).metadata
    assert metadata["tokenizer.ggml.pre"] == "llama-bpe"
    assert metadata["tokenizer.ggml.token_type"].dtype == np.int32
