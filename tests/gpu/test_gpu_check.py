"""scripts/gpu_check.py where kernels are interpreted, and what it tells when a part fails or there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


@needs_package
@needs_no_gpu
def test_gpu_check_without_a_gpu_runs_nothing_and_says_so(tmp_path):
    code, output, found = run_gpu_check(tmp_path)
    assert (code, found) == (3, {})
    assert "no CUDA device" in output
    assert "nothing was run" in output
