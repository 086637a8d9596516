"""Cases on the workers of a Dask cluster. Dask does all scheduling, retries and restarts."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from ..base.errors import ServerError
from ..base.extras import extra

DEATHS = 1
"""Workers of our own cluster that may die under a case before it is set aside. Cases that were set aside run again, one at a time."""

RESTART = "10m"
"""Time within which a worker of our own cluster must be back: a worker that is given up is not started again."""

ANSWER = 10
"""Seconds within which a scheduler must answer."""


def _dask() -> Any:
    return extra("distributed", "cluster", "a cluster")


@contextmanager
def connected(scheduler: str | None, workers: int | None) -> Iterator[Any]:
    """Dask's client of a scheduler, or of a cluster of `workers` processes on this machine, which ends with the block.

    TLS follows Dask's configuration. Raises UnsupportedError without the extra, ServerError for a scheduler that cannot be reached
    or has no worker.
    """
    dask, distributed = extra("dask", "cluster", "a cluster"), _dask()
    if scheduler is not None:
        with _client_of(scheduler) as client:
            yield client
        return
    count = workers or 1
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": DEATHS, "distributed.deploy.lost-worker-timeout": RESTART}),
        distributed.LocalCluster(
            n_workers=count,
            threads_per_worker=1,  # one row at a time, on all threads that Numba has
            env={"NUMBA_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))},
            memory_limit=0,  # pages of mapped models would count, and the worker be ended for them
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs="CRITICAL",
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@contextmanager
def _client_of(scheduler: str) -> Iterator[Any]:
    distributed = _dask()
    tls = distributed.Security().get_connection_args("client")

    async def greeted() -> None:
        """Raises TimeoutError for a server that takes connections and says nothing: Dask's client would wait for its greeting for ever."""
        (await asyncio.wait_for(distributed.comm.connect(scheduler, **tls), ANSWER)).abort()

    try:
        with ThreadPoolExecutor(1) as pool:  # a notebook's thread has an event loop that runs
            pool.submit(lambda: asyncio.run(greeted())).result()
        client = distributed.Client(scheduler, timeout=ANSWER, set_as_default=False)
    except Exception as error:  # MemoryError too, where another server's bytes are taken for sizes
        raise ServerError(f"scheduler {scheduler}: {str(error) or type(error).__name__}") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=60)
        except TimeoutError:
            raise ServerError(f"scheduler {scheduler}: no worker after 60 s, expected at least one") from None
        yield client


def arrived(client: Any, function: Callable[[Any], Any], cases: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """The number of each case and what the function gives for it, in the order of arrival.

    A case that was lost with its workers runs again when all others are done, alone; if its worker is lost again, it has None.

    Raises what the function raises, and ServerError if the scheduler is lost.
    """
    numbers = {future: n for n, future in enumerate(client.map(function, cases, pure=False))}
    lost = []
    for future in _dask().as_completed(list(numbers), loop=client.loop):
        n, result = numbers.pop(future), _result(future)
        if result is None:
            lost.append(n)
        else:
            yield n, result
    for n in lost:
        yield n, _result(client.submit(function, cases[n], pure=False))


def in_order(client: Any, function: Callable[[Any], Any], cases: Sequence[Any]) -> list[Any]:
    """What the function gives for each case. Raises as `arrived`, and ServerError if workers died of a case."""
    results = dict(arrived(client, function, cases))
    if lost := [n for n, result in results.items() if result is None]:
        raise ServerError(f"workers died of case {min(lost)} of {len(cases)}, expected some that survive it")
    return [results[n] for n in range(len(cases))]


def _result(future: Any) -> Any:
    """What a case gave; None if its workers died under it."""
    try:
        return future.result()
    except _dask().KilledWorker:
        return None
    except (_dask().client.FutureCancelledError, OSError) as error:
        raise ServerError(f"the scheduler was lost: {type(error).__name__}. Start a sweep again to go on") from None
