"""The record of a known mistake: the name of an edit, or of engines that make it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..edits.edited import Edited, edits_of
from ..hypothesis import Hypothesis
from ..law.graph import Operation
from ..variant import Variant
from .engines import Engines, Numbers, in_another


@dataclass(frozen=True)
class Mistake:
    """One entry of the catalogue: the name of an edit, or engines.

    text: for people, with braces for numbers that differ from place to place; empty for the words of the edit. at: the tensors whose
    operation can make it; empty if only whole engines can. edit: the kind of its edits, and their id if that is not its own, or * for all.
    engine: whole engines with it, in every layer, with the numbers of the text; without `edit` its operations are those with the mistake.
    fault: False for a rounding that engines do on purpose. likely: on logits alone it is tried first, and on models of any size.
    shared: it is in a function that all operations share, and is tried in all at once alone. local: it is in one tensor, and its number is
    not sought in several names at once.
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

    def at_operation(self, site: Operation) -> Iterator[Hypothesis]:
        """Yields it in an operation that can make it, with each of its numbers."""
        if not self.edit and self.engine is not None:
            for numbers, engine in self.engine(Variant("", site.model, site.dialect)):
                yield self._made(numbers, computes={site.key: Edited(site, in_another(engine, site))})
            return
        kind, _, id = self.edit.partition(": ")
        for edit in edits_of(site, kind):
            if (id or self.id) in ("*", edit.id):
                compute = (lambda number, tree=edit.tree: Edited(site, tree(number))) if edit.grid else Edited(site, edit.tree)
                text = self.text.format(kind=edit.type) if self.text else edit.words
                yield Hypothesis(text, self.id, self.fault, edit.type, computes={site.key: compute}, grid=edit.grid)

    def in_engine(self, base: Variant) -> Iterator[Hypothesis]:
        """Yields the whole engines with it, if it is of another model, dialect or kernel."""
        if self.engine is not None and self.fault:
            for numbers, engine in self.engine(base):
                yield self._made(numbers, engine=engine)

    def _made(self, numbers: Numbers, **made: Any) -> Hypothesis:
        return Hypothesis(self.text.format(**numbers), self.id, self.fault, numbers.get("kind", ""), **made)
