"""What an operation should give, and what its bound is made of: roundings to float32 and to narrower types.

running_error.py says how they add up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from ...model.records import Blocks, Table
from .formats import Array, half_steps
from .precision import FLOAT32, Precision

U = 2.0**-24
"""Half a unit in the last place of float32, relative."""

TINY = 2.0**-126
"""Below float32's normal numbers, which engines may flush to zero."""


class Storage(NamedTuple):
    """The types of one operation's numbers."""

    inputs: tuple[str, ...]
    output: str
    precision: Precision = FLOAT32

    @property
    def is_wide(self) -> bool:
        """Whether everything is float32."""
        return self.output == "float32" and all(t == "float32" for t in self.inputs) and self.precision == FLOAT32


WIDE = Storage((), "float32")


class Error(NamedTuple):
    """What roundings may change a step's value by."""

    worst: Any = 0.0  # the sum of the sizes of their effects
    square: Any = 0.0  # and of their squares
    reach: Any = 0.0  # what numbers on the other side of a boundary can change
    shared: float = 1.0  # elements that have an effect in common, about

    @property
    def bound(self) -> Any:
        """How far roundings may reach, without those of numbers near to a boundary."""
        return np.minimum(self.worst, 6 * np.sqrt(self.square))

    @property
    def is_none(self) -> bool:
        """Whether there are no roundings but for those near to a boundary."""
        return not np.ndim(self.worst) and self.worst == 0

    def over(self, shape: tuple[int, ...], change: Callable[[Any], Any], squared: Callable[[Any], Any] | None = None) -> Error:
        """What a linear step makes of the effects on an array of this shape. squared: and of squares, if not the same.

        A step that gives more numbers than it takes makes several of them share an effect.
        """
        parts = zip(self[:3], (change, squared or change, change), strict=True)
        worst, square, reach = (of(np.broadcast_to(x, shape, subok=True)) if np.ndim(x) or x else 0.0 for x, of in parts)
        return Error(worst, square, reach, max(1.0, self.shared * np.size(worst) / np.size(self.worst)))

    def times(self, factor: Any) -> Error:
        """The effects times a factor."""
        size = np.abs(factor)
        shape = np.broadcast_shapes(np.shape(self.worst), np.shape(self.reach))
        return self.over(shape, lambda a: a * size, lambda a: a * size**2)


def rounding(effect: Any, times: Any = 1, shared: float = 1.0) -> Error:
    """So many roundings with effects of this size each."""
    worst = times * effect
    return Error(worst, worst * effect, 0.0, shared)


def in_turn(numbers: Iterable[Any]) -> Any:
    """The sum of some numbers, one after the other: from Python 3.12 on, `sum` adds floats up more exactly."""
    return reduce(operator.add, numbers)


def added(*errors: Error) -> Error:
    """Errors that add up."""
    reach = in_turn(error.reach for error in errors)
    some = [error for error in errors if not error.is_none]
    if len(some) < 2:
        return (some or errors)[0]._replace(reach=reach)
    size = np.prod(np.broadcast_shapes(*(np.shape(error.worst) for error in some)))
    times = [error.shared * size / np.size(error.worst) for error in some]
    shared = float(times[0])
    if len(set(times)) > 1:
        means = [float(np.mean(error.square)) for error in some]
        shared = in_turn(map(operator.mul, means, times)) / in_turn(means) if any(means) else 1.0
    return Error(sum(e.worst for e in some), sum(e.square for e in some), reach, shared)


class Expected(NamedTuple):
    """The expected output of an operation, and what its bound is made of: see Error."""

    value: Array
    worst: Any
    square: Any
    reach: Any = 0.0
    shared: float = 1.0

    def with_noise(self, level: float, unit: Array) -> Expected:
        """The same with room for noise of this level: a rounding's variance is a third of its largest square. unit: see noise.py."""
        square = 3 * level**2 * unit
        return self._replace(worst=self.worst + 6 * np.sqrt(square), square=self.square + square)


def kept(kind: str, size: Array, times: int = 1) -> Array:
    """The largest error of numbers of this size that are rounded to a float type, so many times."""
    return times * half_steps(size, kind)


def type_of(table: Table) -> str:
    """The float type that a table is stored in; "" for blocks, whose numbers engines widen to their own type."""
    if isinstance(table, Blocks):
        return ""
    return {np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}.get(table.dtype, "")
