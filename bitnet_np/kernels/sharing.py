"""Whether it pays to share kernels among threads.

Each shared kernel ends when its last thread does. Beside busy processes that thread may have to wait for a core, a time slice at a time,
and all others wait for it. Where this takes up what sharing gains, one thread alone is faster, for a while.
"""

import time
from collections.abc import Callable
from typing import Any

from numba import get_num_threads

_PERIOD = 0.05  # seconds of shared work that are looked at together: a clock of processor time may tick 64 times a second
_REST = 0.5  # seconds until sharing is tried again
_LEAST = 1.1  # seconds of processor time in a second, of all threads, spinning included: with fewer, sharing gains nothing


class Sharing:
    """Calls of kernels that a team runs, one at a time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, processor: Callable[[], float] = time.process_time) -> None:
        self._clock, self._processor = clock, processor
        self._seconds = self._worked = 0.0  # of the calls of this period
        self._again = 0.0  # when threads share again

    def members(self) -> int:
        """How many threads share the next call. No bit depends on that."""
        return 1 if self._clock() < self._again else get_num_threads()

    def call(self, members: int, function: Callable[..., None], *arguments: Any) -> None:
        """Call what so many threads share."""
        if members == 1:
            function(*arguments)  # nothing is shared, so nothing is learnt
            return
        forms = _forms(function)
        begin, worked = self._clock(), self._processor()
        function(*arguments)
        if _forms(function) == forms:  # else it was compiled or loaded meanwhile, by one thread
            self._count(self._clock() - begin, self._processor() - worked)

    def _count(self, seconds: float, worked: float) -> None:
        self._seconds += seconds
        self._worked += worked
        if self._seconds >= _PERIOD:
            if self._worked < _LEAST * self._seconds:
                self._again = self._clock() + _REST
            self._seconds = self._worked = 0.0


def _forms(function: Any) -> int:
    """The number of types of arguments that a kernel is compiled for."""
    return len(getattr(function, "overloads", ()))
