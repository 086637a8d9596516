"""The record of a known mistake, and the site in a forward pass where one is tried."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...traces.points import Key
from ..edits.kinds import KINDS, Edit
from ..expression import Node, at_columns, value_of, values_of
from ..graph import Operation
from ..variant import Variant

Array = NDArray[np.float64]
Values = Mapping[Key, Array]

Compute = Callable[[Values], Array]
"""The tensors of a forward pass -> the output of an operation with a mistake in it."""

Numbers = Mapping[str, Any]
"""The values for the braces of a text."""

Engines = Iterator[tuple[Numbers, Variant]]


@dataclass(frozen=True)
class Mistake:
    """One entry of the catalogue: the name of an edit, or engines.

    text: for people, with braces for numbers that differ from place to place; empty for the words of the edit. at: the tensors whose
    operation can make it; empty if only whole engines can. edit: the kind and the words of an edit, with braces for what differs: {a} for
    one word, {A} for several, {W} for several without a number, {kind} for the name of a narrow type. engine: whole engines with it, in
    every layer, with the numbers of the text; without `edit` its operations are those with the mistake. fault: False for a rounding that
    engines do on purpose. likely: on logits alone it is tried first, and on models of any size. shared: it is in a function that all
    operations share, and is tried in all at once alone. local: it is in one tensor, and its number is not sought in several names at once.
    """

    id: str
    text: str = ""
    at: tuple[str, ...] = ()
    edit: str = ""
    engine: Callable[[Variant], Engines] | None = field(default=None, repr=False)
    fault: bool = True
    likely: bool = False
    shared: bool = False
    local: bool = False

    @property
    def is_of_engines(self) -> bool:
        """Whether whole engines are tried with it."""
        return self.fault and (self.engine is not None or self.likely)

    def edits(self, site: Site) -> Iterator[tuple[Numbers, Edit]]:
        """Yields the edits of a site that it is, with what stands for the braces."""
        kind, _, words = self.edit.partition(": ")
        for edit in site.edits(kind) if kind else ():
            match = _compiled(words).fullmatch(edit.words)
            if match is not None:
                yield {"words": edit.words, **match.groupdict()}, edit

    def cause(self, numbers: Numbers) -> Cause:
        """The Cause with its numbers in the text."""
        return Cause((self.text or "{words}").format(**numbers), self.id, self.fault, numbers.get("kind", ""))


_BRACES = {"{W}": r"[^\d]+", "{kind}": r"b?float16|q\d_\w|int\d"}


@cache
def _compiled(words: str) -> re.Pattern[str]:
    """What finds words with braces; all that is said where there are none."""
    parts = re.split(r"(\{\w+\})", words or "{A}")
    said = {part: _BRACES.get(part, ".+" if part[1].isupper() else r"\S*") for part in parts if part[:1] == "{"}
    return re.compile("".join(f"(?P<{part[1:-1]}>{said[part]})" if part in said else re.escape(part) for part in parts))


@dataclass(frozen=True)
class Cause:
    """A recognised mistake, as it is reported."""

    text: str
    id: str  # of the catalogue, or "read." and the id of a reading
    fault: bool = True
    kind: str = ""  # the type that numbers are rounded to, of a rounding

    def __str__(self) -> str:
        return self.text


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


@dataclass(frozen=True, eq=False)
class Site(Operation):
    """An operation that may have a mistake in it."""

    @classmethod
    def at(cls, operation: Operation, length: int = 0) -> Site:
        """The site of an operation. length: of the sequence, where mistakes at single positions are tried."""
        return cls(operation.model, operation.dialect, operation.key, operation.inputs, operation.make, length=length)

    @cached_property
    def _edits(self) -> dict[str, list[Edit]]:
        return {}

    def edits(self, kind: str) -> list[Edit]:
        """The edits of the operation of one kind."""
        if kind not in self._edits:
            self._edits[kind] = [] if self.tree is None else [Edit(*edit) for edit in KINDS[kind](self, self.tree)]
        return self._edits[kind]

    @cached_property
    def _right(self) -> _Right:
        assert self.tree is not None
        return _Right(self.tree)

    def value(self, tree: Node, values: Values) -> Array:
        """The value of an expression in the place of the operation's; NaN where that gives no tensor of its shape."""
        inputs = [values[key] for key in self.inputs]
        try:
            y = np.asarray(value_of(tree, values.__getitem__, len(inputs[0]), self._right.steps(inputs, values)))
        except (ValueError, IndexError):  # shapes that do not go together
            y = np.empty(0)
        return y if y.ndim == 2 else np.full((len(inputs[0]), 1), np.nan)


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
