"""Causal masks as arrays: made by a nested loop, by rows of NumPy, by the package, and found in its cache."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from bitnet_np import masks

from .report import Bar, Table, bar_label, figure, spread
from .rounds import Case, CheckError, Results, Sample, simple, timed
from .setup import Setup
from .stats import ratios, summary

LENGTHS = (64, 128, 256, 512, 1024, 2048)
_CALLS = {64: 50, 128: 20, 256: 5}  # in a measurement, where one takes microseconds
_REPEATED = (64, 128, 512, 64, 128, 512, 1024) * 30  # prompts cut to a few lengths
_DECODE = 256  # tokens one after the other behind a prompt of 64


def rows_of_numpy(n: int) -> NDArray[np.float32]:
    """A causal mask as a careful NumPy user writes it: -inf to the right of the diagonal, row by row."""
    out = np.zeros((n, n), np.float32)
    for row in range(n):
        out[row, row + 1 :] = -np.inf
    return out


WAYS: dict[str, Callable[[masks.MaskCache, int], NDArray]] = {
    "nested loop": lambda cache, n: masks.causal_loop(n, n),
    "rows of NumPy": lambda cache, n: rows_of_numpy(n),
    "made": lambda cache, n: masks.causal(n, n),
    "cached": lambda cache, n: cache.get(n, n),
}


def cases(setup: Setup) -> Iterator[Case]:
    """Each way at each length. The loop needs seconds for the longest, so it runs once."""
    cache = masks.MaskCache()
    for length in sorted(set(setup.lengths or LENGTHS)):
        cache.warm([length])
        for name, way in WAYS.items():
            slow = name == "nested loop" and length > 512
            yield Case(
                "mask",
                f"{name} {length}",
                _repeated(lambda way=way, length=length: way(cache, length), _CALLS.get(length, 1)),  # type: ignore[misc]
                check=lambda way=way, length=length: checked(way(cache, length), length),  # type: ignore[misc]
                work=length * length * (1.0 if name == "nested loop" else 0.01),
                rounds=1 if slow else None,
                warm=not slow,
            )


def _repeated(make: Callable[[], object], calls: int) -> Callable[[int], Sample]:
    """A run of several calls: one alone would measure how fast Python comes back to code that other cases drove out of the caches."""

    def run(threads: int) -> Sample:
        make()
        return {"seconds": timed(lambda: [make() for _ in range(calls)]) / calls}

    return run if calls > 1 else simple(make)


def checked(mask: NDArray, length: int) -> NDArray:
    """A causal mask with 1 for visible keys and 0 for hidden ones, if it is right. Raises CheckError."""
    visible = mask == 0
    if not (visible == np.tri(length, dtype=bool)).all() or not np.isneginf(mask[~visible]).all():
        raise CheckError(f"a causal mask of {length} positions is not 0 on and below the diagonal and -inf above")
    return visible.astype(np.float32)


def hit_rate(requests: Iterator[tuple[int, int]]) -> float:
    """The share of requests (queries, keys) that a fresh cache answers."""
    cache = masks.MaskCache()
    for queries, keys in requests:
        cache.get(queries, keys)
    return cache.hits / (cache.hits + cache.misses)


def tables(setup: Setup, results: Results) -> list[Table]:
    table = Table("causal masks", ["", "threads", "us", "times as long as made", "MB"], unit="times as long as made")
    for case in results.of("mask"):
        length = case.name.rsplit(" ", 1)[1]
        made = next(other for other in results.of("mask") if other.name == f"made {length}")
        for n in results.threads(case):
            seconds = results.values(case, n)
            against = ratios(seconds, results.values(made, n)[: len(seconds)])
            size = int(length) ** 2 * 4 / 1e6
            table.rows.append([case.name, str(n), figure([1e6 * s for s in seconds]), spread(against, ".3g"), f"{size:.2f}"])
            table.bars.append(Bar(bar_label(case.name, n), summary(against)))
    repeated = hit_rate((n, n) for n in _REPEATED)
    decode = hit_rate((1, 64 + i) for i in range(_DECODE))
    table.notes.append(
        f"cache hits: {100 * repeated:.0f} % where a few lengths repeat, {100 * decode:.0f} % in decode, whose masks never do"
    )
    table.notes.append("the package's own attention makes no masks at all: one query needs none, and the rule is cheaper than the array")
    return [table]
