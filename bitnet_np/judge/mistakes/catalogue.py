"""How known mistakes are tried: at one operation, at several at once, in a whole engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import listed
from ...engine.dialects import DIALECTS, Dialect
from ...model.records import Model
from ...traces.points import SCORES, TOP_EXPERTS, Key
from ..edits import kinds
from ..law.graph import EMBEDDING, Operation, operations
from ..readings.wrong import digits
from ..variant import Variant, with_computed
from .engines import in_another
from .mistake import Cause, Edited, Mistake
from .names import CATALOGUE, QUANTISING, ROLES, SHARED

Computes = Mapping[Key, Callable[..., Any]]
"""Operations that are computed otherwise: a Compute each, or what gives one for a number that is sought."""


@dataclass(frozen=True)
class Trial:
    """A mistake at one operation, at several at once, or in a whole engine."""

    cause: Cause
    computes: Computes = field(default_factory=dict, repr=False)
    grid: Sequence[float] = ()  # numbers between which its own is sought, with a brace for it in the text
    everywhere: bool = True  # whether it is in all operations that share what can make it
    number: float | None = None  # the number that it was tried with, if that is sought
    engine: Variant | None = None  # the engine that makes it by itself

    def with_number(self, number: float) -> "Trial":
        """The mistake with its number."""
        named = replace(self.cause, text=self.cause.text.format(number=digits(number)))
        computes = {key: compute(number) for key, compute in self.computes.items()}
        return replace(self, cause=named, computes=computes, grid=(), number=number)

    def variant(self, base: Variant, ids: NDArray[np.int64] | None = None) -> Variant:
        """An engine with it, that is ours otherwise. ids: see with_computed."""
        return with_computed(self.engine or base, self.cause.text, self.computes, ids) if self.computes else self.engine or base


def at_operation(site: Operation, mistakes: Sequence[Mistake] = CATALOGUE) -> Iterator[tuple[Mistake, Trial]]:
    """Yields every one of some mistakes that an operation can make."""
    for mistake in mistakes:
        if site.key.name not in mistake.at:
            continue
        for numbers, edit in mistake.edits(site):
            compute = (lambda number, tree=edit.tree: Edited(site, tree(number))) if edit.grid else Edited(site, edit.tree)
            yield mistake, Trial(mistake.cause(numbers), {site.key: compute}, edit.grid)
        if not mistake.edit and mistake.engine is not None:
            for numbers, engine in mistake.engine(Variant("", site.model, site.dialect)):
                yield mistake, Trial(mistake.cause(numbers), {site.key: Edited(site, in_another(engine, site))})


def in_engine(base: Variant) -> Iterator[Trial]:
    """Yields whole engines with each likely mistake: those of the quantiser, also in other dialects, and then the others."""
    yield from _engines(QUANTISING, base)
    for dialect in (dialect for dialect in DIALECTS.values() if dialect != base.dialect):
        yield from _engines(QUANTISING, replace(base, dialect=dialect), f", in the dialect {dialect.name}")
    yield from _engines([mistake for mistake in CATALOGUE if mistake not in QUANTISING], base)
    yield from trials(sites(base.model, base.dialect), False, [mistake for mistake in CATALOGUE if mistake.likely])


def _engines(mistakes: Iterable[Mistake], base: Variant, where: str = "") -> Iterator[Trial]:
    """Yields whole engines with each of some mistakes that are of the whole engine: another model, dialect or kernel."""
    for mistake in mistakes:
        for numbers, engine in mistake.engine(base) if mistake.engine is not None and mistake.fault else ():
            cause = mistake.cause(numbers)
            yield Trial(replace(cause, text=cause.text + where), engine=replace(engine, text=cause.text + where))


def sites(model: Model, dialect: Dialect, length: int = 0) -> list[Operation]:
    """All operations of a model where mistakes are tried on logits: all but those of codes. length: see Place."""
    return [replace(o, length=length) for o in operations(model, dialect) if not o.key.name.endswith(("_codes", "_scale"))]


def trials(
    span: Sequence[Operation], single: bool, mistakes: Sequence[Mistake] = CATALOGUE, stop: Callable[[], bool] = lambda: False
) -> Iterator[Trial]:
    """Yields every one of some mistakes that some operations can make, whose last one gives the tensor that shows it.

    It may be in all operations that can make it, as in a function that they share, in those of one name, or, with `single`, in one
    operation of one layer. The text says where it is. stop: says when no more is wanted; of many layers even a list of them takes seconds.
    """
    known: dict[str, tuple[Mistake, dict[Key, Trial]]] = {}
    for site in span:
        if stop():
            return
        for mistake, trial in at_operation(site, mistakes):
            known.setdefault(trial.cause.text, (mistake, {}))[1].setdefault(site.key, trial)
    alone, local = [], {site.key.layer for site in span if site.key.layer is not None and site.config.window_of(site.key.layer)}
    for mistake, at in known.values():
        names: dict[str, list[Key]] = {}
        for key in at:
            names.setdefault(key.name, []).append(key)
        of_kinds = [[key for key in keys if (key.layer in local) == is_local] for keys in names.values() for is_local in (True, False)]
        of_kinds = [keys for keys in of_kinds if 1 < len(keys) < len(names[keys[0].name])]  # local layers, and those that see all tokens
        groups = [] if mistake.local else _groups(list(at), not mistake.fault or mistake.id == "edit.fewer_bits")
        if mistake.fault and not mistake.local and not any(trial.grid for trial in at.values()):  # numbers are sought in fewer
            roles = [[key for key in at if key.name in role] for role in ROLES]
            for some in (*roles, *of_kinds):
                groups += [some] * (len(some) > 1 and some not in (*groups, *names.values()))
        for i, keys in enumerate(groups if mistake.shared and groups else (*groups, *names.values())):
            yield _at_all(at, keys, _where(keys, list(at), span[-1].key), i < max(len(groups), 1) or mistake.local)
        if single and not mistake.shared:
            alone += [(at, key) for keys in names.values() if len(keys) > 1 for key in keys]
    for at, key in alone:
        yield _at_all(at, [key], "" if key == span[-1].key else f"at {key.name} of layer {key.layer}: ", False)


def _at_all(at: Mapping[Key, Trial], keys: Sequence[Key], where: str, everywhere: bool) -> Trial:
    """The mistake at these operations, of those that can make it."""
    one = at[keys[0]]
    computes = {key: at[key].computes[key] for key in keys}
    return replace(one, cause=replace(one.cause, text=where + one.cause.text), computes=computes, everywhere=everywhere)


def narrowed(span: Sequence[Operation], trial: Trial) -> Iterator[Trial]:
    """Yields a mistake with fewer bits in all operations that can have them, by one type.

    Of several operations only what some kinds of them share: an engine has one type for its products, or for what it stores.
    """
    for (kind, words), computes in _in_fewer_bits(span, trial.computes, kinds.NARROW).items():
        groups = _groups(list(computes), narrow=True) if len(span) > 1 and kind != "stored" else [list(computes)]
        for keys in groups:
            cause = replace(trial.cause, text=f"{trial.cause.text}; and {words}")
            yield replace(trial, cause=cause, computes={**trial.computes, **{key: computes[key] for key in keys}})


def cached_and_rounded(span: Sequence[Operation]) -> Iterator[Trial]:
    """Yields operations with a type of the KV cache and one of products."""
    for (_, cache), caches in _in_fewer_bits(span, {}, ("stored",)).items():
        for (_, words), computes in _in_fewer_bits(span, caches, ("rounded",)).items():
            for keys in _groups(list(computes), narrow=True) if words.startswith(kinds.OPERANDS) else ():
                cause = Cause(f"{words}{AND}{cache}", "edit.rounded", fault=False)
                yield Trial(cause, {**caches, **{key: computes[key] for key in keys}})


AND = ", and "
"""What stands between two types of fewer bits."""


def _in_fewer_bits(span: Sequence[Operation], mistaken: Computes, narrow: Sequence[str]) -> dict[tuple[str, str], dict[Key, Edited]]:
    """Each operation that can have fewer bits, by the kind of edit and what is said of it; on top of a mistake in some of them."""
    every: dict[tuple[str, str], dict[Key, Edited]] = {}
    for site in (site for site in span if site.key.name != TOP_EXPERTS):
        own = mistaken.get(site.key)
        tree = own.tree if isinstance(own, Edited) else site.tree
        for kind in narrow:
            for words, edit in kinds.KINDS[kind](site, tree):
                every.setdefault((kind, words), {})[site.key] = Edited(site, edit)
    return every


def _groups(keys: list[Key], narrow: bool) -> list[list[Key]]:
    """The operations of several names that may share what they do: all; those of the layers, where the embedding and the head have code of
    their own; of roundings also both without attention, whose kernels have their own types."""
    groups = [keys, [key for key in keys if key.layer is not None]]
    if narrow:
        groups += [[key for key in keys if key != EMBEDDING]]
        groups += [[key for key in some if key.name not in ("kqv_out", *SCORES)] for some in groups]
    return [some for i, some in enumerate(groups) if len({key.name for key in some}) > 1 and some not in groups[:i]]


def _where(keys: Sequence[Key], every: Sequence[Key], last: Key) -> str:
    """The place of a mistake, to be put in front of its text. every: all operations that can make it."""
    names, layers = list(dict.fromkeys(key.name for key in keys)), {key.layer for key in keys}
    if list(keys) == [last]:
        return ""
    same = {key.layer for key in every if key.name in names}
    of_layers = f" of layers {listed([str(n) for n in sorted(n for n in layers if n is not None)])}" if layers < same else " of every layer"
    possible = {key.name for key in every if key.layer is not None or None in layers}
    for noun, at in SHARED.items() if len(names) > 1 and set(names) == possible else ():
        if set(names) <= set(at):
            return f"in {noun}{' of the layers' * (None not in layers and any(key.layer is None for key in every))}: "
    return f"at {listed(names)}{of_layers * (len(layers) > 1)}: "
