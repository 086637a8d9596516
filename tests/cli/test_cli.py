"""The command line: what it prints, what it returns, and one line of help for whatever is wrong with what it is given."""

import hashlib
import io
import json
import os
import re
import struct
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numba
import numpy as np
import pytest
from gguf_bytes import FLOAT32, UINT32, Entry, number, text
from gguf_bytes import gguf as build

import bitnet_np
from bitnet_np import BITNET_CPP, Sampling, embedded, selftest
from bitnet_np.cli import generate as generate_command
from bitnet_np.cli import logits as logits_command
from bitnet_np.cli.main import main
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.load import load
from bitnet_np.forward_pass import compute_logits, forward_full
from bitnet_np.generate import generate
from bitnet_np.judge.logits import Judgement
from bitnet_np.judge.verdict import Verdict
from bitnet_np.sampling import uniforms
from bitnet_np.testing import random_model, write_gguf
from bitnet_np.text.byte_level import BYTE_CHARACTERS
from bitnet_np.text.tokenizer import tokenizer_from

PACKAGE = Path(bitnet_np.__file__).parents[1]
TINY = str(PACKAGE / "bitnet_np" / "data" / "tiny.gguf")
DATA = Path(__file__).parents[1] / "data"
MODELS = [*sorted(DATA.glob("*/*.gguf")), *sorted(path.parent for path in DATA.glob("hf/*/config.json"))]
TOKENS = embedded.recording()["tokens_T17"]
COMMANDS = ("inspect", "logits", "generate", "check", "trace", "grad", "compare", "nll", "convert", "mask", "selftest")
needs_text = pytest.mark.skipif(not find_spec("tokenizers") or not find_spec("jinja2"), reason="needs the extra `text`")


@pytest.fixture(scope="module")
def model():
    return load(TINY)


@pytest.fixture(scope="module")
def tokenizer():
    file = open_gguf(TINY)
    return tokenizer_from(file.metadata, file.path)


@pytest.fixture(autouse=True)
def threads_stay():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.fixture
def run(capsys):
    """Standard output of a command that ends with `code`, as JSON where that was asked for."""

    def ran(*arguments, code=0):
        assert main(list(map(str, arguments))) == code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return json.loads(captured.out, parse_constant=pytest.fail) if "--json" in arguments else captured.out

    return ran


@pytest.fixture
def refused(capsys):
    """The one line on standard error of a command that ends with 2 and prints nothing."""

    def ran(*arguments):
        assert main(list(map(str, arguments))) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.fullmatch("bitnet-np: .+\n", captured.err)
        return captured.err

    return ran


def saved(path, array, **how):
    np.save(path, array, **how)
    return path


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def listed(ids):
    return ",".join(map(str, ids))


def sha256(array):
    return hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()


# --- inspect --------------------------------------------------------------------------------------------------------------------------


def test_inspect_says_what_a_file_holds(run):
    out = run("inspect", TINY)
    assert out.startswith(f"{TINY}: GGUF v3, 886,720 bytes, 35 tensors\nsupported: yes\n")
    assert (
        "type  tensors   elements    bytes\n"
        "F16         1    131,072  262,144\n"
        "F32        13      4,864   19,456\n"
        "I2_S       21  2,359,296  590,496\n"
    ) in out
    assert "\nkv_heads                   2\n" in out
    assert "\nKV cache, bytes per token  3072\n" in out
    assert re.search(r"\nbitnet-b1\.58\.rope\.freq_base +500000\.0\n", out)
    assert re.search(r"\ntokenizer\.ggml\.tokens +\[512 values\]\n", out)
    assert "attn_q" not in out
    assert re.search(r"\nblk\.2\.attn_k\.weight +I2_S +128 x 256 +8,224\n", run("inspect", TINY, "--tensors"))


def test_inspect_lists_what_a_dump_may_hold(run, model):
    """The names, layers, shapes and dtypes that a forward pass records."""
    recorded = {}

    def record(name, layer, array):
        axes = ["T", *([array.size // len(array)] if array.ndim > 1 else [])]
        recorded.setdefault(name, ([], axes, str(array.dtype)))[0].append(layer)

    forward_full(model, TOKENS[None], record=record)
    points = run("inspect", TINY, "--points", "--json")["points"]
    assert {p["name"]: (p["layers"], p["shape"], p["dtype"]) for p in points} == recorded
    assert all(p["meaning"] for p in points)
    out = run("inspect", TINY, "--points")
    assert re.search(r"\nKcur_rope +0-2 +T x 128 +float32 +keys after RoPE\n", out)
    assert re.search(r"\nattn_norm_scale +0-2 +T +float32 ", out)
    assert "Kcur_rope" not in run("inspect", TINY)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)
def test_inspect_knows_every_recorded_model(run, path):
    assert "supported: yes" in run("inspect", str(path))


def test_inspect_in_json(run):
    found = run("inspect", TINY, "--json")
    names = "file bytes kind version supported problem config kv_cache_bytes_per_token types keys"
    assert set(found) == set(names.split())
    assert (found["file"], found["bytes"], found["kind"], found["version"]) == (TINY, Path(TINY).stat().st_size, "GGUF v3", 3)
    assert (found["supported"], found["problem"]) == (True, None)
    assert found["config"] == vars(load(TINY).config)
    assert found["kv_cache_bytes_per_token"] == 2 * 4 * 3 * 2 * 64
    assert found["types"]["I2_S"] == {"tensors": 21, "elements": 2359296, "bytes": 590496}
    assert found["keys"]["general.architecture"] == "bitnet-b1.58"
    assert found["keys"]["bitnet-b1.58.block_count"] == 3
    assert found["keys"]["tokenizer.ggml.add_bos_token"] is True
    assert found["keys"]["tokenizer.ggml.tokens"] == "[512 values]"
    tensors = run("inspect", TINY, "--json", "--tensors")["tensors"]
    assert len(tensors) == 35
    assert tensors[0] == {"name": "token_embd.weight", "type": "F16", "shape": "512 x 256", "bytes": 262144}


def test_inspect_shows_what_cannot_be_run_and_says_why(run, tmp_path):
    keys = [("general.architecture", text("falcon")), ("odd", number(FLOAT32, float("nan"))), ("falcon.block_count", number(UINT32, 1))]
    path = written(tmp_path / "other.gguf", build(keys, [Entry("output.weight", (256, 2), 14)]))
    out = run("inspect", path, "--tensors")
    assert f"supported: no: {path}: general.architecture is 'falcon', supported are bitnet-b1.58, bitnet-25, bitnet, llama, " in out
    assert "config" not in out
    assert re.search(r"\nfalcon\.block_count +1\n", out)
    assert re.search(r"\noutput\.weight +Q6_K +2 x 256 +420\n", out)
    found = run("inspect", path, "--json")
    assert (found["supported"], found["config"], found["kv_cache_bytes_per_token"]) == (False, None, None)
    assert "general.architecture is 'falcon'" in found["problem"]
    assert found["keys"]["odd"] == "nan"


def test_inspect_shows_the_numbers_of_a_model_with_damaged_weights(run, tmp_path):
    raw = bytearray(Path(TINY).read_bytes())
    at = open_gguf(TINY).tensors["blk.1.ffn_norm.weight"].offset
    raw[at : at + 4] = struct.pack("<f", float("nan"))
    found = run("inspect", written(tmp_path / "nan.gguf", bytes(raw)), "--json")
    assert "tensor blk.1.ffn_norm.weight has NaN or infinity in it" in found["problem"]
    assert found["config"]["width"] == 256


def test_nothing_in_a_file_can_garble_the_terminal(run, tmp_path):
    evil = "\x1b[2J\n\r\x07\u202e"
    keys = [("general.architecture", text(evil)), (evil, text(evil))]
    path = written(tmp_path / "\x1b.gguf", build(keys, [Entry(evil, (4,))]))
    out = run("inspect", path, "--tensors")
    assert all(character.isprintable() or character == "\n" for character in out)
    assert out.count(r"\x1b[2J\n\r\x07\u202e") == 5  # architecture twice, key, value and tensor
    assert run("inspect", path, "--json", "--tensors")["tensors"][0]["name"] == evil


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\2\0\0\0", b"hello", build()[:-1], Path(TINY).read_bytes()[:-1]])
def test_a_broken_file_is_named(refused, tmp_path, content):
    path = written(tmp_path / "broken.gguf", content)
    for arguments in (("inspect", path), ("logits", path, "--tokens", "1"), ("generate", path, "--tokens", "1")):
        assert refused(*arguments).startswith(f"bitnet-np: {path}: ")


def test_no_file_at_all(refused, tmp_path):
    assert "nowhere.gguf" in refused("inspect", tmp_path / "nowhere.gguf")
    assert str(tmp_path) in refused("inspect", tmp_path)


# --- logits ---------------------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_model(refused, tmp_path):
    expected = "no such file, expected a Hugging Face folder or the path of a GGUF file"
    assert refused("inspect", tmp_path) == f"bitnet-np: {tmp_path / 'config.json'}: {expected}\n"


def test_a_missing_file_is_named_first(refused, tmp_path):
    path = tmp_path / "nowhere.npz"
    for arguments in (["inspect", path], ["check", TINY, "--tokens", "1", "--theirs", path], ["compare", path, path]):
        assert refused(*arguments) == f"bitnet-np: {path}: No such file or directory\n"


def test_a_model_with_nan_in_it_is_run_if_that_is_said(run, refused, tmp_path):
    model = random_model(1, family="llama", tied=False)
    write_gguf(tmp_path / "sound.gguf", model)
    model.token_embd.flags.writeable = True
    model.token_embd[7, 3] = np.nan  # no token of ours
    write_gguf(tmp_path / "nan.gguf", model)
    for command in (["logits"], ["generate"], ["nll"], ["trace", "--out", tmp_path / "t.npz"]):
        told = [command[0], tmp_path / "nan.gguf", "--tokens", "1,2,3", *command[1:], "--json"]
        assert "tensor token_embd.weight has NaN or infinity in it" in refused(*told)
        run(*told, "--allow-nan")
    sound, damaged = (run("logits", tmp_path / f"{name}.gguf", "--tokens", "1,2,3", "--json", "--allow-nan") for name in ("sound", "nan"))
    assert damaged["sha256"] == sound["sha256"]


def test_logits_in_text(run, model):
    logits = forward_full(model, TOKENS[None])[0]
    lines = run("logits", TINY, "--tokens", listed(TOKENS)).splitlines()
    best = np.argsort(-logits[-1], kind="stable")[:5]
    assert lines[:5] == ["shape   [17, 512] float32", f"sha256  {sha256(logits)}", "", "last position", "token  logit"]
    assert [line.split() for line in lines[5:]] == [[str(i), f"{logits[-1, i]:+.6f}"] for i in best]


def test_logits_in_json(run, model):
    logits = forward_full(model, TOKENS[None])[0]
    found = run("logits", TINY, "--tokens", listed(TOKENS), "--json")
    assert found.pop("seconds") > 0
    best = np.argsort(-logits[-1], kind="stable")[:5].tolist()
    top = [[{"id": i, "logit": float(logits[-1, i])} for i in best]]
    assert found == {"shape": [17, 512], "sha256": sha256(logits), "top": top, "dialect": "exact", "mode": "auto"}


@pytest.mark.parametrize(
    "options",
    [
        ["--mode", "parallel"],
        ["--mode", "incremental"],
        ["--mode", "auto", "--parallel-threshold", "0"],
        ["--parallel-threshold", "100"],
        ["--chunk", "1"],
        ["--chunk", "7"],
        ["--chunk", "100"],
        ["--mode", "incremental", "--chunk", "3"],
        ["--threads", "1"],
        ["--threads", "2"],
        ["--threads", "2", "--chunk", "7"],
    ],
    ids=" ".join,
)
def test_every_path_prints_one_checksum(run, model, options):
    found = run("logits", TINY, "--tokens", listed(TOKENS), "--json", *options)
    assert found["sha256"] == sha256(forward_full(model, TOKENS[None]))
    assert found["mode"] == (options[1] if "--mode" in options else "incremental" if "--chunk" in options else "auto")


def test_all_sources_of_one_sequence(run, model, tmp_path):
    ids = [1, 2, 300, 4]
    sources = [
        ("--tokens", "1,2,300,4"),
        ("--tokens", " 1 2, 300,\n4,"),
        ("--tokens-file", saved(tmp_path / "a.npy", np.array(ids))),
        ("--tokens-file", saved(tmp_path / "b.npy", np.array(ids, ">u2"))),
        ("--tokens-file", written(tmp_path / "a.json", "[1, 2,\n 300, 4]")),
        ("--tokens-file", written(tmp_path / "a.txt", "1 2,300 4\n\n")),
    ]
    found = [run("logits", TINY, *source, "--json") for source in sources]
    assert {each["sha256"] for each in found} == {sha256(forward_full(model, [ids]))}
    assert {tuple(each["shape"]) for each in found} == {(4, 512)}


def test_all_sources_of_a_batch(run, model, tmp_path):
    ids = [[1, 2, 3], [511, 0, 7]]
    logits = forward_full(model, ids)
    sources = [
        saved(tmp_path / "a.npy", np.array(ids, np.int32)),
        saved(tmp_path / "b.npy", np.asfortranarray(ids)),
        written(tmp_path / "a.json", "[[1,2,3],[511,0,7]]"),
        written(tmp_path / "a.txt", "1 2 3\r\n511,0,7"),
    ]
    for source in sources:
        found = run("logits", TINY, "--tokens-file", source, "--json")
        assert (found["shape"], found["sha256"]) == ([2, 3, 512], sha256(logits))
        assert [top[0]["id"] for top in found["top"]] == logits[:, -1].argmax(axis=1).tolist()
    out = run("logits", TINY, "--tokens-file", sources[0])
    assert "last position of sequence 0\n" in out
    assert "last position of sequence 1\n" in out
    one = run("logits", TINY, "--tokens-file", written(tmp_path / "one.json", "[[5, 6]]"), "--json")
    assert one["shape"] == [1, 2, 512]


@needs_text
def test_text_is_what_the_files_tokenizer_says(run, model, tokenizer):
    for words in ("ab", "a b", "ü", ""):
        found = run("logits", TINY, "--text", words, "--json")
        assert found["sha256"] == sha256(forward_full(model, [tokenizer.encode(words)]))


def test_the_checksum_is_of_the_files_numbers(run, model, tmp_path):
    out = tmp_path / "out"
    found = run("logits", TINY, "--tokens", listed(TOKENS), "--json", "--out", out)
    array = np.load(out)
    assert array.dtype == np.float32
    assert hashlib.sha256(array.astype("<f4").tobytes()).hexdigest() == found["sha256"]
    np.testing.assert_array_equal(array, forward_full(model, TOKENS[None])[0])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("options", [[], ["--chunk", "5"], ["--mode", "parallel"]])
def test_the_last_position_only(run, model, tmp_path, options):
    logits = forward_full(model, TOKENS[None])
    found = run("logits", TINY, "--tokens", listed(TOKENS), "--last", "--json", *options)
    assert (found["shape"], found["sha256"]) == ([512], sha256(logits[0, -1]))
    batch = saved(tmp_path / "batch.npy", np.stack([TOKENS, TOKENS]))
    found = run("logits", TINY, "--tokens-file", batch, "--last", "--json", *options)
    assert (found["shape"], len(found["top"])) == ([2, 512], 2)
    assert found["sha256"] == sha256(np.stack([logits[0, -1]] * 2))


def test_another_dialect(run, model):
    found = run("logits", TINY, "--tokens", listed(TOKENS), "--as", "bitnet.cpp", "--json")
    assert found["sha256"] == sha256(forward_full(model, TOKENS[None], dialect=BITNET_CPP))
    assert found["dialect"] == "bitnet.cpp"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", ""], "--tokens: Tokens cannot be empty"),
        (["--tokens", ","], "--tokens: Tokens cannot be empty"),
        (["--tokens", "1,x"], "--tokens is '1,x', expected integers separated by commas or blanks"),
        (["--tokens", "1.5"], "--tokens is '1.5'"),
        (["--tokens", "1," * 100 + "\x1b"], "--tokens is '1,1,1"),
        (["--tokens", "9" * 5000], "--tokens is '999"),
        (["--tokens", "9" * 30], "--tokens: token ids have dtype object, expected integers of 64 bits at most"),
        (["--tokens", str(2**63)], "expected less than 2**63"),
        (["--tokens", "512"], "token 512 at position 0 of sequence 0 is not an id of the vocabulary, 0..511"),
        (["--tokens", "1,-1"], "token -1 at position 1"),
        (["--tokens", "1," * 513], "513 positions, the model's context is 512"),
        (["--tokens", "1", "--chunk", "0"], "chunk is 0, expected at least 1"),
        (["--tokens", "1", "--chunk", "-3"], "chunk is -3"),
        (["--tokens", "1", "--chunk", "2", "--mode", "parallel"], "--chunk needs --mode incremental, not parallel"),
        (["--tokens", "1", "--chunk", "2", "--mode", "auto"], "--chunk needs --mode incremental, not auto"),
        (["--tokens", "1", "--threads", "0"], "--threads is 0, expected 1 to"),
        (["--tokens", "1", "--threads", "-1"], "--threads is -1"),
        (["--tokens", "1", "--threads", "100000"], "--threads is 100000"),
        (["--tokens", "1", "--out", "no/such/folder/x.npy"], "expected a file in a folder that is there"),
        (["--tokens", "1", "--out", "."], "expected a file in a folder that is there"),
        (["--tokens-file", "nowhere.npy"], "nowhere.npy"),
        (["--tokens-file", "nowhere.json"], "nowhere.json"),
        (["--tokens-file", "ids.csv"], "ids.csv: expected a name that ends in .npy, .json or .txt"),
    ],
)
def test_wrong_arguments_of_logits(refused, arguments, message):
    assert message in refused("logits", TINY, *arguments)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", "", "no array of token ids"),
        ("x.json", "[1, 2", "no array of token ids"),
        ("x.json", "[" * 100_000, "no array of token ids"),
        ("x.json", b"\xff\xfe[1]", "not UTF-8 at byte 0"),
        ("x.json", "\ufeff[1]", "no array of token ids"),
        ("x.json", "[[1, 2], [3]]", "its sequences have 1 to 2 tokens, expected as many in each"),
        ("x.json", "[[1], 2]", "no array of token ids"),
        ("x.json", "[[[1]], [2]]", "no array of token ids"),
        ("x.json", "[[[1]]]", "token ids have shape [1, 1, 1], expected [T] or [B, T]"),
        ("x.json", "7", "token ids have shape [], expected [T] or [B, T]"),
        ("x.json", "null", "token ids have shape []"),
        ("x.json", '{"tokens": [1]}', "token ids have shape []"),
        ("x.json", "[]", "Tokens cannot be empty"),
        ("x.json", "[[], []]", "Tokens cannot be empty"),
        ("x.json", "[1.0, 2.0]", "token ids have dtype float64, expected integers"),
        ("x.json", "[1, null]", "token ids have dtype object"),
        ("x.json", '["1"]', "token ids have dtype <U1"),
        ("x.json", "[true]", "token ids have dtype bool"),
        ("x.json", "[NaN]", "token ids have dtype float64"),
        ("x.json", "[" + "9" * 5000 + "]", "no array of token ids"),
        ("x.json", "[" + "9" * 30 + "]", "token ids have dtype object"),
        ("x.txt", "", "Tokens cannot be empty"),
        ("x.txt", " \n\n", "Tokens cannot be empty"),
        ("x.txt", "1 2\n3\n", "its sequences have 1 to 2 tokens"),
        ("x.txt", "1 2 three", ", line 1 is '1 2 three', expected integers separated by commas or blanks"),
        ("x.txt", "1 2\n\n3 4.5\n", ", line 3 is '3 4.5', expected integers"),
        ("x.txt", b"\xff", "not UTF-8 at byte 0"),
    ],
)
def test_wrong_files_of_tokens(refused, tmp_path, name, content, message):
    path = written(tmp_path / name, content)
    found = refused("logits", TINY, "--tokens-file", path)
    assert found.startswith(f"bitnet-np: {path}")
    assert message in found


def npy(header, data=bytes(48)):
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def header(descr="'<i8'", shape="(2,)"):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"


NPY = {  # each makes NumPy raise something else, and pickles and archives are no arrays
    "empty": b"",
    "text": b"1,2,3",
    "pickle": b"\x80\x04K\x01.",
    "zip": b"PK\x03\x04" + bytes(100),
    "end of zip": b"PK\x05\x06" + bytes(18),
    "magic only": b"\x93NUMPY",
    "version 9": b"\x93NUMPY\x09\x00" + bytes(90),
    "no header": npy(""),
    "cut header": npy(header())[:40],
    "open brace": npy("{'descr'"),
    "indented": npy(" \n  x\n y"),
    "parentheses": npy("(" * 3000),
    "minus signs": npy("-" * 5000 + "1"),
    "huge header": npy("{" + " " * 60_000 + header()[1:]),
    "no such dtype": npy(header("'foo'")),
    "objects": npy(header("'O'")),
    "cut data": npy(header(shape="(7,)")),
    "more data than memory": npy(header(shape=f"({2**60},)")),
    "too large": npy(header(shape=f"({2**63 - 1},)")),
    "larger": npy(header(shape=f"({10**20},)")),
    "product overflows": npy(header(shape=f"({2**32}, {2**32})")),
    "negative": npy(header(shape="(-1,)")),
    "bool": npy(header(shape="(True,)")),
}


@pytest.mark.parametrize("name", NPY)
def test_files_that_are_no_npy(refused, tmp_path, name):
    path = written(tmp_path / "x.npy", NPY[name])
    said = refused("logits", TINY, "--tokens-file", path)
    assert said.startswith(f"bitnet-np: {path}: ")
    assert ".npy" in said.removeprefix(f"bitnet-np: {path}: ") or "bytes of data, expected" in said
    check = ["check", TINY, "--tokens", "1", "--theirs", path]
    for options in ([], ["--last"]):
        assert refused(*check, *options).startswith(f"bitnet-np: {path}: ")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1.0, 2.0]), "token ids have dtype float64, expected integers"),
        (np.array([], np.int64), "Tokens cannot be empty"),
        (np.zeros((0, 3), np.int64), "Tokens cannot be empty"),
        (np.array(3), "token ids have shape [], expected [T] or [B, T]"),
        (np.zeros((1, 1, 1), np.int64), "token ids have shape [1, 1, 1]"),
        (np.array(["1"]), "token ids have dtype <U1"),
        (np.array([(1, 2)], "i4,i4"), "expected numbers and at most 8 axes"),
        (np.array([np.datetime64("2024-01-01")]), "token ids have dtype"),
    ],
)
def test_arrays_that_are_no_tokens(refused, tmp_path, array, message):
    path = saved(tmp_path / "x.npy", array)
    assert message in refused("logits", TINY, "--tokens-file", path)


def test_pickles_are_never_loaded(refused, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    evil = np.empty(1, object)
    evil[0] = Evil()
    path = saved(tmp_path / "evil.npy", evil, allow_pickle=True)
    assert "expected numbers" in refused("logits", TINY, "--tokens-file", path)
    assert "expected numbers" in refused("check", TINY, "--tokens", "1", "--theirs", path, "--last")
    assert "dtype('O')" in refused("check", TINY, "--tokens", "1", "--theirs", path)
    assert not (tmp_path / "made").exists()


@contextmanager
def failing_save(monkeypatch, error):
    def save(file, array):
        file.write(b"half of it")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", save)
        yield


def test_a_failing_disk_leaves_nothing_half_written(refused, run, tmp_path, monkeypatch):
    out = written(tmp_path / "out.npy", "the one before")
    with failing_save(monkeypatch, OSError(28, "No space left on device")):
        assert "No space left" in refused("logits", TINY, "--tokens", "1", "--out", out)
    with failing_save(monkeypatch, KeyboardInterrupt()):
        run("logits", TINY, "--tokens", "1", "--out", out, code=130)
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]
    assert out.read_text() == "the one before"


def test_no_memory(refused, monkeypatch):
    def too_much(*args, **options):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(logits_command, "compute_logits", too_much)
    assert "Unable to allocate 9 TiB" in refused("logits", TINY, "--tokens", "1")


def test_text_without_the_extra(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'bitnet_np[text]'" in refused("logits", TINY, "--text", "ab")
    assert "pip install 'bitnet_np[text]'" in refused("generate", TINY, "--prompt", "ab")


def test_the_demo_model_speaks_without_the_extra(monkeypatch, capsys):
    for name in ("tokenizers", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["generate", "--prompt", "Once upon a time", "-n", "8"]) == 0
    assert capsys.readouterr().out.startswith(", a young girl named Nora")


# --- generate -------------------------------------------------------------------------------------------------------------------------

HOT = ["--temperature", "3"]


def test_generate_prints_tokens_and_keeps_speeds_apart(model, capsys):
    assert main(["generate", TINY, "--tokens", "1,2,3", "-n", "6"]) == 0
    captured = capsys.readouterr()
    assert captured.out == listed(generate(model, [1, 2, 3], 6)[3:]) + "\n"
    speeds = r"prefill [\d.]+ tokens/s \(3 tokens\), decode [\d.]+ tokens/s \(6 tokens\)\n"
    assert re.fullmatch(speeds, captured.err)


def test_each_token_is_printed_as_it_comes(monkeypatch):
    screen, seen = io.BytesIO(), []

    def slow(*args, **options):
        for token in (5, 60, 7):
            seen.append(screen.getvalue())
            yield token

    monkeypatch.setattr(generate_command, "stream", slow)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen))
    assert main(["generate", TINY, "--tokens", "1"]) == 0
    assert seen == [b"", b"5", b"5,60"]
    assert screen.getvalue() == b"5,60,7\n"


def test_generate_in_json(run, model):
    found = run("generate", TINY, "--tokens", "1,2,3", "-n", "6", "--json")
    assert found.pop("prefill_tokens_per_second") > 0
    assert found.pop("decode_tokens_per_second") > 0
    assert found == {"prompt": [1, 2, 3], "tokens": generate(model, [1, 2, 3], 6)[3:]}
    assert run("generate", TINY, "--tokens", "1", "-n", "1", "--json")["decode_tokens_per_second"] is None
    assert run("generate", TINY, "--tokens", "1", "-n", "0", "--json")["tokens"] == []
    assert run("generate", TINY, "--tokens", "1", "-n", "0") == "\n"


@needs_text
def test_generate_from_text(run, model, tokenizer):
    prompt = tokenizer.encode("a b")
    options = ["-n", "9", "--stop", "", *HOT]
    new = generate(model, prompt, 9, sampling=Sampling(3.0))[len(prompt) :]
    assert run("generate", TINY, "--prompt", "a b", *options) == tokenizer.decode(new) + "\n"
    found = run("generate", TINY, "--prompt", "a b", *options, "--json")
    assert (found["prompt"], found["tokens"], found["text"]) == (prompt, new, tokenizer.decode(new))


@needs_text
def test_text_may_end_inside_a_character(run, tokenizer, monkeypatch):
    first, second = (list(tokenizer.tokens).index(BYTE_CHARACTERS[byte]) for byte in "é".encode())
    for new, expected in (([first, second], "é"), ([first], "\ufffd")):
        monkeypatch.setattr(generate_command, "stream", lambda *args, new=new, **options: iter(new))
        assert run("generate", TINY, "--prompt", "a") == expected + "\n"
        assert run("generate", TINY, "--prompt", "a", "--json")["text"] == expected


@needs_text
def test_generate_as_a_chat(run, tokenizer):
    found = run("generate", TINY, "--prompt", "a b", "--chat", "-n", "3", "--json")
    assert found["prompt"] == tokenizer.chat([{"role": "user", "content": "a b"}])
    assert set(found) == {"prompt", "tokens", "text", "prefill_tokens_per_second", "decode_tokens_per_second"}


def test_seeds_and_numbers_say_every_token(run, model):
    def of(*options):
        return run("generate", TINY, "--tokens", "7,8", "-n", "12", *HOT, *options)

    assert of("--seed", "5") == of("--seed", "5") == of("--uniforms", listed(islice(uniforms(5), 12)))
    assert of("--seed", "5") != of("--seed", "6")
    assert of() == of("--seed", "0") == listed(generate(model, [7, 8], 12, sampling=Sampling(3.0))[2:]) + "\n"
    options = ["--top-k", "5", "--top-p", "0.9", "--seed", "2"]
    assert of(*options) == listed(generate(model, [7, 8], 12, sampling=Sampling(3.0, 5, 0.9), seed=2)[2:]) + "\n"
    assert of("--as", "bitnet.cpp") == listed(generate(model, [7, 8], 12, sampling=Sampling(3.0), dialect=BITNET_CPP)[2:]) + "\n"
    assert of("--threads", "2") == of("--threads", "1") == of()


def test_generation_stops(run):
    new = run("generate", TINY, "--tokens", "7", "-n", "12", *HOT, "--json")["tokens"]
    first = new.index(new[4])
    assert run("generate", TINY, "--tokens", "7", "-n", "12", *HOT, "--json", "--stop", f"{new[4]}")["tokens"] == new[:first]
    assert run("generate", TINY, "--tokens", "7", "-n", "12", *HOT, "--json", "--stop", "")["tokens"] == new


@needs_text
def test_text_stops_at_the_files_end_tokens(run, model, tokenizer):
    prompt = tokenizer.encode("ab")
    seed = next(
        s for s in range(999) if set(tokenizer.stops) & set(generate(model, prompt, 40, sampling=Sampling(9.0), seed=s)[len(prompt) :])
    )
    options = ["--prompt", "ab", "-n", "40", "--temperature", "9", "--seed", seed, "--json"]
    whole = run("generate", TINY, *options, "--stop", "")["tokens"]
    first = min(whole.index(stop) for stop in tokenizer.stops if stop in whole)
    assert run("generate", TINY, *options)["tokens"] == whole[:first]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", ""], "Tokens cannot be empty"),
        (["--tokens", "600"], "token 600"),
        (["--tokens", "1", "-n", "-1"], "number of tokens to generate is -1"),
        (["--tokens", "1", "-n", "512"], "a prompt of 1 and 512 new tokens exceed the model's context of 512"),
        (["--tokens", "1", "--temperature", "-1"], "temperature is -1.0"),
        (["--tokens", "1", "--temperature", "nan"], "temperature is nan"),
        (["--tokens", "1", "--top-k", "-1"], "top_k is -1"),
        (["--tokens", "1", "--top-p", "0"], "top_p is 0.0"),
        (["--tokens", "1", "--seed", "-1", *HOT], "seed is -1"),
        (["--tokens", "1", "--uniforms", "0.5,x"], "--uniforms is '0.5,x'"),
        (["--tokens", "1", "--uniforms", "1.0", *HOT], "uniform number is 1.0"),
        (["--tokens", "1", "--uniforms", "", *HOT], "ran out"),
        (["--tokens", "1", "--stop", "x"], "--stop is 'x'"),
        (["--tokens", "1", "--stop", "512"], "stop token 512 is not an id"),
        (["--tokens", "1", "--chat"], "--chat needs --prompt"),
        (["--tokens", "1", "--threads", "0"], "--threads is 0"),
        (["nowhere.gguf", "--tokens", "1"], "nowhere.gguf"),
        pytest.param(["--prompt", "\udc80"], "lone surrogate", marks=needs_text),
    ],
)
def test_wrong_arguments_of_generate(refused, arguments, message):
    assert message in refused("generate", *(arguments if "gguf" in arguments[0] else [TINY, *arguments]))


def test_without_n_as_many_tokens_as_fit(run):
    prompt = ",".join(["7"] * 500)
    assert len(run("generate", TINY, "--tokens", prompt, "--json")["tokens"]) == 12
    assert len(run("generate", TINY, "--tokens", "7", "--json")["tokens"]) == 64


def test_generate_takes_one_prompt(refused, tmp_path):
    path = written(tmp_path / "two.json", "[[1], [2]]")
    assert "token ids have shape [2, 1], expected [T]: one prompt" in refused("generate", TINY, "--tokens-file", path)


def test_an_interrupt_is_no_traceback(capsys, monkeypatch):
    def interrupted(*args, **options):
        yield 5
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "stream", interrupted)
    assert main(["generate", TINY, "--tokens", "1"]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("5", "bitnet-np: interrupted\n")


# --- check ----------------------------------------------------------------------------------------------------------------------------


def test_check_judges_the_embedded_recording(run):
    out = run("check")
    rows = [line.split() for line in out.splitlines() if re.match(r"\d+ (prefill|decode) ", line)]
    assert [row[:2] for row in rows] == [[str(n), path] for n in embedded.LENGTHS for path in ("prefill", "decode")] * 2
    assert [row[-1] for row in rows] == ["FLIPS"] * 8 + ["ROUNDING"] * 6 + ["FLIPS"] * 2
    assert out.count("tokens      max error  mean error      NMSE  scale") == 2
    assert out.count("the bits known for every machine") == 2
    assert out.endswith("\n\nfine\n")


def test_check_of_the_recording_in_json(run):
    found = run("check", "--json")
    assert found["fine"] is True
    assert found["known_bits"] == {"forward, exact": True, "forward, bitnet.cpp": True}
    assert list(found["dialects"]) == ["exact", "bitnet.cpp"]
    judgement = found["dialects"]["bitnet.cpp"]["17 decode"]
    assert (judgement["verdict"], judgement["positions"]) == ("ROUNDING", 17)


def test_check_fails_where_the_kernels_do(run, monkeypatch):
    monkeypatch.setattr(selftest, "known_bits", dict)
    out = run("check", code=1)
    assert "forward, exact: NOT the bits known for every machine" in out
    assert "NOT FINE: the kernels are broken on this machine" in out
    assert run("check", "--json", code=1)["fine"] is False


def test_check_fails_where_roundings_that_are_followed_do_not_agree(run, monkeypatch):
    """A verdict that would do for a dump from elsewhere does not do for the recording."""
    recording = embedded.recording()
    noise = np.random.default_rng(0)
    logits = {name: value for name, value in recording.items() if name.startswith("logits")}
    moved = recording | {name: value + noise.normal(0, 1e-3, value.shape) for name, value in logits.items()}
    monkeypatch.setattr(embedded, "recording", lambda: moved)
    monkeypatch.setattr(selftest, "run", lambda beginning: [("forward, exact", True)])
    out = run("check", code=1)
    assert out.count("  FLIPS\n") == 16
    assert out.endswith("NOT FINE: the kernels are broken on this machine, see bitnet-np selftest\n")


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


JUDGED = [
    (lambda x: x, 0, "SAME_BITS"),
    (lambda x: x[None], 0, "SAME_BITS"),
    (lambda x: x.astype(np.float64), 0, "ROUNDING"),
    (lambda x: x.astype(np.float16), 0, "FLIPS"),
    (lambda x: x * np.float32(1.01), 1, "WRONG"),
    (lambda x: x * np.float32(1.05), 1, "WRONG"),
    (lambda x: changed(x, (3, 4), np.nan), 2, "INVALID"),
    (lambda x: x[:-1], 2, "INVALID"),
    (lambda x: x[:, :-1], 2, "INVALID"),
    (lambda x: np.zeros_like(x), 2, "INVALID"),
    (lambda x: x.astype(np.int32), 2, "INVALID"),
]


@pytest.mark.parametrize(("change", "code", "verdict"), JUDGED)
def test_check_judges_a_dump(run, model, tmp_path, change, code, verdict):
    theirs = saved(tmp_path / "theirs.npy", change(compute_logits(model, TOKENS[None])[0]))
    arguments = ["check", TINY, "--tokens", listed(TOKENS), "--theirs", theirs]
    found = run(*arguments, "--json", code=code)
    assert set(found) == {"verdict", "meaning", "reason", "first_wrong", "operations", "missing", "notes", "closer_to_float64", "logits"}
    assert (found["verdict"], found["meaning"]) == (verdict, Verdict[verdict].text)
    assert set(found["logits"]) == {field.name for field in fields(Judgement)} | {"meaning"}
    assert found["logits"]["verdict"] == verdict
    out = run(*arguments, code=code)
    assert out.startswith(f"{theirs} against {TINY}, dialect exact\n\n{found['meaning']}\n{found['reason']}\n")
    assert bool(re.search(rf"\nlogits .* {verdict}\n", out)) == (verdict != "INVALID")


def test_check_takes_bare_numbers(run, refused, model, tmp_path):
    """Of the last token, or of all, by how many there are: the model says the rest."""
    ids = np.stack([TOKENS, TOKENS[::-1]])
    batch = saved(tmp_path / "ids.npy", ids)
    logits = forward_full(model, ids)

    def judged(array, name, *options):
        array.tofile(tmp_path / name)
        found = run("check", TINY, "--theirs", tmp_path / name, "--json", *options)
        return found["verdict"], found["logits"]["positions"]

    one = ["--tokens", listed(TOKENS)]
    assert judged(logits[0], "x.f32", *one) == ("SAME_BITS", 17)
    assert judged(logits[0], "x.bin", *one, "--format", "raw") == ("SAME_BITS", 17)
    assert judged(logits[0, -1], "x.f32", *one) == ("SAME_BITS", 1)
    assert judged(logits[0, -1], "x.f32", *one, "--last") == ("SAME_BITS", 1)
    assert judged(logits, "x.f32", "--tokens-file", batch) == ("SAME_BITS", 34)
    assert judged(logits[:, -1], "x.f32", "--tokens-file", batch, "--last") == ("SAME_BITS", 2)
    logits[0, :3].tofile(tmp_path / "x.f32")
    message = "x.f32: 6144 bytes, expected 34816 for float32 [17, 512]"
    assert message in refused("check", TINY, *one, "--theirs", tmp_path / "x.f32")
    np.savez(tmp_path / "x.npz", result_output=logits[0])
    assert "expected logits alone" in refused("check", TINY, *one, "--theirs", tmp_path / "x.npz", "--last")


@pytest.mark.parametrize(
    ("picture", "message"), [("no/x.png", "expected a file in a folder that is there"), ("x.foo", "x.foo: expected a name")]
)
def test_where_no_picture_can_be_drawn(refused, tmp_path, picture, message):
    pytest.importorskip("matplotlib")
    assert message in refused("compare", "nowhere.npz", "nowhere.npz", "--plot", picture)
    theirs = saved(tmp_path / "theirs.npy", np.zeros((1, 512), np.float32))
    assert message in refused("check", TINY, "--tokens", "1", "--theirs", theirs, "--plot", picture)


def test_nothing_is_printed_before_an_error(refused, tmp_path):
    pytest.importorskip("matplotlib")
    theirs = saved(tmp_path / "theirs.npy", np.zeros((1, 512), np.float32))
    found = refused("check", TINY, "--tokens", "1", "--theirs", theirs, "--plot", tmp_path / "x.png")
    assert found == "bitnet-np: --plot needs a dump with intermediate tensors\n"


def test_check_of_a_batch_the_last_position_and_a_dialect(run, model, tmp_path):
    ids = np.stack([TOKENS, TOKENS[::-1]])
    tokens, theirs = saved(tmp_path / "ids.npy", ids), tmp_path / "theirs.npy"

    def judged(*options, code=0):
        found = run("check", TINY, "--tokens-file", tokens, "--theirs", theirs, "--json", *options, code=code)["logits"]
        return found["verdict"], found["positions"]

    saved(theirs, forward_full(model, ids))
    assert judged() == ("SAME_BITS", 34)
    assert judged("--last", code=2) == ("INVALID", 0)
    saved(theirs, forward_full(model, ids, last_only=True))
    assert judged("--last") == ("SAME_BITS", 2)
    assert judged(code=2) == ("INVALID", 0)
    saved(theirs, forward_full(model, ids, dialect=BITNET_CPP))
    assert judged() == ("FLIPS", 34)
    assert judged("--as", "bitnet.cpp", "--threads", "2") == ("SAME_BITS", 34)
    saved(theirs, 2 * forward_full(model, ids))
    assert judged(code=1) == ("WRONG", 34)


@needs_text
def test_check_of_a_text(run, model, tokenizer, tmp_path):
    theirs = saved(tmp_path / "theirs.npy", forward_full(model, [tokenizer.encode("a b")])[0])
    assert run("check", TINY, "--text", "a b", "--theirs", theirs, "--json")["verdict"] == "SAME_BITS"


@pytest.mark.parametrize(
    "arguments",
    [
        [TINY],
        ["--tokens", "1"],
        ["--theirs", "x.npy"],
        [TINY, "--tokens", "1"],
        [TINY, "--theirs", "x.npy"],
        ["--tokens", "1", "--theirs", "x.npy"],
        ["--tokens", ""],
    ],
)
def test_check_needs_all_or_nothing(refused, arguments):
    assert "check needs MODEL, token ids (--tokens, --tokens-file or --text) and --theirs, or none of them" in refused("check", *arguments)


def test_wrong_arguments_of_check(refused, tmp_path):
    theirs = saved(tmp_path / "theirs.npy", np.zeros((1, 512), np.float32))
    assert "shape [0, 512]" in refused(
        "check", TINY, "--tokens", "1", "--theirs", saved(tmp_path / "none.npy", np.zeros((0, 512), np.float32))
    )
    assert "nowhere.npy" in refused("check", TINY, "--tokens", "1", "--theirs", "nowhere.npy")
    assert "Tokens cannot be empty" in refused("check", TINY, "--tokens", "", "--theirs", theirs)
    assert "token 512" in refused("check", TINY, "--tokens", "512", "--theirs", theirs)
    assert "nowhere.gguf" in refused("check", "nowhere.gguf", "--tokens", "1", "--theirs", theirs)


# --- selftest -------------------------------------------------------------------------------------------------------------------------


def test_selftest(run):
    out = run("selftest", "--threads", "2")
    names = list(selftest.cases())
    assert set(names) == set(selftest.known_bits())
    assert [line.removesuffix("as known").rstrip() for line in out.splitlines() if line.endswith("  as known")] == names
    assert re.search(r"\nthreads +2\n", out)
    assert re.search(r"\n\nall as known, [\d.]+ s\n$", out)


def test_selftest_in_json(run):
    found = run("selftest", "--json")
    names = "machine python numpy numba threads instruction_path features fine kernels seconds"
    assert set(found) == set(names.split())
    assert found["fine"] is True
    assert found["kernels"] == dict.fromkeys(selftest.cases(), True)
    assert isinstance(found["features"], list)


def test_check_compiles_no_kernel_that_a_forward_pass_does_not_use(run, monkeypatch):
    every = selftest.cases()
    monkeypatch.setattr(selftest, "cases", lambda: every | {"product": lambda: pytest.fail("a kernel of the backward pass")})
    assert set(run("check", "--json")["known_bits"]) == {name for name in every if name.startswith("forward")}


@pytest.mark.parametrize("name", ["rms_norm", "attend, window", "forward, exact"])
def test_selftest_names_the_kernel_that_differs(run, monkeypatch, name):
    tampered = selftest.known_bits() | {name: "0" * 64}
    monkeypatch.setattr(selftest, "known_bits", lambda: tampered)
    out = run("selftest", code=1)
    assert [line.split("  ")[0] for line in out.splitlines() if line.endswith("DIFFER")] == [name]
    assert "NOT FINE" in out
    found = run("selftest", "--json", code=1)
    assert found["fine"] is False
    assert [kernel for kernel, fine in found["kernels"].items() if not fine] == [name]


# --- help, and the program from outside -----------------------------------------------------------------------------------------------


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"bitnet-np {bitnet_np.__version__}\n")


def test_help(capsys):
    for arguments in ([], *([command] for command in COMMANDS)):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--help"])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert out.startswith(f"usage: {' '.join(['bitnet-np', *arguments])} ")
        assert all(each in out for each in (["--json"] if arguments else [*COMMANDS, "Exit codes: 0 fine, 1 a difference"]))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["logits"],
        ["logits", TINY],
        ["logits", TINY, "--tokens", "1", "--text", "a"],
        ["logits", TINY, "--tokens", "1", "--threads", "many"],
        ["logits", TINY, "--tokens", "1", "--mode", "fast"],
        ["logits", TINY, "--tokens", "1", "--as", "ollama"],
        ["generate"],
        ["inspect"],
        ["inspect", TINY, "--threads", "1"],
    ],
)
def test_usage(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: bitnet-np")


def program(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "bitnet_np", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PACKAGE), **environment},
    )


def test_the_program(model, tmp_path):
    theirs = saved(tmp_path / "theirs.npy", np.float32(1.05) * forward_full(model, TOKENS[None])[0])
    started = [
        program("logits", TINY, "--tokens", listed(TOKENS), "--threads", "2", "--json"),
        program("check", TINY, "--tokens", listed(TOKENS), "--theirs", theirs),
        program("inspect", "nowhere.gguf"),
    ]
    (logits, *_), (_, stderr), (nothing, message) = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 1, 2]
    assert json.loads(logits)["sha256"] == sha256(forward_full(model, TOKENS[None]))
    assert (stderr, nothing) == (b"", b"")
    assert message.startswith(b"bitnet-np: ")


def test_a_reader_that_leaves_is_no_error():
    started = [program("inspect", TINY, "--tensors"), program("logits", TINY, "--tokens", "1")]  # more than a buffer, and less
    for process in started:
        process.stdout.close()
    for process in started:
        assert process.stderr.read() == b""
        assert process.wait() == 141  # as of a program that SIGPIPE ends


@needs_text
def test_a_terminal_that_cannot_show_the_text():
    process = program("generate", TINY, "--prompt", "ab", "-n", "20", *HOT, PYTHONIOENCODING="ascii")
    out, _ = process.communicate()
    assert process.returncode == 0
    assert b"\\ufffd" in out
    assert out.isascii()


# --- what argparse lets through, and what is written over -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--tokens", "--tokens-file", "--text", "--out", "--metrics", "--chunk", "--threads", "--as"])
def test_an_option_is_never_given_two_dashes_as_its_value(option, capsys):
    """argparse makes an empty list of them before Python 3.13, whatever type the option has."""
    with pytest.raises(SystemExit) as stopped:
        main(["logits", TINY, f"{option}=--"])
    assert stopped.value.code == 2
    assert f"{option}=--" in capsys.readouterr().err


def test_what_is_read_is_not_written_over(run, refused, tmp_path):
    model, tokens = tmp_path / "model.gguf", saved(tmp_path / "tokens.npy", np.array([1, 2, 3]))
    model.write_bytes(Path(TINY).read_bytes())
    link = tmp_path / "link.npy"
    link.symlink_to(model)
    for option, out in (("--out", model), ("--out", tokens), ("--metrics", model), ("--out", link)):
        before = model.read_bytes(), Path(tokens).read_bytes()
        message = refused("logits", model, "--tokens-file", tokens, option, out)
        assert f"{option} is {out}, which is read: " in message
        assert (model.read_bytes(), Path(tokens).read_bytes()) == before
    run("logits", model, "--tokens-file", tokens, "--out", tmp_path / "new.npy")
    run("logits", model, "--tokens-file", tokens, "--out", tmp_path / "new.npy")  # which is read by nobody


def test_errors_are_no_output_where_standard_error_is_closed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    command = f"{sys.executable} -m bitnet_np logits {TINY} --tokens 999 2>&-"
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


def test_what_has_no_end_is_not_read(refused, tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for arguments in (["inspect", pipe], ["inspect", "/dev/zero"], ["check", TINY, "--tokens", "1", "--theirs", pipe]):
        assert "neither a file nor a folder, expected a file" in refused(*arguments)
    monkeypatch.setattr("bitnet_np.cli.inputs._MOST_TEXT", 10)
    monkeypatch.setattr("bitnet_np.cli.generate_many._LONGEST_LINE", 20)
    for name in ("t.txt", "t.json"):
        assert f"{name}: more than 10 bytes" in refused("logits", TINY, "--tokens-file", written(tmp_path / name, b"1 2 3 4 5 6"))
    lines = written(tmp_path / "prompts", b'{"id": 1, "tokens": [1]}\n')
    assert "prompts, line 1: more than 20 bytes" in refused("generate", TINY, "--prompts-file", lines)
