"""The record of a wrong tensor, and what readings share: when numbers are explained, and how places are said in words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...base.errors import listed
from ...traces.points import Key
from ..place import Place

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

_SURE = 1e-6  # NMSE left by a reading that explains: float32 noise, squared, with room for a flipped code
_CLOSER, _CLOSER_NARROW = 0.01, 0.1  # of the error, left by a reading that explains; the second of numbers of narrow types
_NEARLY_RIGHT = 0.01  # NMSE
_NOISY = 8  # times the noise: a mistake's own roundings are not those of the right operation
FEW = 4  # columns, or listed numbers
ROWS = 64  # tokens looked at


@dataclass(frozen=True)
class Wrong(Place):
    """A wrong tensor of another engine, beside what it should be and what it was computed from. The model has the RoPE of its layer."""

    inputs: list[Array]  # theirs, [T, width] each
    value: Array  # what it should be, [T, width]
    theirs: Array  # [T, width]
    places: NDArray[np.bool_]  # True for each wrong element, [T, width]
    noise: float  # NMSE that narrow types make by themselves, 0 in float32
    tensors: Mapping[Key, Array]  # all of theirs

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
        """Whether computed numbers are theirs, and far closer than the right ones, which may be close themselves."""
        if not np.isfinite(computed).all() or not explained(computed, self.theirs, self.noise):
            return False
        closer = _CLOSER_NARROW if self.noise else _CLOSER
        return bool(((computed - self.theirs) ** 2).sum() <= closer * ((self.value - self.theirs) ** 2).sum())

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


def explained(computed: NDArray, theirs: NDArray, noise: float) -> bool:
    """Whether the numbers that a reading computes from the inputs are theirs."""
    return bool((np.abs(computed - theirs) ** 2).sum() <= matched(noise) * (np.abs(theirs) ** 2).sum())


def matched(noise: float) -> float:
    """The NMSE up to which numbers are explained, where narrow types make `noise` by themselves."""
    return max(_SURE, _NOISY * noise)


def rough(noise: float) -> float:
    """The relative error of single numbers."""
    return max(1e-7, noise**0.5)


def numbered(what: str, numbers: NDArray) -> str:
    """The noun, and the first of the numbers: elements 3, 5, 8."""
    return f"{what}{'s' * (numbers.size > 1)} {listed(numbers.tolist(), FEW)}"


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


def said(what: str, numbers: NDArray, verb: str) -> str:
    """The noun, the first runs of the numbers, and the verb: elements 0 to 7 are."""
    return f"{runs(what, numbers)} {verb if numbers.size == 1 else {'is': 'are', 'has': 'have'}[verb]}"
