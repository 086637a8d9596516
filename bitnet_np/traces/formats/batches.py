"""Arrays of several sequences, cut into those of each."""

from dataclasses import dataclass

import numpy as np

from ...base.errors import shown
from ..normal_form import without_leading_ones
from ..points import Entry
from .arrays import Labelled
from .labels import is_scores


@dataclass(frozen=True)
class Batch:
    """Arrays of several sequences: [B, T, ...] or [BT, ...], padded where lengths differ, or all tokens end to end, [sum of lengths, ...].

    Scores are [B, H, T, T].
    """

    content: Labelled
    lengths: tuple[int, ...]  # of the sequences, at least two
    left: bool = False  # whether padding is in front of a sequence

    def misfit(self) -> str | None:
        """Why the arrays are not those of so many sequences; None if they may be."""
        count = len(self.lengths)
        for label, entry in self.content.arrays.items():
            shape = self._shape(entry)
            if not shape or 0 in shape or shape[0] not in (count, sum(self.lengths)):
                expected = f"{count} sequences, [{count}, {max(self.lengths)}, width], or {sum(self.lengths)} rows"
                return f"{self.content.path}: {shown(label)} has shape {list(entry.shape)}, expected {expected}"
        return None

    def padded(self) -> bool:
        """Whether there are rows of padding."""
        shapes = [self._shape(entry) for entry in self.content.arrays.values()]
        return min(self.lengths) < max(self.lengths) and any(shape[1:2] == (max(self.lengths),) for shape in shapes)

    def sequence(self, b: int) -> Labelled:
        """The arrays of one sequence, without padding."""
        return self.content._replace(arrays={label: self._cut(label, array, b) for label, array in self.content.arrays.items()})

    def _shape(self, entry: Entry) -> tuple[int, ...]:
        """The shape without leading axes of length 1; [BT, ...] of padded sequences as [B, T, ...]."""
        shape, count, longest = without_leading_ones(entry.shape, 1), len(self.lengths), max(self.lengths)
        if shape[:1] == (count * longest,) and count * longest != sum(self.lengths):
            shape = (count, longest, *shape[1:])
        return shape

    def _cut(self, label: str, entry: Entry, b: int) -> Entry:
        shape, longest, length = self._shape(entry), max(self.lengths), self.lengths[b]
        index: tuple[int | slice, ...] = (b,)
        kept = slice(longest - length, None) if self.left else slice(length)
        if shape[0] != len(self.lengths):
            end = sum(self.lengths[: b + 1])
            index = (slice(end - length, end),)
        elif is_scores(label) and len(shape) == 4:
            index = (b, slice(None), kept, kept)
        elif shape[1:2] == (longest,):
            index = (b, kept)
        part = np.broadcast_to(np.zeros((), entry.dtype), shape)[index].shape
        return Entry(part, entry.dtype, lambda: entry.load().reshape(shape)[index])
