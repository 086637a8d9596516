"""What an operation should give, and what its bound is made of: float32's own roundings, and those to narrower types.

Engines that keep numbers in fewer bits round every tensor that they write: the inputs of an operation, the steps inside it and its result.
Each such rounding changes a number by at most `delta`, and the result by as much times the derivative. For independent roundings with
effects d_i

    |error| <= min(sum d_i, 6 sqrt(sum d_i^2))

as for float32's own (operations.py); the sums of squares serve its statistics. Fused engines round less, and stay within the same bound.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..model.records import Blocks, Table
from .precision import FLOAT32, ROUNDOFF, Precision

Array = NDArray[np.float64]

U = 2.0**-24
"""Half a unit in the last place of float32, relative."""

_TINY = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}
"""Half the spacing of each type's subnormal numbers, where it is not negligible."""


class Storage(NamedTuple):
    """The types of one operation's numbers."""

    inputs: tuple[str, ...]
    output: str
    precision: Precision = FLOAT32

    @property
    def is_wide(self) -> bool:
        """Whether everything is float32."""
        return self.output == "float32" and all(t == "float32" for t in self.inputs) and self.precision == FLOAT32

    @property
    def scale(self) -> float:
        """The relative error of a scale that is kept in the precision's own type for scales."""
        return ROUNDOFF[self.precision.scale]

    def near_boundary(self, exact: Array) -> NDArray[np.bool_]:
        """Numbers that roundings of an input, of its scale and of their product may move over a boundary between two codes."""
        relative = ROUNDOFF[self.inputs[0]] + 2 * ROUNDOFF[self.output] + self.scale
        return (np.abs(np.abs(exact - np.floor(exact)) - 0.5) <= relative * np.abs(exact)) & (relative > 0)


WIDE = Storage((), "float32")


class Expected(NamedTuple):
    """The expected output of an operation, and what its bound is made of."""

    value: Array
    unit: Array  # the operation on absolute values, same shape or broadcastable
    steps: float | Array  # rounded terms of a sum
    reach: float | Array = 0.0  # change that ambiguous roundings of inputs can make
    common: float = 6.0  # roundings, in units of u, that all elements can share
    worst: float | Array = 0.0  # what larger roundings add, such as to narrow types: the sum of their sizes, and of their squares
    square: float | Array = 0.0
    shared: float = 1.0  # elements that have these roundings in common, about

    def times(self, factor: float) -> Expected:
        """The result times a factor, before its roundings to narrow types."""
        return self._replace(value=self.value * factor, unit=self.unit * abs(factor), reach=self.reach * abs(factor))

    def stored(self, types: Storage, *inputs: Array, inside: tuple[Array, ...] = (), more: tuple[Array, ...] = ()) -> Expected:
        """The result with its roundings to narrow types.

        inputs: of each input how much the result changes with it, times its size. inside: the sizes of steps that are rounded as the result
        is. more: effects of other roundings.
        """
        if types.is_wide:
            return self
        effects = [kept(kind, size) for kind, size in zip(types.inputs, inputs, strict=False)]
        effects += [kept(types.output, size) for size in (*inside, self.value)]
        effects += more
        return self._replace(worst=sum(effects), square=sum(effect * effect for effect in effects))

    def with_factor(self, effect: Array) -> Expected:
        """The result where a factor, too, is rounded, to this effect: all elements share its error."""
        own, size = self.square * self.value**2, effect * np.abs(self.value)
        every = float((own + size**2).sum())
        shared = self.shared if every == 0 else max(self.shared, (float(size.sum()) ** 2 + float(own.sum())) / every)
        return self._replace(worst=self.worst + effect, square=self.square + effect**2, shared=shared)


def kept(kind: str, size: Array, times: int = 1) -> Array:
    """The largest error of numbers of this size that are rounded to a float type, so many times."""
    return times * (ROUNDOFF[kind] * np.abs(size) + _TINY[kind])


def half_steps(x: Array, kind: str) -> Array:
    """The largest error of each number of [.., width] that is kept in this type."""
    size = np.abs(x)
    if kind in ROUNDOFF:
        return kept(kind, x)
    if kind in ("int8", "int4"):
        most = {"int8": 127, "int4": 7}[kind]
        return np.broadcast_to(size.max(axis=-1, keepdims=True) / (2 * most), size.shape)
    block = {"q8_0": 32, "q4_0": 32, "q6_K": 16}[kind]
    if x.shape[-1] % block:
        block = x.shape[-1]
    largest = np.repeat(size.reshape(*x.shape[:-1], -1, block).max(axis=-1), block, axis=-1)
    # a code's half step, and a step kept as float16; q4_0's other end is a whole step short; q6_K's steps are 8 bits of a larger one
    steps = {"q8_0": 0.5 / 127, "q4_0": 1 / 8, "q6_K": 1 / 31}[kind]
    return largest * steps + ROUNDOFF["float16"] * size


def rounded(x: Array, kind: str) -> Array:
    """Numbers [.., width] in codes of this type, about as engines round to it: to the nearest step."""
    step = 2 * half_steps(x, kind)
    return np.rint(x / np.where(step == 0, 1, step)) * step


def type_of(table: Table) -> str:
    """The float type that a table is stored in; "" for blocks, whose numbers engines widen to their own type."""
    if isinstance(table, Blocks):
        return ""
    return {np.dtype(np.float16): "float16", np.dtype(np.uint16): "bfloat16"}.get(table.dtype, "")
