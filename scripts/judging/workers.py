"""Options of scripts whose cases may run on a Dask cluster."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bitnet_np.cli.cluster import connected
from bitnet_np.cli.commands import SECTIONS
from bitnet_np.cli.parser import add_arguments


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them to a script's parser."""
    add_arguments(parser, SECTIONS["CLUSTER"])


@contextmanager
def over_workers(arguments: argparse.Namespace) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]]:
    """A function like `map`: outcomes come in the order of the cases, wherever and whenever each was computed. Raises OptionError."""
    with connected(arguments) as client:
        yield map if client is None else lambda run, cases: (future.result() for future in client.map(run, cases, pure=False))
