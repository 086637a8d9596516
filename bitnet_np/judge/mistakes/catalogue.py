"""The one catalogue of known mistakes, and how it is read: at one operation, in a whole engine, fitted to any tensor.

The list comes from defects that engines have had: their issue trackers, and what their authors ask an oracle to find. A new mistake is an
entry in the file of its subject; traces, logits alone, the table in docs/mistakes.md and scripts/mutations.py read it from here.
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
"""Mistakes of whole engines outside the quantiser. Those that change little come first, because large ones show anyway."""

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


def _each(result: Any, is_one: Callable[[Any], bool]) -> Iterator[tuple[Numbers, Any]]:
    """Yields numbers and results of a mistake that gives one result, or several with their numbers."""
    if is_one(result):
        yield {}, result
    else:
        yield from result


def at_operation(model: Model, dialect: Dialect, operation: Operation) -> Iterator[Attempt]:
    """Yields every mistake that is known for an operation."""
    site = Site(model, dialect, operation)
    for mistake in CATALOGUE:
        if mistake.compute is not None and site.name in mistake.at and mistake.when(model, dialect):
            for numbers, compute in _each(mistake.compute(site), callable):
                yield Attempt(cause(mistake, numbers), compute)


def in_engine(base: Variant) -> Iterator[Variant]:
    """Yields whole engines with each known mistake: those of the quantiser, also in other dialects, and then the others."""
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
            for numbers, variant in _each(mistake.engine(base), lambda result: isinstance(result, Variant)):
                named = cause(mistake, numbers, numbers.get("where", ""))
                yield replace(variant, text=named.text, mistake=named.id)


def fitted(fit: Fit) -> Iterator[tuple[Cause, Array]]:
    """Yields the mistakes that any operation can make, with numbers fitted to the other engine's tensor."""
    for mistake in anywhere.MISTAKES:
        if mistake.fitted is not None:
            for numbers, array in _each(mistake.fitted(fit), lambda result: hasattr(result, "shape")):
                yield cause(mistake, numbers), array
