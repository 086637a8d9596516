"""Cases drawn around edges: each value of each field comes before any comes again, and a field is often plain."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from ..testing.space import Case, fitted, lengths_of, with_fields

PLAIN = 0.35
"""How often a field has its plainest value: a failure that needs a plain field is found, and one that needs several others too."""

MOST_WORK = 10**8
"""Multiply-adds of a drawn case, about."""

_SECOND = ("batch", "layers")
_LESS = (*_SECOND, "group", "ffn", "width")
"""Fields that get a small value, the plainest or the second, where a case is too much work: what is left is as edgy."""


def work_of(case: Case) -> int:
    """Multiply-adds of its products."""
    heads = case.kv_heads * case.group
    layer = case.width * (2 * case.head_dim * (heads + case.kv_heads) + 3 * case.ffn * (1 + case.experts))
    layer += case.length * heads * case.head_dim
    return sum(lengths_of(case)) * (case.layers * layer + case.width * case.vocab)


class Deck:
    """Cases without end."""

    def __init__(self, edges: Mapping[str, Sequence[Any]], rng: random.Random) -> None:
        self.edges, self.rng = dict(edges), rng
        self._left: dict[str, list[Any]] = {}

    def without(self, name: str, value: Any) -> None:
        """Draw a value no more."""
        self.edges[name] = tuple(x for x in self.edges[name] if x != value) or self.edges[name][:1]
        self._left.pop(name, None)

    def draw(self) -> Case:
        """The next case."""
        case = fitted(with_fields(Case(), {name: self._value(name) for name in self.edges}))
        for name in _LESS:
            if work_of(case) > MOST_WORK:
                values = self.edges[name]
                case = fitted(with_fields(case, {name: values[min(name in _SECOND, len(values) - 1)]}))
        return case

    def _value(self, name: str) -> Any:
        values = self.edges[name]
        if len(values) == 1 or (name != "length" and self.rng.random() < PLAIN):
            return values[0]
        left = self._left.setdefault(name, [])
        if not left:
            left += self.rng.sample(values, len(values)) if name == "length" else self.rng.sample(values[1:], len(values) - 1)
        return left.pop()
