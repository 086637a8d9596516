"""The GPU's backend against the CPU's: the same operations, and the same bits from the kernels, interpreted or on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_marks import needs_gpu, needs_package

from bitnet_np.engine.backend import OPERATIONS

CHECKS = Path(__file__).parents[1] / "cuda_checks"


USUAL = ("kernels", "whole_forward", "masked_cache", "decoding", "refusals")
"""Checks that have every kernel between them. The others run these in more families, calls and orders, or read the machine code."""


def run_checks(how: str, *names: str) -> None:
    """All checks, or some, in a process of their own: the models' find the kernels compiled."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, str(CHECKS), how, *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    checks = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(checks) > (10 if names else 20)
    assert not [f"{line['check']}: {line['problem']}" for line in checks if line["problem"]]


@needs_package
def test_kernels_as_they_are_compiled_give_the_bits_of_the_cpu(is_thorough):
    """Instruction by instruction, by an interpreter of PTX that refuses races and waits that are missing."""
    run_checks("--ptx", *(() if is_thorough else USUAL))


@pytest.mark.gpu
@needs_package
@needs_gpu
def test_kernels_on_the_gpu_give_the_bits_of_the_cpu():
    run_checks("--gpu")


@needs_package
def test_the_device_has_every_operation():
    from bitnet_np.gpu.backend import Cuda

    assert all(callable(getattr(Cuda, name)) for name in OPERATIONS)
