"""The one catalogue of known mistakes, and how it is read: at one operation, in a whole engine, fitted to any tensor.

The list comes from defects that engines have had: their issue trackers, and what their authors ask an oracle to find. A new mistake is an
entry in the file of its subject; traces, logits alone, the table in docs/mistakes.md and scripts/mutations.py read it from here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ...base.errors import listed
from ...engine.dialects import DIALECTS, Dialect
from ...model.records import Model
from ...traces.points import FIELDS, Key
from ..graph import HEAD_NORMS, Operation, operations
from ..variant import Variant, with_computed
from . import anywhere, attention, conversions, edited, experts, gates, hidden, layers, matrices, norms, pooling, quantiser, rope, switches
from .mistake import Array, Cause, Compute, Fit, Mistake, Numbers, Site, Sought, cause

ENGINES = (
    norms.EPSILON,
    matrices.SCALES,
    norms.WEIGHTS,
    matrices.BIASES,
    layers.TABLES,
    norms.MISSING,
    gates.MISTAKES,
    experts.MISTAKES,
    switches.MISTAKES,
    rope.MISTAKES,
    attention.WHOLE_ENGINE,
    layers.LAYERS,
    layers.PROMPTS,
)
"""Mistakes of whole engines outside the quantiser. Those that change little come first, because large ones show anyway."""

CATALOGUE: tuple[Mistake, ...] = (
    *switches.MISTAKES,
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
    *rope.MISTAKES,
    *attention.WHOLE_ENGINE,
    *attention.OTHERS,
    *gates.MISTAKES,
    *experts.MISTAKES,
    *pooling.MISTAKES,
    *layers.TABLES,
    *layers.OPERATIONS,
    *layers.LAYERS,
    *layers.PROMPTS,
    *anywhere.MISTAKES,
)
"""All known mistakes. Of two that fit a tensor alike the first one stands."""

HIDDEN: tuple[Mistake, ...] = (*hidden.MISTAKES, *layers.ORDERS, *edited.MISTAKES)
"""Mistakes that are searched for where none of the catalogue explains a tensor, at its operation or through several."""


@dataclass(frozen=True)
class Attempt:
    """A mistake at one operation."""

    cause: Cause
    compute: Compute = field(repr=False)
    together: bool = False


def _each(result: Any) -> Iterator[tuple[Numbers, Any]]:
    """Yields numbers and results of a mistake that gives one result, or several with their numbers, or none."""
    if isinstance(result, list | Iterator):
        yield from result
    elif result is not None:
        yield {}, result


def at_operation(
    model: Model, dialect: Dialect, operation: Operation, mistakes: Sequence[Mistake] = CATALOGUE, length: int = 0
) -> Iterator[Attempt]:
    """Yields every one of some mistakes that an operation can make, but for those whose number is sought."""
    site = Site(model, dialect, operation, length=length)
    for mistake in mistakes:
        if mistake.compute is not None and site.name in mistake.at and mistake.when(model, dialect):
            for numbers, compute in _each(mistake.compute(site)):
                yield Attempt(cause(mistake, numbers), compute, mistake.together)


def as_rounded(model: Model, dialect: Dialect, operation: Operation, cause: Cause) -> Compute:
    """The operation with the rounding that a cause of this catalogue names, which it can make."""
    known = [mistake for mistake in CATALOGUE if mistake.id == cause.id]
    return next(attempt.compute for attempt in at_operation(model, dialect, operation, known) if attempt.cause.kind == cause.kind)


def in_engine(base: Variant) -> Iterator[Variant]:
    """Yields whole engines with each known mistake: those of the quantiser, also in other dialects, and then the others."""
    yield from engines(quantiser.MISTAKES, base)
    for dialect in DIALECTS.values():
        if dialect != base.dialect:
            for variant in engines(quantiser.MISTAKES, replace(base, dialect=dialect)):
                yield replace(variant, text=f"{variant.text}, in the dialect {dialect.name}")
    for group in ENGINES:
        yield from engines(group, base)


@dataclass(frozen=True)
class Trial:
    """A mistake at several operations at once, or at one of them."""

    cause: Cause
    computes: Mapping[Key, Compute] = field(repr=False)
    widest: bool  # whether it is in all operations that can make it
    number: float | None = None  # the number that it was tried with, if that is sought

    @property
    def id(self) -> str:
        """Its id in the catalogue."""
        return self.cause.id


def trials(
    model: Model, dialect: Dialect, span: Sequence[Operation], singly: bool, mistakes: Sequence[Mistake] = CATALOGUE, length: int = 0
) -> Iterator[Trial]:
    """Yields every one of some mistakes that some operations can make, whose last one gives the tensor that shows it.

    It may be in all operations that can make it, as in a function that they share, in those of one name, or, with `singly`, in one
    operation of one layer. The text says where it is.
    """
    known: dict[str, dict[Key, Attempt]] = {}
    last = span[-1].key
    for operation in span:
        for attempt in at_operation(model, dialect, operation, mistakes, length):
            if attempt.cause.id.startswith("dump.") and operation.key != last:
                continue  # a tensor that is not in the dump was not dumped from a wrong buffer
            known.setdefault(attempt.cause.text, {})[operation.key] = attempt
    shared = [places for places in known.values() if next(iter(places.values())).together]
    others = [places for places in known.values() if not next(iter(places.values())).together]
    for attempts, keys, where, widest in (*_placed(others, last, singly), *_placed(shared, last, False, together=True)):
        own = attempts[keys[0]].cause
        yield Trial(replace(own, text=where + own.text), {key: attempts[key].compute for key in keys}, widest)


@dataclass(frozen=True)
class Numbered:
    """A mistake with a number in it that is not known, at several operations at once, or at one of them."""

    id: str  # in the catalogue
    text: str  # its place, and what is wrong, with a brace for the number
    grid: Sequence[float]  # numbers between which its own is sought
    computes: Mapping[Key, Callable[[float], Compute]] = field(repr=False)
    widest: bool

    def trial(self, number: float) -> Trial:
        """The mistake with that number."""
        named = Cause(self.text.format(number=number), self.id)
        return Trial(named, {key: compute(number) for key, compute in self.computes.items()}, self.widest, number)


def numbered_mistakes(model: Model, dialect: Dialect, span: Sequence[Operation], singly: bool) -> Iterator[Numbered]:
    """Yields the hidden mistakes of some operations whose numbers are sought, placed as trials are."""
    sites = [Site(model, dialect, operation) for operation in span]
    for mistake in HIDDEN:
        known: dict[str, dict[Key, Sought]] = {}
        for site in sites:
            if mistake.search is not None and site.name in mistake.at and mistake.when(model, dialect):
                result = mistake.search(site)
                every = [Sought(mistake.text, mistake.grid, result)] if callable(result) else result or ()
                for sought in every:
                    known.setdefault(sought.text, {})[site.key] = sought
        for places, keys, where, widest in _placed(list(known.values()), span[-1].key, singly):
            if mistake.apart and len({key.name for key in keys}) > 1:
                continue
            one = places[keys[0]]
            yield Numbered(mistake.id, where + one.text, one.grid, {k: places[k].compute for k in keys}, widest or mistake.apart)


_Placed = TypeVar("_Placed")


def _placed(
    known: Sequence[Mapping[Key, _Placed]], last: Key, singly: bool, together: bool = False
) -> Iterator[tuple[Mapping[Key, _Placed], list[Key], str, bool]]:
    """Yields what is known of each mistake with the operations that make it together, the place in words, and
    whether these are all that can make it."""
    alone = []
    for places in known:
        names: dict[str, list[Key]] = {}
        for key in places:
            names.setdefault(key.name, []).append(key)
        groups = [list(places)] if len(names) > 1 else []
        in_layers = [key for key in places if key.layer is not None]
        if len(in_layers) < len(places) and len({key.name for key in in_layers}) > 1:
            groups.append(in_layers)  # the embedding and the head may have code of their own
        for i, keys in enumerate(groups if together and groups else (*groups, *names.values())):
            yield places, keys, _where(keys, last, several=len({k.layer for k in keys}) > 1), i == 0
        alone += [(places, key) for keys in names.values() if len(keys) > 1 for key in keys] if singly else []
    for places, key in alone:
        yield places, [key], "" if key == last else f"at {key.name} of layer {key.layer}: ", False


def _where(keys: Sequence[Key], last: Key, several: bool) -> str:
    """The place of a mistake, to be put in front of its text. several: it is in more than one layer."""
    if list(keys) == [last]:
        return ""
    names = list(dict.fromkeys(key.name for key in keys))
    return f"at {listed(names)}{' of every layer' if several else ''}: "


def hidden_engines(base: Variant) -> Iterator[Variant]:
    """Yields whole engines with each hidden mistake that is no change of single operations."""
    yield from engines(HIDDEN, base)


def engines(mistakes: Iterable[Mistake], base: Variant) -> Iterator[Variant]:
    """Yields whole engines with each of some mistakes that a whole engine can make."""
    for mistake in mistakes:
        if mistake.everywhere is not None:
            yield from _everywhere(mistake, mistake.everywhere, base)
        if mistake.engine is not None and mistake.when(base.model, base.dialect):
            for numbers, variant in _each(mistake.engine(base)):
                named = cause(mistake, numbers, numbers.get("where", ""))
                yield replace(variant, text=named.text, mistake=named.id)


def _everywhere(mistake: Mistake, where: str, base: Variant) -> Iterator[Variant]:
    """Yields whole engines that make a mistake in every operation that can make it, or in those of each name."""
    known: dict[str, dict[Key, Compute]] = {}
    for operation in operations(base.model, base.dialect):
        place = where.format(name=_name_of(operation.key)) if operation.key.layer is not None or "{" not in where else _AT_THE_END
        for attempt in at_operation(base.model, base.dialect, operation, [mistake]):
            known.setdefault(place + attempt.cause.text, {})[operation.key] = attempt.compute
    for text, computes in known.items():
        yield replace(with_computed(base, text, computes), mistake=mistake.id, weak=mistake.weak)


_AT_THE_END = "at result_norm: "


def _name_of(key: Key) -> str:
    """The name of what an operation computes with, as files have it: that of its matrix or norm."""
    if key.name.endswith("_in"):
        return f"the norm inside {FIELDS[key.name.removesuffix('_in')]}"
    return FIELDS.get(key.name, HEAD_NORMS.get(key.name, key.name))


def fitted(fit: Fit) -> Iterator[tuple[Cause, Array]]:
    """Yields the mistakes that any operation can make, with numbers fitted to the other engine's tensor."""
    for mistake in anywhere.MISTAKES:
        if mistake.fitted is not None:
            for numbers, array in _each(mistake.fitted(fit)):
                yield cause(mistake, numbers), array
