"""The cost of a kernel: instructions of warps, passes through shared memory, sectors of global memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_WARP, _BANKS, _SECTOR = 32, 32, 32  # lanes; words of shared memory that come at once; bytes of global memory


@dataclass
class Counts:
    """Text of an instruction -> the number of warps that ran it, and for memory its cost and the least possible cost."""

    warps: Counter[str] = field(default_factory=Counter)
    cost: Counter[str] = field(default_factory=Counter)
    least: Counter[str] = field(default_factory=Counter)

    def add(self, text: str, threads: NDArray[np.int64]) -> None:
        self.warps[text] += len(np.unique(threads // _WARP))

    def shared(self, text: str, threads: NDArray[np.int64], places: NDArray[np.int64], size: int) -> None:
        """Counts passes: one for 32 words of different banks. With 8 or 16 bytes a lane, halves or quarters of a warp take turns."""
        lanes = _WARP * 4 // max(4, size)
        for part in _groups(threads // lanes, places):
            words = np.unique((part[:, None] // 4 + np.arange(max(1, size // 4))).reshape(-1))
            self.cost[text] += int(np.bincount(words % _BANKS).max())
            self.least[text] += -(-len(words) // _BANKS)

    def sectors(self, text: str, threads: NDArray[np.int64], places: NDArray[np.int64], size: int) -> None:
        for part in _groups(threads // _WARP, places):
            self.cost[text] += len(np.unique(np.concatenate([part // _SECTOR, (part + size - 1) // _SECTOR])))
            self.least[text] += -(-len(np.unique(part)) * size // _SECTOR)

    def of(self, prefix: str) -> tuple[int, int, int]:
        """Warps, cost and least cost of all instructions whose text begins with `prefix`."""
        one, two, three = (
            sum(n for text, n in counter.items() if text.startswith(prefix)) for counter in (self.warps, self.cost, self.least)
        )
        return one, two, three


def _groups(numbers: NDArray[np.int64], places: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    ends = np.flatnonzero(np.diff(numbers)) + 1
    yield from np.split(places, ends)
