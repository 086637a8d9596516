"""Every processor gives the same bits, and no kernel uses memory after it was freed, or beyond its end.

Lesser processors are simulated (tests/support/processors.py). Digests of passes are recorded in tests/data/passes.json.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import processors
import pytest
from passes import OWN_MAPPINGS
from processors import PROCESSORS

from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES
from bitnet_np.kernels import processor

TESTS = Path(__file__).parents[1]
RECORDED = json.loads((TESTS / "data" / "passes.json").read_text("utf-8"))
x86 = pytest.mark.skipif(processor.architecture() != "x86_64", reason="not an x86-64 processor")
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc, whose malloc can map each array by itself")


# What a test expects does not depend on the processor that runs it. These ask it all the same:
ASK_THE_PROCESSOR = {
    "conftest.py": "for as many threads as it has, or four: no number of threads changes a bit",
    "kernels/test_float_state.py": "for the name of its state of arithmetic",
    "kernels/test_processor.py": "because this is what they test",
    "kernels/test_processors.py": "which processors it can stand in for",
    "kernels/test_ternary_tiles.py": "for matrix tiles, to run them as well as their twin; and for its borders of ways, to run both sides",
    "scripts/test_bench.py": "for matrix tiles, which have a bench where they are",
    "support/assembly.py": "for nothing: it lets kernels be compiled for others",
    "support/guarded.py": "for each way of ternary products, to run all of them",
    "support/guarded_inside.py": "for each way of ternary products, to run all of them",
    "support/kernel_calls.py": "which kernels it never launches",
    "support/passes.py": "for matrix tiles, to do without them as well",
    "support/processors.py": "which processors it can stand in for",
    "support/soak.py": "for matrix tiles, to do without them",
    "sweep/test_run.py": "to compare it with what a report says of the machine",
    "testing/test_part_cases.py": "for the borders of its kernels, to see that every side of them is run",
}
ASKS = re.compile(
    r"cpu_features|get_host|instruction_path|has_fma|converts_half|is_wide\b|architecture\(|why_absent|amx\.unit|\bunit=|_product\.LEAST|_tiles\.LEAST"
    r"|\bWIDE\b.*tiles|cpu_count|platform\.(machine|processor)"
)


def test_the_tests_that_ask_the_processor_say_why():
    asking = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py") if ASKS.search(path.read_text("utf-8"))}
    assert asking == ASK_THE_PROCESSOR.keys()


def run(program, *arguments, **environment):
    """What a program of tests/support prints, from JSON."""
    path = os.pathsep.join([*sys.path, str(TESTS.parent / "scripts")])
    environment = {**os.environ, "PYTHONPATH": path, "NUMBA_NUM_THREADS": "2", **environment}
    command = [sys.executable, str(TESTS / "support" / f"{program}.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@x86
@pytest.mark.usual("AVX2", "SSE")  # one with fused multiply-add, one without, which runs every kernel; compiling takes most of the time
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_lesser_processor_gives_the_same_bits(name):
    """And again where memory that was freed is gone."""
    simulated = PROCESSORS[name]
    if not simulated.runs_here():
        pytest.skip(f"this processor cannot stand in for {name}")
    if simulated.is_like_this_one():
        pytest.skip(f"this processor takes the ways of {name}: all tests run them, and the next one runs every pass")
    expected = {
        "path": simulated.path,
        "is_wide": simulated.is_wide,
        "least": simulated.least,
        "wrong": [],
        "contract": [],
        "costs": [],
        "extremes": processors.extremes(simulated.types),
        "passes": {name: digest for name, digest in RECORDED.items() if name.startswith(simulated.passes)},
    }
    whole = ["whole"] if simulated.is_whole else []
    assert run("processors", " ".join(simulated.types), ",".join(simulated.passes), *whole, **simulated.environment) == expected
    if simulated.passes:
        of_bytes = "family bitnet-b1.58", "ternary, exact", *simulated.types
        assert run("passes", "2", *of_bytes, **simulated.environment, **OWN_MAPPINGS) == {
            name: digest for name, digest in RECORDED.items() if name.startswith(of_bytes)
        }


OF_EACH_KIND = ("family bitnet-b1.58", "family gemma3", "family qwen2moe", "ternary", "Q4_K", "Q8_0", "float", "dialect", "cache")
"""Beginnings of passes that have every operation between them: each array is a call of the system there. Other types have their kernels
in the self-test, which runs as well."""


@glibc
def test_no_kernel_uses_memory_after_it_was_freed(is_thorough):
    """A usual run takes one family, one type of blocks and the caches: these call most kernels."""
    types, beginnings, whole = "Q4_K", ("family bitnet-b1.58", "ternary", "Q4_K", "cache"), []
    if is_thorough:
        assert run("passes", "1") == RECORDED  # compiled where memory is quick
        types, beginnings, whole = " ".join(kind.name for kind in ALL_BLOCK_TYPES), OF_EACH_KIND, ["whole"]
    here = run("processors", types, ",".join(beginnings), *whole, **OWN_MAPPINGS)
    passes = {name: digest for name, digest in RECORDED.items() if name.startswith(beginnings)}
    assert (here["passes"], here["wrong"], here["contract"], here["costs"]) == (passes, [], [], [])


@pytest.mark.usual(0)  # test_threads.py finds most of what it would, but for results in freed memory
def test_threads_that_compute_at_once_get_the_same_bits():
    assert run("soak", "4", MALLOC_ARENA_MAX="1") > 100


@glibc
def test_memory_that_was_freed_is_gone():
    """So a kernel that used it would die. Without the setting it does not."""
    program = "import ctypes, numpy as np; x = np.ones(999); place = x.ctypes.data; del x; print(ctypes.c_double.from_address(place).value)"
    for mappings, dies in (({}, False), (OWN_MAPPINGS, True)):
        done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **mappings}, capture_output=True, check=False)
        assert (done.returncode < 0) == dies


@x86
@pytest.mark.skipif("NUMBA_CPU_NAME" in os.environ, reason="Numba has been told of another processor")
def test_without_settings_the_processors_own_features_decide():
    here = processor.cpu_features()
    assert here == {feature[1:] for feature in llvm.get_host_cpu_features().flatten().split(",") if feature.startswith("+")}
    paths = ("avx512vnni", "avx512-vnni"), ("avx512bw", "avx512"), ("avxvnni", "avx-vnni"), ("avx2", "avx2")
    best = next((path for feature, path in paths if feature in here), None)
    assert best is None or processor.instruction_path() == best
