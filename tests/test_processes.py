"""What processes go through, `python -m bitnet_np` first: exit codes, signals, pipes, full disks, names, forks and threads."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pages
import pytest
from command_line import HOT, ROOT, TINY, TOKENS, needs_text, save_array, sha256, with_commas

from bitnet_np import contract
from bitnet_np.base.errors import NonFiniteError
from bitnet_np.cli import mask
from bitnet_np.cli.main import main
from bitnet_np.engine.backend import Wrapped
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.forward_pass import forward_full, prefill
from bitnet_np.files.load import load
from bitnet_np.kernels import cpu
from bitnet_np.sweep import run, tasks
from bitnet_np.testing import random_model, selftest
from bitnet_np.testing.models import write_gguf

PROGRAM = """
import multiprocessing, os, sys
from concurrent.futures import ThreadPoolExecutor
import numba, numpy as np
from bitnet_np import KVCache, forward, forward_full
from bitnet_np.testing import random_model, selftest

model = random_model(0, width=128, ffn=256, vocab=300, context=300)
tokens = np.arange(250)[None]

def logits(_):
    return forward_full(model, tokens, last_only=True).tobytes()

if __name__ == "__main__":
    numba.set_num_threads(2)
    expected = logits(0)
    cache = KVCache(model.config, 8, 250)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(logits, range(16))) == {expected}, "threads"
        of_slot = pool.map(lambda slot: forward(model, tokens, cache, slots=[slot], last_only=True).tobytes(), range(8))
        assert set(of_slot) == {expected}, "slots of one cache"
    for way in sys.argv[1:]:
        with multiprocessing.get_context(way).Pool(2) as pool:
            assert set(pool.map_async(logits, range(4)).get(timeout=200)) == {expected}, way
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        assert logits(0) == expected, "two threads on one core"
    print("fine")
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {"PYTHONPATH": str(ROOT)}
linux = pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes, and /dev/full")


def started(*arguments, stdout=subprocess.PIPE, **environment):
    """`bitnet-np` as a process of its own, with these environment variables."""
    command = [sys.executable, "-m", "bitnet_np", *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT | environment, stdout=stdout, stderr=subprocess.PIPE)


def finished(command, shell=False):
    """A command that ran to its end."""
    return subprocess.run(command, shell=shell, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False)


def test_the_program(tmp_path):
    logits = forward_full(load(TINY), TOKENS[None])
    theirs = save_array(tmp_path / "theirs.npy", np.float32(1.05) * logits[0])
    processes = [
        started("logits", TINY, "--tokens", with_commas(TOKENS), "--threads", "2", "--json"),
        started("check", TINY, "--tokens", with_commas(TOKENS), "--theirs", theirs),
        started("inspect", "nowhere.gguf"),
    ]
    (printed, *_), (_, stderr), (nothing, message) = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 1, 2]
    assert json.loads(printed)["sha256"] == sha256(logits)
    assert [line for line in stderr.splitlines() if not line.endswith(b" so far")] == []  # progress, on a slow machine
    assert nothing == b""
    assert message.startswith(b"bitnet-np: ")


def test_a_reader_that_leaves_is_no_error():
    started("logits", TINY, "--tokens", "1").communicate()  # standard error says so where kernels are compiled for more than ten seconds
    processes = [started("inspect", TINY, "--tensors"), started("logits", TINY, "--tokens", "1")]  # more than a buffer, and less
    for process in processes:
        process.stdout.close()
    for process in processes:
        assert process.stderr.read() == b""
        assert process.wait() == 141  # as a program that SIGPIPE ends


@needs_text
def test_a_terminal_that_cannot_show_the_text():
    process = started("generate", TINY, "--prompt", "ab", "-n", "20", *HOT, PYTHONIOENCODING="ascii")
    out, _ = process.communicate()
    assert process.returncode == 0
    assert b"\\ufffd" in out
    assert out.isascii()


def test_errors_are_no_output_where_standard_error_is_closed():
    done = finished(f"{sys.executable} -m bitnet_np logits {TINY} --tokens 999 2>&-", shell=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_threads_and_pools_of_processes_compute_the_same_bits(tmp_path):
    """fork is what multiprocessing did by default on Linux: a child of a process with OpenMP's threads runs kernels on one thread."""
    (tmp_path / "program.py").write_text(PROGRAM)
    ways = ["spawn", *(["fork"] if hasattr(os, "fork") and sys.platform != "darwin" else [])]
    done = finished([sys.executable, str(tmp_path / "program.py"), *ways])
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.fixture
def interrupt(monkeypatch):
    """A function that does what Ctrl-C does, when Python next looks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_a_prefill_leaves_the_cache_as_it_was(interrupt):
    """In the second chunk of the prompt."""
    model, calls = load(TINY), []
    cache = KVCache(model.config, 1, 40)
    prefill(model, [TOKENS[:3]], cache)

    def attend(*arguments):
        calls.append(1)
        if len(calls) == model.config.n_layers + 2:
            interrupt()
        return cpu.attend(*arguments)

    with pytest.raises(KeyboardInterrupt):
        prefill(model, [TOKENS[3:]], cache, block=4, ops=Wrapped(cpu, attend=attend))
    assert (len(calls), cache.lengths.tolist()) == (model.config.n_layers + 2, [3])
    np.testing.assert_array_equal(prefill(model, [TOKENS[3:]], cache), forward_full(model, TOKENS[None], last_only=True))


@pytest.mark.skipif(os.name == "nt", reason="there are no such signals there")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
@pytest.mark.parametrize(("command", "file"), [("convert", "out.gguf"), ("trace", "out.npz"), ("logits", "out.npy")])
def test_a_command_that_is_asked_to_end_leaves_no_file(monkeypatch, tmp_path, command, file, name, code):
    """When the output is complete, and about to get its name."""
    number, out = getattr(signal, name), str(tmp_path / file)
    arguments = ["convert", TINY, out] if command == "convert" else [command, TINY, "--tokens", "1,2", "--out", out]
    default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    before = signal.signal(number, default)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *names: signal.raise_signal(number))
            with pytest.raises(SystemExit, match=str(code)):  # so that a program ends that calls it
                main(arguments)
        assert (list(tmp_path.iterdir()), signal.getsignal(number)) == ([], default)
        signal.signal(number, signal.SIG_IGN)  # as nohup does
        rename = os.replace
        monkeypatch.setattr(os, "replace", lambda *names: signal.raise_signal(number) or rename(*names))
        assert main(arguments) == 0
    finally:
        signal.signal(number, before)
    assert [path.name for path in tmp_path.iterdir()] == [file]


class Loses:
    """What `__del__` raises goes nowhere, and so does what a callback of C raises."""

    def __del__(self):
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.skipif(os.name == "nt", reason="there is no such signal there")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_is_lost_ends_the_command_later(monkeypatch):
    """By the next one, if it does not come at once, or when the command is done."""
    clock, left = [0.0], []

    def work(seconds):
        Loses()
        for clock[0] in seconds:
            left.append(clock[0])
            signal.raise_signal(signal.SIGHUP)
        left.append("done")

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        for seconds in ([], [0.5, 0.9, 1.1, 2.0]):
            monkeypatch.setattr(mask, "run", lambda arguments, seconds=seconds: work(seconds))
            with pytest.raises(SystemExit, match="129"):
                main(["mask", "3", "3"])
            clock[0] = 0.0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert left == ["done", 0.5, 0.9, 1.1]


@pytest.mark.skipif(os.name == "nt", reason="there are no such signals there")
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_sweep_that_is_asked_to_end_goes_on(tmp_path, capsys, monkeypatch, name, code):
    """In its third row."""
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[models]\nm = "{TINY}"\n[tokens]\nn = {{ random = 5, seed = 1, count = 4 }}\n[[run]]\ndo = "logits"\n')
    calls, number = [], getattr(signal, name)

    def perform(task):
        calls.append(task.key)
        if len(calls) == 3:
            signal.raise_signal(number)
        return tasks.perform(task)

    monkeypatch.setattr(selftest, "run", lambda: iter(()))
    monkeypatch.setattr(run, "perform", perform)
    before = signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit, match=str(code)):
            main(["sweep", str(plan), "--out", str(tmp_path / "out")])
        assert main(["sweep", str(plan), "--out", str(tmp_path / "out")]) == 0
    finally:
        signal.signal(number, before)
    assert calls == [*calls[:3], *calls[2:3], calls[-1]]
    assert len(set(calls)) == 4


def test_of_two_writers_of_a_file_the_last_wins_whole(tmp_path, monkeypatch):
    """The second begins and ends when the first is about to give its file its name."""
    out, rename = tmp_path / "out.npy", os.replace

    def second(*names):
        monkeypatch.setattr(os, "replace", rename)
        assert main(["logits", TINY, "--tokens", "3", "--out", str(out)]) == 0
        assert np.load(out).shape[0] == 1
        rename(*names)

    monkeypatch.setattr(os, "replace", second)
    assert main(["logits", TINY, "--tokens", "1,2", "--out", str(out)]) == 0
    np.testing.assert_array_equal(np.load(out), forward_full(load(TINY), [[1, 2]])[0])
    assert list(tmp_path.iterdir()) == [out]


@linux
def test_a_full_disk_and_a_closed_standard_input():
    with open("/dev/full", "wb") as full:
        processes = [
            started("logits", TINY, "--tokens", "1,2,3", stdout=full),
            started("logits", TINY, "--tokens", "1,2,3", "--out", "/dev/full"),
        ]
    for process in processes:
        assert b"No space left on device" in process.communicate(timeout=300)[1]
        assert process.returncode == 2
    done = finished(f"{sys.executable} -m bitnet_np inspect {TINY} <&-", shell=True)
    assert (done.returncode, done.stderr) == (0, "")


@linux
def test_help_and_schemas_that_cannot_be_printed_are_errors():
    """Also where they do not fit a buffer, or there is none."""
    with open("/dev/full", "wb") as full:
        ways = [(words, how) for words in (["--help"], ["logits", "--json-schema"]) for how in ({}, {"PYTHONUNBUFFERED": "1"})]
        processes = [started(*words, stdout=full, **how) for words, how in ways]
    for process in processes:
        assert process.communicate(timeout=300)[1] == b"bitnet-np: [Errno 28] No space left on device\n"
        assert process.returncode == 2


@linux
@pytest.mark.parametrize("way", ["{} >&-", "{} 2>/dev/full", "{} >&- 2>&-"])
def test_an_error_that_cannot_be_printed_is_one_still(way):
    done = finished(way.format(f"{sys.executable} -m bitnet_np logits nowhere.gguf --tokens 1"), shell=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("" if "2>" in way else "bitnet-np: nowhere.gguf: no such file or folder\n")


@linux
@pytest.mark.parametrize("way", ["env -u HOME {}", "ulimit -n 16; {}", "LC_ALL=C PYTHONUTF8=0 {}", "{} >&-"])
def test_a_process_that_lacks_what_others_have(way):
    done = finished(way.format(f"{sys.executable} -m bitnet_np logits {TINY} --tokens 1,2,3 --json"), shell=True)
    assert (done.returncode, done.stderr, "sha256" in done.stdout) == (0, "", "&-" not in way)


@linux
def test_names_that_are_no_utf8(tmp_path, capsys):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    model, out, missing = (folder / os.fsdecode(name) for name in (b"m\xfe.gguf", b"o\xfe.npy", b"none\xfe.gguf"))
    shutil.copy(TINY, model)
    tokens = ["--tokens", with_commas(TOKENS)]
    assert main(["logits", str(model), *tokens, "--out", str(out)]) == 0
    np.testing.assert_array_equal(np.load(out), forward_full(load(TINY), TOKENS[None])[0])
    assert main(["check", str(model), *tokens, "--theirs", str(out), "--html", str(page := folder / "page.html")]) == 0
    assert "m\\udcfe.gguf" in page.read_text("utf-8")
    assert main(["inspect", str(model), "--json"]) == 0
    capsys.readouterr()
    assert main(["logits", str(missing), *tokens]) == 2
    assert "none\\udcfe.gguf: no such file or folder" in capsys.readouterr().err


@linux
def test_the_system_ends_a_process_whose_model_is_truncated(tmp_path):
    path = shutil.copy(TINY, tmp_path / "model.gguf")
    program = "import os, sys, bitnet_np as bn; m = bn.load(sys.argv[1]); os.truncate(sys.argv[1], 4096); print(m.token_embd.sum())"
    done = finished([sys.executable, "-c", program, str(path)])
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")


def test_calls_of_asyncio_give_the_same_bits():
    model, tokens = load(TINY), TOKENS[None]

    async def calls():
        return await asyncio.gather(*(asyncio.to_thread(forward_full, model, tokens) for _ in range(4)))

    assert {logits.tobytes() for logits in asyncio.run(calls())} == {forward_full(model, tokens).tobytes()}


GREENLETS = """
from gevent import joinall, monkey, spawn
monkey.patch_all()
import sys, bitnet_np as bn
model = bn.load(sys.argv[1])
jobs = [spawn(lambda: bn.forward_full(model, [[1, 2, 3]]).tobytes()) for _ in range(4)]
joinall(jobs)
assert {job.value for job in jobs} == {bn.forward_full(model, [[1, 2, 3]]).tobytes()}
"""


def test_greenlets_give_the_same_bits():
    pytest.importorskip("gevent")
    done = finished([sys.executable, "-c", GREENLETS, TINY])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("first", ["", "bitnet_np.forward"], ids=["alone", "behind the main one"])
def test_a_subinterpreter_is_refused(first):
    module = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    in_the_other = "'import bitnet_np; bitnet_np.forward'"
    program = f"import bitnet_np, {module} as other\n{first}\nprint(other.run_string(other.create(), {in_the_other}))"
    done = finished([sys.executable, "-c", program])
    assert "this is a subinterpreter" in done.stdout + done.stderr


def test_a_python_without_the_gil_is_refused():
    done = finished([sys.executable, "-c", "import sys; sys._is_gil_enabled = lambda: False; import bitnet_np; bitnet_np.forward"])
    assert done.returncode == 1
    assert "UnsupportedError: this Python runs without the GIL" in done.stderr


@linux
def test_arrays_of_more_than_2_to_the_31_numbers(tmp_path):
    """In sparse files, of which only what is written takes room."""

    def sparse(name, shape, dtype):
        array = np.memmap(tmp_path / name, dtype, "w+", shape=shape)
        assert array.size > 1 << 31
        return array

    table, rng = sparse("table", ((1 << 20) + 1, 2048), np.float16), np.random.default_rng(1)
    table[-1] = rng.random(2048)
    np.testing.assert_array_equal(cpu.embed(table, np.array([1 << 20, 0])), [table[-1], np.zeros(2048)])
    shape = ((1 << 15) + 1, 1024, 1, 64)
    keys, values = sparse("keys", shape, np.float32), sparse("values", shape, np.float32)
    q, k, v = rng.random((3, 5, 1, 64), np.float32)
    slot, position = np.full(5, 1 << 15), np.arange(5)
    cpu.storage().write(0, keys, values, slot, position, k, v)
    expected = cpu.attend(q, k[None], v[None], np.zeros(5, np.int64), position)
    np.testing.assert_array_equal(cpu.attend(q, keys, values, slot, position), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.37, 1e-42, -1e-42, 0.0])
def test_numbers_of_every_kind_in_weights(tmp_path, value):
    model, path = random_model(3, width=128, ffn=128, heads=4, kv_heads=2, head_dim=32), tmp_path / "m.gguf"
    value, layer = np.float32(value), model.layers[0]
    table = model.token_embd.copy()
    table[7, 5] = value
    scaled = replace(layer, attn_q=replace(layer.attn_q, weights=replace(layer.attn_q.weights, scale=value)))
    for changed, refused in (
        (replace(model, token_embd=table), not np.isfinite(value)),
        (replace(model, layers=(scaled, *model.layers[1:])), not value >= 0 or value == np.inf),
    ):
        write_gguf(path, changed)
        if refused:
            with pytest.raises(NonFiniteError, match=r"tensor (token_embd|blk\.0\.attn_q)\.weight has "):
                load(path)
        else:
            loaded = load(path)
            np.testing.assert_array_equal(forward_full(loaded, [[7, 8]]), forward_full(loaded, [[7, 8]], ops=contract))


def test_each_condition_of_the_page_has_its_test():
    for condition, _, name in pages.table(ROOT / "docs" / "processes.md", "condition"):
        file, _, test = name.strip("`").partition("::")
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text("utf-8"), condition


LIMITED = """
import resource, sys
from pathlib import Path
from bitnet_np.cli import mask
from bitnet_np.cli.main import main

few, many = (["logits", sys.argv[1], "--threads", "1", "--allow-beyond-context", "--tokens", ",".join(["1"] * n)] for n in (3, 300_000))
codes = [main(few)]
size = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, ((size << 10) + (32 << 20), resource.RLIM_INFINITY))
codes += [main(many), main(few)]
print(codes)
"""


@linux
def test_a_limited_address_space():
    """What does not fit is refused with its size, and the process goes on."""
    done = finished([sys.executable, "-c", LIMITED, TINY])
    assert done.returncode == 0, done.stderr
    answers, _, _ = done.stdout.partition("[0, 2, 0]\n")
    assert answers != done.stdout
    assert answers[: len(answers) // 2] * 2 == answers
    assert re.search(r"^bitnet-np: KV cache.* 300000 positions cannot be had", done.stderr, re.MULTILINE)
