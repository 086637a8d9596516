"""Options of commands that may run on a Dask cluster."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..base.validate import integer
from ..sweep import cluster
from .commands import cluster_arguments
from .parser import add_arguments


def add_cluster_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add them to a program's parser."""
    add_arguments(parser, cluster_arguments(what))


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[Any]:
    """Dask's client, whose dashboard is printed; None without --scheduler and --workers. Raises OptionError."""
    if arguments.scheduler is None and arguments.workers is None:
        yield None
        return
    if arguments.workers is not None:
        integer("--workers", arguments.workers, 1, 1024)
    with cluster.connected(arguments.scheduler, arguments.workers) as client:
        print(f"bitnet-np: dashboard {client.dashboard_link}", file=sys.stderr)
        yield client


@contextmanager
def over_workers(arguments: argparse.Namespace) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]]:
    """A function like `map`: outcomes come in the order of the cases, wherever and whenever each was computed. Raises OptionError."""
    with connected(arguments) as client:
        yield map if client is None else lambda run, cases: (future.result() for future in client.map(run, cases, pure=False))
