"""What Numba compiles while a command runs: it is shown, and its time does not count as the command's."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

from ..kernels.working_clock import working_clock
from . import progress

_clocks: list[Callable[[], float]] = [time.perf_counter]
"""The clock of this command."""


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
    with event.install_listener("numba:compile", _Compilations()), working_clock() as _clocks[0]:
        yield


def working_time() -> float:
    """Seconds since some time, without those in which this command compiled kernels or loaded them from disk."""
    return _clocks[0]()
