"""The record of a known mistake, and the site in a forward pass where one is tried."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...model.records import Model, with_rope_of
from ...traces.points import Key
from ..edits import kinds
from ..edits.definition import expression
from ..edits.expression import Node, at_columns, value_of, values_of
from ..graph import Operation, layer_input, operation_of
from ..variant import Variant

Array = NDArray[np.float64]
Values = Mapping[Key, Array]

Compute = Callable[[Values], Array]
"""The tensors of a forward pass -> the output of an operation with a mistake in it."""

Numbers = Mapping[str, Any]
"""The values for the braces of a text."""

Computes = Iterator[tuple[Numbers, Compute]]
Engines = Iterator[tuple[Numbers, Variant]]


@dataclass(frozen=True)
class Mistake:
    """One entry of the catalogue.

    text: for people, with braces for numbers that differ from place to place. at: the tensors whose operation can make it; empty if only
    whole engines can. compute: one operation with it, in float64. engine: a whole engine with it, in every layer; without `compute` its
    operations are those with the mistake. Both give one result, or several with the numbers of the text, or none where the model cannot
    make it. fault: False for a rounding that engines do on purpose. likely: on logits alone it is tried first, and on models
    of any size. family: the kind of edits with a number that is sought, instead of a result. together: it is in a function that all
    operations share, and is tried in all at once alone. apart: it is in one tensor, and its number is not sought in several names at once.
    """

    id: str
    text: str
    at: tuple[str, ...] = ()
    compute: Callable[[Site], Compute | Iterable[tuple[Numbers, Compute]] | None] | None = field(default=None, repr=False)
    engine: Callable[[Variant], Variant | Iterable[tuple[Numbers, Variant]] | None] | None = field(default=None, repr=False)
    fault: bool = True
    likely: bool = False
    family: str = ""
    together: bool = False
    apart: bool = False

    @property
    def is_of_engines(self) -> bool:
        """Whether whole engines are tried with it."""
        return self.fault and (self.engine is not None or self.likely)


@dataclass(frozen=True)
class Cause:
    """A recognised mistake, as it is reported."""

    text: str
    id: str  # of the catalogue, or "read." and the id of a reading
    fault: bool = True
    kind: str = ""  # the type that numbers are rounded to, of a rounding

    def __str__(self) -> str:
        return self.text


def cause(mistake: Mistake, numbers: Numbers) -> Cause:
    """The Cause of a mistake, with its numbers in the text."""
    return Cause(mistake.text.format(**numbers), mistake.id, mistake.fault, numbers.get("kind", ""))


class _Right:
    """The steps of an operation without a mistake: an edit computes again only what follows it."""

    def __init__(self, tree: Node):
        self._tree = tree
        self._inputs: list[Array] = []
        self._steps: dict[Node, Any] | None = None

    def steps(self, inputs: list[Array], values: Values) -> Mapping[Node, Any]:
        """The values of steps that are small or no larger than the result, from the second time on that the same inputs come."""
        if len(inputs) != len(self._inputs) or not all(map(operator.is_, inputs, self._inputs)):
            self._inputs, self._steps = inputs, None
            return {}
        if self._steps is None:
            steps = values_of(self._tree, values.__getitem__, len(inputs[0]))
            most = max(_SMALL, np.size(steps[self._tree]))
            self._steps = {node: x for node, x in steps.items() if np.size(x) <= most}
        return self._steps


_SMALL = 1 << 20  # numbers of a step that are kept


@dataclass(frozen=True)
class Site(Operation):
    """An operation that may have a mistake in it."""

    @classmethod
    def at(cls, operation: Operation, length: int = 0) -> Site:
        """The site of an operation. length: of the sequence, where mistakes at single positions are tried."""
        return cls(**vars(operation) | {"length": length})

    @property
    def name(self) -> str:
        return self.key.name

    @cached_property
    def turning(self) -> Model:
        """The model with the RoPE of its layer."""
        return with_rope_of(self.model, self.key.layer)

    @property
    def index(self) -> int:
        """The number of its layer."""
        assert self.key.layer is not None
        return self.key.layer

    @property
    def layer_input(self) -> Key:
        """The input tensor of its layer."""
        return layer_input(self.model, self.index)

    @cached_property
    def tree(self) -> Node | None:
        """The operation as an expression; None where it has none."""
        return expression(self)

    @cached_property
    def _edits(self) -> dict[str, list[tuple[str, Node]]]:
        return {}

    def edits(self, kind: str) -> list[tuple[str, Node]]:
        """The edits of the operation of one kind: in words, and the expression with each."""
        if kind not in self._edits:
            self._edits[kind] = [] if self.tree is None else list(kinds.KINDS[kind](self, self.tree))
        return self._edits[kind]

    def families(self, kind: str) -> Iterator[kinds.Family]:
        """The edits of the operation with a number, of one kind."""
        return iter(()) if self.tree is None else kinds.families(kind, self, self.tree)

    @cached_property
    def _right(self) -> _Right:
        assert self.tree is not None
        return _Right(self.tree)

    def value(self, tree: Node, values: Values) -> Array:
        """The value of an expression in the place of the operation's; NaN where that gives no tensor of its shape."""
        inputs = self.read(values)
        try:
            y = np.asarray(value_of(tree, values.__getitem__, len(inputs[0]), self._right.steps(inputs, values)))
        except (ValueError, IndexError):  # shapes that do not go together
            y = np.empty(0)
        return y if y.ndim == 2 else np.full((len(inputs[0]), 1), np.nan)

    def edited(self, tree: Node) -> Edited:
        """The operation by an expression."""
        return Edited(self, tree)

    def otherwise(self, engine: Variant) -> Compute:
        """The operation in another engine, which leaves the input as it is where it does not have that operation."""
        other = operation_of(engine.model, engine.dialect, self.key)
        if other is None:
            return lambda values: values[self.inputs[0]]
        return lambda values: other.evaluate(*(values[key] for key in other.inputs)).value

    def read(self, values: Values) -> list[Array]:
        """What the operation reads."""
        return [values[key] for key in self.inputs]

    def of(self, function: Callable[..., Array]) -> Compute:
        """The Compute of a function of the operation's inputs."""
        return lambda values: function(*self.read(values))


@dataclass(frozen=True)
class Edited:
    """The Compute of an edit."""

    site: Site
    tree: Node

    def __call__(self, values: Values) -> Array:
        return self.site.value(self.tree, values)

    def at(self, columns: NDArray[np.intp], values: Values) -> Array:
        """Some elements of the result alone, [T, n]."""
        return self.site.value(at_columns(self.tree, columns), values)
