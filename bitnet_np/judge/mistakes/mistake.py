"""The record of a known mistake, and the edits of an operation, which is the site where one is tried."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...traces.points import Key
from ..edits.kinds import KINDS, Edit
from ..law.expression import Array, Node, at_columns, value_of, values_of
from ..law.graph import Operation
from ..variant import Variant

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

    def edits(self, site: Operation) -> Iterator[tuple[Numbers, Edit]]:
        """Yields the edits of an operation that it is, with what stands for the braces."""
        kind, _, words = self.edit.partition(": ")
        for edit in edits_of(site, kind) if kind else ():
            match = _compiled(words).fullmatch(edit.words)
            if match is not None:
                yield {"words": edit.words, **match.groupdict()}, edit

    def cause(self, numbers: Numbers) -> Cause:
        """The Cause with its numbers in the text."""
        return Cause((self.text or "{words}").format(**numbers), self.id, self.fault, numbers.get("kind", ""))


_BRACES = {"{W}": r"[^\d]+", "{kind}": r"b?float16|[qQ]\d_\w|int\d|e\dm\d|(?:MX|NV)FP\d"}


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
