"""Mistakes that are edits of the definition's expression of an operation (edits/): those with names of their own, and any others."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ...traces.points import FIELDS, LAYER_NAMES
from ..edits import kinds
from ..edits.expression import Node
from ..graph import EMBEDDING, LOGITS, NORM, POSITIONS, SCALED
from .mistake import Computes, Mistake, Numbers, Site

AT = (
    *(key.name for key in (EMBEDDING, POSITIONS, SCALED)),
    *LAYER_NAMES,
    *(f"{name}_in" for name in FIELDS),
    *(key.name for key in (NORM, LOGITS)),
)
Values = Callable[[Site], Iterator[tuple[Numbers, float]]]
"""The wrong numbers that engines have in the place of one of the model's, with what the text says of them."""


def named(subject: str, at: tuple[str, ...], *rows: tuple[str, str, str], **common: Any) -> tuple[Mistake, ...]:
    """Edits that are well-known mistakes, by a table: the rest of an id, the edit, and a text.

    An edit is its kind and its words, with braces for what differs: {a} for one word, {A} for several, {W} for several without a number;
    two edits are joined by " + ". {kind} for the name of a narrow type. The text may have the same braces; without one it is the edit's
    words. common: other fields of Mistake, the same for all.
    """
    return tuple(
        Mistake(f"{subject}.{id}", text or edit.split(": ", 1)[1], at, compute=partial(recognised, edit), **common)
        for id, edit, text in rows
    )


def numbered(subject: str, at: tuple[str, ...], *rows: tuple[str, str, str, Values], **common: Any) -> tuple[Mistake, ...]:
    """The same of numbers of the model: the rest of an id, the noun of the number, a text, and the wrong numbers."""
    return tuple(
        Mistake(f"{subject}.{id}", text, at, compute=partial(_with_numbers, noun, values), **common) for id, noun, text, values in rows
    )


def recognised(edit: str, site: Site) -> Computes:
    """The edits of a site that have these words, with what stands for the braces."""
    first, *others = edit.split(" + ")
    kind, words = first.split(": ", 1)
    known = list(_matching(words, site.edits(kind)))
    for more in others:
        kind, words = more.split(": ", 1)
        known = [
            ({**numbers, **added}, edited)
            for numbers, tree in known
            for added, edited in _matching(words, kinds.KINDS[kind](site, tree))
            if all(numbers.get(name, value) == value for name, value in added.items())
        ]
    for numbers, tree in known:
        yield numbers, site.edited(tree)


def _matching(words: str, edits: Iterable[tuple[str, Node]]) -> Iterator[tuple[Numbers, Node]]:
    """Yields the edits that are said so: what stands for the braces of the words, and the expression."""
    parts = re.split(r"(\{\w+\})", words)
    pattern = "".join(
        re.escape(part) if part[:1] != "{" else f"(?P<{part[1:-1]}>{_BRACES.get(part, _WORDS if part[1].isupper() else _WORD)})"
        for part in parts
    )
    for said, tree in edits:
        match = re.fullmatch(pattern, said)
        if match is not None:
            yield match.groupdict(), tree


_WORDS, _WORD = r".+", r"\S*"
_BRACES = {"{W}": r"[^\d]+", "{kind}": r"b?float16|q\d_\w|int\d"}


def _with_numbers(noun: str, values: Values, site: Site) -> Computes:
    families = [family for family in site.families("numbers") if family.words.startswith(f"{noun} is ")]
    for family in families:
        for numbers, value in values(site):
            yield numbers, site.edited(family.of(value))


# --- those without a name -----------------------------------------------------------------------------------------------------------------


def _edits(kind: str, site: Site) -> Computes:
    for words, tree in site.edits(kind):
        yield {"what": words}, site.edited(tree)


MISTAKES: tuple[Mistake, ...] = (
    *(
        Mistake(
            f"edit.{kind}",
            "{what}",
            AT,
            compute=partial(_edits, kind),
            fault=kind not in kinds.NARROW,
            together=kind in kinds.TOGETHER,
        )
        for kind in kinds.KINDS
    ),
    *(Mistake(f"edit.{kind}", "{what}", AT, family=kind, apart=kind != "numbers") for kind in kinds.FAMILIES),
)
"""One entry for each kind of edit: its sentences bring their own nouns."""
