"""Where an edit may be: at one operation, at several at once, in a whole engine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...base.errors import listed
from ...engine.dialects import DIALECTS, Dialect
from ...model.records import Model
from ...traces.points import SCORES, TOP_EXPERTS, Key
from ..edits import kinds
from ..edits.edited import Edited
from ..hypothesis import Computes, Hypothesis
from ..law.graph import EMBEDDING, Operation, operations
from ..variant import Variant
from .catalogue import CATALOGUE, QUANTISING, ROLES, ROWS, SHARED, at_operation
from .mistake import Mistake


def in_engine(base: Variant) -> Iterator[Hypothesis]:
    """Yields whole engines with each likely mistake: those of the quantiser, also in other dialects, and then the others."""
    for dialect in (base.dialect, *(dialect for dialect in DIALECTS.values() if dialect != base.dialect)):
        where = "" if dialect == base.dialect else f", in the dialect {dialect.name}"
        for one in (one for mistake in QUANTISING for one in mistake.in_engine(replace(base, dialect=dialect))):
            yield replace(one, text=one.text + where)
    for mistake in CATALOGUE:
        yield from () if mistake in QUANTISING else mistake.in_engine(base)
    yield from hypotheses(sites(base.model, base.dialect), False, [mistake for mistake in CATALOGUE if mistake.likely])


def sites(model: Model, dialect: Dialect, length: int = 0) -> list[Operation]:
    """All operations of a model where mistakes are tried on logits: all but those of codes. length: see Place."""
    return [replace(o, length=length) for o in operations(model, dialect) if not o.key.name.endswith(("_codes", "_scale"))]


def hypotheses(
    span: Sequence[Operation], single: bool, mistakes: Sequence[Mistake] = CATALOGUE, stop: Callable[[], bool] = lambda: False
) -> Iterator[Hypothesis]:
    """Yields every one of some mistakes that some operations can make, whose last one gives the tensor that shows it.

    It may be in all operations that can make it, as in a function that they share, in those of one name, or, with `single`, in one
    operation of one layer. The text says where it is. stop: says when no more is wanted; of many layers even a list of them takes seconds.
    """
    known: dict[str, dict[Key, Hypothesis]] = {}
    for site in span:
        if stop():
            return
        for one in at_operation(site, mistakes):
            known.setdefault(one.text, {}).setdefault(site.key, one)
    if len(span) == 1:  # nothing shares it
        yield from (at[span[0].key] for at in known.values())
        return
    alone, local = [], {site.key.layer for site in span if site.key.layer is not None and site.config.window_of(site.key.layer)}
    for at in known.values():
        mistake, names = ROWS[next(iter(at.values())).id], dict[str, list[Key]]()
        for key in at:
            names.setdefault(key.name, []).append(key)
        of_kinds = [[key for key in keys if (key.layer in local) == is_local] for keys in names.values() for is_local in (True, False)]
        of_kinds = [keys for keys in of_kinds if 1 < len(keys) < len(names[keys[0].name])]  # local layers, and those that see all tokens
        groups = [] if mistake.local else _groups(list(at), not mistake.fault or mistake.id == "edit.fewer_bits")
        if mistake.fault and not mistake.local and not any(one.grid for one in at.values()):  # numbers are sought in fewer
            for keys in (*([key for key in at if key.name in role] for role in ROLES), *of_kinds):
                groups += [keys] * (len(keys) > 1 and keys not in (*groups, *names.values()))
        for i, keys in enumerate(groups if mistake.shared and groups else (*groups, *names.values())):
            yield _at_all(at, keys, _where(keys, list(at), span[-1].key), i < max(len(groups), 1) or mistake.local)
        if single and not mistake.shared:
            alone += [(at, key) for keys in names.values() if len(keys) > 1 for key in keys]
    for at, key in alone:
        yield _at_all(at, [key], "" if key == span[-1].key else f"at {key.name} of layer {key.layer}: ", False)


def _at_all(at: Mapping[Key, Hypothesis], keys: Sequence[Key], where: str, everywhere: bool) -> Hypothesis:
    """The mistake at these operations, of those that can make it."""
    one, computes = at[keys[0]], {key: at[key].computes[key] for key in keys}
    return Hypothesis(where + one.text, one.id, one.fault, one.kind, computes, one.grid, everywhere)  # replace takes three times as long


def narrowed(span: Sequence[Operation], mistake: Hypothesis) -> Iterator[Hypothesis]:
    """Yields a mistake with fewer bits in all operations that can have them, by one type.

    Of several operations only what some kinds of them share: an engine has one type for its products, or for what it stores.
    """
    for (kind, _, words), computes in _in_fewer_bits(span, mistake.computes, kinds.NARROW).items():
        groups = _groups(list(computes), narrow=True) if len(span) > 1 and kind != "stored" else [list(computes)]
        for keys in groups:
            both: Computes = {**mistake.computes, **{key: computes[key] for key in keys}}
            yield replace(mistake, text=f"{mistake.text}; and {words}", computes=both)


def cached_and_rounded(span: Sequence[Operation]) -> Iterator[Hypothesis]:
    """Yields operations with a type of the KV cache and one of products."""
    for (*_, cache), caches in _in_fewer_bits(span, {}, ("stored",)).items():
        rounded = _in_fewer_bits(span, caches, ("rounded",)).items()
        for words, computes in ((words, computes) for (_, id, words), computes in rounded if id in kinds.OPERANDS):
            for keys in _groups(list(computes), narrow=True):
                both = {**caches, **{key: computes[key] for key in keys}}
                yield Hypothesis(f"{words}{AND}{cache}", "edit.rounded", fault=False, computes=both)


AND = ", and "
"""What stands between two types of fewer bits."""


def _in_fewer_bits(span: Sequence[Operation], mistaken: Computes, narrow: Sequence[str]) -> dict[tuple[str, str, str], dict[Key, Edited]]:
    """Each operation that can have fewer bits, by the kind of edit, its id, and what is said of it; on top of a mistake in some of them."""
    edits: dict[tuple[str, str, str], dict[Key, Edited]] = {}
    for site in (site for site in span if site.key.name != TOP_EXPERTS):
        edited = mistaken.get(site.key)
        tree = edited.tree if isinstance(edited, Edited) else site.tree
        for kind in narrow:
            for edit in (kinds.Edit(*edit) for edit in kinds.KINDS[kind](site, tree)):
                edits.setdefault((kind, edit.id, edit.words), {})[site.key] = Edited(site, edit.tree)
    return edits


def _groups(keys: list[Key], narrow: bool) -> list[list[Key]]:
    """The operations of several names that may share what they do: all; those of the layers, where the embedding and the head have code of
    their own; of roundings also both without attention, whose kernels have their own types."""
    groups = [keys, [key for key in keys if key.layer is not None]]
    if narrow:
        groups += [[key for key in keys if key != EMBEDDING]]
        groups += [[key for key in group if key.name not in ("kqv_out", *SCORES)] for group in groups]
    return [group for i, group in enumerate(groups) if len({key.name for key in group}) > 1 and group not in groups[:i]]


def _where(keys: Sequence[Key], able: Sequence[Key], last: Key) -> str:
    """The place of a mistake, to be put in front of its text. able: all operations that can make it."""
    names, layers = list(dict.fromkeys(key.name for key in keys)), {key.layer for key in keys}
    if list(keys) == [last]:
        return ""
    same = {key.layer for key in able if key.name in names}
    of_layers = f" of layers {listed([str(n) for n in sorted(n for n in layers if n is not None)])}" if layers < same else " of every layer"
    possible = {key.name for key in able if key.layer is not None or None in layers}
    noun = next((noun for noun, at in SHARED.items() if set(names) == possible <= set(at)), "")
    if noun and len(names) > 1:
        return f"in {noun}{' of the layers' * (None not in layers and any(key.layer is None for key in able))}: "
    return f"at {listed(names)}{of_layers * (len(layers) > 1)}: "
