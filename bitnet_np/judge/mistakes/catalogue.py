"""How known mistakes are tried: at one operation, at several at once, in a whole engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...base.errors import listed
from ...engine.dialects import DIALECTS
from ...traces.points import SCORES, Key
from ..edits import kinds
from ..edits.expression import Node
from ..graph import Operation, operations
from ..variant import Variant, with_computed
from .engines import in_another
from .mistake import Cause, Compute, Edited, Mistake, Site
from .names import CATALOGUE, QUANTISING, SHARED


@dataclass(frozen=True)
class Attempt:
    """A mistake at one operation."""

    mistake: Mistake
    cause: Cause
    compute: Callable[..., Any] = field(repr=False)  # a Compute; with a grid what gives one for a number
    grid: Sequence[float] = ()  # numbers between which its own is sought, with a brace for it in the text


def at_operation(operation: Operation, mistakes: Sequence[Mistake] = CATALOGUE, length: int = 0) -> Iterator[Attempt]:
    """Yields every one of some mistakes that an operation can make."""
    site = Site.at(operation, length)
    for mistake in mistakes:
        if site.key.name not in mistake.at:
            continue
        for numbers, edit in mistake.edits(site):
            compute = partial(_at_number, site, edit.tree) if edit.grid else Edited(site, edit.tree)
            yield Attempt(mistake, mistake.cause(numbers), compute, edit.grid)
        if not mistake.edit and mistake.engine is not None:
            for numbers, engine in mistake.engine(Variant("", site.model, site.dialect)):
                yield Attempt(mistake, mistake.cause(numbers), Edited(site, in_another(engine, site)))


def _at_number(site: Site, tree: Callable[[float], Node], number: float) -> Edited:
    return Edited(site, tree(number))


def as_rounded(operation: Operation, cause: Cause) -> Compute:
    """The operation with the rounding that a cause of this catalogue names, which it can make."""
    known = [mistake for mistake in CATALOGUE if mistake.id == cause.id]
    return next(attempt.compute for attempt in at_operation(operation, known) if attempt.cause.kind == cause.kind)


def in_engine(base: Variant) -> Iterator[Variant]:
    """Yields whole engines with each likely mistake: those of the quantiser, also in other dialects, and then the others."""
    yield from _engines(QUANTISING, base)
    for dialect in DIALECTS.values():
        if dialect != base.dialect:
            for variant in _engines(QUANTISING, replace(base, dialect=dialect)):
                yield replace(variant, text=f"{variant.text}, in the dialect {dialect.name}")
    yield from _engines([mistake for mistake in CATALOGUE if mistake not in QUANTISING], base)
    span, likely = list(operations(base.model, base.dialect)), [mistake for mistake in CATALOGUE if mistake.likely]
    for trial in trials(span, False, likely):
        yield replace(with_computed(base, trial.cause.text, trial.computes), mistake=trial.cause.id)


@dataclass(frozen=True)
class Trial:
    """A mistake at several operations at once, or at one of them."""

    cause: Cause
    computes: Mapping[Key, Callable[..., Any]] = field(repr=False)  # as those of attempts
    everywhere: bool  # whether it is in all operations that share what can make it
    grid: Sequence[float] = ()
    number: float | None = None  # the number that it was tried with, if that is sought

    def with_number(self, number: float) -> "Trial":
        """The mistake with its number."""
        named = replace(self.cause, text=self.cause.text.format(number=number))
        return Trial(named, {key: compute(number) for key, compute in self.computes.items()}, self.everywhere, number=number)


def trials(span: Sequence[Operation], single: bool, mistakes: Sequence[Mistake] = CATALOGUE, length: int = 0) -> Iterator[Trial]:
    """Yields every one of some mistakes that some operations can make, whose last one gives the tensor that shows it.

    It may be in all operations that can make it, as in a function that they share, in those of one name, or, with `single`, in one
    operation of one layer. The text says where it is.
    """
    known: dict[str, dict[Key, Attempt]] = {}
    for operation in span:
        for attempt in at_operation(operation, mistakes, length):
            known.setdefault(attempt.cause.text, {}).setdefault(operation.key, attempt)
    alone = []
    for attempts in known.values():
        mistake = next(iter(attempts.values())).mistake
        names: dict[str, list[Key]] = {}
        for key in attempts:
            names.setdefault(key.name, []).append(key)
        groups = [] if mistake.local else _groups(list(attempts), not mistake.fault)
        for i, keys in enumerate(groups if mistake.shared and groups else (*groups, *names.values())):
            yield _trial(attempts, keys, _where(keys, list(attempts), span[-1].key), i < max(len(groups), 1) or mistake.local)
        if single and not mistake.shared:
            alone += [(attempts, key) for keys in names.values() if len(keys) > 1 for key in keys]
    for attempts, key in alone:
        yield _trial(attempts, [key], "" if key == span[-1].key else f"at {key.name} of layer {key.layer}: ", False)


def _trial(attempts: Mapping[Key, Attempt], keys: Sequence[Key], where: str, everywhere: bool) -> Trial:
    one = attempts[keys[0]]
    return Trial(replace(one.cause, text=where + one.cause.text), {key: attempts[key].compute for key in keys}, everywhere, one.grid)


Computed = Mapping[Key, Callable[..., Any]]
"""Operations that are computed otherwise."""


def narrowed(span: Sequence[Operation], mistaken: Computed) -> Iterator[tuple[str, Computed]]:
    """Yields operations with a mistake in some of them, and with fewer bits in all that can have them, by what is said of the bits.

    Of several operations only what some kinds of them share: an engine has one type for its products, or for what it stores.
    """
    for (kind, words), computes in _in_fewer_bits(span, mistaken, kinds.NARROW).items():
        groups = _groups(list(computes), narrow=True) if len(span) > 1 and kind != "stored" else [list(computes)]
        for keys in groups:
            yield words, {**mistaken, **{key: computes[key] for key in keys}}


def cached_and_rounded(span: Sequence[Operation]) -> Iterator[tuple[tuple[str, str], Computed]]:
    """Yields operations with a type of the KV cache and one of products, by what is said of both."""
    for (_, cache), caches in _in_fewer_bits(span, {}, ("stored",)).items():
        for (_, words), computes in _in_fewer_bits(span, caches, ("rounded",)).items():
            for keys in _groups(list(computes), narrow=True) if words.startswith(kinds.OPERANDS) else ():
                yield (words, cache), {**caches, **{key: computes[key] for key in keys}}


def _in_fewer_bits(
    span: Sequence[Operation], mistaken: Computed, narrow: Sequence[str]
) -> dict[tuple[str, str], dict[Key, Callable[..., Any]]]:
    """Each operation that can have fewer bits, by the kind of edit and what is said of it; on top of a mistake in some of them."""
    every: dict[tuple[str, str], dict[Key, Callable[..., Any]]] = {}
    for operation in span:
        site, own = Site.at(operation), mistaken.get(operation.key)
        tree = own.tree if isinstance(own, Edited) else site.tree
        for kind in narrow:
            for words, edit in kinds.KINDS[kind](site, tree) if tree is not None else ():
                every.setdefault((kind, words), {})[operation.key] = Edited(site, edit)
    return every


def _groups(keys: list[Key], narrow: bool) -> list[list[Key]]:
    """The operations of several names that may share what they do: all; those of the layers, where the embedding and the head have code of
    their own; of roundings also both without attention, whose kernels have their own types."""
    groups = [keys, [key for key in keys if key.layer is not None]]
    if narrow:
        groups += [[key for key in some if key.name not in ("kqv_out", *SCORES)] for some in groups]
    return [some for i, some in enumerate(groups) if len({key.name for key in some}) > 1 and some not in groups[:i]]


def _where(keys: Sequence[Key], every: Sequence[Key], last: Key) -> str:
    """The place of a mistake, to be put in front of its text. every: all operations that can make it."""
    names, layers = list(dict.fromkeys(key.name for key in keys)), {key.layer for key in keys}
    if list(keys) == [last]:
        return ""
    for noun, at in SHARED.items() if len(names) > 1 else ():
        if set(names) <= set(at):
            return f"in {noun}{' of the layers' * (None not in layers and any(key.layer is None for key in every))}: "
    return f"at {listed(names)}{' of every layer' * (len(layers) > 1)}: "


def _engines(mistakes: Iterable[Mistake], base: Variant) -> Iterator[Variant]:
    """Yields whole engines with each of some mistakes that are of the whole engine: another model, dialect or kernel."""
    for mistake in mistakes:
        if mistake.engine is not None and mistake.fault:
            for numbers, variant in mistake.engine(base):
                yield replace(variant, text=mistake.cause(numbers).text, mistake=mistake.id)
