"""scripts/gpu_host.py and gpu_check.py where kernels are interpreted, and what gpu_check tells when a part fails or does not end."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import pytest
from gpu_marks import needs_compiler, needs_no_gpu, needs_package


def run_gpu_check(tmp_path: Path, *arguments: str) -> tuple[int, str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"NUMBA_NUM_THREADS": "1"}
    out = tmp_path / "gpu.json"
    command = [sys.executable, gpu_check.__file__, "--json", str(out), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return result.returncode, result.stdout + result.stderr, json.loads(out.read_text()) if out.exists() else {}


@needs_package
@needs_compiler
def test_gpu_check_runs_all_its_parts_where_kernels_are_interpreted(tmp_path):
    code, output, written = run_gpu_check(tmp_path, "--interpret")
    assert (code, written["problems"]) == (0, []), output
    assert written["found"].keys() == {
        "describe",
        "peaks",
        "bits",
        "decode",
        "ways",
        "prefill",
        "matrices",
        "masks",
        "kernels",
        "sanitized",
    }
    assert all(entry["equal"] for entry in written["found"]["bits"].values())
    assert "INTERPRETED: no time below means anything" in output


RESULTS = ("all logits", "the largest logit", "the largest logit, a step ahead")


@needs_package
@needs_compiler
def test_gpu_host_counts_launches_and_times_the_host(tmp_path):
    out = tmp_path / "host.json"
    command = [sys.executable, str(Path(gpu_check.__file__).with_name("gpu_host.py")), "--tiny", "--json", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    figures = json.loads(out.read_text())
    assert {name: entry["launches"] for name, entry in figures.items()} == {
        "prefill of 64 tokens": 17,
        "prefill of 4 tokens": 17,
        "one token, launch by launch": 12,
        **{f"a step of {batch}, {results}": 1 for batch in (1, 16) for results in RESULTS},
        "a step of a batch of 16 requests": 1,
    }
    assert all(entry["milliseconds"] > 0 for entry in figures.values())


@pytest.fixture
def script(monkeypatch):
    """gpu_check.py without a device, with two parts of which the first fails."""
    monkeypatch.setattr(gpu_check, "open_cuda", lambda: None)
    monkeypatch.setattr(gpu_check, "PARTS", {"wrong": lambda run: 1 / 0, "masks": lambda run: {"loop_seconds": 1}})
    return gpu_check


def test_a_part_of_gpu_check_that_fails_leaves_the_others_a_process_of_their_own(script, tmp_path, monkeypatch):
    replaced = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: replaced.extend(arguments) or sys.exit(7))
    out = tmp_path / "gpu.json"
    with pytest.raises(SystemExit, match="7"):
        script.main(["--json", str(out), "--parts", "wrong,masks", "--seconds", "100"])
    assert not any(isinstance(thread, threading.Timer) and not thread.finished.is_set() for thread in threading.enumerate())
    assert "ZeroDivisionError" in json.loads(out.read_text())["problems"][0]
    arguments = replaced[2:]
    assert arguments[arguments.index("--parts") + 1] == "masks"
    assert 90 < float(arguments[arguments.index("--seconds") + 1]) <= 100


@needs_package
def test_gpu_check_goes_on_with_what_it_has_and_tells_it_last(script, tmp_path, capsys):
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({"found": {"bits": {"a": {"equal": True}}}, "problems": ["wrong: it was"]}))
    assert script.main(["--json", str(out), "--parts", "masks", "--resume"]) == 1
    assert json.loads(out.read_text())["found"] == {"bits": {"a": {"equal": True}}, "masks": {"loop_seconds": 1}}
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == "PROBLEM: wrong: it was"
    assert any("no table" in line for line in output)  # the masks of this test have no times


@needs_package
def test_gpu_check_tells_what_it_has_when_a_part_does_not_end(script, capsys, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: None)
    script.give_up(script.Run(None, script.TINY, {"bits": {"a": {"equal": True}}}))
    output = capsys.readouterr().out
    assert "1 of 1" in output
    assert "PROBLEM: a part did not end" in output


@pytest.mark.parametrize(("compute", "overlaps", "problems"), [([9, 0], False, 1), ([9, 0], True, 0), ([8, 6], False, 0)])
def test_launches_that_do_not_overlap_where_they_can_are_a_problem(monkeypatch, compute, overlaps, problems):
    monkeypatch.setattr(gpu_check, "_decoded", lambda *_: {"launches_overlap": overlaps})
    run = gpu_check.Run(SimpleNamespace(), gpu_check.TINY, {"describe": {"compute": compute}})
    assert [way["blocks_at_once"] for way in gpu_check.ways(run)] == [1, 2, 1, 1, 1]
    assert (run.on.fused, run.on.overlap, run.on.at_once) == (True, True, 1)
    assert len(run.problems) == problems


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands in for the program")
@pytest.mark.parametrize("found", ["nothing", "a race", "no program"])
def test_checkers_of_memory_and_races_run_where_they_are_installed(tmp_path, monkeypatch, found):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    if found != "no program":
        program = tmp_path / "compute-sanitizer"
        program.write_text(f"#!/bin/sh\necho $@\n[ $2 = memcheck ] || exit {9 if found == 'a race' else 0}\n")
        program.chmod(0o755)
    run = gpu_check.Run(SimpleNamespace(), gpu_check.GPU)
    results = gpu_check.sanitized(run)
    if found == "a race":
        assert results["memcheck"] == "clean"
        assert "--gpu decoder greedy_steps" in results["racecheck"]
        assert [problem.partition(":")[0] for problem in run.problems] == ["racecheck"]
    else:
        assert (results, run.problems) == ({"memcheck": "clean", "racecheck": "clean"} if found == "nothing" else {}, [])


@needs_package
@needs_no_gpu
def test_gpu_check_without_a_gpu_runs_nothing_and_says_so(tmp_path):
    code, output, written = run_gpu_check(tmp_path)
    assert (code, written) == (3, {})
    assert "no CUDA device" in output
    assert "nothing was run" in output
