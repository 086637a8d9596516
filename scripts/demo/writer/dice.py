"""Repeatable chance: choices from the project's own streams of uniform numbers, so a document depends on its seed and index alone."""

from collections.abc import Sequence
from typing import TypeVar

from bitnet_np.generation.sampling import uniforms

T = TypeVar("T")


class Dice:
    """Choices from the stream (seed, index)."""

    def __init__(self, seed: int, index: int) -> None:
        self._numbers = uniforms(seed, index)

    def number(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + int(next(self._numbers) * (high - low + 1))

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.number(0, len(choices) - 1)]

    def one(self, *choices: T) -> T:
        return self.pick(choices)

    def some(self, choices: Sequence[T], n: int) -> list[T]:
        """n different choices, in a random order."""
        left = list(choices)
        return [left.pop(self.number(0, len(left) - 1)) for _ in range(n)]

    def chance(self, probability: float) -> bool:
        return next(self._numbers) < probability
