"""Fuzz the readers of model files and dumps: whatever is wrong with a file, an error of the package's own family must say so.

    python scripts/fuzz_gguf.py [--cases 20000] [--seed 0] [--jobs J] [--seconds S] [--save DIR] [FILE ...]

The seeds, the sound files that are changed, are small models of every family and tensor type, Hugging Face folders of every model type,
tokenizers, and dumps of every format that the judge reads; or the GGUF files and folders on the command line, which should be small. A
model that loads is run, because kernels have no bounds checks. A finding is an exception of another kind, a crash, more than a second of
processor time (without compiling), or more memory than the file's size and 64 MB.
Case n depends on n alone, and the first n is --seed, so that seed and `--cases 1` repeat a finding. Cases run in processes of their own;
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
from dataclasses import dataclass
from pathlib import Path

from fuzzing.cases import case, read_seeds, run_cases, write
from fuzzing.seeds import write_seeds

from bitnet_np.base.progress import silent
from bitnet_np.cli.progress import bar

HANG = 60.0  # seconds of silence after which a process is ended; compiling kernels is part of them
_TURN = 0.5  # seconds between checks of the processes
_START = 300.0  # seconds of silence before its first case: it may have to compile all kernels

Say = Callable[[int, str], None]


@dataclass
class Worker:
    """A process that runs some cases, started again after a case that ended it."""

    command: Callable[[int], list[str]]  # the number of the first case -> the command line
    first: int
    step: int
    log: Path  # its standard error
    say: Say
    process: subprocess.Popen | None = None
    current: int | None = None  # the case that it runs now
    silent: float = 0.0  # seconds, counted by calls of `watch`, so that the sleep of the machine does not count
    failed: str = ""  # the reason why it could not go on

    def run(self) -> None:
        while True:
            self.current, self.silent = None, 0.0
            with open(self.log, "w") as log:
                self.process = subprocess.Popen(self.command(self.first), stdout=subprocess.PIPE, stderr=log, text=True)
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.silent = 0.0
                n, outcome = json.loads(line)
                self.current = None if outcome else n
                if outcome:
                    self.say(n, outcome)
                    self.first = n + self.step
            code = self.process.wait()
            if code == 0:
                return
            if self.current is None:
                self.failed = f"a process ended with {code} outside of any case:\n{self.log.read_text()[-2000:]}"
                return
            self.say(self.current, "no end" if self.silent > HANG else f"ended its process with {code}: {self.log.read_text()[-300:]!r}")
            self.first = self.current + self.step

    def watch(self) -> None:
        """End a process that has been silent for too long."""
        self.silent += _TURN
        if self.process and self.process.poll() is None and self.silent > (_START if self.current is None else HANG):
            self.process.kill()


def supervise(workers: Sequence[Worker], tick: Callable[[], None]) -> None:
    """Run workers side by side until all are done. `tick` is called every _TURN."""
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for worker in workers:
            worker.watch()
        tick()
        threads[0].join(_TURN) if threads[0].is_alive() else time.sleep(_TURN)
    for worker in workers:
        if worker.failed:
            raise RuntimeError(worker.failed)


def _work(options: argparse.Namespace, paths: Sequence[Path], folder: Path) -> None:
    """The work of a worker process. It prints a line at the start of each case, and one at its end."""
    faulthandler.enable()
    first, step = map(int, options.worker.split(":"))
    numbers = range(first, options.seed + options.cases, step)
    run_cases(read_seeds(paths), numbers, folder, lambda *line: print(json.dumps(line), flush=True), options.seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz the readers of models and dumps, and the kernels behind them.")
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="GGUF files and folders to change; default: small models and dumps of all kinds"
    )
    parser.add_argument("--cases", type=int, default=20_000, help="number of cases (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case (default %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of processes (default %(default)s); 0 runs all cases in this one"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
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
                if known:
                    return
                file_arguments = "".join(f" {path}" for path in options.files)
                saved = ""
                if options.save:
                    saved = f" (kept in {_save(paths, n, options.save / str(n))})"
                print(f"{outcome} <- fuzz_gguf.py --seed {n} --cases 1{file_arguments}{saved}", flush=True)

        if options.jobs:
            jobs = min(options.jobs, max(1, options.cases))
            supervise(
                [_worker(options, paths, folder, i, jobs, say) for i in range(jobs)], lambda: advance(sum(outcomes.values()), options.cases)
            )
        else:
            numbers = range(options.seed, options.seed + options.cases)
            run_cases(read_seeds(paths), numbers, folder / "0", lambda n, outcome: say(n, outcome) if outcome else None, options.seconds)
    done, took = sum(outcomes.values()), time.perf_counter() - start
    counts = f"{outcomes['ran']} ran, {outcomes['refused']} refused, {outcomes['found']} findings"
    print(f"{done} cases: {counts}, {took:.1f} s, {done / took:.0f} a second")
    return 1 if outcomes["found"] else 0


def _worker(options: argparse.Namespace, paths: Sequence[Path], folder: Path, i: int, jobs: int, say: Say) -> Worker:
    def command(first: int) -> list[str]:
        limits = [f"--seed={options.seed}", f"--cases={options.cases}", f"--seconds={options.seconds}", f"--folder={folder / str(i)}"]
        return [sys.executable, __file__, f"--worker={first}:{jobs}", *limits, *map(str, paths)]

    return Worker(command, options.seed + i, jobs, folder / f"{i}.log", say)


def _save(paths: Sequence[Path], n: int, folder: Path) -> Path:
    seed, files = case(read_seeds(paths), n)
    shutil.rmtree(folder, ignore_errors=True)
    write(folder / seed.name, files)
    return folder


if __name__ == "__main__":
    sys.exit(main())
