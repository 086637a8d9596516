"""Token ids from the command line and from files: all sources agree, and a file is not trusted."""

import os
import sys

import numpy as np
import pytest
from command_line import TINY, needs_text, save_array, sha256, write_file

from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.traces.token_files import read_sequences, read_token_ids

# --- sources --------------------------------------------------------------------------------------------------------------------------


def test_all_sources_of_one_sequence(run, model, tmp_path):
    ids = [1, 2, 300, 4]
    sources = [
        ("--tokens", "1,2,300,4"),
        ("--tokens", " 1 2, 300,\n4,"),
        ("--tokens-file", save_array(tmp_path / "a.npy", np.array(ids))),
        ("--tokens-file", save_array(tmp_path / "b.npy", np.array(ids, ">u2"))),
        ("--tokens-file", write_file(tmp_path / "a.json", "[1, 2,\n 300, 4]")),
        ("--tokens-file", write_file(tmp_path / "a.txt", "1 2,300 4\n\n")),
    ]
    results = [run("logits", TINY, *source, "--json") for source in sources]
    assert {result["sha256"] for result in results} == {sha256(forward_full(model, [ids]))}
    assert {tuple(result["shape"]) for result in results} == {(4, 512)}


def test_padded_ids_in_files_have_a_mask_or_lengths(run, tmp_path):
    ids, mask = np.array([[1, 2, 3], [0, 7, 8]]), np.array([[1, 1, 1], [0, 1, 1]])
    np.savez(tmp_path / "a.npz", input_ids=ids, attention_mask=mask)
    np.savez(tmp_path / "b.npz", tokens=ids[:, ::-1], lengths=[3, 2])
    held = write_file(tmp_path / "a.json", f'{{"input_ids": {ids.tolist()}, "attention_mask": {mask.tolist()}}}')
    expected = [[1, 2, 3], [7, 8]]
    assert [row.tolist() for row in read_sequences(tmp_path / "a.npz")] == [row.tolist() for row in read_sequences(held)] == expected
    assert [row.tolist() for row in read_sequences(tmp_path / "b.npz")] == [[3, 2, 1], [8, 7]]
    np.savez(tmp_path / "a.npz", input_ids=ids[1], attention_mask=mask[1])
    assert run("logits", TINY, "--tokens-file", tmp_path / "a.npz", "--json")["shape"] == [2, 512]


def test_all_sources_of_a_batch(run, model, tmp_path):
    ids = [[1, 2, 3], [511, 0, 7]]
    logits = forward_full(model, ids)
    sources = [
        save_array(tmp_path / "a.npy", np.array(ids, np.int32)),
        save_array(tmp_path / "b.npy", np.asfortranarray(ids)),
        write_file(tmp_path / "a.json", "[[1,2,3],[511,0,7]]"),
        write_file(tmp_path / "a.txt", "1 2 3\r\n511,0,7"),
    ]
    for source in sources:
        result = run("logits", TINY, "--tokens-file", source, "--json")
        assert (result["shape"], result["sha256"]) == ([2, 3, 512], sha256(logits))
        assert [top[0]["id"] for top in result["top"]] == logits[:, -1].argmax(axis=1).tolist()
    out = run("logits", TINY, "--tokens-file", sources[0])
    assert "last position of sequence 0\n" in out
    assert "last position of sequence 1\n" in out
    one = run("logits", TINY, "--tokens-file", write_file(tmp_path / "one.json", "[[5, 6]]"), "--json")
    assert one["shape"] == [1, 2, 512]


@needs_text
def test_text_is_what_the_files_tokenizer_says(run, model, tokenizer):
    for words in ("ab", "a b", "ü", ""):
        result = run("logits", TINY, "--text", words, "--json")
        assert result["sha256"] == sha256(forward_full(model, [tokenizer.encode(words)]))


def test_text_without_the_extra(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'bitnet_np[text]'" in refused("logits", TINY, "--text", "ab")
    assert "pip install 'bitnet_np[text]'" in refused("generate", TINY, "--prompt", "ab")


# --- files that are refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", "", "no array of token ids"),
        ("x.json", "[1, 2", "no array of token ids"),
        ("x.json", "[" * 100_000, "no array of token ids"),
        ("x.json", b"\xff\xfe[1]", "not UTF-8 at byte 0"),
        ("x.json", "[[1, 2], [3]]", "its sequences have 1 to 2 tokens, expected as many in each"),
        ("x.json", "[[1], 2]", "no array of token ids"),
        ("x.json", "[[[1]]]", "token ids have shape [1, 1, 1], expected [T] or [B, T]"),
        ("x.json", "7", "token ids have shape [], expected [T] or [B, T]"),
        ("x.json", "[]", "Tokens cannot be empty"),
        ("x.json", "[1.0, 2.0]", "token ids have dtype float64, expected integers"),
        ("x.json", "[1, null]", "token ids have dtype object"),
        ("x.json", "[true]", "token ids have dtype bool"),
        ("x.json", "[" + "9" * 5000 + "]", "no array of token ids"),
        ("x.json", "[" + "9" * 30 + "]", "token ids have dtype object"),
        ("x.txt", "", "Tokens cannot be empty"),
        ("x.txt", "1 2\n3\n", "its sequences have 1 to 2 tokens"),
        ("x.txt", "1 2 three", ", line 1 is '1 2 three', expected integers separated by commas or blanks"),
        ("x.txt", "1 2\n\n3 4.5\n", ", line 3 is '3 4.5', expected integers"),
        ("x.txt", b"\xff", "not UTF-8 at byte 0"),
        ("x.npy", np.array(3), "token ids have shape [], expected [T] or [B, T]"),
        ("x.npy", np.array(["1"]), "token ids have dtype <U1"),
        ("x.npy", np.array([(1, 2)], "i4,i4"), "expected numbers and at most 8 axes"),
        ("x.npy", np.array([np.datetime64("2024-01-01")]), "token ids have dtype"),
    ],
)
def test_wrong_files_of_tokens(refused, tmp_path, name, content, message):
    path = (save_array if name.endswith(".npy") else write_file)(tmp_path / name, content)
    error = refused("logits", TINY, "--tokens-file", path)
    assert error.startswith(f"bitnet-np: {path}")
    assert message in error


def test_pickles_are_never_loaded(refused, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    evil = np.empty(1, object)
    evil[0] = Evil()
    path = save_array(tmp_path / "evil.npy", evil, allow_pickle=True)
    assert "expected numbers" in refused("logits", TINY, "--tokens-file", path)
    assert "expected numbers" in refused("check", TINY, "--tokens", "1", "--theirs", path, "--last")
    assert "dtype('O')" in refused("check", TINY, "--tokens", "1", "--theirs", path)
    assert not (tmp_path / "made").exists()


def test_what_has_no_end_is_not_read(refused, tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for arguments in (["inspect", pipe], ["inspect", "/dev/zero"], ["check", TINY, "--tokens", "1", "--theirs", pipe]):
        assert "neither a file nor a folder, expected a file" in refused(*arguments)
    monkeypatch.setattr("bitnet_np.traces.token_files._MOST_TEXT", 10)
    for name in ("t.txt", "t.json"):
        assert f"{name}: more than 10 bytes" in refused("logits", TINY, "--tokens-file", write_file(tmp_path / name, b"1 2 3 4 5 6"))


@pytest.mark.parametrize(("name", "text"), [("x.json", "[1, 2]"), ("x.txt", "1 2")])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, name, text):
    assert read_token_ids(write_file(tmp_path / name, "\ufeff" + text)).tolist() == [1, 2]
