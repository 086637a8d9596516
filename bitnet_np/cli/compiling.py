"""What Numba compiles while a command runs: it is shown, and its time does not count as the command's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

from . import progress

_waits = [event.TimingListener()]
"""The time that the kernels of this command took to be there."""


class _Compilations(event.Listener):
    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: Any) -> None:
        self.count += 1
        text = f"compiling kernels, on the first run only: {self.count}"
        progress.show(text, text)

    def on_end(self, event: Any) -> None:
        progress.clear()


@contextmanager
def compiling() -> Iterator[None]:
    """Context of a command: shows when Numba compiles. A first run takes some 10 seconds of it, later ones read the cache."""
    progress.start()
    _waits[0] = event.TimingListener()
    with event.install_listener("numba:compile", _Compilations()), event.install_listener("numba:compiler_lock", _waits[0]):
        yield


def working_time() -> float:
    """Seconds since some time, without those in which this command compiled kernels or loaded them from disk."""
    return time.perf_counter() - (_waits[0].duration if _waits[0].done else 0.0)
