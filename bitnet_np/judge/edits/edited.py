"""Operations with an edit in them, as they are computed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..hypothesis import Values
from ..law.expression import Array, Node, at_columns, value_of, values_of
from ..law.graph import Operation
from .kinds import KINDS, Edit

_SMALL = 1 << 20  # numbers of a step that are kept


def edits_of(site: Operation, kind: str) -> list[Edit]:
    """The edits of an operation of one kind."""
    if kind not in site.kept:
        site.kept[kind] = [Edit(*edit) for edit in KINDS[kind](site, site.tree)]
    return site.kept[kind]


def _right_steps(site: Operation, inputs: list[Array], values: Values) -> Mapping[Node, Any]:
    """The values of steps without a mistake: an edit computes again only what follows it.

    Those that are small or no larger than the result, from the second time on that the same inputs come.
    """
    before, steps = site.kept.get("right", ([], None))
    if len(inputs) != len(before) or not all(map(operator.is_, inputs, before)):
        site.kept["right"] = inputs, None
        return {}
    if steps is None:
        every = values_of(site.tree, values.__getitem__, len(inputs[0]))
        most = max(_SMALL, np.size(every[site.tree]))
        steps = {node: x for node, x in every.items() if np.size(x) <= most}
        site.kept["right"] = inputs, steps
    return steps


@dataclass(frozen=True)
class Edited:
    """The Compute of an edit: an expression in the place of an operation's."""

    site: Operation
    tree: Node

    def __call__(self, values: Values) -> Array:
        """Its value; NaN where that gives no tensor of the operation's shape."""
        inputs = [values[key] for key in self.site.inputs]
        try:
            y = np.asarray(value_of(self.tree, values.__getitem__, len(inputs[0]), _right_steps(self.site, inputs, values)))
        except (ValueError, IndexError):  # shapes that do not go together
            y = np.empty(0)
        return y if y.ndim == 2 else np.full((len(inputs[0]), 1), np.nan)

    def at(self, columns: NDArray[np.intp], values: Values) -> Array:
        """Some elements of the result alone, [T, n]."""
        return Edited(self.site, at_columns(self.tree, columns))(values)
