"""The record of a wrong tensor, which readings read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model.records import Model, with_rope_of
from ...traces.points import HEADS, Key
from ..evidence import NEAR, explains
from ..law.expression import Array, Node, at_columns, constant, nodes, replaced, value_of, values_of
from ..law.graph import Operation, operations
from ..words import Indices, runs

ROWS = 64  # tokens looked at


class TimeIsOver(Exception):
    """The time for readings of a tensor is over."""


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
    stop: Callable[[], bool] = lambda: False  # says when the time for readings is over

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
        """The tensor, or some elements of it, if a step had given these numbers. Raises TimeIsOver."""
        self.go_on()
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

    def go_on(self) -> None:
        """Raises TimeIsOver if it is. Whatever readings compare asks, so one that tries many things ends with the search."""
        if self.stop():
            raise TimeIsOver

    def accounts(self, computed: NDArray) -> bool:
        """Whether computed numbers are theirs. Raises TimeIsOver."""
        return self.explains(computed, self.theirs, self.value)

    def explains(self, computed: NDArray, theirs: Array, right: Array) -> bool:
        """The same of a part of the numbers, or of some that these follow from."""
        self.go_on()
        return explains(computed, theirs, right, self.noise)

    @property
    def is_nearly_right(self) -> bool:
        """Whether it is itself but for a small error: another tensor with its numbers is a copy of it then."""
        return bool(((self.value - self.theirs) ** 2).sum() < NEAR * (self.theirs**2).sum())

    def is_right_outside(self, marked: NDArray[np.bool_]) -> bool:
        """Whether the rest is right: in narrow types a small error of all numbers is beyond the bound in a few."""
        square = (self.theirs - self.value) ** 2
        return bool(square[marked].sum() > 0.5 * square.sum())

    @cached_property
    def following(self) -> set[Key]:
        """This tensor, and all that follow from it."""
        keys, place = {self.key}, self.operation
        for other in operations(place.model, place.dialect):
            if keys.intersection(other.inputs):
                keys.add(other.key)
        return keys

    def beside(self) -> Iterator[tuple[Key, Array]]:
        """Yields the tensors of its shape that an engine has at hand: the model's input and those of its layer and of the one before."""
        n = len(self.model.layers) if self.key.layer is None else self.key.layer
        for key in self.tensors:
            near = key.layer in (None, n, n - 1) and key not in self.following and not key.name.endswith(("_codes", "_scale"))
            if near and not self.is_nearly_right and self.tensors[key].shape == self.theirs.shape:
                yield key, self.tensors[key]
