"""Prefill and decode beside processes that keep cores busy."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from . import forwards
from .report import Table, spread
from .rounds import Case, Results, Sample, Setup, ratios

COUNTS = 0, 1, 2  # of busy processes
_BUSY = [sys.executable, "-I", "-S", "-c", "print(flush=True)\nwhile True: pass"]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Context in which so many other processes compute."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(_BUSY, stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()  # it runs
        yield


def _beside(count: int, run: Callable[[int], Sample], threads: int) -> Sample:
    with busy(count):
        return run(threads)


def cases(setup: Setup) -> Iterator[Case]:
    prompts = [forwards.prefill_case(setup, length) for length in setup.fitting((512,))]
    for case in [*prompts, forwards.decode_case("neighbours", f"decode {setup.steps}", setup, 1)]:
        for count in COUNTS:
            yield replace(case, bench="neighbours", name=_name(case.name, count), run=partial(_beside, count, case.run), request=None)


def _name(what: str, count: int) -> str:
    return f"{what}, {count} busy"


def tables(setup: Setup, results: Results) -> list[Table]:
    """Seconds, and round by round how many times those without neighbours and those of the fewest threads."""
    table = Table("neighbours", ["", "threads", "s (min-max)", "x 0 busy", "x fewest threads"])
    by_name = {case.name: case for case in results.of("neighbours")}
    for case in by_name.values():
        alone = by_name[_name(case.name.rpartition(",")[0], 0)]
        threads = results.threads(case)
        for n in threads:
            seconds = results.values(case, n)
            of = [ratios(seconds, others) for others in (results.values(alone, n), results.values(case, min(threads)))]
            table.rows.append([case.name, str(n), spread(seconds, ".2f"), *(spread(values, ".2f") for values in of)])
    table.notes.append("busy: processes that compute all the time; x: medians of the rounds' ratios")
    return [table]
