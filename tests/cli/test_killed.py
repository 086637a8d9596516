"""A command that is killed while it writes leaves the file that was there, whole, or none."""

import json
import os
import signal
import subprocess
import sys

import pytest
from command_line import ROOT, TINY

from bitnet_np.cli.main import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits the size of files")

# Each command runs in a child. From the opening of its output on, the system ends it at the 51st byte of a file ("writing"), or it ends
# itself when the output is complete and about to get its name ("renaming").
PROGRAM = """
import json, os, resource, signal, sys
from bitnet_np.cli.main import main

folder, commands = json.loads(sys.stdin.read())

def hook(event, arguments):
    if event == "open" and moment == "writing" and str(arguments[0]).startswith(folder) and arguments[1] not in (None, "r", "rb"):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
    if event == "os.rename" and moment == "renaming" and str(arguments[1]).startswith(folder):
        os.kill(os.getpid(), signal.SIGKILL)

for name, arguments in commands.items():
    for moment in ("writing", "renaming"):
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.addaudithook(hook)
            try:
                print(main(arguments), file=sys.stderr)
            finally:
                os._exit(0)
        ended = os.WTERMSIG(os.waitpid(child, 0)[1])
        print(json.dumps([name, moment, ended, sorted(file for file in os.listdir(folder) if not file.startswith("."))]))
"""
IDS = ["--tokens", "1,2,3"]


def test_what_was_there_is_whole_and_nothing_else_appears(tmp_path, capsys):
    folder, dump = tmp_path / "outputs", tmp_path / "dump.npz"
    folder.mkdir()
    assert main(["trace", TINY, *IDS, "--out", str(dump)]) == 0
    capsys.readouterr()
    commands = {
        "logits.npy": ["logits", TINY, *IDS, "--out"],
        "metrics.json": ["logits", TINY, *IDS, "--metrics"],
        "trace.npz": ["trace", TINY, *IDS, "--out"],
        "trace": ["trace", TINY, *IDS, "--format", "npy", "--out"],
        "check.html": ["check", TINY, *IDS, "--theirs", str(dump), "--html"],
        "receipt.json": ["compare", str(dump), str(dump), "--receipt"],
        "nll.npy": ["nll", TINY, *IDS, "--out"],
        "grad.npz": ["grad", TINY, *IDS, "--out"],
        "converted.gguf": ["convert", TINY, "--force"],
    }
    files = sorted(set(commands) - {"trace"})  # a folder that is there is an error
    for name in files:
        (folder / name).write_bytes(b"old")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=json.dumps([str(folder), {name: [*arguments, str(folder / name)] for name, arguments in commands.items()}]),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    signals = {"writing": signal.SIGXFSZ, "renaming": signal.SIGKILL}
    expected = [[name, moment, number, files] for name in commands for moment, number in signals.items()]
    assert [json.loads(line) for line in run.stdout.splitlines()] == expected, run.stderr
    assert {name: (folder / name).read_bytes() for name in files} == dict.fromkeys(files, b"old")
