"""Arrays of several sequences, cut into those of each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...base.errors import shown
from ..normal_form import without_leading_ones
from .arrays import Array, Labelled


@dataclass(frozen=True)
class Batch:
    """Arrays of several sequences: [B, T, ...], padded where lengths differ, or all tokens end to end, [sum of lengths, ...]."""

    content: Labelled
    lengths: tuple[int, ...]  # of the sequences, at least two
    left: bool = False  # whether padding is in front of a sequence

    def misfit(self) -> str | None:
        """Why the arrays are not those of so many sequences; None if they may be."""
        count = len(self.lengths)
        for label, (header, _) in self.content.arrays.items():
            shape = without_leading_ones(header.shape, 1)
            if not shape or 0 in shape or shape[0] not in (count, sum(self.lengths)):
                expected = f"{count} sequences, [{count}, {max(self.lengths)}, width], or {sum(self.lengths)} rows"
                return f"{self.content.path}: {shown(label)} has shape {list(header.shape)}, expected {expected}"
        return None

    def padded(self) -> bool:
        """Whether there are rows of padding."""
        shapes = [without_leading_ones(header.shape, 1) for header, _ in self.content.arrays.values()]
        return min(self.lengths) < max(self.lengths) and any(shape[1:2] == (max(self.lengths),) for shape in shapes)

    def sequence(self, b: int) -> Labelled:
        """The arrays of one sequence, without padding."""
        return self.content._replace(arrays={label: self._cut(array, b) for label, array in self.content.arrays.items()})

    def _cut(self, array: Array, b: int) -> Array:
        header, load = array
        shape, longest, length = without_leading_ones(header.shape, 1), max(self.lengths), self.lengths[b]
        index: tuple[int | slice, ...] = (b,)
        if shape[0] != len(self.lengths):
            end = sum(self.lengths[: b + 1])
            index = (slice(end - length, end),)
        elif shape[1:2] == (longest,):
            index = (b, slice(longest - length, None) if self.left else slice(length))
        part = np.broadcast_to(np.zeros((), header.dtype), shape)[index].shape
        return header._replace(shape=part, fortran=False), partial(_part, load, shape, index)


def _part(load: Callable[[], NDArray], shape: tuple[int, ...], index: tuple[int | slice, ...]) -> NDArray:
    return load().reshape(shape)[index]
