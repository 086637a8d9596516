"""A pass that is recorded once and then run again for other inputs, by one compiled call.

A decoded token spends a tenth to a fifth of its time in Python between kernels, whose code and data the weights drive out of the caches.
But one token is like the next: the same kernels on the same weights. So the launches of one pass are kept, with the memory that it worked
in.

A recording must hold all that the pass computes. A kernel may read an input, the result of another launch, or a constant: a read-only
array. Python must not look at a result (launching.looked_at). A pass that breaks these rules is not recorded. A breach that they do not
detect, such as an array that NumPy changes in place, is found by comparing bits (engine/repeats.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import launching, workspace
from .fast.team import JOB


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
        self._job, self._jobs = np.zeros(JOB // 8, np.int64), list[NDArray[np.int64]]()
        self.place = self._job.ctypes.data
        self._room = workspace.Room()
        self._result = workspace.in_room(self._room, launching.observed, self, function, *self._inputs)
        self.result = self._result.copy()
        self.is_whole = self.is_whole and self._room.holds(self._result)
        self._addresses = np.array([job.ctypes.data for job in self._jobs])

    def launched(self, arguments: tuple[Any, ...]) -> None:
        words, self._job[0] = self._job[0] // 8, 0  # none if the kernel is not compiled, such as with NUMBA_DISABLE_JIT
        self.is_whole = self.is_whole and words > 0 and all(map(self._is_known, arguments))
        self._jobs.append(self._job[1 : 1 + words].copy())

    def looked_at(self) -> None:
        self.is_whole = False

    def _is_known(self, x: Any) -> bool:
        """Whether an argument of a kernel is a number, or an array that only launches write, or nothing. Keeps constants."""
        if isinstance(x, tuple):
            return all(map(self._is_known, x))
        if not isinstance(x, np.ndarray) or self._room.holds(x) or id(workspace.owner_of(x)) in self._shared:
            return True
        self._kept.append(x)
        return not x.flags.writeable or x.size == 0

    def again(self, inputs: Sequence[NDArray]) -> NDArray:
        """The result for other inputs, of the same shapes."""
        for own, x in zip(self._inputs, inputs, strict=True):
            own[...] = x
        launching.launch_again(self._addresses)
        return self._result.copy()

    def forget(self) -> None:
        """Clear the memory of the pass, so that nothing is left in it that its launches do not write."""
        self._room.clear()
