"""What all commands share: help, exit codes, one line for each error, and outputs that overwrite nothing that is read."""

import io
import json
import re
import shlex
import shutil
import subprocess
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
from bitnet_np.testing.models import random_model, write_gguf

COMMANDS = ("inspect", "logits", "generate", "check", "trace", "grad", "compare", "nll", "convert", "mask", "selftest", "completion")


# --- help and usage -------------------------------------------------------------------------------------------------------------------


def test_version_and_help(ended):
    assert ended("--version") == (0, f"bitnet-np {bitnet_np.__version__}\n", "")
    for words in ([], *([command] for command in COMMANDS)):
        code, out, _ = ended(*words, "--help")
        assert (code, out.startswith(f"usage: {' '.join(['bitnet-np', *words])} ")) == (0, True)
        assert all(each in out for each in (["--json"] if words else [*COMMANDS, "Exit codes: 0 fine, 1 a difference"]))


@pytest.mark.parametrize(
    ("words", "end"),
    [
        (["logits", TINY], ""),
        (["logits", TINY, "--tokens", "1", "--text", "a"], ""),
        (["logits", TINY, "--tokens", "1", "--threads", "many"], ""),
        (["generate", "-n", "1"], ""),
        (["inspect", TINY, "--threads", "1"], ""),
        (["chek"], "did you mean check?"),
        (["frobnicate"], ")"),
        (["generate", "--promt", "x"], "unrecognized arguments: --promt, did you mean --prompt?"),
        (["check", TINY, "--text=a", "--their=x", "--thiers=y", "--", "--zzz"], "--thiers, did you mean --theirs or --threads?"),
        (["mask", "1", "1", "--zzz"], "unrecognized arguments: --zzz"),
        (["mask", "1", "1", "-q"], "mask: error: unrecognized arguments: -q"),
        (["logits", TINY, "--tokens", "1", "2"], "logits: error: unrecognized arguments: 2"),
        (["check", TINY, "--as", "vllm"], "did you mean vllm-f16 or vllm-bf16?"),
        (["logits", TINY, "--tokens", "1", "--as", "ollama"], "did you mean llama.cpp?"),
        (["logits", TINY, "--tokens", "1", "--mode", "paralel"], "did you mean parallel?"),
    ],
)
def test_wrong_usage_is_answered_with_the_word_that_is_like_a_mistyped_one(ended, words, end):
    code, out, err = ended(*words)
    assert (code, out) == (2, "")
    assert err.startswith("usage: bitnet-np")
    assert err.endswith(f"{end}\n")
    assert len(err.splitlines()) == 2
    assert len(err) < 400


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete_commands_options_values_and_files(run, shell):
    pytest.importorskip("shtab")
    script = run("completion", shell)
    assert all(word in script for word in (*COMMANDS, "tokens-file", "incremental", "bitnet.cpp"))
    assert (shell != "bash") | ("check___theirs_COMPGEN=_shtab_compgen_files" in script)
    assert run("completion", shell, "--json") == {"shell": shell, "script": script.removesuffix("\n")}


def test_bash_completes_what_is_typed(run, tmp_path):
    pytest.importorskip("shtab")
    bash = shutil.which("bash") or pytest.skip("needs bash")
    (tmp_path / "c.sh").write_text(run("completion", "bash"))
    lines = [
        f"source {tmp_path / 'c.sh'}",
        "COMP_WORDS=(bitnet-np check --the)",
        "COMP_CWORD=2",
        "_shtab_bitnet_np",
        'echo "${COMPREPLY[@]}"',
    ]
    done = subprocess.run([bash, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--theirs"], done.stderr


@pytest.mark.parametrize("name", [None, *build_parser().commands])
def test_every_command_has_two_examples_that_parse(name):
    parser = build_parser()
    shown = (parser.commands[name] if name else parser).format_help()
    lines = re.findall(r"^  (bitnet-np .+)$", shown.partition("Examples:\n")[2], re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])[1:]
        assert words[0] == name or name is None
        parser.parse_args(words)


def test_help_has_check_first_its_options_in_groups_and_fits_a_terminal(ended, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = ended("--help")
    assert re.search(r"COMMAND\n +(\w+) ", out)[1] == "check"
    _, out, _ = ended("check", "--help")
    groups = re.findall(r"^(\w.*):$", out, re.MULTILINE)
    assert groups == ["options", "what to judge", "the engine", "output", "rarely needed", "Examples"]
    assert "usage: bitnet-np check [options] [MODEL]\n" in out
    assert max(len(line) for line in out.partition("Examples")[0].splitlines()) <= 80


@pytest.mark.parametrize("words", [[], ["logits"], ["generate"], ["sweep"]])
def test_alone_a_command_that_needs_more_prints_its_help(ended, words):
    code, out, err = ended(*words)
    assert (code, out) == (2, "")
    assert "Examples:" in err


@pytest.mark.parametrize("option", ["--tokens", "--tokens-file", "--text", "--out", "--metrics", "--chunk", "--threads", "--as"])
def test_an_option_is_never_given_two_dashes_as_its_value(option, ended):
    """Before Python 3.13 argparse makes an empty list of the two dashes, whatever type the option has."""
    code, _, err = ended("logits", TINY, f"{option}=--")
    assert code == 2
    assert f"{option}=--" in err


OF_COMPARE = {
    "--models": "--models needs token ids: --tokens, --tokens-file or --text",
    "--models --tokens 1 --html x.html": "--html is for dumps, expected it without --models",
    "--tokens 1": "--tokens is for models, expected it with --models",
    "--as llama.cpp": "--as is for models, expected it with --models",
}
OF_NLL = {
    "--tokens 1,2,3 --save-all-logits x.kld --stride 2": "--save-all-logits and --stride exclude each other",
    f"--kl-divergence-base {TINY} --save-all-logits x.kld": "--kl-divergence-base and --save-all-logits exclude each other",
    "--tokens 1,2,3 --ctx-size 3": "--ctx-size is 3, expected it with --save-all-logits alone",
    f"--kl-divergence-base {TINY}": "starts with b'GGUF",
    "--tokens 1,2,3 --save-all-logits no/x.kld": "--save-all-logits is no/x.kld, expected a file in a folder",
    f"--tokens 1,2,3 --save-all-logits {TINY}": "--save-all-logits is ",
}
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
        (["logits", TINY, "--tokens", "1", "--precision", "kv=q3"], "precision: kv: the type is 'q3', expected one of float16, "),
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
        (["logits", TINY, "--tokens-file", "ids.csv"], "ids.csv: expected a name that ends in .npy, .npz, .json or .txt"),
        (["generate", TINY, "--tokens", "1", "--uniforms", "0.5,x"], "--uniforms is '0.5,x'"),
        (["generate", TINY, "--tokens", "1", "--stop", "x"], "--stop is 'x'"),
        (["generate", TINY, "--tokens", "1", "--chat"], "--chat needs --prompt"),
        pytest.param(["generate", TINY, "--prompt", "\udc80"], "lone surrogate", marks=needs_text),
        (["mask", 129, 129], "a mask of 129 x 129 is too large to print"),
        (["check", TINY, "--tokens", "1"], "check lacks --theirs, --engine or --endpoint; without arguments it checks this machine"),
        (["check", "--theirs", "x"], "check lacks MODEL and token ids (--tokens, --tokens-file or --text); without"),
        (["check", "--tokens", ""], "check lacks MODEL and --theirs, --engine or --endpoint; without"),
        (["check", TINY], "check lacks token ids (--tokens, --tokens-file or --text) and --theirs, --engine or --endpoint; without"),
        *((["compare", TINY, TINY, *words.split()], said) for words, said in OF_COMPARE.items()),
        *((["nll", TINY, *words.split()], said) for words, said in OF_NLL.items()),
        *((["trace", TINY, "--tokens", "1", f"--layers={layers}", "--out", "no.npz"], "--layers") for layers in LAYERS),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(refused, arguments, message):
    assert message in refused(*arguments)


def test_a_model_with_nan_in_it_is_run_if_that_is_said(run, refused, tmp_path):
    model = random_model(1, family="llama", tied=False)
    write_gguf(tmp_path / "sound.gguf", model)
    model.token_embd.flags.writeable = True
    model.token_embd[7, 3] = np.nan  # no token of the prompt is 7
    write_gguf(tmp_path / "nan.gguf", model)
    for command in (["logits"], ["generate"], ["nll"], ["trace", "--out", tmp_path / "t.npz"]):
        arguments = [command[0], tmp_path / "nan.gguf", "--tokens", "1,2,3", *command[1:], "--json"]
        assert "tensor token_embd.weight has NaN or infinity in it" in refused(*arguments)
        run(*arguments, "--allow-nan")
    sound, damaged = (run("logits", tmp_path / f"{name}.gguf", "--tokens", "1,2,3", "--json", "--allow-nan") for name in ("sound", "nan"))
    assert damaged["sha256"] == sound["sha256"]


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


def test_an_interrupt_is_no_traceback(ended, monkeypatch):
    def interrupted(*args, **options):
        yield 5
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "stream", interrupted)
    assert ended("generate", TINY, "--tokens", "1") == (130, "5\n", "bitnet-np: interrupted\n")


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
    assert f"OUT.gguf is {model}, which is read: " in refused("convert", model, model)
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
