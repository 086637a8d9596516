"""Fuzz every reader, guided by coverage: inputs that reach new lines of the package are changed further, and kept in a corpus that grows.

    pip install atheris
    python scripts/fuzz_coverage.py CORPUS [READER ...] [--seconds 60] [--jobs J]

CORPUS: the folder of what has been found worth keeping, for each reader a folder in it; it is made where it is not there, and used again
where it is. READER: what is read, such as gguf or dump-npz; default: all (--list prints them). --seconds: for each reader.

atheris (libFuzzer for Python) has wheels for Linux and Python 3.11 to 3.13. A finding is an exception that is not of the package's own
family, a crash, more than a second of processor time, or more memory than the files' size and 64 MB. It ends the reader's run; its input
is left in CORPUS/findings, and `--repeat FILE READER` reads that alone. The exit status is 1 if there are findings. Kernels are not
instrumented, because Numba compiles them, and models are not run: `fuzz_gguf.py` does that.
"""

import argparse
import importlib.util
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

_END = 60  # seconds of one input after which libFuzzer ends the process


class Run(NamedTuple):
    """What became of one reader's run."""

    reader: str
    inputs: int
    finding: str  # "" if there is none


def _kernels() -> list[str]:
    """The modules that Numba compiles, which knows no counters of branches."""
    root = Path(__file__).parents[1]
    paths = [path.relative_to(root).with_suffix("") for path in (root / "bitnet_np" / "kernels").rglob("*.py")]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def _fuzz(name: str, corpus: Path, seconds: float) -> None:
    """The work of a process for one reader. It ends the process."""
    import atheris

    with atheris.instrument_imports(include=["bitnet_np"], exclude=_kernels()):
        from fuzzing.cases import outcome
        from fuzzing.readers import mutated, prepare, readers, written
    reader = readers()[name]
    prepare(corpus / name, reader)
    (corpus / "findings").mkdir(exist_ok=True)

    def one_input(data: bytes) -> None:
        folder = written(scratch, reader, data)
        ended = outcome(lambda: reader.read(folder), sum(map(len, reader.files(data).values())))
        if ended not in ("ran", "refused"):
            raise RuntimeError(f"FINDING: {ended}")

    def change(data: bytes, largest: int, seed: int) -> bytes:
        if seed % 2:
            return atheris.Mutate(data, len(data))
        return mutated(data, largest, random.Random(seed))

    scratch = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    for seed in reader.seeds:
        one_input(seed)  # compiles what has to be compiled
    options = [f"-max_total_time={seconds:.0f}", f"-artifact_prefix={corpus}/findings/{name}-", f"-timeout={_END}", "-rss_limit_mb=0"]
    atheris.Setup([sys.argv[0], str(corpus / name), *options, "-print_final_stats=1"], one_input, custom_mutator=change)
    atheris.Fuzz()


def _run(name: str, corpus: Path, seconds: float) -> Run:
    """Fuzz one reader in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, str(corpus), name, f"--seconds={seconds}", "--worker"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, "TMPDIR": scratch})
    log = done.stdout + done.stderr
    counted = re.findall(r"^(?:stat::number_of_executed_units: |#)(\d+)", log, re.MULTILINE)
    finding = re.search(r"FINDING: (.*)", log)
    if done.returncode == 0:
        return Run(name, max(map(int, counted), default=0), "")
    return Run(name, max(map(int, counted), default=0), finding[1] if finding else f"ended with {done.returncode}: {log[-600:]}")


def _repeat(name: str, file: Path) -> str:
    """What becomes of one input."""
    from fuzzing.cases import outcome
    from fuzzing.readers import readers, written

    reader, data = readers()[name], file.read_bytes()
    with tempfile.TemporaryDirectory() as scratch:
        folder = written(Path(scratch), reader, data)
        return outcome(lambda: reader.read(folder), sum(map(len, reader.files(data).values())))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz every reader, guided by coverage.")
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="folder of the inputs that are kept; with --repeat, the input")
    parser.add_argument("readers", nargs="*", metavar="READER", help="what is read (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="time for each reader (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the readers and stop")
    parser.add_argument("--repeat", action="store_true", help="read the one input CORPUS with READER, and say what becomes of it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        _fuzz(options.readers[0], options.corpus, options.seconds)
    from fuzzing.readers import readers

    known = list(readers())
    if unknown := set(options.readers) - set(known):
        parser.error(f"unknown readers {', '.join(sorted(unknown))}, expected some of {', '.join(known)}")
    if options.list:
        print("\n".join(known))
        return 0
    if options.repeat:
        ended = _repeat(options.readers[0], options.corpus)
        print(ended)
        return 0 if ended in ("ran", "refused") else 1
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install atheris")
    start, runs = time.perf_counter(), []
    with ThreadPoolExecutor(options.jobs) as pool:
        for run in pool.map(lambda name: _run(name, options.corpus, options.seconds), options.readers or known):
            runs.append(run)
            print(f"{run.reader}: {run.inputs:,} inputs{', FINDING ' + run.finding if run.finding else ''}", flush=True)
    findings = sum(bool(run.finding) for run in runs)
    print(f"{sum(run.inputs for run in runs):,} inputs, {findings} findings, {time.perf_counter() - start:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
