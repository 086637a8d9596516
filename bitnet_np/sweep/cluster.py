"""Rows and windows on the workers of a Dask cluster. Dask schedules, retries and restarts; nothing of that is done here."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from secrets import token_hex
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ServerError
from ..base.extras import extra
from ..base.progress import Progress, silent
from ..engine.dialects import Dialect
from ..engine.network import Runtime
from ..generation.nll import check_windows, window_nll
from .process import ModelFile, check_selftest, model_of
from .tasks import KILLED, Outcome, Task, perform

DEATHS = 1
"""Workers of our own cluster that may die under a task before it is set aside. Tasks that were set aside run again, one at a time."""

ANSWER = 10
"""Seconds in which a scheduler must answer."""


def _dask() -> Any:
    return extra("distributed", "cluster", "a cluster")


@contextmanager
def connected(scheduler: str | None, workers: int | None) -> Iterator[Any]:
    """Dask's client of a scheduler, or of a cluster of so many processes on this machine, which ends with the block.

    TLS is as Dask's own configuration says. Raises UnsupportedError without the extra, ServerError for a scheduler that cannot be reached
    or has no worker.
    """
    dask, distributed = extra("dask", "cluster", "a cluster"), _dask()
    if scheduler is not None:
        if scheduler.startswith("tls:") and distributed.Security().get_connection_args("client").get("ssl_context") is None:
            raise ServerError(f"scheduler {scheduler}: Dask's configuration names no certificate for TLS, expected distributed.comm.tls")
        try:
            with ThreadPoolExecutor(1) as pool:  # a notebook's thread has an event loop that runs
                pool.submit(asyncio.run, _greeted(scheduler)).result()
            client = distributed.Client(scheduler, timeout=ANSWER, set_as_default=False)
        except Exception as error:  # MemoryError too, where another server's bytes are taken for sizes
            raise ServerError(f"scheduler {scheduler}: {str(error) or type(error).__name__}") from None
        with client:
            yield _with_workers(client, scheduler)
        return
    count = workers or 1
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": DEATHS}),
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


async def _greeted(address: str) -> None:
    """Raises TimeoutError for a server that takes connections and says nothing: Dask's client would wait for its greeting for ever."""
    distributed = _dask()
    greeting = distributed.comm.connect(address, **distributed.Security().get_connection_args("client"))
    (await asyncio.wait_for(greeting, ANSWER)).abort()


def _with_workers(client: Any, scheduler: str) -> Any:
    try:
        client.wait_for_workers(1, timeout=60)
    except TimeoutError:
        raise ServerError(f"scheduler {scheduler}: no worker after 60 s, expected at least one") from None
    return client


def results(client: Any, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
    """What became of tasks, in the order of arrival.

    A task that was lost with its workers runs again when all others are done, alone; if its worker is lost again, its outcome is KILLED.

    Raises DifferentBitsError if a machine fails the selftest, ServerError if the scheduler is lost.
    """
    run = token_hex(4)
    names = {f"{task.operation}-{task.key}-{run}": task for task in tasks}
    futures = {future.key: future for future in client.map(perform, list(names.values()), key=list(names))}
    lost = []
    for future in _dask().as_completed(list(futures.values()), loop=client.loop):
        del futures[future.key]
        task = names.pop(future.key)
        outcome = _arrived(future)
        if outcome is None:
            lost.append(task)
        else:
            yield task, outcome
    for task in lost:
        outcome = _arrived(client.submit(perform, task, key=f"{task.operation}-{task.key}-{run}-alone"))
        yield task, outcome or Outcome(KILLED, {"error": "the worker died of this task, again and alone"})


def _arrived(future: Any, advice: str = ". Start the sweep again to go on") -> Any:
    """What a task gave; None if its workers died under it."""
    try:
        return future.result()
    except _dask().KilledWorker:
        return None
    except (_dask().client.FutureCancelledError, OSError) as error:
        raise ServerError(f"the scheduler was lost: {type(error).__name__}{advice}") from None


def cluster_nll(
    client: Any, model: ModelFile, ids: ArrayLike, *, stride: int | None, dialect: Dialect, progress: Progress = silent
) -> NDArray[np.float64]:
    """`token_nll` of a long text on a cluster, a task for each window: the same bits for any number of workers.

    ids: [T] -> float64 [T - 1]. Raises as `token_nll` does, and as `results`.
    """
    checked, windows = check_windows(model_of(model).config, ids, stride)
    arguments = [(model, dialect, checked[w.begin : w.end], w.known - w.begin) for w in windows]
    run = token_hex(4)
    futures = client.map(_window, arguments, key=[f"nll-{n}-{run}" for n in range(len(windows))])
    for done, _ in enumerate(_dask().as_completed(futures, loop=client.loop), 1):
        progress(done, len(windows))
    arrived = [_arrived(future, advice="") for future in futures]
    if any(values is None for values in arrived):
        raise ServerError("workers died of a window of the text, expected some that have the memory for it")
    return np.concatenate(arrived)


def _window(arguments: tuple[ModelFile, Dialect, NDArray[np.int64], int]) -> NDArray[np.float64]:
    model, dialect, ids, known = arguments
    check_selftest()
    return window_nll(Runtime(model_of(model), dialect).checked(), ids, known)
