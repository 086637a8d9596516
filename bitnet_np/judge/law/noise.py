"""The law of noise: errors that have one level everywhere are roundings, whatever their format is; a mistake stands out of them.

No list has the formats of all engines. But a format rounds every number of an operation, in every layer, so its errors are alike. They are
compared in units of what a relative error of 1 in each step of the operation would make of each number (running_error.py). In these units
20 formats from two bfloat16 (2^-19) to NVFP4 (2^-3) have levels that differ by at most 2.9 times between matrices and 1.9 times between
layers; a row has at most 3.4 times the level of its tensor, a column 3.1 times, and a single number 9 times.

So errors are noise where their level is that of the same operation in other layers, or of all products of their layer, or of other products
in a model of one layer; where no row, column or number stands out by more than the extremes of so many normal numbers, UNEVEN times; and
where they are no common factor. What this cannot see is a mistake that is in all layers or in all products of one, has no place, is no
factor, and is smaller than the coarsest noise that is believed. Known mistakes are tried before noise is believed, and formats by name
where it is coarser.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

import numpy as np

from ...model.records import Weights
from ...traces.points import FIELDS, Key
from .expected import TINY, Array
from .products import row_blocks

UNEVEN = 4.0
"""Times that levels of one format differ between operations, rows and columns, whose blocks and largest numbers are not alike."""
UNEVEN_ATTENTION = 2.5
"""The same of the rows of attention, which are 2.3 times as noisy as all at most: a token too many weighs most where few are seen."""
_OF_SUM = 2.0**-16  # the largest level of attention whose softmax's sum alone is inexact, most where one key is seen
COARSEST = 2.0**-2
"""The largest level of any format: NVFP4 of both operands has 2^-3, a misread type of weights 2^-0.05 and more."""
COARSEST_UNNAMED = 2.0**-3
"""The largest level that is believed of one operation without knowing its format: weights of 4 bits in blocks have 2^-3.4 at most."""
_COARSEST_OFFERED = 2.0**-4
"""The largest level of several operations that is offered to be declared: integers that saturate, and other mistakes, are coarser."""
COARSEST_SEEN = 2.0**-6
"""The same of several operations and of logits, where a mistake has no place, and of sums of layers: int8 of whole tensors has 2^-6.6."""
COARSEST_SPREAD = 2.0**-4
"""The same of several operations where no factor of a tensor between them makes much of the error: most weights of 4 bits."""
COARSEST_BIASED = 2.0**-7
"""The largest level of roundings of logits that have a direction, as numbers have that are cut: of 130 right engines one has 2^-7.07."""
PARTS, _STEP = 8, 0.02
"""Parts of a tensor that are multiplied one at a time by a factor, 1 + _STEP, to see what that does to a later one."""
LARGEST_SEEN = 2.0**-4
"""The largest part of the squares of a result that is noise: float4 leaves 0.05 in a layer. In ternary models flipped codes reach far."""
FLOAT16_NOISE = 2.0**-11 / 3**0.5
"""The level of numbers that are rounded to float16."""
BFLOAT16_NOISE = 8 * FLOAT16_NOISE
FINE = 2.0**-8
"""The largest level of functions of single numbers, such as an exponential by a table, and of norms."""
_MANY = 0.3  # of the others of its kind
_NONE = 2.0**-8  # of the level: numbers that are off by less have no noise; where a table is exact some have
_FACTOR = 0.95  # of the squared error: operands that are cut leave 0.85 to a common factor, a wrong scale all, and a bias to the mean
_FACTOR_OF_ROWS = 0.5  # of the squared error, of a factor for each position or element, where noise is coarse
_POSITIONS = 64  # that are compared with one another
_FEWEST = 8  # numbers that have a factor in common: chance makes one of a few
_ROWS = 4  # fewest to know what they have in common
_PRODUCTS = 4  # fewest others of a layer to know its format
_OF_VALUES = 0.25  # of the squared error of attention, of what is no sum of values; of noise in values alone half at least
_TERM = 0.5  # of the squared error, of a factor of one term of a sum
_OF_ONE = 0.1  # of the squared error, of a factor of a tensor between two or of a part of it: right engines leave 0.08
_OF_ONE_IN_LOGITS = 0.15  # the same of logits, of factors of the tensors of all layers: right engines leave 0.13
_OF_POSITIONS = 0.75  # the same of factors of all parts of a tensor at each position: right engines leave 0.5 in a width of 64


class Residual(NamedTuple):
    """The error of one tensor as noise."""

    kind: str  # what operations are compared with it: "products", "attention", "several" between two tensors of a dump, or its name
    level: float = 0.0  # RMS, in units of a relative error of 1 in each step; 0 where it has our bits
    odd: str = ""  # what is not like noise, in words
    along: float = 0.0  # the part of it along the right numbers, and its mean, in the same units
    mean: float = 0.0
    is_spread: bool = False  # of several operations: see the function of this name

    @property
    def most(self) -> float:
        """The largest level that is believed without knowing a format."""
        if self.kind in (SEVERAL, STREAM):
            return COARSEST_SPREAD if self.is_spread else COARSEST_SEEN
        return COARSEST_UNNAMED if self.kind in OF_SUMS else FINE

    @property
    def is_believed(self) -> bool:
        """Whether it is like noise, of a level that is believed without knowing a format."""
        return not self.odd and 0 < self.level <= self.most

    @property
    def may_be_format(self) -> bool:
        """Whether a format may have made it that has to be known by its numbers: too coarse to be believed, or in this tensor alone."""
        return not self.odd and self.kind in (SEVERAL, *OF_SUMS) and 0 < self.level <= COARSEST

    def is_like(self, other: "Residual") -> bool:
        """Whether it has no more noise than another tensor, and neither a factor nor a mean that the other has not: engines give single
        matrices more bits.

        A root or an exponential by a table has other errors at other numbers, which all rows of a layer may share.
        """
        if self.most == FINE:
            return self.level <= UNEVEN**2 * other.level
        low = min(self.level, other.level)
        return self.level <= UNEVEN * other.level and max(abs(self.along - other.along), abs(self.mean - other.mean)) <= low


PRODUCTS, ATTENTION, SEVERAL, TABLE, STREAM = "products", "attention", "several", "inp_embd", "sums of layers"
OF_SUMS = (PRODUCTS, ATTENTION, TABLE, STREAM)
"""Kinds whose errors lie on all numbers alike; those of a function are where it is steep or curved."""


def kind_of(key: Key) -> str:
    """The kind of one operation."""
    if key.name in (*FIELDS, "result_output"):
        return PRODUCTS
    # engines hand what layers add to on to another machine in 8 bits
    return {"ffn_inp": STREAM, "l_out": STREAM, "kqv_out": ATTENTION, "kq": ATTENTION}.get(key.name, key.name)


def residual(key: Key, value: Array, unit: Array, theirs: Array, spared: int = 0) -> Residual:
    """The error of a tensor [T, width] that should have this value. unit: what a relative error of 1 in each step makes of each number,
    squared. spared: first positions that may have no noise."""
    kind, error = kind_of(key), theirs - value
    unit = (unit + unit.mean(axis=1, keepdims=True)) / 2  # steps of integers are as large for small numbers as for others
    r = error / np.sqrt(np.maximum(unit, TINY**2))
    level, size = max(float(np.sqrt((r**2).mean())), TINY), float((value**2).sum())
    factor = float((error * value).sum()) / max(size, TINY)
    along = factor * float(np.sqrt(size / max(unit.sum(), TINY)))
    odd = _odd(kind, r, level, error, factor, size) or (_odd_rows(kind, r, level, error, value, spared) if level > FINE else "")
    return Residual(kind, level, odd, along, float(r.mean()))


def _odd(kind: str, r: Array, level: float, error: Array, factor: float, size: float) -> str:
    """What of an error is not like noise, in words. r: in its units. factor: of everything, less 1. size: of the right numbers."""
    square = r**2
    if factor**2 * size > _FACTOR * float((error**2).sum()):
        return f"everything is {1 + factor:.6g} times what it should be"
    if len(r) >= _ROWS and float((r.mean(axis=0) ** 2).mean()) > _FACTOR * level**2:
        return "every position has the same error"
    if float(np.quantile(square, 0.75)) < (_NONE * level) ** 2:
        return "most numbers are right"
    if kind not in OF_SUMS:
        return ""
    for what, squares, axis in (("position", square.mean(axis=1), 1), ("element", square.mean(axis=0), 0)):
        worst = int(squares.argmax())
        times = float(np.sqrt(squares[worst])) / level
        most = UNEVEN_ATTENTION if (kind, what) == (ATTENTION, "position") and level > _OF_SUM else UNEVEN
        if times > most * (1 + _extreme(len(squares)) / np.sqrt(2 * square.shape[axis])):
            return f"{what} {worst} is off by {times:.3g} times as much as the whole tensor"
    if (times := float(np.sqrt(square.max())) / level) > UNEVEN * (1 + _extreme(square.size)):
        t, i = np.unravel_index(int(square.argmax()), square.shape)
        return f"position {t}, element {i} is off by {times:.3g} times as much as the whole tensor"
    return ""


def _odd_rows(kind: str, r: Array, level: float, error: Array, value: Array, spared: int) -> str:
    """What of the positions or elements of a coarse error is not like noise, in words: a factor, or a position that sees too little to be
    wrong."""
    if kind in OF_SUMS:
        for axis, what, chance in ((1, "position", 0.0), (0, "element", _likeness(value))):
            along, size = (error * value).sum(axis=axis), np.maximum((value**2).sum(axis=axis), TINY)
            share, most = float((along**2 / size).sum()), _FACTOR_OF_ROWS * (1 + chance) * float((error**2).sum())
            if value.shape[axis] >= _FEWEST and share > most:
                return f"each {what} is a multiple of what it should be"
    least = int((r[spared:] ** 2).mean(axis=1).argmin()) + spared if len(r) > spared else 0
    if kind == ATTENTION and float((r[least] ** 2).mean()) * UNEVEN**2 < level**2:
        return f"position {least} has less than a {UNEVEN:g}th of the noise of all"
    return ""


def is_of_values(values: Array, error: Array, kv_heads: int) -> bool:
    """Whether an error of attention [T, HK] is in values [T, GK], where the first token's are right, as caches keep it whole: what wrong
    weights make is a sum of the values that a position sees."""
    v, e = (x.reshape(len(x), kv_heads, -1, values.shape[1] // kv_heads) for x in (values, error))
    seen = [(v[: t + 1, group, 0], e[t, group]) for t in range(1, min(len(v), v.shape[-1] // 2)) for group in range(kv_heads)]
    whole = sum(float((x**2).sum()) for _, x in seen)
    summed = sum(float(((x @ np.linalg.qr(rows.T)[0]) ** 2).sum()) for rows, x in seen)
    return whole - summed > _OF_VALUES * whole


def _likeness(value: Array) -> float:
    """The part of the squares of noise that factors of elements explain by chance: all of it where positions are multiples of one."""
    some = value[:: -(-len(value) // _POSITIONS)]
    products = some @ some.T
    return float((products**2).sum()) / max(float(np.trace(products)) ** 2, TINY)


def odd_across(errors: Array, noisy: Array, level: float) -> str:
    """What of the error of several operations is not like noise, in words. errors: NMSE at each position [P]. noisy: that of noise."""
    if float(errors.mean()) > LARGEST_SEEN:
        return f"NMSE is {errors.mean():.2g}"
    least = int((errors[: len(noisy)] / np.maximum(noisy, TINY)).argmin())
    if level > FINE and errors[least] * UNEVEN**2 < noisy[least]:  # as of a mistake of positions or scores
        return f"position {least} has less than a {UNEVEN:g}th of the noise of all"
    return ""


def with_part_changed(x: Array, part: int) -> Array:
    """A tensor [T, width] with one of its parts times a factor."""
    parts = np.arange(x.shape[1]) * PARTS // x.shape[1]
    return x * (1 + _STEP * (parts == part))


def is_spread(error: Array, effects: Iterable[Array], in_logits: bool = False) -> bool | None:
    """Whether an error [T, width] behind several operations has no direction, as noise of all of them has none; None without effects.

    effects: [PARTS, T, width] for each tensor between, what a factor of each of its parts does to the result. A tensor that has lost
    numbers, or has others that do not depend on them, errs by its own negative and by something else: a factor explains half of what it
    does. Or its parts have another factor at each position. in_logits: the result is logits, behind all tensors of a model.
    """
    most = _OF_ONE_IN_LOGITS if in_logits else _OF_ONE
    square, is_tried = float((error**2).sum()), None
    if len(error) >= _ROWS and len(error) * float((error.mean(axis=0) ** 2).sum()) > _FACTOR * square:
        return False
    for parts in effects:
        is_tried = True
        at_each = np.linalg.qr(np.moveaxis(parts, 0, 2))[0]
        if float((np.einsum("tip,ti->tp", at_each, error) ** 2).sum()) > _OF_POSITIONS * square:
            return False
        if any(float((x * error).sum()) ** 2 > most * square * float((x**2).sum()) for x in (*parts, parts.sum(axis=0))):
            return False
    return is_tried


def left_out(x: Array, weights: Weights, error: Array) -> str:
    """The inputs of a product [T, M] that make most of its error [T, N] by being left out, or summed again, in words; or none."""
    along, square = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for rows, some in row_blocks(weights):
        along += ((error[:, rows] @ some) * x).sum(axis=0)
        square += (some**2).sum(axis=0) * (x**2).sum(axis=0)
    times = along / np.maximum(square, TINY**2)
    odd = np.abs(times) > 0.5
    if not odd.any():
        return ""
    part = x[:, odd] * times[odd]
    left = sum(float(((error[:, rows] - part @ some[:, odd].T) ** 2).sum()) for rows, some in row_blocks(weights))
    most = np.flatnonzero(odd)
    return f"{most.size} inputs from {most[0]} to {most[-1]} make most of the error" if left < float((error**2).sum()) / 2 else ""


def wrong_term(terms: Sequence[Array], value: Array, error: Array) -> str:
    """The term [T, width] of a sum that makes most of its error by a factor, in words; or none. A factor of the whole sum, which numbers
    that are cut have as well, is not counted."""
    parts = np.stack([*terms, error])
    parts -= ((parts * value).sum(axis=(1, 2)) / max(float((value**2).sum()), TINY))[:, None, None] * value
    for number, term in enumerate(parts[:-1], 1):
        along, square = float((term * parts[-1]).sum()), max(float((term**2).sum()), TINY)
        if along**2 > _TERM * square * float((parts[-1] ** 2).sum()):
            return f"term {number} of the sum is {1 + along / square:.6g} times what it should be"
    return ""


def doubt(level: float) -> str:
    """What errors are where they are like noise that is too coarse to be believed, in words; and how to declare it, if that is offered."""
    if level > _COARSEST_OFFERED:
        why = "a coarse format that is not known, or a mistake in all numbers"
        return f"errors are alike everywhere, at a level of 2^{np.log2(level):.1f}: {why}"
    power = int(np.ceil(np.log2(level)))
    return f"errors are alike everywhere: if the engine computes so coarsely, declare it (--precision noise=2^{power})"


def _extreme(count: int) -> float:
    """The largest of so many normal numbers, about."""
    return float(np.sqrt(2 * np.log(max(count, 2))))


@dataclass(frozen=True)
class Noise:
    """The errors of all tensors of a dump."""

    residuals: Mapping[Key, Residual]

    def level(self, key: Key) -> float:
        """The level of noise of the same operation in other layers, or of its kind; 0 if these have none."""
        levels = [self.residuals[other].level for other in self._others(key) if self.explains(other)]
        return median_low(levels) if levels else 0.0

    def _others(self, key: Key) -> list[Key]:
        kind = self.residuals[key].kind
        others = [other for other, x in self.residuals.items() if other != key and x.kind == kind]
        return [other for other in others if other.name == key.name] or others

    def explains(self, key: Key) -> bool:
        """Whether the error of a tensor is like noise, and what many others have: engines may spare a few layers."""
        own = self.residuals[key]
        is_single = own.kind != SEVERAL
        is_apart = is_single and key.name in ("result_output", TABLE)  # the head and the embedding may have other formats
        is_alone = is_single and own.level <= FINE and not self._others(key)
        return own.is_believed and (is_apart or is_alone or self._is_like_others(key) or self._is_of_its_layer(key))

    def _is_like_others(self, key: Key) -> bool:
        own, others = self.residuals[key], [self.residuals[other] for other in self._others(key)]
        return bool(others) and sum(map(own.is_like, others)) >= max(1, _MANY * len(others))

    def _is_of_its_layer(self, key: Key) -> bool:
        """Whether all products of a layer have the noise of this one: engines spare the first and the last layer, or choose for each."""
        products = [x for other, x in self.residuals.items() if (other.layer, x.kind) == (key.layer, PRODUCTS) and other != key]
        own = self.residuals[key]
        return own.kind == PRODUCTS and len(products) >= _PRODUCTS and all(x.is_believed and own.is_like(x) for x in products)

    def words(self, key: Key, function: str = "") -> str:
        """The noise of an operation, in words. function: the name of the one that it is made of, if there is one."""
        kind, level = self.residuals[key].kind, self.residuals[key].level
        in_layer = self._is_of_its_layer(key) and not self._is_like_others(key)
        alike = f", alike in all products of layer {key.layer}" if in_layer else ", everywhere alike" * bool(self._others(key))
        is_rounded = kind in (*OF_SUMS, SEVERAL)
        noun = {SEVERAL: "operations", TABLE: "embeddings"}.get(kind, kind) if is_rounded else function or key.name
        how = f"computed with about 2^{np.log2(level):.1f} of noise" if is_rounded else f"approximated to {level:.1g}"
        return f"{noun} {'are' if noun.endswith('s') else 'is'} {how}{alike}"
