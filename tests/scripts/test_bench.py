"""The benchmark: what it refuses, what it computes from samples, and every sub-bench once on the tiny shape. No speed is asserted."""

import hashlib
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bench
import gguf
import large_model
import numba
import numpy as np
import pytest
from benchmarks import forwards, gradients, memory, models, neighbours, operations, peaks, processes, report
from benchmarks.released import released
from benchmarks.rounds import OURS, Case, CheckError, Key, Results, Setup, check, measure, simple, summary, tokens

from bitnet_np import forward_full, load
from bitnet_np.base.errors import OptionError
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.kernels import workspace
from bitnet_np.kernels.fast import amx
from bitnet_np.testing.models import random_model
from bitnet_np.testing.selftest import digest

FAKE_LLAMA = """
import time
__version__ = "fake 1"
class Llama:
    def __init__(self, path, n_ctx, verbose):
        open(path, "rb").close()
        self.ctx, self.fed, self.context = self, 0, n_ctx
        print("noise that is no answer", flush=True)
    def n_vocab(self): return 4
    def reset(self): self.fed = 0
    def eval(self, tokens):
        self.fed += len(tokens)
        assert self.fed <= self.context
        time.sleep(0.001)
def llama_set_n_threads(context, n, batch): assert n == batch
def llama_get_logits(context): return LOGITS
LOGITS = [0.0, 1.0, 2.0, 3.0]
"""


FAKE_BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-r"] == "1" and given["-o"] == "json"
with open(given["-m"] + ".log", "a") as log:
    print(given["-p"], given["-n"], given["-t"], file=log)
print(json.dumps([{{"build_commit": "abc123", "samples_ns": [{nanoseconds}]}}]))
"""
SETUP = Setup(Path(), random_model(0, context=1024), (1,), None, None, 2)
needs_shebangs = pytest.mark.skipif(sys.platform == "win32", reason="a script is no program here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def quick(folder, tmp_path):
    """Runs bench.py with everything small -> exit code and JSON (None if there is none)."""

    def run(*arguments):
        target = tmp_path / "out.json"
        given = ["--model-dir", str(folder), "--rounds", "2", "--steps", "2", "--read-mb", "1"]
        if "--lengths" not in arguments:
            given += ["--lengths", "4,8"]
        if not {"--shape", "--model"} & set(arguments):
            given += ["--shape", "tiny"]
        if "--threads" not in arguments:  # waking a second thread on a busy machine takes longer than all the rest
            given += ["--threads", "1"]
        code = bench.main([*arguments, *given, "--batch", "1,2", "--json", str(target)])
        return code, json.loads(target.read_text()) if target.exists() else None

    return run


@pytest.fixture
def fake_llama(tmp_path, monkeypatch):
    """A stand-in for llama-cpp-python that workers import; returns the file, to be changed."""
    module = tmp_path / "fake" / "llama_cpp.py"
    module.parent.mkdir()
    module.write_text(FAKE_LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(module.parent), prepend=os.pathsep)
    return module


@pytest.fixture
def fake_bench(tmp_path):
    """Writes a stand-in for llama-bench, which logs its tests beside the model; returns its path."""

    def write(nanoseconds=2_000_000_000):
        path = tmp_path / "llama-bench"
        path.write_text(FAKE_BENCH.format(python=sys.executable, nanoseconds=nanoseconds))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return write


@pytest.fixture
def bare_python(tmp_path):
    """A Python without any package."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


# --- numbers --------------------------------------------------------------------------------------------------------------------------


def test_samples_are_summed_up_and_are_fractions_of_the_same_rounds_peak():
    assert summary([3.0, 1.0, 2.0, 10.0]) == (2.5, 1.0, 10.0, pytest.approx(8.95))
    case = Case("b", "c", simple(lambda: None))
    results = Results([case])
    results.samples[Key("b", "c", OURS, 1)] = [{"seconds": 1.0}, {"seconds": 2.0}]
    results.samples[Key("peaks", "b", "machine", 1)] = [{"seconds": 0.0, "read": 20.0}, {"seconds": 0.0, "read": 10.0}]
    assert results.fractions(case, 1, 10, "read") == [0.5, 0.5]
    assert results.fractions(case, 1, 10, "int8") == []


def test_a_fit_finds_both_terms():
    lengths = np.array([10, 100, 1000])
    assert forwards.fit(lengths, 3e-3 * lengths + 5e-6 * lengths**2) == pytest.approx((3e-3, 5e-6, 1))
    assert forwards.fit(lengths, [1.0, 1.0, 2.0])[2] < 0.9


def test_ratios_of_batches_are_of_the_same_rounds():
    cases = [Case("batch", f"{way}, batch 8 x 32", lambda threads: {}) for way in ("prefill", "token by token", "decode")]
    samples = {Key("batch", case.name, OURS, 1): [{"seconds": n * s} for s in (0.25, 0.5)] for n, case in enumerate(cases, 1)}
    samples[Key("batch", cases[1].name, OURS, 1)] = [{"seconds": 2.0}, {"seconds": 1.0}]
    _, table = forwards.batch_tables(SETUP, Results(cases, samples))
    assert table.rows == [["batch 8 x 32", "1", "375.00", "1500.00", "5.00 (2.00-8.00)"]]


def test_a_batch_of_8_is_measured_at_the_lengths_of_bitnet_rs(monkeypatch):
    monkeypatch.setattr(forwards, "decode_case", lambda *arguments: Case("batch", "decode", lambda threads: {}))
    names = {case.name for case in forwards.batch(SETUP)}
    assert names >= {f"{way}, batch 8 x {t}" for way in ("prefill", "token by token") for t in (32, 64, 128, 256, 512, 1024)}
    assert "prefill, batch 4 x 32" not in names


def test_wrong_masks_and_products_are_not_timed(quick, monkeypatch, capsys):
    monkeypatch.setitem(operations.WAYS, "made", lambda n: np.zeros((n, n), np.float32))
    monkeypatch.setattr(operations, "product", lambda x, weights, dialect, ops=None: np.full((2, 2), len(x), np.float32))
    for name in ("masks", "products"):
        assert quick(name) == (1, None)
        assert "not the other path's" in capsys.readouterr().err


# --- checks before timing -------------------------------------------------------------------------------------------------------------


def case_of(result, **more):
    return Case("b", "c", simple(lambda: None), check=result, **more)


def test_check_gives_a_digest_and_refuses_wrong_results():
    ones = np.ones(3, np.float32)
    assert check(case_of(lambda: ones, expected=lambda: ones.copy()), (1, 2)) == hashlib.sha256(ones.tobytes()).hexdigest()
    with pytest.raises(CheckError, match="NaN or infinity"):
        check(case_of(lambda: np.array([1.0, np.nan])), (1,))
    with pytest.raises(CheckError, match="number of threads"):
        check(case_of(lambda: np.array([float(numba.get_num_threads())])), (1, 2))
    with pytest.raises(CheckError, match="not the other path's"):
        check(case_of(lambda: ones, expected=lambda: -ones), (1,))


def test_a_wrong_result_is_not_timed(quick, monkeypatch, capsys):
    monkeypatch.setattr(forwards, "forward_full", lambda model, ids, **options: np.zeros((1, model.config.vocab), np.float32))
    code, found = quick("prefill")
    assert (code, found) == (1, None)
    assert "not the other path's" in capsys.readouterr().err


def test_sides_take_turns_and_the_order_turns_around():
    class Stub:
        name = "peer"

        def run(self, request):
            log.append(("peer", request["threads"]))
            return {"seconds": 1.0}

    log = []

    def case(name, request):
        return Case("b", name, lambda threads: log.append((name, threads)) or {"seconds": 1e-3}, request=request, warm=False)

    results = Results()
    measure("b", [case("one", {"do": "it"}), case("two", None)], (1, 2), 2, 60, lambda n: {"seconds": 0.0}, [Stub()], results)
    first, second = log[:6], log[6:]
    assert first == [("one", 1), ("peer", 1), ("one", 2), ("peer", 2), ("two", 1), ("two", 2)]
    assert second == [("two", 1), ("two", 2), ("peer", 1), ("one", 1), ("peer", 2), ("one", 2)]
    assert len(results.samples[Key("peaks", "b", "machine", 2)]) == 2


def test_what_the_budget_does_not_hold_is_skipped_and_named():
    def case(name, work):
        return Case("b", name, lambda threads: {"seconds": 0.1 * work}, work=work)

    results = Results()
    measure("b", [case("large", 5), case("huge", 100), case("small", 1)], (1,), 3, 2.0, lambda n: {"seconds": 0.0}, [], results)
    assert [case.name for case in results.cases] == ["large", "small"]
    assert results.skipped == ["b huge, which --budget would not hold"]


# --- the machine ----------------------------------------------------------------------------------------------------------------------


def test_peaks_are_of_what_the_machine_has():
    found = peaks.Peaks(1)(2)
    assert found["read"] == max(value for name, value in found.items() if name.startswith("read, "))
    assert found["fma"] > 0
    assert ("tiles" in found) == (amx.unit() is not None)


def test_fractions_are_of_the_instructions_in_use(monkeypatch):
    many = Case("b", "c", lambda threads: {"seconds": 1.0}, rows=128, macs=7)
    one, blocks = replace(many, rows=1), replace(many, ternary=False)
    monkeypatch.setattr(amx, "unit", lambda: amx.PLAIN)
    assert [case.measured for case in (one, many, blocks)] == [(7, "int8"), (7, "tiles"), (7, "int8")]
    monkeypatch.setattr(amx, "unit", lambda: None)
    assert many.measured == (7, "int8")
    assert replace(many, macs=0, float_macs=9).measured == (9, "fma")


def test_memory_is_seen_where_it_is_used():
    """Also what lies in memory that earlier results had: it is given back first. 64 MB is about what the C library may keep."""
    held = []
    found = memory.traced(lambda: held.append(np.ones(1_000_000, np.uint8)))
    assert 1_000_000 <= found["left"] <= found["peak"] < 1_100_000
    for call, size in ((lambda: np.ones(200_000_000, np.uint8), 200_000_000), (lambda: workspace.empty((4000, 4000)).fill(1), 64_000_000)):
        call()
        found, growth = memory.traced(call), memory.resident_growth(call)
        assert size <= found["peak"] < 1.1 * size
        assert found["left"] < 100_000
        assert growth is None or 0.93 * size < growth < 1.2 * size
    for name in ("peak", "resident"):
        with pytest.raises(CheckError, match=f"memory x: {name} is .* bytes, but the result alone has"):
            memory.checked("x", {"peak": size, "resident": size, name: 0}, size)


def test_neighbours_are_busy_as_long_as_they_are_asked_for(monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: started.append(popen(*arguments, **options)) or started[-1])
    with neighbours.busy(2):
        assert [process.poll() for process in started] == [None, None]
    assert all(process.poll() for process in started)


# --- peers ----------------------------------------------------------------------------------------------------------------------------


def test_a_file_for_llama_cpp_holds_the_same_shape(folder):
    shape = released(vocab=300, n_layers=1, ffn=512)
    path = models.for_llama_cpp(folder, shape, seed=1)
    reader = gguf.GGUFReader(path)
    assert bytes(reader.fields["general.architecture"].parts[-1]).decode() == "bitnet"
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    gate = tensors["blk.0.ffn_gate.weight"]
    assert (gate.tensor_type, gate.shape.tolist()) == (gguf.GGMLQuantizationType.TQ2_0, [256, 512])
    values = gguf.quants.dequantize(gate.data, gate.tensor_type)
    assert len(np.unique(values)) == 3
    assert np.isclose(values.std() * 16, 1, atol=0.15)  # 1 / sqrt(width), up to a tenth
    assert tensors["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType.F16
    assert models.for_llama_cpp(folder, shape, seed=1) == path
    assert models.for_llama_cpp(folder, shape, seed=2) != path
    with pytest.raises(OptionError, match="ffn is 384, but rows of TQ2_0 are multiples of 256"):
        models.for_llama_cpp(folder, released(ffn=384), 0)


def test_a_peer_that_is_not_installed_is_refused_at_once(quick, bare_python, capsys):
    for python, message in ((bare_python, "pip install llama-cpp-python, or --vs llama-cpp=PYTHON"), ("/nowhere/python", "does not run")):
        assert quick("decode", "--vs", f"llama-cpp={python}") == (2, None)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("side", ["llama-cpp", pytest.param("ik-llama", marks=needs_shebangs)])
def test_another_engine_runs_beside_us(quick, fake_llama, fake_bench, tmp_path, capsys, side):
    """In several benches, with a plot."""
    pytest.importorskip("matplotlib")
    picture, model, log = tmp_path / "bars.png", tmp_path / "theirs.gguf", tmp_path / "theirs.gguf.log"
    asked, described = ["--vs", side], "not the same model (llama_cpp fake 1)"
    if side == "ik-llama":
        asked, described = (
            ["--vs", f"{side}={fake_bench()}", "--peer-model", str(model)],
            f"ik_llama.cpp abc123 by its llama-bench, on {model}",
        )
    code, found = quick("decode", "prefill", *asked, "--plot", str(picture))
    assert code == 0
    assert {entry["bench"] for entry in found["results"]} == {"prefill", "decode", "peaks"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    theirs = {(entry["bench"], entry["case"], entry["threads"]): entry["samples"] for entry in found["results"] if entry["side"] == side}
    assert set(theirs) == {("prefill", "4 tokens", 1), ("prefill", "8 tokens", 1), ("decode", "2 after 8", 1)}
    assert described in found["peers"][side]
    assert f"x {side}: {side}'s seconds / ours" in capsys.readouterr().out
    if side == "ik-llama":
        assert all(samples == [{"seconds": 2.0}] * 2 for samples in theirs.values())
        assert {"4 0 1", "8 0 1", "0 2 1"} <= set(log.read_text().splitlines())


def test_llama_cpp_gets_the_same_file_where_it_is_not_ternary(quick, fake_llama, tmp_path, capsys):
    path = tmp_path / "m.gguf"
    assert large_model.main(["tiny", "Q4_K_M", str(path)]) == 0
    code, outcome = quick("prefill", "decode", "--vs", "llama-cpp", "--as", "llama.cpp", "--model", str(path))
    assert code == 0
    assert outcome["peers"]["llama-cpp"] == "llama.cpp, the same file (llama_cpp fake 1)"
    assert "decode, prefill, products round as llama.cpp does" in capsys.readouterr().out
    digests = {entry["case"]: entry["sha256"] for entry in outcome["results"] if entry.get("sha256")}
    ids, model = tokens(0, 512, 1, 8), load(path)
    assert digests["8 tokens"] == digest(forward_full(model, ids, last_only=True, dialect=DIALECTS["llama.cpp"]))
    assert digests["8 tokens"] != digest(forward_full(model, ids, last_only=True))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.0, 1.0, 2.0, 3.0", "float('nan'), 1.0, 2.0, 3.0", ["not finite, or all the same"]),
        ("0.0, 1.0, 2.0, 3.0", "1.0, 1.0, 1.0, 1.0", ["not finite, or all the same"]),
        ("time.sleep(0.001)", 'import os, sys; print("bad luck", file=sys.stderr, flush=True); os._exit(3)', ["exit code 3: ", "bad luck"]),
    ],
)
def test_a_peer_whose_logits_are_wrong_or_that_dies_is_no_peer(quick, fake_llama, capsys, old, new, said):
    fake_llama.write_text(FAKE_LLAMA.replace(old, new))
    assert quick("decode", "--vs", "llama-cpp") == (2, None)
    message = capsys.readouterr().err
    assert all(text in message for text in said)


# --- the command ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "invalid choice"),
        (["decode", "--threads", "1,x"], "invalid numbers value: '1,x'"),
        (["decode", "--rounds", "0"], "0 is not at least 1"),
        (["decode", "--rounds", "5,6"], "invalid positive value: '5,6'"),
        (["decode", "--vs", "others"], "'others' is none of llama-cpp"),
        (["decode", "--shape", "tiny", "--model", "m.gguf"], "not allowed with"),
    ],
)
def test_arguments_that_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--threads", numba.config.NUMBA_NUM_THREADS + 1), ("--model", "none.gguf")])
def test_what_is_not_there_is_refused(option, value, capsys):
    assert bench.main(["decode", option, str(value)]) == 2
    assert ("Numba has" if option == "--threads" else value) in capsys.readouterr().err


CASES = {
    "prefill": {"4 tokens", "8 tokens", "all logits of 4"},
    "decode": {"2 after 8", "2 after 8, not recorded", "greedy 2 after 8"},
    "batch": {f"decode, batch {b}" for b in (1, 2)}
    | {f"{way}, batch {b} x {t}" for way in ("prefill", "token by token") for b in (1, 2) for t in (4, 8)},
    "attention": {"4 tokens", "8 tokens"},
    "products": {"4 tokens", "8 tokens"},
    "masks": {f"{n} {way}" for n in (4, 8) for way in operations.WAYS},
    "neighbours": {f"{what}, {count} busy" for what in ("4 tokens", "8 tokens", "decode 2") for count in neighbours.COUNTS},
    "gradients": {f"{what}, {kind}, 4 x {t}" for what in ("forward", "gradients") for kind in gradients.KINDS for t in (4, 8)},
    "load": {"first logits"},
    "memory": {
        "forward_full, all logits",
        "forward_full, last",
        "incremental, all logits",
        "incremental, last",
        "prefill into a cache",
        "decode step",
    },
}


def test_prompts_longer_than_the_context_of_a_random_model(quick, capsys):
    """And from three lengths on how seconds grow."""
    code, found = quick("prefill", "--lengths", "4,8,600")
    assert code == 0
    assert "600 tokens" in {entry["case"] for entry in found["results"]}
    assert "1 threads: seconds of T tokens are " in capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_every_bench_runs_and_writes_every_sample(quick, name, capsys):
    before = numba.get_num_threads()
    threads = {1, 2} if name == "decode" else {1}
    code, found = quick(name, "--threads", ",".join(map(str, threads)))
    assert code == 0
    assert numba.get_num_threads() == before
    assert found["schema"] == report.SCHEMA
    assert found["machine"]["numba"] == numba.__version__
    assert found["model"]["ternary_weights"] == 3 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256)
    assert found["skipped"] == []
    ours = [entry for entry in found["results"] if entry["bench"] == name]
    assert {entry["case"] for entry in ours} == CASES[name]
    assert {(entry["case"], entry["threads"]) for entry in ours} == {(case, n) for case in CASES[name] for n in threads}
    for entry in found["results"]:
        assert len(entry["samples"]) == 2
        assert all(sample["seconds"] > 0 for sample in entry["samples"])
    for entry in ours:
        assert (entry["sha256"] is None) == (name in ("load", "memory") or entry["case"].startswith("gradients"))
    assert {entry["threads"] for entry in found["results"] if entry["bench"] == "peaks"} == threads
    out = capsys.readouterr().out
    for table in found["tables"]:
        assert table["rows"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
        assert table["title"] in out


def test_compile_tells_cold_from_warm(quick, monkeypatch, capsys):
    """Without compiling: that takes half a minute."""
    asked = []

    def fresh(setup, threads, what, cache):
        asked.append(cache)
        cold = asked.count(cache) == 1
        return {"seconds": 9.0 if cold else 1.0, "compile": 8.0 * cold, "functions": 50 * cold}

    monkeypatch.setattr(processes, "fresh", fresh)
    code, found = quick("compile")
    assert code == 0
    assert len(set(asked)) == 2
    entry = next(entry for entry in found["results"] if entry["bench"] == "compile")
    assert entry["samples"] == [{"seconds": 9.0, "compile": 8.0, "functions": 50, "warm": 1.0}] * 2
    assert "at most 10 s of compilation: met (8.0)" in capsys.readouterr().out

    monkeypatch.setattr(processes, "fresh", lambda *arguments, **options: {"seconds": 1.0, "compile": 1.0, "functions": 3})
    assert quick("compile")[0] == 1
    assert "3 functions were compiled again" in capsys.readouterr().err


def test_a_fresh_process_must_agree(folder, monkeypatch, quick, capsys):
    monkeypatch.setattr(processes, "forward_full", lambda model, ids: np.zeros(1, np.float32))
    code, _ = quick("load")
    assert code == 1
    assert "a fresh process computed other logits" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["", "=/nowhere/llama-bench", f"={sys.executable}"])
def test_a_llama_bench_that_does_not_run_is_skipped_by_name(quick, capsys, program):
    code, found = quick("prefill", "--vs", f"ik-llama{program}")
    assert code == 0
    (skipped,) = found["skipped"]
    assert skipped.startswith("--vs ik-llama: ")
    assert program[1:] in skipped
    assert skipped in capsys.readouterr().out
    assert found["peers"] == {}


@needs_shebangs
def test_a_llama_bench_without_times_is_no_peer(quick, fake_bench, capsys):
    assert quick("prefill", "--vs", f"ik-llama={fake_bench(nanoseconds=0)}") == (2, None)
    assert "reports no time: samples_ns is [0]" in capsys.readouterr().err
