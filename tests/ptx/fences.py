"""What blocks of one launch may know of each other: by fences and atomic operations.

A block that has written tells the others by an atomic operation. It tells only of writes that a fence has made visible: a fence of the
thread that wrote, or one of any thread of its block behind a barrier. Another block that takes part in the atomic operations knows what it
has been told only behind a fence of its own. These are the release and acquire patterns of the PTX memory model, and no others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Fences:
    """One block's: the writes that it has not made visible, and its threads that may read what other blocks have told."""

    def __init__(self, threads: int) -> None:
        self._hidden, self._visible = np.zeros(threads, np.int64), np.zeros(threads, np.int64)
        """The ticks of the last write of each thread without a fence behind it, and with one; 0 without such a write."""
        self.took_part = False  # in an atomic operation on the device's memory
        self.told_until = 0  # the tick up to which its writes are told
        self.knows = np.zeros(threads, bool)

    def written(self, threads: NDArray[np.int64], tick: int) -> None:
        self._hidden[threads] = tick
        self.told_until = min(self.told_until, tick - 1)  # the rest of the tick is not told: what was written in it before, neither

    def fence(self, threads: NDArray[np.int64], tick: int) -> None:
        behind = self._hidden < tick  # a barrier
        behind[threads] = True
        np.copyto(self._visible, self._hidden, where=behind & (self._hidden > 0))
        self._hidden[behind] = 0
        if self.took_part:
            self.knows[threads] = True

    def atomic(self, threads: NDArray[np.int64], tick: int) -> None:
        mine = np.zeros(len(self._hidden), bool)
        mine[threads] = True
        if not self._hidden.any() and ((self._visible < tick) | mine).all():
            self.told_until = tick
        self.took_part = True

    def barrier(self) -> None:
        self.knows[:] = self.knows.any()
