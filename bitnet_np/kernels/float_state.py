"""The state of floating-point arithmetic of each thread: how results are rounded, and whether subnormal numbers count.

Other libraries change it, and threads inherit it from the thread that starts them. The contract holds in the default state alone: round to
nearest, and keep subnormal numbers. Public functions therefore run in the default state, and then restore the caller's state. Threads that
share a kernel do the same (fast/team.py). A caller's functions that are called during this time also run in the default state.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import wraps
from typing import ParamSpec, TypeVar

from ..base.errors import UnsupportedError
from .cache.disk_cache import compiled
from .fast.float_control import DEFAULT, exchanged
from .processor import architecture

P = ParamSpec("P")
R = TypeVar("R")

_ONE, _LITTLE = 1.0, float.fromhex("0x1p-60")  # a sum of these is rounded
_LEAST_NORMAL, _SUBNORMAL = struct.unpack("<2d", struct.pack("<2Q", 1 << 52, 1 << 51))  # made of bits: arithmetic may give 0


def is_default() -> bool:
    """Whether arithmetic on this thread is in the default state, by what it computes."""
    return _ONE + _LITTLE == _ONE == _ONE - _LITTLE and _LEAST_NORMAL * 0.5 > 0.0 and _SUBNORMAL * 2.0 > 0.0


@compiled()
def _exchange(state):
    return exchanged(state)


def exchange(state: int | None) -> int:
    """Set the control register of this thread, which is known on x86-64 and ARM64; returns what it was."""
    return _exchange(_settable(state))


def _settable(state: int | None) -> int:
    if state is None:
        raise UnsupportedError(
            "floating-point arithmetic does not round to nearest or takes subnormal numbers for 0, and the default cannot be set on "
            f"{architecture()}: set it before you call bitnet_np"
        )
    return state


@contextmanager
def default_state() -> Iterator[None]:
    """Context, for imports, in which this thread computes in the default state. Afterwards the old state is restored."""
    before = None if is_default() else exchange(DEFAULT)
    try:
        yield
    finally:
        if before is not None:
            exchange(before)


def in_default_state(function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """The function's result, computed in the default state. Afterwards this thread's state is what it was, also where Ctrl-C comes."""
    if is_default():
        return function(*args, **options)
    before: list[int] = []
    change = map(_exchange, (_settable(DEFAULT),))
    try:
        before.extend(change)  # one call of C, so an interrupt comes before the state is another or when it is known
        return function(*args, **options)
    finally:
        if before:
            _exchange(before[0])


def steady(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator of public functions: they run in the default state, and leave nothing of NumPy's error state behind when interrupted.

    It costs 0.4 microseconds where the state is the caller's.
    """

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        run = copy_context().run
        return run(function, *args, **options) if is_default() else run(lambda: in_default_state(function, *args, **options))

    return called
