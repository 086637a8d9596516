"""A clock that stands while kernels are compiled, or loaded from disk."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event


@contextmanager
def working_clock() -> Iterator[Callable[[], float]]:
    """Context of a clock: seconds since some time, without those inside the context in which kernels came to be there."""
    waits = event.TimingListener()
    with event.install_listener("numba:compiler_lock", waits):
        yield lambda: time.perf_counter() - (waits.duration if waits.done else 0.0)
