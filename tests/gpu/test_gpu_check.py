"""scripts/gpu_check.py where kernels are interpreted, and what it tells when a part fails or there is no GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gpu_check
import pytest
from gpu_marks import needs_no_gpu, needs_package


def run_gpu_check(tmp_path: Path, *arguments: str) -> tuple[int, str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"NUMBA_NUM_THREADS": "1"}
    out = tmp_path / "gpu.json"
    command = [sys.executable, gpu_check.__file__, "--json", str(out), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return result.returncode, result.stdout + result.stderr, json.loads(out.read_text()) if out.exists() else {}


@needs_package
def test_a_part_that_fails_leaves_the_others(tmp_path):
    """Where kernels are interpreted. Of the other parts, which compile every kernel, cuda_checks/models.py asks what they find."""
    parts = ["nothing", "kernels"]
    code, output, found = run_gpu_check(tmp_path, "--interpret", "--parts", ",".join(parts))
    assert code == 1
    assert list(found) == parts
    assert "invalid choice: 'nothing'" in found["nothing"]["problem"]
    assert found["kernels"]["ran"] == 2, output


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands in for the program")
@pytest.mark.parametrize("finds", [False, True])
def test_checkers_of_memory_and_races_run_where_they_are_installed(tmp_path, monkeypatch, finds):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert gpu_check.sanitized(None) == {}
    program = tmp_path / "compute-sanitizer"
    line = '{"check": "a", "seconds": 1, "problem": ""}'
    program.write_text(f"#!/bin/sh\necho '{line}'\necho $@\n[ $6 = memcheck ] || exit {9 if finds else 0}\n")
    program.chmod(0o755)
    results = gpu_check.sanitized(None)
    assert results["memcheck"] == {"ran": 1, "seconds": 1}
    assert ("problem" in results["racecheck"], "problem" in results) == (finds, finds)
    assert not finds or "--gpu decoding attend" in results["problem"]


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands in for the program")
def test_nvidia_smi_watches_where_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu_check, "SECONDS", 0.5)
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "-i 0" ] || exit 1\nfor n in 90 0 0 40 60; do echo $n; done\nexec sleep 60\n')
    program.chmod(0o755)
    calls = []
    assert gpu_check.busy(lambda: calls.append(time.sleep(0.01))) == 50
    assert len(calls) > 1
    program.write_text("#!/bin/sh\n")  # which says nothing
    assert gpu_check.busy(lambda: None) is None
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert gpu_check.busy(lambda: calls.clear()) is None


@needs_package
def test_the_peaks_of_a_device_are_those_of_its_data_sheet():
    """An H100 with HBM3: 3.35 TB/s, and 1,979 TOPS of int8, which count a multiply-add twice."""
    clocks = {"MEMORY_CLOCK_RATE": 2619000, "GLOBAL_MEMORY_BUS_WIDTH": 5120, "CLOCK_RATE": 1830000, "MULTIPROCESSOR_COUNT": 132}
    most = gpu_check.peaks(SimpleNamespace(compute_capability=(9, 0), **clocks))
    assert most == {"bytes": pytest.approx(3.35e12, rel=0.01), "int8": pytest.approx(1979e12 / 2, rel=0.01)}
    assert gpu_check.peaks(SimpleNamespace(compute_capability=(10, 0))) == {}


@needs_package
@needs_no_gpu
def test_gpu_check_without_a_gpu_runs_nothing_and_says_so(tmp_path):
    code, output, found = run_gpu_check(tmp_path)
    assert (code, found) == (3, {})
    assert "no CUDA device" in output
    assert "nothing was run" in output
