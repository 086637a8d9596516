"""tokenizer.json -> the tokenizer that a GGUF file would have, judged by the tokenizers library on the same file."""

import json
import re
from pathlib import Path

import hf_models
import numpy as np
import pytest
from benchmarks.released import CHAT_TEMPLATE
from hf_models import bitnet_folder
from tokenizer_files import changed, from_json
from tokenizer_models import CONFIG, OURS, SPECIAL, TOLD

from bitnet_np.base.errors import FileFormatError, UnsupportedError
from bitnet_np.cli import main as cli
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.load import open_model
from bitnet_np.text.byte_level import PRE_TOKENIZERS
from bitnet_np.text.hf_tokenizer import tokenizer_metadata
from bitnet_np.text.tokenizer import tokenizer_from

tokenizers = pytest.importorskip("tokenizers")

LLAMA3 = TOLD["llama-bpe"]
SIZE = len(OURS["llama-bpe"].tokens)
CHATS = CONFIG | {"chat_template": CHAT_TEMPLATE}


def write(folder, told, config=CHATS):
    for name, value in (("tokenizer", told), ("tokenizer_config", config)):
        (folder / f"{name}.json").write_text(json.dumps(value))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_patterns_have_the_name_that_stands_for_them(name):
    rules = PRE_TOKENIZERS[name]
    split, last = LLAMA3["pre_tokenizer"]["pretokenizers"]
    splits = [split | {"pattern": {"Regex": pattern}} for pattern in rules.patterns]
    told = changed(LLAMA3, "pre_tokenizer.pretokenizers", [*splits, last])
    told["model"]["ignore_merges"] = rules.whole_words
    found = PRE_TOKENIZERS[tokenizer_metadata(Path("m"), told, CONFIG, {}, None)["tokenizer.ggml.pre"]]
    assert (found.patterns, found.whole_words) == (rules.patterns, rules.whole_words)


def test_special_tokens_and_the_chat_template():
    ours = from_json(LLAMA3, CHATS, vocab_size=SIZE + 3)
    assert ([ours.tokens[i] for i in (ours.bos, ours.eos)], ours.add_bos) == (SPECIAL[:2], True)
    assert ours.encode(SPECIAL[1])[-1] != ours.eos  # only text
    assert ours.encode("a<tool>", special=False)[-1] == ours.tokens.index("<tool>")  # user-defined: always found
    assert ours.tokens[SIZE:] == [f"[PAD{SIZE + i}]" for i in range(3)]  # rows of the embedding without a token
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
        ("added_tokens.0.id", 3, FileFormatError, "as 3, expected a distinct id"),
        ("added_tokens.0.id", 2**40, FileFormatError, "expected at most 65536 more"),
        ("added_tokens", {}, UnsupportedError, "post_processor makes"),
        ("added_tokens", 7, FileFormatError, "added_tokens is 7"),
        ("model.vocab", [], FileFormatError, "model.vocab is []"),
        ("model.vocab.!", 1, FileFormatError, "as 1, expected a distinct id"),
        ("model.merges", {}, FileFormatError, "model.merges is {}"),
        ("model.merges", [["a", "b", "c"]], FileFormatError, "model.merges has ['a', 'b', 'c'], expected two tokens"),
        ("model.merges", ["! \u4e00"], FileFormatError, "is no token of type normal"),
    ],
)
def test_what_is_no_such_tokenizer_is_refused_by_name(path, value, error, message):
    with pytest.raises(error, match="^m.*" + re.escape(message)):
        from_json(changed(LLAMA3, path, value), CONFIG)


def test_where_bos_and_the_template_come_from(tmp_path):
    told = changed(LLAMA3, "post_processor", None)
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
    told = LLAMA3 | {"normalizer": {"type": "NFC"}}
    ours, theirs = from_json(told, CONFIG), tokenizers.Tokenizer.from_str(json.dumps(told))
    for text in ("e\u0301", "\u1100\u1161 <tool>e\u0301", "\u212b"):
        assert ours.encode(text, special=True) == theirs.encode(text).ids
    assert ours.decode(ours.encode("e\u0301")) == "\u00e9"


def test_a_folder_that_is_converted_keeps_its_tokenizer(tmp_path, capsys):
    folder, _ = bitnet_folder(tmp_path / "model", vocab=SIZE + 4, context=200)
    write(folder, LLAMA3)

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
