"""Fuzz what comes from outside: files of models and dumps, the arguments of every public function, and the command line.

Whatever is wrong with a file or an argument, an error of the package's own family must say so.

    python scripts/fuzz_gguf.py [--cases 20000] [--seed 0] [--jobs J] [--seconds S] [--save DIR] [FILE ...]

The seeds, the sound files that are changed, are small models of every family and tensor type, Hugging Face folders of every model type,
tokenizers, and dumps of every format that the judge reads; or the GGUF files and folders on the command line, which should be small. A
model that loads is run, because kernels have no bounds checks. A finding is an exception of another kind, a crash, more than a second of
processor time (without compiling), or more memory than the file's size and 64 MB.
Case n depends on n alone, and the first n is --seed, so that seed and `--cases 1` repeat a finding. Cases run in separate processes;
`--jobs 0` runs them in this one. The exit status is 1 if there are findings.
"""

import argparse
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fuzzing.cases import case, read_seeds, run_cases, write
from fuzzing.seeds import write_seeds

from bitnet_np.base.progress import silent
from bitnet_np.cli.progress import bar

HANG = 60.0  # seconds that a case may take; compiling kernels is part of them

Say = Callable[[int, str], None]


def supervise(command: Callable[[int], list[str]], first: int, step: int, log: Path, say: Say) -> None:
    """Run cases in a process, and in another from the next case on where one ended its process. Raises RuntimeError where none begins.

    command: the number of the first case -> the command line. log: the file of its standard error.
    """
    while True:
        current = None  # the case that it runs now
        with open(log, "w") as errors:
            process = subprocess.Popen(command(first), stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            current, outcome = json.loads(line)
            if outcome:
                say(current, outcome)
                first, current = current + step, None
        code = process.wait()
        if code == 0:
            return
        if current is None:
            raise RuntimeError(f"a process ended with {code} outside of any case:\n{log.read_text()[-2000:]}")
        say(current, f"ended its process with {code}: {log.read_text()[:300]!r}")
        first = current + step


def _work(options: argparse.Namespace, paths: Sequence[Path], folder: Path) -> None:
    """The work of a worker process. It prints a line at the start of each case, and one at its end. A hang ends it, with a trace."""
    faulthandler.enable()
    first, step = map(int, options.worker.split(":"))

    def say(*line: object) -> None:
        faulthandler.dump_traceback_later(HANG, exit=True)
        print(json.dumps(line), flush=True)

    run_cases(read_seeds(paths), range(first, options.seed + options.cases, step), folder, say, options.seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz the readers of models and dumps, public functions, and the kernels behind them.")
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="GGUF files and folders to change; default: small models and dumps of all kinds"
    )
    parser.add_argument("--cases", type=int, default=20_000, help="number of cases (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case (default %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of processes (default %(default)s); 0 runs all cases in this one"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--save", type=Path, metavar="DIR", help="save the files of findings in this folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        _work(options, options.files, options.folder)
        return 0

    start, outcomes, lock = time.perf_counter(), Counter[str](), threading.Lock()
    advance = bar("fuzzing") if sys.stderr.isatty() else silent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = options.files or sorted(write_seeds(folder / "seeds").iterdir())

        def say(n: int, outcome: str) -> None:
            with lock:
                known = outcome in ("ran", "refused")
                outcomes[outcome if known else "found"] += 1
                advance(sum(outcomes.values()), options.cases)
                if known:
                    return
                file_arguments = "".join(f" {path}" for path in options.files)
                saved = ""
                if options.save:
                    saved = f" (kept in {_save(paths, n, options.save / str(n))})"
                print(f"{outcome} <- fuzz_gguf.py --seed {n} --cases 1{file_arguments}{saved}", flush=True)

        if options.jobs:
            jobs = min(options.jobs, max(1, options.cases))
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(lambda i: supervise(*_worker(options, paths, folder, i, jobs), say), range(jobs)))
        else:
            numbers = range(options.seed, options.seed + options.cases)
            run_cases(read_seeds(paths), numbers, folder / "0", lambda n, outcome: say(n, outcome) if outcome else None, options.seconds)
    done, took = sum(outcomes.values()), time.perf_counter() - start
    counts = f"{outcomes['ran']} ran, {outcomes['refused']} refused, {outcomes['found']} findings"
    print(f"{done} cases: {counts}, {took:.1f} s, {done / took:.0f} a second")
    return 1 if outcomes["found"] else 0


def _worker(
    options: argparse.Namespace, paths: Sequence[Path], folder: Path, i: int, jobs: int
) -> tuple[Callable[[int], list[str]], int, int, Path]:
    """The arguments of `supervise` for one of several processes."""
    limits = [f"--seed={options.seed}", f"--cases={options.cases}", f"--seconds={options.seconds}", f"--folder={folder / str(i)}"]

    def command(first: int) -> list[str]:
        return [sys.executable, __file__, f"--worker={first}:{jobs}", *limits, *map(str, paths)]

    return command, options.seed + i, jobs, folder / f"{i}.log"


def _save(paths: Sequence[Path], n: int, folder: Path) -> Path:
    seed, files = case(read_seeds(paths), n)
    shutil.rmtree(folder, ignore_errors=True)
    write(folder / seed.name, files)
    return folder


if __name__ == "__main__":
    sys.exit(main())
