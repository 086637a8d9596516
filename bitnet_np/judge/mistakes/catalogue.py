"""The one catalogue of known mistakes, and how it is read: at one operation, in a whole engine, fitted to any tensor.

The list comes from defects that engines have had: their issue trackers, and what their authors ask an oracle to find. A new mistake is an
entry in the file of its subject; traces, logits alone, the table in docs/judging.md and scripts/mutations.py read it from here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ...dialects import DIALECTS, Dialect
from ...model import Model
from ..graph import Operation
from ..variant import Variant
from . import anywhere, attention, gates, layers, matrices, norms, positions, quantiser
from .mistake import Array, Cause, Compute, Fit, Mistake, Numbers, Site, cause

ENGINES = (
    norms.EPSILON,
    matrices.SCALES,
    norms.WEIGHTS,
    matrices.BIASES,
    layers.TABLES,
    norms.MISSING,
    gates.MISTAKES,
    positions.MISTAKES,
    attention.WHOLE_ENGINE,
    layers.LAYERS,
)
"""What a whole engine can get wrong beside its quantiser: mistakes that change little come first, because large ones show anyway."""

CATALOGUE: tuple[Mistake, ...] = (
    *matrices.BIASES,
    *matrices.DIALECTS,
    *matrices.SCALES,
    *quantiser.MISTAKES,
    *matrices.CODES,
    *matrices.WEIGHTS,
    *norms.EPSILON,
    *norms.WEIGHTS,
    *norms.MISSING,
    *norms.OTHERS,
    *positions.MISTAKES,
    *attention.WHOLE_ENGINE,
    *attention.OTHERS,
    *gates.MISTAKES,
    *layers.TABLES,
    *layers.OPERATIONS,
    *layers.LAYERS,
    *anywhere.MISTAKES,
)
"""All known mistakes. Of two that fit a tensor alike the first one stands."""


@dataclass(frozen=True)
class Attempt:
    """A mistake at one operation."""

    cause: Cause
    compute: Compute = field(repr=False)


def _each(made: Any, one: Callable[[Any], bool]) -> Iterator[tuple[Numbers, Any]]:
    """One result, or several with their numbers."""
    if one(made):
        yield {}, made
    else:
        yield from made


def at_operation(model: Model, dialect: Dialect, operation: Operation) -> Iterator[Attempt]:
    """Every mistake that is known for an operation."""
    site = Site(model, dialect, operation)
    for mistake in CATALOGUE:
        if mistake.compute is not None and site.name in mistake.at and mistake.when(model, dialect):
            for numbers, compute in _each(mistake.compute(site), callable):
                yield Attempt(cause(mistake, numbers), compute)


def in_engine(base: Variant) -> Iterator[Variant]:
    """Every whole engine with a known mistake: those of the quantiser, also in other dialects, and then the others."""
    yield from _engines(quantiser.MISTAKES, base)
    for dialect in DIALECTS.values():
        if dialect != base.dialect:
            for variant in _engines(quantiser.MISTAKES, replace(base, dialect=dialect)):
                yield replace(variant, text=f"{variant.text}, in the dialect {dialect.name}")
    for group in ENGINES:
        yield from _engines(group, base)


def _engines(mistakes: Iterable[Mistake], base: Variant) -> Iterator[Variant]:
    for mistake in mistakes:
        if mistake.engine is not None and mistake.when(base.model, base.dialect):
            for numbers, variant in _each(mistake.engine(base), lambda made: isinstance(made, Variant)):
                found = cause(mistake, numbers, numbers.get("where", ""))
                yield replace(variant, text=found.text, mistake=found.id)


def fitted(fit: Fit) -> Iterator[tuple[Cause, Array]]:
    """What any operation can get wrong, with numbers fitted to the other engine's tensor."""
    for mistake in anywhere.MISTAKES:
        if mistake.fitted is not None:
            for numbers, array in _each(mistake.fitted(fit), lambda made: hasattr(made, "shape")):
                yield cause(mistake, numbers), array
