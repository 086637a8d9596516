"""Whether it pays to share kernels among threads.

A shared kernel ends when its last thread does. If other processes are busy, that thread may have to wait for a core, a time slice at a
time, and all other threads wait for it. If this costs more than sharing gains, one thread alone is faster for a while.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from .numba_threads import get_num_threads

R = TypeVar("R")

_PERIOD = 0.05  # seconds of shared work that are looked at together: a clock of processor time may tick 64 times a second
_REST = 0.5  # seconds until sharing is tried again
_KNOWN = 5.0  # seconds from the beginning of a rest for which it is known how much processor time one thread alone gets
_GAIN = 1.1  # times that much, of all threads, spinning included: with less, sharing gains nothing
_LONG = 1e-3  # seconds of a kernel: threads wait for each other in shorter ones, whatever time one alone would get


class Sharing:
    """Calls of kernels that a team runs, one at a time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, processor: Callable[[], float] = time.process_time) -> None:
        self._clock, self._processor = clock, processor
        self._seconds = self._worked = 0.0  # of the shared calls of this period
        self._kernels = 0  # in them
        self._alone_seconds = self._alone_worked = 0.0  # of the calls of the last rest
        self._rest = -_KNOWN  # when that began

    def members(self) -> int:
        """How many threads share the next call. No bit depends on that."""
        return 1 if self._clock() < self._rest + _REST else get_num_threads()

    def call(self, members: int, kernels: int, function: Callable[..., R], *arguments: Any) -> R:
        """The result of a function that runs `kernels` kernels, which `members` threads share."""
        begin = self._clock()
        if members == 1 and begin >= self._rest + _REST:
            return function(*arguments)  # the caller has one thread, and nothing is learnt
        forms, worked = _forms(function), self._processor()
        result = function(*arguments)
        if _forms(function) == forms:  # otherwise one thread compiled or loaded it during the call
            self._count(members, kernels, self._clock() - begin, self._processor() - worked)
        return result

    def _count(self, members: int, kernels: int, seconds: float, worked: float) -> None:
        if members == 1:
            self._alone_seconds += seconds
            self._alone_worked += worked
            return
        self._seconds += seconds
        self._worked += worked
        self._kernels += kernels
        if self._seconds >= _PERIOD:
            alone = self._alone() if self._seconds > _LONG * self._kernels else 1.0
            if self._worked < _GAIN * alone * self._seconds:
                self._rest, self._alone_seconds, self._alone_worked = self._clock(), 0.0, 0.0
            self._seconds, self._worked, self._kernels = 0.0, 0.0, 0

    def _alone(self) -> float:
        """Seconds of processor time that one thread alone gets in a second: all, where the last rest does not say."""
        if self._alone_seconds < _PERIOD or self._clock() > self._rest + _KNOWN:
            return 1.0
        return min(1.0, self._alone_worked / self._alone_seconds)


def _forms(function: Any) -> int:
    """The number of types of arguments that a kernel is compiled for."""
    return len(getattr(function, "overloads", ()))
