"""The one catalogue of known mistakes, and how it is read: at one operation, in a whole engine, fitted to any tensor.

The list comes from defects that engines have had: their issue trackers, and what their authors ask an oracle to find. A new mistake is an
entry in the file of its subject; traces, logits alone, the table in docs/mistakes.md and scripts/mutations.py read it from here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...dialects import DIALECTS, Dialect
from ...errors import listed
from ...model import Model
from ...traces.points import Key
from ..graph import Operation
from ..variant import Variant
from . import anywhere, attention, conversions, experts, gates, layers, matrices, norms, positions, quantiser
from .mistake import Array, Cause, Compute, Fit, Mistake, Numbers, Site, cause

ENGINES = (
    norms.EPSILON,
    matrices.SCALES,
    norms.WEIGHTS,
    matrices.BIASES,
    layers.TABLES,
    norms.MISSING,
    gates.MISTAKES,
    experts.MISTAKES,
    positions.MISTAKES,
    attention.WHOLE_ENGINE,
    layers.LAYERS,
    layers.PROMPTS,
)
"""Mistakes of whole engines outside the quantiser. Those that change little come first, because large ones show anyway."""

CATALOGUE: tuple[Mistake, ...] = (
    *matrices.BIASES,
    *matrices.DIALECTS,
    *matrices.SCALES,
    *quantiser.MISTAKES,
    *matrices.CODES,
    *matrices.WEIGHTS,
    *conversions.MISTAKES,
    *norms.EPSILON,
    *norms.WEIGHTS,
    *norms.MISSING,
    *norms.OTHERS,
    *positions.MISTAKES,
    *attention.WHOLE_ENGINE,
    *attention.OTHERS,
    *gates.MISTAKES,
    *experts.MISTAKES,
    *layers.TABLES,
    *layers.OPERATIONS,
    *layers.LAYERS,
    *layers.PROMPTS,
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


@dataclass(frozen=True)
class Trial:
    """A mistake at several operations at once, or at one of them."""

    cause: Cause
    computes: Mapping[Key, Compute] = field(repr=False)


def trials(model: Model, dialect: Dialect, span: Sequence[Operation], singly: bool) -> Iterator[Trial]:
    """Yields every mistake that is known for some operations, whose last one gives the tensor that shows it.

    It may be in all operations that can make it, as in a function that they share, in those of one name, or, with `singly`, in one
    operation of one layer. The text says where it is.
    """
    known: dict[str, dict[Key, Attempt]] = {}
    last = span[-1].key
    for operation in span:
        for attempt in at_operation(model, dialect, operation):
            if attempt.cause.id.startswith("dump.") and operation.key != last:
                continue  # a tensor that is not in the dump was not dumped from a wrong buffer
            known.setdefault(attempt.cause.text, {})[operation.key] = attempt
    alone = []
    for places in known.values():
        names: dict[str, list[Key]] = {}
        for key in places:
            names.setdefault(key.name, []).append(key)
        groups = [list(places)] if len(names) > 1 else []
        for keys in (*groups, *names.values()):
            yield _trial(places, keys, _where(keys, last, several=len({k.layer for k in keys}) > 1))
        alone += [(places, key) for keys in names.values() if len(keys) > 1 for key in keys] if singly else []
    for places, key in alone:
        yield _trial(places, [key], "" if key == last else f"at {key.name} of layer {key.layer}: ")


def _trial(attempts: Mapping[Key, Attempt], keys: Sequence[Key], where: str) -> Trial:
    own = attempts[keys[0]].cause
    return Trial(replace(own, text=where + own.text), {key: attempts[key].compute for key in keys})


def _where(keys: Sequence[Key], last: Key, several: bool) -> str:
    """The place of a mistake, to be put in front of its text. several: it is in more than one layer."""
    if list(keys) == [last]:
        return ""
    names = list(dict.fromkeys(key.name for key in keys))
    return f"at {listed(names)}{' of every layer' if several else ''}: "


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
