"""What all commands share: help, exit codes, one line for each error, and outputs that overwrite nothing that is read."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import TINY, needs_text, save_array, write_file
from fuzzing.gguf_bytes import gguf as build

import bitnet_np
from bitnet_np.cli import generate as generate_command
from bitnet_np.cli import logits as logits_command
from bitnet_np.cli.main import build_parser, main

COMMANDS = ("inspect", "logits", "generate", "check", "trace", "grad", "compare", "nll", "convert", "mask", "selftest")


# --- help and usage -------------------------------------------------------------------------------------------------------------------


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
        ["logits", TINY],
        ["logits", TINY, "--tokens", "1", "--text", "a"],
        ["logits", TINY, "--tokens", "1", "--threads", "many"],
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


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["chek"], "did you mean check?"),
        (["frobnicate"], ")"),
        (["generate", "--promt", "x"], "unrecognized arguments: --promt, did you mean --prompt or --prompts-file?"),
        (["check", TINY, "--text=a", "--their=x", "--thiers=y", "--", "--zzz"], "--thiers, did you mean --theirs or --threads?"),
        (["mask", "1", "1", "--zzz"], "unrecognized arguments: --zzz"),
        (["check", TINY, "--as", "vllm"], "did you mean vllm-f16 or vllm-bf16?"),
        (["logits", TINY, "--tokens", "1", "--as", "ollama"], "did you mean llama.cpp?"),
        (["logits", TINY, "--tokens", "1", "--mode", "paralel"], "did you mean parallel?"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_one_that_is_like_it(arguments, end, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"{end}\n")


def test_a_shell_can_complete_commands_options_values_and_files():
    script = pytest.importorskip("shtab").complete(build_parser(), "bash")
    assert all(word in script for word in (*COMMANDS, "--tokens-file", "incremental", "bitnet.cpp"))
    assert "check___theirs_COMPGEN=_shtab_compgen_files" in script


@pytest.mark.parametrize("option", ["--tokens", "--tokens-file", "--text", "--out", "--metrics", "--chunk", "--threads", "--as"])
def test_an_option_is_never_given_two_dashes_as_its_value(option, capsys):
    """Before Python 3.13 argparse makes an empty list of the two dashes, whatever type the option has."""
    with pytest.raises(SystemExit) as stopped:
        main(["logits", TINY, f"{option}=--"])
    assert stopped.value.code == 2
    assert f"{option}=--" in capsys.readouterr().err


ALL_OR_NONE = "check needs MODEL, token ids (--tokens, --tokens-file or --text) and --theirs or --endpoint, or none of them"
LAYERS = ["", "a", "1-", "-1", "3-1", "0,,1", "0-99999999", "٣"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["logits", TINY, "--tokens", ""], "--tokens: Tokens cannot be empty"),
        (["logits", TINY, "--tokens", "1,x"], "--tokens is '1,x', expected integers separated by commas or blanks"),
        (["logits", TINY, "--tokens", "1," * 100 + "\x1b"], "--tokens is '1,1,1"),
        (["logits", TINY, "--tokens", "9" * 30], "--tokens: token ids have dtype object, expected integers of 64 bits at most"),
        (["logits", TINY, "--tokens", str(2**63)], "expected less than 2**63"),
        (["logits", TINY, "--tokens", "1", "--chunk", "2", "--mode", "parallel"], "--chunk needs --mode incremental, not parallel"),
        (["logits", TINY, "--tokens", "1", "--precision", "kv=q3"], "precision: kv is 'q3', expected one of float32, "),
        (["logits", TINY, "--tokens", "1", "--precision", "act=bf16"], "--precision is 'act=bf16', expected kv=TYPE alone"),
        (["logits", TINY, "--tokens", "1", "--precision", "bf16"], "each once, did you mean kv=bf16 or act=bf16?"),
        (["logits", TINY, "--tokens", "1", "--precision", "kvs=bf16"], "each once, did you mean kv?"),
        (["logits", TINY, "--tokens", "1", "--threads", "0"], "--threads is 0, expected 1 to"),
        (["logits", TINY, "--tokens", "1", "--out", "no/such/folder/x.npy"], "expected a file in a folder that is there"),
        (["logits", TINY, "--tokens", "1", "--out", "x.npz"], "--out is x.npz, expected a name that ends in .npy: that is what is written"),
        (["nll", TINY, "--tokens", "1,2", "--out", "x.txt"], "expected a name that ends in .npy"),
        (["logits", TINY, "--tokens", "1", "--out", "."], "expected a file in a folder that is there"),
        (["convert", TINY, "x.safetensors"], "OUT.gguf is x.safetensors, expected a name that ends in .gguf"),
        (["trace", TINY, "--tokens", "1", "--out", "x.npz", "--format", "safetensors"], "x.npz: format is safetensors, but the"),
        (["logits", "nothing.gguf", "--tokens", "1", "--metrics", "no/x.json"], "--metrics is no/x.json, expected a file in a folder"),
        (["logits", TINY, "--tokens-file", "ids.csv"], "ids.csv: expected a name that ends in .npy, .json or .txt"),
        (["generate", TINY, "--tokens", "1", "--uniforms", "0.5,x"], "--uniforms is '0.5,x'"),
        (["generate", TINY, "--tokens", "1", "--stop", "x"], "--stop is 'x'"),
        (["generate", TINY, "--tokens", "1", "--chat"], "--chat needs --prompt"),
        pytest.param(["generate", TINY, "--prompt", "\udc80"], "lone surrogate", marks=needs_text),
        (["mask", 129, 129], "a mask of 129 x 129 is too large to print"),
        (["check", TINY, "--tokens", "1"], ALL_OR_NONE),
        (["check", "--tokens", ""], ALL_OR_NONE),
        *((["trace", TINY, "--tokens", "1", f"--layers={layers}", "--out", "no.npz"], "--layers") for layers in LAYERS),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(refused, arguments, message):
    assert message in refused(*arguments)


# --- errors ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\2\0\0\0", b"hello", build()[:-1], Path(TINY).read_bytes()[:-1]])
def test_a_broken_file_is_named(refused, tmp_path, content):
    path = write_file(tmp_path / "broken.gguf", content)
    for arguments in (("inspect", path), ("logits", path, "--tokens", "1"), ("generate", path, "--tokens", "1")):
        assert refused(*arguments).startswith(f"bitnet-np: {path}: ")


def test_a_folder_that_is_no_model(refused, tmp_path):
    expected = "no such file, expected a Hugging Face folder or the path of a GGUF file"
    assert refused("inspect", tmp_path) == f"bitnet-np: {tmp_path / 'config.json'}: {expected}\n"


def test_a_missing_file_is_named_first(refused, tmp_path):
    model, dump = tmp_path / "nowhere.gguf", tmp_path / "nowhere.npz"
    assert refused("inspect", model) == f"bitnet-np: {model}: no such file or folder\n"
    for arguments in (["inspect", dump], ["check", TINY, "--tokens", "1", "--theirs", dump], ["compare", dump, dump]):
        assert refused(*arguments) == f"bitnet-np: {dump}: no such file or folder\n"


def test_no_memory(refused, monkeypatch):
    def too_much(*args, **options):
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(logits_command, "compute_logits", too_much)
    assert "Unable to allocate 9 TiB" in refused("logits", TINY, "--tokens", "1")


def test_an_interrupt_is_no_traceback(capsys, monkeypatch):
    def interrupted(*args, **options):
        yield 5
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "stream", interrupted)
    assert main(["generate", TINY, "--tokens", "1"]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("5\n", "bitnet-np: interrupted\n")


def test_what_is_read_is_not_written_over(run, refused, tmp_path):
    model, tokens = tmp_path / "model.gguf", save_array(tmp_path / "tokens.npy", np.array([1, 2, 3]))
    model.write_bytes(Path(TINY).read_bytes())
    link = tmp_path / "link.npy"
    link.symlink_to(model)
    for option, out in (("--out", model), ("--out", tokens), ("--metrics", model), ("--out", link)):
        before = model.read_bytes(), Path(tokens).read_bytes()
        message = refused("logits", model, "--tokens-file", tokens, option, out)
        assert f"{option} is {out}, which is read: " in message
        assert (model.read_bytes(), Path(tokens).read_bytes()) == before
    run("logits", model, "--tokens-file", tokens, "--out", tmp_path / "new.npy")
    run("logits", model, "--tokens-file", tokens, "--out", tmp_path / "new.npy")  # which nothing reads


# --- --metrics ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["logits", "--tokens", "1,2,3"], (3, 9, 9)),
        (["logits", "--tokens", "1,2,3", "--mode", "parallel"], (1, 3, 0)),
        (["generate", "--tokens", "1,2", "-n", "4"], (4, 12, 15)),
        (["nll", "--tokens", "1,2,3"], (1, 3, 6)),  # the last token predicts none
    ],
)
def test_the_command_line_writes_and_prints_them(tmp_path, printed, arguments, expected):
    out = tmp_path / "metrics.json"
    _, error = printed(arguments[0], TINY, *arguments[1:], "--metrics", out)
    metrics = json.loads(out.read_text())
    assert (metrics["forwards"], metrics["layers"], metrics["kv_positions"]) == expected
    assert "ternary_matmul" in error
    assert f"{expected[0]} forwards, {expected[1]} layers, {expected[2]} positions written to KV caches" in error


def test_standard_error_comes_behind_the_output_where_both_go_to_one_place(monkeypatch, tmp_path):
    both = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(both))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(both, write_through=True))
    assert main(["logits", TINY, "--tokens", "1", "--metrics", str(tmp_path / "metrics.json")]) == 0
    assert both.getvalue().index(b"shape") < both.getvalue().index(b"1 forwards")


def test_a_batch_of_prompts_is_measured_too(run, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "tokens": [1, 2]}\n{"id": 2, "tokens": [3]}\n')
    out = tmp_path / "metrics.json"
    run("generate", TINY, "--prompts-file", tmp_path / "prompts.jsonl", "--batch", 2, "-n", 3, "--metrics", out)
    assert json.loads(out.read_text())["forwards"] == 3
