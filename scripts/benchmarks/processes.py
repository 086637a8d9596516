"""Measurements that need a fresh process: loading, and compilation when nothing is cached."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitnet_np
from bitnet_np import forward_full
from bitnet_np.testing.selftest import digest

from .report import Table, figure, spread
from .rounds import Case, CheckError, Results, Sample, Setup, summary

WORKER = Path(__file__).parent / "workers" / "fresh.py"
ROOT = Path(bitnet_np.__file__).parents[1]
MEMORY_GOAL = 1.3  # peak resident memory over the file's size
COMPILE_GOAL = 10.0  # seconds


def fresh(setup: Setup, threads: int, *what: str, cache: str | None = None) -> dict[str, Any]:
    """What a new process prints that loads the model; workers/fresh.py says what it does besides. Raises CheckError."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = cache
    command = [sys.executable, str(WORKER), str(setup.path), str(threads), *what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(f"a fresh process ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    sample = json.loads(done.stdout)
    expected = digest(forward_full(setup.model, [[0]]))
    if (received := sample.pop("sha256", expected)) != expected:
        raise CheckError(f"a fresh process computed other logits: sha256 {received}, here {expected}")
    return sample


def load(setup: Setup) -> Iterator[Case]:
    yield Case("load", "first logits", lambda threads: fresh(setup, threads), nbytes=setup.path.stat().st_size)


def load_tables(setup: Setup, results: Results) -> list[Table]:
    table = Table(
        "load: a new process until the logits of one token, kernels cached, file in the page cache",
        ["", "threads", "load and first logits s", "load s", "first logits s", "import s", "peak MB", "of the file"],
    )
    for case in results.of("load"):
        for n in results.threads(case):
            seconds, *parts = (results.values(case, n, name) for name in ("seconds", "load", "first", "import"))
            memory = results.values(case, n, "peak_bytes")
            ratio = [value / case.nbytes for value in memory]
            sizes = figure([value / 1e6 for value in memory]), figure(ratio, ".2f")
            table.rows.append([case.name, str(n), spread(seconds, ".2f"), *(figure(part, ".2f") for part in parts), *sizes])
            met = "met" if summary(ratio).median <= MEMORY_GOAL else "not met"
            table.notes.append(f"peak resident memory at most {MEMORY_GOAL} times the file, {n} threads: {met} ({figure(ratio, '.2f')})")
    table.notes.append("peak: resident memory of the process, interpreter, compiler and pages of the file in use included")
    return [table]


def compilation(setup: Setup) -> Iterator[Case]:
    def run(threads: int) -> Sample:
        with tempfile.TemporaryDirectory() as cache:
            cold = fresh(setup, threads, "every", cache=cache)
            warm = fresh(setup, threads, "every", cache=cache)
        if warm["functions"]:
            raise CheckError(f"{warm['functions']:.0f} functions were compiled again although they were cached")
        return {**cold, "warm": warm["seconds"]}

    yield Case("compile", "cold start", run, rounds=2, warm=False, threads=setup.threads[-1:])


def compile_tables(setup: Setup, results: Results) -> list[Table]:
    table = Table(
        "compile: an empty cache; load, prefill, full forward and decode",
        ["", "threads", "compilation s", "functions", "cold s", "warm s"],
    )
    for case in results.of("compile"):
        for n in results.threads(case):
            compiling, cold, warm = (results.values(case, n, name) for name in ("compile", "seconds", "warm"))
            functions = results.values(case, n, "functions")
            table.rows.append([case.name, str(n), spread(compiling), figure(functions, ".0f"), figure(cold), figure(warm, ".2f")])
            met = "met" if summary(compiling).median <= COMPILE_GOAL else "not met"
            table.notes.append(f"at most {COMPILE_GOAL:.0f} s of compilation: {met} ({figure(compiling)})")
    return [table]
