"""Compiling and launching kernels: each is compiled twice, for threads to share and for the calling thread alone."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .cache.disk_cache import compiled
from .fast.calls import Calls
from .float_state import default_state, is_default
from .sharing import Sharing

Floats = NDArray[np.float32]

# IEEE division: Python's would raise on a zero, and test for one at every step
serial = compiled(error_model="numpy")
inlined = compiled(error_model="numpy", forceinline=True)  # for functions of a full tile, an argument that would go through memory
rule = compiled(inline="always")  # Numba inlines it before it knows types, with the error model of the calling kernel
_shared = compiled(error_model="numpy", parallel=True)


class Kernel(NamedTuple):
    """One kernel compiled two ways, which give the same bits."""

    shared: Callable  # with `prange` shared out among threads
    alone: Callable  # on the calling thread


def _renamed(function: Any, name: str, **names: Any) -> FunctionType:
    """The function under a name of its own, by which profiles and compiled kernels on disk are told apart, with other global names."""
    renamed = FunctionType(function.__code__, {**function.__globals__, **names} if names else function.__globals__, name)
    renamed.__qualname__ = name
    return renamed


def parallel(function: Callable) -> Kernel:
    return Kernel(_shared(function), serial(_renamed(function, function.__name__ + "_alone")))


def elementwise(loop: Callable, rule: Callable, name: str) -> Kernel:
    """The kernel of this name that a loop becomes which calls `of_one` for each number: it calls this rule."""
    return parallel(_renamed(loop, name, of_one=rule))


_SPINS = "GOMP_SPINCOUNT"


def load_openmp(environment: MutableMapping[str, str]) -> None:
    """Load the threads of GNU OpenMP, which Numba takes on Linux, such that one without work looks for some 0.2 ms and then sleeps.

    By themselves they look for some milliseconds, in which another process could use the core, or a thread of ours that has work. If they
    slept at once, each kernel would have to wake them. Their runtime reads the environment when a process loads it, and never again: this
    does nothing where it is loaded already, and leaves a user's settings and the environment as they are. No thread is started.
    """
    if sys.platform == "linux" and not {_SPINS, "OMP_WAIT_POLICY"} & environment.keys():
        environment[_SPINS] = "10000"
        with suppress(ImportError):
            importlib.import_module("numba.np.ufunc.omppool")
        del environment[_SPINS]


load_openmp(os.environ)


SMALL = 1 << 15  # elementary steps below which waking other threads costs more than it saves
_turn, _sharing = threading.Lock(), Sharing()
_threads_started = _forked = False


def _after_fork() -> None:
    """In a forked child: threads that its parent had started are not there, and OpenMP ends a process that asks for them."""
    global _forked, _turn
    _forked, _turn = _threads_started, threading.Lock()  # another thread of the parent may have held the old lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Observer(Protocol):
    """Sees what a thread launches."""

    def launched(self, kernel: Callable, arguments: tuple[Any, ...]) -> None:
        """A function of a kernel was called."""

    def looked_at(self) -> None:
        """Python looks at a result, and may decide by it what is launched next."""


class _ThisThread(threading.local):
    observer: Observer | None = None


_this_thread = _ThisThread()


def launch(kernel: Kernel, work: int, *args: Any) -> None:
    """Run a kernel, on this thread alone when there is little to do: asking for fewer threads takes longer than a small kernel.

    Shared kernels run one at a time, whichever Python thread calls. Two at once would share the cores anyway, and abort the process where
    Numba has no threading layer but its workqueue. In a child that was forked after threads had started, every kernel runs alone.
    """
    global _threads_started
    if not is_default():
        with default_state():
            launch(kernel, work, *args)
        return
    alone = work <= SMALL or _forked
    function = kernel.alone if alone else kernel.shared
    if alone:
        function(*args)
    else:
        with _turn:
            _threads_started = True
            _sharing.call(function, *args)
    if _this_thread.observer is not None:
        _this_thread.observer.launched(function, args)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Context in which an observer sees what this thread launches."""
    _this_thread.observer = observer
    try:
        yield
    finally:
        _this_thread.observer = None


def looked_at() -> None:
    """Say that Python looks at a result of this thread's kernels."""
    if _this_thread.observer is not None:
        _this_thread.observer.looked_at()


def launch_again(calls: Calls) -> bool:
    """Run kernels that were launched before, in their order. Returns False, and runs none, in a forked child: they may share threads."""
    global _threads_started
    if _forked:
        return False
    with default_state(), _turn:
        _threads_started = True
        _sharing.call(calls.run)
    return True


def read_only(array: NDArray) -> NDArray:
    """An array of weights as the kernels take them: read-only, because Numba compiles anew for writable ones.

    Numba has no float16 on the CPU: it gets the bits as int16, which tells them from bfloat16's uint16.
    """
    if array.dtype == np.float16:
        array = array.view(np.int16)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
