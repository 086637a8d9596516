"""The cases of a script, spread over a cluster of Dask's: --workers and --scheduler."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from bitnet_np.sweep.cluster import connected

Case = TypeVar("Case")
Outcome = TypeVar("Outcome")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --workers and --scheduler. Without either the cases run in this process."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--workers", type=int, metavar="N", help="spread the cases over N processes of this machine")
    group.add_argument(
        "--scheduler", metavar="ADDRESS", help="spread them over the workers of this scheduler, which have scripts/ on their path"
    )


@contextmanager
def over_workers(options: argparse.Namespace) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]]:
    """A function like `map`: outcomes come in the order of the cases, wherever and whenever each was computed."""
    if options.workers is None and options.scheduler is None:
        yield map
        return
    with connected(options.scheduler, options.workers) as client:

        def outcomes(function: Callable[[Case], Outcome], cases: Sequence[Case]) -> Iterator[Outcome]:
            for future in client.map(function, cases, pure=False):
                yield future.result()

        yield outcomes
