"""Options of commands that may run on a Dask cluster."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..base.validate import integer
from ..sweep import cluster


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
