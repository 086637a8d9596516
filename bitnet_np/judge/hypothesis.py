"""The record of a thought about wrong numbers: an edit, with numbers, in the operations where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..traces.points import Key
from .law.expression import Array
from .variant import Variant, with_computed
from .words import digits

Values = Mapping[Key, Array]

Compute = Callable[[Values], Array]
"""The tensors of a forward pass -> the output of an operation with an edit in it."""

Computes = Mapping[Key, Callable[..., Any]]
"""Operations that are computed otherwise: a Compute each, or what gives one for a number that is sought."""


@dataclass(frozen=True)
class Hypothesis:
    """What an engine may do otherwise, at one operation, at several at once, or as a whole. One that fits is the cause that is reported."""

    text: str  # with a brace for the number that is sought, if one is
    id: str  # of the table of names, "edit." and a kind of edits, "read." and a reading
    fault: bool = True  # False for a rounding that engines do on purpose
    kind: str = ""  # the type that numbers are rounded to, of a rounding
    computes: Computes = field(default_factory=dict, repr=False)
    grid: Sequence[float] = field(default=(), repr=False)  # numbers between which its own is sought
    everywhere: bool = True  # whether it is in all operations that share what can make it
    number: float | None = None  # the number that it was tried with, if that is sought
    engine: Variant | None = None  # the engine that makes it by itself
    left: float = np.inf  # NMSE that it leaves

    def __str__(self) -> str:
        return self.text

    def at(self, place: str) -> Hypothesis:
        """The same with words in front of its text: where it is."""
        return replace(self, text=place + self.text)

    def with_number(self, number: float | None) -> Hypothesis:
        """The same with its number, if it has one."""
        if number is None:
            return self
        computes = {key: compute(number) for key, compute in self.computes.items()}
        return replace(self, text=self.text.format(number=digits(number)), computes=computes, grid=(), number=number)

    def variant(self, base: Variant, ids: NDArray[np.int64] | None = None) -> Variant:
        """An engine with it, that is ours otherwise. ids: see with_computed."""
        engine = self.engine or base
        return with_computed(engine, self.text, self.computes, ids) if self.computes else replace(engine, text=self.text)
