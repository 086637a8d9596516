"""The record of a wrong tensor, and what readings share: when numbers are explained, and how places are said in words."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model.records import Model, with_rope_of
from ...traces.points import HEADS, Key
from ..law.expression import Array, Node, at_columns, constant, nodes, replaced, value_of, values_of
from ..law.graph import Operation

Indices = NDArray[np.intp]

_SURE = 1e-6  # NMSE left by a reading that explains: float32 noise, squared, with room for a flipped code
_CLOSER, _CLOSER_NARROW = 0.01, 0.1  # of the error, left by a reading that explains; the second of numbers of narrow types
_NEARLY_RIGHT = 0.01  # NMSE
_NOISY = 8  # times the noise: a mistake's own roundings are not those of the right operation
FEW = 4  # columns, or listed numbers
ROWS = 64  # tokens looked at
_FIRST_STEPS = 4
_GOLDEN = (5**0.5 - 1) / 2
_TOGETHER = 64  # rows compared at once with all


@dataclass(frozen=True)
class Wrong:
    """A wrong tensor of another engine, beside what it should be and what it was computed from."""

    operation: Operation  # that gives it
    inputs: list[Array]  # of that, theirs, [T, width] each; none if they are not known
    value: Array  # what it should be, [T, width]
    theirs: Array  # [T, width]
    places: NDArray[np.bool_]  # True for each wrong element, [T, width]
    noise: float  # NMSE that narrow types make by themselves, 0 in float32
    tensors: Mapping[Key, Array]  # all of theirs

    @property
    def key(self) -> Key:
        return self.operation.key

    @cached_property
    def model(self) -> Model:
        """The model, with the RoPE of its layer."""
        return with_rope_of(self.operation.model, self.key.layer)

    @cached_property
    def _leaves(self) -> dict[Key, Array]:
        return dict(zip(self.operation.inputs, self.inputs, strict=True))

    @cached_property
    def steps(self) -> dict[Node, Any]:
        """The right values of all steps of the expression."""
        with np.errstate(all="ignore"):
            return values_of(self.operation.tree, self._leaves.__getitem__, len(self.theirs))

    def step(self, what: str) -> Node | None:
        """The step of this kind or noun; None if the operation has none."""
        return next((node for node, _ in nodes(self.operation.tree) if what in (node.kind, node.noun)), None)

    def with_step(self, node: Node, numbers: Array, columns: Indices | None = None) -> Array:
        """The tensor, or some elements of it, if a step had given these numbers."""
        other = replaced(self.operation.tree, node, constant(node.noun, numbers))
        other = other if columns is None else at_columns(other, columns)
        with np.errstate(all="ignore"):
            return value_of(other, self._leaves.__getitem__, len(self.theirs), self.steps)

    @property
    def head_dim(self) -> int:
        """The elements of a head, of tensors that are cut into heads; else 1."""
        size = self.model.config.head_dim
        return size if self.key.name in HEADS and self.theirs.shape[1] % size == 0 else 1

    def in_units(self, columns: Indices) -> str:
        """The heads that some elements are, in words, or the elements, where these are no whole heads."""
        heads = np.unique(columns // self.head_dim)
        return runs("head", heads) if columns.size == heads.size * self.head_dim > heads.size else runs("element", columns)

    @cached_property
    def wrong_rows(self) -> Indices:
        """The rows with a wrong element."""
        return np.flatnonzero(self.places.any(axis=1))

    @cached_property
    def wrong_columns(self) -> Indices:
        """The columns with a wrong element."""
        return np.flatnonzero(self.places.any(axis=0))

    def rows(self, which: Indices) -> "Wrong":
        """The same of some rows alone, for operations that compute each row from that row; of the first ones for attention, too."""
        cut = {name: getattr(self, name)[which] for name in ("value", "theirs", "places")}
        return replace(self, inputs=[x[which] for x in self.inputs], **cut)

    def accounts(self, computed: NDArray) -> bool:
        """Whether computed numbers are theirs."""
        return explains(computed, self.theirs, self.value, self.noise)

    @property
    def is_nearly_right(self) -> bool:
        """Whether it is itself but for a small error: another tensor with its numbers is a copy of it then."""
        return bool(((self.value - self.theirs) ** 2).sum() < _NEARLY_RIGHT * (self.theirs**2).sum())

    def is_right_outside(self, marked: NDArray[np.bool_]) -> bool:
        """Whether the rest is right: in narrow types a small error of all numbers is beyond the bound in a few."""
        square = (self.theirs - self.value) ** 2
        return bool(square[marked].sum() > 0.5 * square.sum())

    def beside(self) -> Iterator[tuple[Key, Array]]:
        """Yields the tensors of its shape that an engine has at hand: the model's input and those of its layer and of the one before."""
        n = len(self.model.layers) if self.key.layer is None else self.key.layer
        for key in self.tensors:
            near = key.layer in (None, n, n - 1) and key != self.key and not key.name.endswith(("_codes", "_scale"))
            if near and self.tensors[key].shape == self.theirs.shape:
                yield key, self.tensors[key]


def explains(computed: NDArray, theirs: Array, right: Array, noise: float) -> bool:
    """Whether computed numbers are theirs, and far closer than the right ones, which may be close themselves."""
    if not np.isfinite(computed).all():
        return False
    left, before, size = ((x**2).sum() for x in (computed - theirs, right - theirs, theirs))
    return bool(left <= min(matched(noise) * size, (_CLOSER_NARROW if noise else _CLOSER) * before))


def matched(noise: float) -> float:
    """The NMSE up to which numbers are explained, where narrow types make `noise` by themselves."""
    return max(_SURE, _NOISY * noise)


def rough(noise: float) -> float:
    """The relative error of single numbers."""
    return max(1e-7, noise**0.5)


def nearest(candidates: Array, targets: Array) -> Indices:
    """The row of candidates [N, K] that is nearest to each of some targets [n, K]."""
    return ((candidates * candidates).sum(axis=1) - 2 * targets @ candidates.T).argmin(axis=1)


def sources(candidates: Array, targets: Array, near: float) -> Indices | None:
    """The row of candidates that each target is, up to `near` in each number; None if one is none."""
    found = []
    for begin in range(0, len(targets), _TOGETHER):
        some = targets[begin : begin + _TOGETHER]
        found.append(nearest(candidates, some))
        if not (np.abs(candidates[found[-1]] - some) <= near).all():
            return None
    return np.concatenate(found)


def places_of(numbers: NDArray, count: int, what: str) -> str:
    """Some of `count` numbered things: runs of them where these are few, every n-th, or the same ones of each group."""
    steps = np.diff(numbers)
    if np.count_nonzero(steps > 1) < 2:
        return f"{runs(what, numbers)} of {count}"
    if (steps == steps[0]).all():
        ordinal = {2: "second", 3: "third"}.get(int(steps[0]), f"{steps[0]}th")
        return f"every {ordinal} {what} from {what} {numbers[0]}, {numbers.size} of {count}"
    marked = np.isin(np.arange(count), numbers)
    for size in (n for n in range(3, count // 2 + 1) if count % n == 0):
        groups = marked.reshape(-1, size)
        if (groups == groups[0]).all():
            return f"{runs(what, np.flatnonzero(groups[0]))} of each {size}"
    return f"{runs(what, numbers)}, {numbers.size} of {count}"


def parts_of(places: NDArray[np.bool_], mostly: float) -> list[str]:
    """The positions and the elements of a tensor [T, width] where some are wrong. mostly: where more than this part are, all are."""
    said = []
    for axis, what in ((1, "position"), (0, "element")):
        some, count = np.flatnonzero(places.any(axis=axis)), places.shape[1 - axis]
        if 0 < some.size < mostly * count:
            said.append(places_of(some, count, what))
    return said


def runs(what: str, numbers: NDArray) -> str:
    """The noun, and the first runs of the numbers: elements 0 to 7, 12."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    spans = [f"{part[0]} to {part[-1]}" if part.size > 1 else f"{part[0]}" for part in parts]
    more = f" and {len(spans) - FEW} runs more" if len(spans) > FEW else ""
    return f"{what}{'s' * (numbers.size > 1)} {', '.join(spans[:FEW])}{more}"


def runs_and_verb(what: str, numbers: NDArray, verb: str) -> str:
    """The noun, the first runs of the numbers, and the verb: elements 0 to 7 are."""
    return f"{runs(what, numbers)} {verb if numbers.size == 1 else {'is': 'are', 'has': 'have'}[verb]}"


def digits(number: float) -> str:
    """A number of six digits, or of as many as tell it from 1, where it may be a factor."""
    return next((text for n in range(6, 18) if float(text := f"{number:.{n}g}") != 1), "1")


def least_to_largest(numbers: NDArray, count: int = 4) -> str:
    """The least and the largest of some numbers, of so many digits; one of them where they read the same."""
    low, high = f"{numbers.min():.{count}g}", f"{numbers.max():.{count}g}"
    return low if low == high else f"{low} to {high}"


def instead(theirs: float, right: float, least: int = 6) -> str:
    """A number instead of another, of so many digits, or of as many as tell them apart."""
    texts = ((f"{theirs:.{n}g}", f"{right:.{n}g}") for n in range(least, 18))
    return " instead of ".join(next((pair for pair in texts if pair[0] != pair[1]), (repr(theirs), repr(right))))


def plain(number: float, near: float) -> str:
    """The number of fewest digits that is as near: somebody may have written it."""
    every = (f"{number:.{digits}g}" for digits in range(1, 7))
    return next((f"{float(text):.6g}" for text in every if abs(float(text) - number) <= near * abs(number)), f"{number:.6g}")


def moves_in_words(source: Indices, what: str, of: str = "the numbers") -> str:
    """Which rows or columns are another one, in words: as a rule if there is one, else by runs of them."""
    count, index = len(source), np.arange(len(source))
    off = np.flatnonzero(source != index)
    shift = source[off] - off
    if off.size == count and source.max() < count and np.unique(shift % count).size == 1:
        by = (int(shift[0]) + count // 2) % count - count // 2
        return f"{what}s are shifted by {abs(by)}: {what} {max(0, -by)} has {of} of {what} {max(0, by)}"
    if off.size == 2 and (np.sort(source) == index).all():
        return f"{what}s {off[0]} and {off[1]} are exchanged"
    if off.size > 1 and np.unique(source[off]).size == 1:
        which = places_of(off, count, what).removesuffix(f" of {count}").removesuffix(f", {off.size}")
        return f"{which} have {of} of {what} {source[off[0]]}"
    rule = _rule(source) if off.size > 2 else None
    if rule is not None:
        return f"{what} {rule}"
    step, breaks = np.diff(source[off]), [0]  # 1 where a run of them stands elsewhere, 0 where one stands in the place of all
    for k in range(len(step)):
        if off[k + 1] != off[k] + 1 or step[k] not in (0, 1) or (k > breaks[-1] and step[k] != step[k - 1]):
            breaks.append(k + 1)
    moves = np.split(off, breaks[1:])
    first = [f"{runs_and_verb(what, some, 'has')} {of} of {runs(what, np.unique(source[some]))}" for some in moves[:3]]
    if len(moves) > max(3, off.size // 2):
        first = [f"the right numbers in other places: {first[0]}", *first[1:]]
    return ", ".join(first) + (f", and {len(moves) - 3} more" if len(moves) > 3 else "")


def _rule(source: Indices) -> str | None:
    """The rule of an order, if one of those that an index computed wrongly gives fits all of it."""
    count, i = len(source), np.arange(len(source))
    if (source == count - 1 - i).all():
        return "i has the numbers of i from the end: the order is the opposite"
    for n in range(2, count):
        for words, rule in ((f"i % {n}", i % n), (f"i // {n}", i // n), (f"i - i % {n}", i - i % n), (f"i ^ {n // 2}", i ^ (n // 2))):
            if (source == rule).all():
                return f"i has the numbers of {words}"
        if count % n == 0 and (source == i.reshape(-1, n).T.ravel()).all():
            return f"i has the numbers of {n} * (i % {count // n}) + i // {count // n}: rows of {n} are read as columns"
    return None


def nearest_number(error: Callable[[float], float], grid: Sequence[float], steps: int, worth: float = np.inf) -> float | None:
    """The number with the least error beside the best one of a grid, by a golden section. None if the first steps of it leave `worth`."""
    errors = [error(x) for x in grid]
    best = int(np.argmin(errors))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    of_a, of_b = error(a), error(b)
    for step in range(steps):
        if step == _FIRST_STEPS and not min(of_a, of_b, errors[best]) < worth:
            return None
        if of_a < of_b:
            high, b, of_b = b, a, of_a
            a = high - _GOLDEN * (high - low)
            of_a = error(a)
        else:
            low, a, of_a = a, b, of_b
            b = low + _GOLDEN * (high - low)
            of_b = error(b)
    middle = (low + high) / 2
    return float(grid[best]) if errors[best] <= error(middle) else middle
