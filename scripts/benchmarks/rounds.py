"""Cases, the checks of their results, and rounds in which all sides take turns.

Machines drift: clocks change, neighbours come and go. So nothing is measured in one go: each round measures every case with every number of
threads and on every side once, in an order that turns around from round to round, and sides are compared within a round.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bitnet_np import Model
from bitnet_np.engine.dialects import EXACT, Dialect
from bitnet_np.kernels import ternary_tiles
from bitnet_np.kernels.fast import amx
from bitnet_np.testing.selftest import digest

from .llama_bench import LlamaBench
from .peers import Peer

Engine = Peer | LlamaBench
"""Another engine: its `run` takes a request as workers/peer.py has it, and gives a sample."""
OURS = "bitnet_np"
Sample = dict[str, float]
"""The measurements of one run: "seconds", and more in some cases."""


class CheckError(Exception):
    """A result is wrong, so its speed means nothing."""


@dataclass(frozen=True)
class Setup:
    """The model and the options of one call of bench.py."""

    path: Path
    model: Model
    threads: tuple[int, ...]
    lengths: tuple[int, ...] | None  # None: the bench's own
    batches: tuple[int, ...] | None
    steps: int  # tokens to decode
    seed: int = 0
    dialect: Dialect = EXACT  # of prefill and decode

    def fitting(self, default: tuple[int, ...]) -> list[int]:
        """The lengths that were asked for or the default, as far as the model's context holds them, without repetition and in order."""
        return sorted({min(length, self.model.config.context) for length in self.lengths or default})


def tokens(seed: int, vocab: int, *shape: int) -> NDArray[np.int64]:
    """Random ids, the same for every side."""
    return np.random.default_rng(seed).integers(0, vocab, shape)


# --- samples --------------------------------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """A summary of samples."""

    median: float
    low: float
    high: float
    p95: float


def summary(values: Sequence[float]) -> Summary:
    """The median, the extremes, and the 95th percentile (linear between the two nearest)."""
    if not values:
        raise ValueError("no samples to sum up")
    return Summary(float(np.median(values)), min(values), max(values), float(np.percentile(values, 95)))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios round by round. A slow minute slows both sides of a round, so their median is steadier than a ratio of medians."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


@dataclass(frozen=True)
class Case:
    """One computation to time."""

    bench: str
    name: str
    run: Callable[[int], Sample]  # number of threads, which are set already
    check: Callable[[], NDArray] | None = None  # the result, by a run of its own: finite, and the same for every number of threads
    expected: Callable[[], NDArray] | None = None  # the same bits by another path
    tokens: int = 0  # per run
    rows: int = 1  # tokens that go through a matrix at a time, which decides the instructions
    macs: int = 0  # multiply-adds of bytes per run
    float_macs: int = 0  # those of float32
    ternary: bool = True  # whether these bytes are ternary weights, which matrix tiles multiply where there are any
    nbytes: int = 0  # of weights that a run must read from memory
    request: dict | None = None  # the request that lets a peer do the same
    work: float = 1.0  # relative to the other cases of the bench: to predict how long a run takes
    rounds: int | None = None  # at most
    warm: bool = True  # run it once before the rounds
    threads: tuple[int, ...] | None = None  # in place of the bench's

    @property
    def measured(self) -> tuple[int, str]:
        """The multiply-adds that its speed is measured by, and the peak of the instructions they run on: "tiles", "int8" or "fma"."""
        if not self.macs:
            return self.float_macs, "fma"
        on_tiles = self.ternary and amx.unit() is not None and self.rows >= ternary_tiles.LEAST
        return self.macs, "tiles" if on_tiles else "int8"


class Key(NamedTuple):
    """The key of samples: a case, run by one side with a number of threads."""

    bench: str
    case: str
    side: str
    threads: int


@dataclass
class Results:
    """All measurements."""

    cases: list[Case] = field(default_factory=list)
    samples: dict[Key, list[Sample]] = field(default_factory=dict)
    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def of(self, bench: str) -> list[Case]:
        return [case for case in self.cases if case.bench == bench]

    def threads(self, case: Case) -> list[int]:
        return [key.threads for key in self.samples if key[:3] == (case.bench, case.name, OURS)]

    def values(self, case: Case, threads: int, name: str = "seconds", side: str = OURS) -> list[float]:
        """One measurement in each round that has it."""
        return [sample[name] for sample in self.samples[Key(case.bench, case.name, side, threads)] if name in sample]

    def peak(self, case: Case, threads: int, name: str) -> list[float]:
        """The machine's peak in the rounds of a case; empty where it has none of this kind."""
        peaks = self.samples.get(Key("peaks", case.bench, "machine", threads), [])
        return [sample[name] for sample in peaks if name in sample][: len(self.values(case, threads))]

    def fractions(self, case: Case, threads: int, amount: float, peak: str) -> list[float]:
        """Achieved amount per second as a fraction of the peak, round by round."""
        peaks = self.peak(case, threads, peak)
        return ratios([amount / seconds for seconds in self.values(case, threads)], peaks) if peaks else []


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def simple(run: Callable[[], object]) -> Callable[[int], Sample]:
    """The `run` of a case that only calls a function."""
    return lambda threads: {"seconds": timed(run)}


def check(case: Case, threads: Sequence[int]) -> str | None:
    """The digest of the case's result, after the checks that Case names. Raises CheckError."""
    if case.check is None:
        return None
    digests = {}
    for n in threads:
        numba.set_num_threads(n)
        result = case.check()
        if not np.isfinite(result).all():
            raise CheckError(f"{case.bench} {case.name}: the result has NaN or infinity in it, with {n} threads")
        digests[n] = digest(result)
    if len(set(digests.values())) > 1:
        raise CheckError(f"{case.bench} {case.name}: the result depends on the number of threads: {digests}")
    ours = next(iter(digests.values()))
    if case.expected is not None and (other := digest(case.expected())) != ours:
        raise CheckError(f"{case.bench} {case.name}: sha256 {ours} is not the other path's, {other}")
    return ours


def measure(
    bench: str,
    cases: Iterable[Case],
    threads: Sequence[int],
    rounds: int,
    budget: float,
    peaks: Callable[[int], Sample],
    peers: Sequence[Engine],
    results: Results,
) -> None:
    """Check and warm every case, then run the rounds. Cases that would take the bench over `budget` seconds are skipped, and named."""
    admitted: list[Case] = []
    planned, pace = 0.0, 0.0  # seconds; seconds per unit of work
    for case in cases:
        counts, turns = case.threads or tuple(threads), min(rounds, case.rounds or rounds)
        sides = 1 + (len(peers) if case.request else 0)
        if admitted and planned + pace * case.work * turns * len(counts) * sides > budget:
            results.skipped.append(f"{bench} {case.name}, which --budget would not hold")
            continue
        if (digest_of_result := check(case, counts)) is not None:
            results.digests[bench, case.name] = digest_of_result
        if case.warm:
            once = [one(case, OURS, n, peers)["seconds"] for n in counts]
            pace = max(once) / case.work
            planned += sum(once) * turns * sides
            for peer in peers if case.request else ():
                one(case, peer.name, counts[0], peers)
        admitted.append(case)
    results.cases += admitted
    for turn in tqdm(range(rounds), desc=bench, disable=not sys.stderr.isatty(), leave=False):
        for n in sorted({n for case in admitted for n in case.threads or threads}):
            results.samples.setdefault(Key("peaks", bench, "machine", n), []).append(peaks(n))
        order = admitted if turn % 2 == 0 else admitted[::-1]
        for case in order:
            if turn >= (case.rounds or rounds):
                continue
            for n in case.threads or threads:
                sides_here = [OURS, *(peer.name for peer in peers if case.request)]
                for side in sides_here if turn % 2 == 0 else sides_here[::-1]:
                    results.samples.setdefault(Key(bench, case.name, side, n), []).append(one(case, side, n, peers))


def one(case: Case, side: str, threads: int, peers: Sequence[Engine]) -> Sample:
    """One run of one side."""
    if side != OURS:
        peer = next(peer for peer in peers if peer.name == side)
        return peer.run({**(case.request or {}), "threads": threads})
    numba.set_num_threads(threads)
    return case.run(threads)
