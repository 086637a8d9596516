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
_GAIN = 1.1  # seconds of processor time in a second, of all threads, spinning included: with less, sharing gains nothing


class Sharing:
    """Calls of kernels that a team runs, one at a time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, processor: Callable[[], float] = time.process_time) -> None:
        self._clock, self._processor = clock, processor
        self._seconds = self._worked = 0.0  # of the shared calls of this period
        self._rest = -_REST  # when it began

    def members(self) -> int:
        """How many threads share the next call. No bit depends on that."""
        return 1 if self._clock() < self._rest + _REST else get_num_threads()

    def call(self, members: int, function: Callable[..., None], *arguments: Any) -> None:
        """Call what so many threads share."""
        if members == 1:
            function(*arguments)
            return
        begin, forms, worked = self._clock(), _forms(function), self._processor()
        function(*arguments)
        if _forms(function) != forms:  # it was compiled or loaded meanwhile, by one thread
            return
        self._seconds += self._clock() - begin
        self._worked += self._processor() - worked
        if self._seconds >= _PERIOD:
            if self._worked < _GAIN * self._seconds:
                self._rest = self._clock()
            self._seconds = self._worked = 0.0


def _forms(function: Any) -> int:
    """The number of types of arguments that a kernel is compiled for."""
    return len(getattr(function, "overloads", ()))
