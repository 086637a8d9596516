"""Compiling and launching kernels, which one thread runs or several."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numba import config, prange, types
from numba.core.compiler_lock import global_compiler_lock
from numpy.typing import NDArray

from .cache.disk_cache import compiled, serial
from .cache.disk_cache import inlined as inlined  # for kernels
from .cache.disk_cache import rule as rule
from .fast.team import LINE, call_member, code_address, number_at, run_job, run_team
from .fast.team import shared as shared  # for kernels
from .float_state import in_default_state, is_default
from .sharing import Sharing

R = TypeVar("R")
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Kernel(NamedTuple):
    """A kernel: a function of its team, and of arrays and scalars."""

    body: Callable  # what each member of a team runs
    run: Callable  # `body` by a whole team: `run((address of the team's words, place for its job or 0), *arguments)`


def renamed(function: Any, name: str, names: Mapping[str, Any]) -> FunctionType:
    """The function under another name, which tells it apart in profiles and among compiled kernels on disk, with other global names."""
    renamed = FunctionType(function.__code__, {**function.__globals__, **names}, name)
    renamed.__qualname__ = name
    return renamed


def parallel(function: Callable) -> Kernel:
    """A decorator: a function of a team and of arrays and scalars becomes a kernel, which threads share by one loop over `shared`."""
    body, code = serial(function), function.__code__
    # with the parameters of the function: Numba takes long to look at a star's
    others = ", ".join(code.co_varnames[1 : code.co_argcount])
    text = compile(f"lambda team, {others}: run_team(body, team, ({others},))", code.co_filename, "eval")
    names = {"run_team": run_team, "body": body, "__name__": function.__module__}
    run = renamed(eval(text, {}), f"{function.__name__}.run", names)
    run.__code__ = run.__code__.replace(co_firstlineno=code.co_firstlineno)
    return Kernel(body, serial(run))


@compiled(parallel=True)
def _crew(member, job, members):
    """Have threads call a function for each member of a team."""
    for own in prange(members):
        call_member(member, job, own)


def variant(loop: Callable, name: str, **names: Any) -> Kernel:
    """A kernel of this name: the loop, with some of its global names replaced."""
    return parallel(renamed(loop, name, names))


_SPINS = "GOMP_SPINCOUNT"


def load_openmp(environment: MutableMapping[str, str]) -> None:
    """Load the threads of GNU OpenMP, which Numba takes on Linux, so that an idle thread spins for about 0.2 ms and then sleeps.

    By default they spin for some milliseconds, during which another process, or a thread of ours that has work, could use the core. If they
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
_turn, _sharing = threading.RLock(), Sharing()  # an RLock knows its thread: `release` is an error where `acquire` was interrupted
_alone, _team = (np.zeros((1 + members) * LINE // 8, np.int64) for members in (1, config.NUMBA_NUM_THREADS))  # the words of fast/team.py
_alone[:3], _team[:3] = (0, 1, 0), (0, 1, 1)
_ALONE, _TEAM = _alone.ctypes.data, _team.ctypes.data
_threads_started = _forked = False


def _after_fork() -> None:
    """In a forked child: threads that its parent had started are not there, and OpenMP ends a process that asks for them."""
    global _forked, _turn
    _forked, _turn = _threads_started, threading.RLock()  # another thread of the parent may have held the old lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
    _take, _release = global_compiler_lock.acquire, global_compiler_lock.release  # a child could wait for a thread that it lacks
    os.register_at_fork(before=_take, after_in_parent=_release, after_in_child=_release)


class Observer(Protocol):
    """Sees what a thread launches."""

    place: int
    """An address for the job of each launch (fast/team.py)."""

    def launched(self, arguments: tuple[Any, ...]) -> None:
        """A kernel was launched, and its job is there."""

    def looked_at(self) -> None:
        """Python looks at a result, which may decide what is launched next."""

    def chosen(self, number: NDArray[np.int32], count: int, branch: Callable[[int], None]) -> None:
        """A result below `count`, an array of one number, decides which launches come next: those of branch(number)."""


class _ThisThread(threading.local):
    observer: Observer | None = None


_this_thread = _ThisThread()


def launch(kernel: Kernel, work: int, *args: Any) -> None:
    """Run a kernel, on this thread alone when there is little to do: asking for fewer threads takes longer than a small kernel.

    Shared kernels run one at a time, whichever Python thread calls. Two at once would share the cores anyway, and abort the process where
    Numba has no threading layer but its workqueue. In a child that was forked after threads had started, every kernel runs alone.
    """
    if not is_default():
        return in_default_state(launch, kernel, work, *args)
    observer = _this_thread.observer
    place = 0 if observer is None else observer.place
    if work <= SMALL:
        kernel.run((_ALONE, place), *args)
    else:
        _by_team(1, kernel.run, (_TEAM, place), *args)
    if observer is not None:
        observer.launched(args)
    return None


def _by_team(kernels: int, function: Callable[..., R], *args: Any) -> R:
    """The result of a function that runs `kernels` kernels, called by the team."""
    global _threads_started
    try:  # not `with`: in Python 3.14 an interrupt may come between a lock and the block that it guards
        _turn.acquire()
        members = 1 if _forked else _sharing.members()
        if members > 1 and not _team[0]:
            _team[0] = code_address(_crew, types.int64, types.int64, types.int64)
        _threads_started |= members > 1
        _team[1] = members
        return _sharing.call(members, kernels, function, *args)
    finally:
        try:  # noqa: SIM105  an interrupt may come after a call of `suppress`
            _turn.release()
        except RuntimeError:  # there was an interrupt before it had it
            pass


def observed(observer: Observer, function: Callable[..., R], *arguments: Any) -> R:
    """function(*arguments), while an observer sees what this thread launches."""
    try:
        _this_thread.observer = observer
        return function(*arguments)
    finally:
        _this_thread.observer = None


def looked_at() -> None:
    """Say that Python looks at a result of this thread's kernels."""
    if _this_thread.observer is not None:
        _this_thread.observer.looked_at()


def choose(number: NDArray[np.int32], count: int, branch: Callable[[int], None]) -> None:
    """branch(number), for a result of kernels below `count`: an array of one number. All branches launch equally many kernels."""
    if _this_thread.observer is None:
        branch(int(number[0]))
    else:
        _this_thread.observer.chosen(number, count, branch)


@serial
def _run_steps(steps, jobs, begin):
    for i in range(begin, len(steps)):
        first, count, number = steps[i]
        if number:
            first += count * number_at(number)
        if not jobs[first]:
            return i
        for job in range(first, first + count):
            run_job(jobs[job])
    return len(steps)


def launch_again(steps: Ints, jobs: Ints, begin: int) -> int:
    """Run kernels that were launched before, from a step on. Returns the number of steps, or the first step whose jobs are not known.

    steps [n, 3]: the first job of each, how many there are, and 0, or the address of an int32 that says after how many times as many jobs
    the first one comes. jobs: their addresses, 0 where a job is not known.
    """
    return in_default_state(_by_team, len(steps), _run_steps, steps, jobs, begin)


def read_only(array: NDArray) -> NDArray:
    """An array of weights as the kernels take them: read-only, because Numba compiles again for writable ones.

    Numba has no float16 on the CPU: it gets the bits as int16, which tells them from bfloat16's uint16.
    """
    if array.dtype == np.float16:
        array = array.view(np.int16)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
