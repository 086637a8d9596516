"""A pass that is recorded once and then run again for other inputs, by one compiled call.

A decoded token spends a tenth to a fifth of its time in Python between kernels, whose code and data the weights drive out of the caches.
But one token is like the next: the same kernels on the same weights. So the launches of one pass are kept, with the memory that it worked
in.

A recording must hold all that the pass computes. A kernel may read an input, the result of another launch, or a constant: a read-only
array. Python must not look at a result (launching.looked_at). A pass that breaks these rules is not recorded. A breach that they do not
detect, such as an array that NumPy changes in place, is found by comparing bits (engine/repeats.py).

A result may choose among branches (launching.choose), such as a token's experts. A branch is recorded when it is chosen for the first time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import launching, workspace
from .fast.team import JOB

Job = NDArray[np.int64]
"""The words of a launch (fast/team.py)."""


class _Choice(NamedTuple):
    """Launches of a pass that a number chooses."""

    number: NDArray[np.int32]  # an array of one
    branches: int  # how many there are
    branch: Callable[[int], None]
    launches: int  # of the branch


class Recording:
    """The launches of one pass: `function` of some inputs, which are arrays, to an array.

    state: arrays outside of the pass's memory that every such pass reads and writes. result: the result of the recorded pass. is_whole:
    whether the launches are all that the pass did, as far as the rules show. is_compared: whether a comparison has confirmed it.
    """

    def __init__(self, function: Callable[..., NDArray], inputs: Sequence[NDArray], state: Sequence[NDArray]) -> None:
        self.is_whole, self.is_compared = True, False
        self._inputs = [x.copy() for x in inputs]
        self._shared = {id(workspace.owner_of(x)) for x in (*self._inputs, *state)}
        self._kept: list[Any] = [*state]
        self._job, self._launches = np.zeros(JOB // 8, np.int64), list[Job | _Choice]()
        self.place = self._job.ctypes.data
        self._room, self._branch_room = workspace.Room(), workspace.Room()  # branches share memory: they run one after another
        self._result = workspace.in_room(self._room, launching.observed, self, function, *self._inputs)
        self.result = self._result.copy()
        self.is_whole = self.is_whole and self._room.holds(self._result)
        self._choices, self._steps, self._jobs = self._program()

    def launched(self, arguments: tuple[Any, ...]) -> None:
        words, self._job[0] = self._job[0] // 8, 0  # none if the kernel is not compiled, such as with NUMBA_DISABLE_JIT
        self.is_whole = self.is_whole and words > 0 and all(map(self._is_known, arguments))
        self._launches.append(self._job[1 : 1 + words].copy())

    def looked_at(self) -> None:
        self.is_whole = False

    def chosen(self, number: NDArray[np.int32], count: int, branch: Callable[[int], None]) -> None:
        launches = self._launches_of(branch, int(number[0]))
        self.is_whole = self.is_whole and self._is_known(number) and len(launches) > 0
        self._launches.append(_Choice(number, count, branch, len(launches)))

    def _launches_of(self, branch: Callable[[int], None], number: int) -> list[Any]:
        before, self._launches = self._launches, []
        try:
            workspace.in_room(self._branch_room, branch, number)
            return self._launches
        finally:
            self._launches = before

    def _is_known(self, x: Any) -> bool:
        """Whether an argument of a kernel is a number, or an array that only launches write, or nothing. Keeps constants."""
        if isinstance(x, tuple):
            return all(map(self._is_known, x))
        if not isinstance(x, np.ndarray) or self._room.holds(x) or self._branch_room.holds(x) or id(workspace.owner_of(x)) in self._shared:
            return True
        self._kept.append(x)
        return not x.flags.writeable or x.size == 0

    def _program(self) -> tuple[dict[int, _Choice], NDArray[np.int64], NDArray[np.int64]]:
        """The choices by their steps, and steps and jobs as launching.launch_again takes them."""
        choices, steps, jobs = dict[int, _Choice](), list[tuple[int, int, int]](), list[int]()
        for launch in self._launches:
            if isinstance(launch, _Choice):
                choices[len(steps)] = launch
                steps.append((len(jobs), launch.launches, launch.number.ctypes.data))
                jobs += [0] * (launch.branches * launch.launches)
            else:
                steps.append((len(jobs), 1, 0))
                jobs.append(launch.ctypes.data)
        return choices, np.array(steps, np.int64).reshape(-1, 3), np.array(jobs, np.int64)

    def again(self, inputs: Sequence[NDArray]) -> NDArray:
        """The result for other inputs, of the same shapes."""
        for own, x in zip(self._inputs, inputs, strict=True):
            own[...] = x
        step = 0
        while (step := launching.launch_again(self._steps, self._jobs, step)) != len(self._steps):
            self._choose(step)
            step += 1
        return self._result.copy()

    def _choose(self, step: int) -> None:
        """Run a branch whose jobs are not known, and keep them for the next time."""
        choice, number = self._choices[step], int(self._choices[step].number[0])
        jobs = launching.observed(self, self._launches_of, choice.branch, number)
        self._kept.append(jobs)
        self.is_whole = self.is_whole and len(jobs) == choice.launches
        if self.is_whole:
            first = self._steps[step, 0] + number * len(jobs)
            self._jobs[first : first + len(jobs)] = [job.ctypes.data for job in jobs]

    def forget(self) -> None:
        """Clear the memory of the pass, so that nothing is left in it that its launches do not write."""
        self._room.clear()
        self._branch_room.clear()
