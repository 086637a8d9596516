"""`python -m bitnet_np` as a program of its own: exit codes, pipes that are closed, terminals of few characters."""

import json
import os
import subprocess
import sys

import numpy as np
from command_line import HOT, ROOT, TINY, TOKENS, needs_text, save_array, sha256, with_commas

from bitnet_np.files.load import load
from bitnet_np.forward_pass import forward_full


def program(*arguments, **environment):
    """The program, started with these arguments and environment variables."""
    return subprocess.Popen(
        [sys.executable, "-m", "bitnet_np", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_the_program(tmp_path):
    logits = forward_full(load(TINY), TOKENS[None])
    theirs = save_array(tmp_path / "theirs.npy", np.float32(1.05) * logits[0])
    started = [
        program("logits", TINY, "--tokens", with_commas(TOKENS), "--threads", "2", "--json"),
        program("check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs),
        program("inspect", "nowhere.gguf"),
    ]
    (printed, *_), (_, stderr), (nothing, message) = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 1, 2]
    assert json.loads(printed)["sha256"] == sha256(logits)
    assert [line for line in stderr.splitlines() if not line.endswith(b" so far")] == []  # progress, on a slow machine
    assert nothing == b""
    assert message.startswith(b"bitnet-np: ")


def test_a_reader_that_leaves_is_no_error():
    started = [program("inspect", TINY, "--tensors"), program("logits", TINY, "--tokens", "1")]  # more than a buffer, and less
    for process in started:
        process.stdout.close()
    for process in started:
        assert process.stderr.read() == b""
        assert process.wait() == 141  # as a program that SIGPIPE ends


@needs_text
def test_a_terminal_that_cannot_show_the_text():
    process = program("generate", TINY, "--prompt", "ab", "-n", "20", *HOT, PYTHONIOENCODING="ascii")
    out, _ = process.communicate()
    assert process.returncode == 0
    assert b"\\ufffd" in out
    assert out.isascii()


def test_errors_are_no_output_where_standard_error_is_closed():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m bitnet_np logits {TINY} --tokens 999 2>&-"
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")
