"""Mistakes that nobody listed: any edit of the definition's expression of an operation (edits/)."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from ...traces.points import FIELDS, LAYER_NAMES
from ..edits import kinds
from ..edits.expression import Node, value_of
from ..graph import EMBEDDING, LOGITS, NORM, POSITIONS, SCALED
from .mistake import Array, Compute, Computes, Mistake, Site, Sought, Values

AT = (
    *(key.name for key in (EMBEDDING, POSITIONS, SCALED)),
    *LAYER_NAMES,
    *(f"{name}_in" for name in FIELDS),
    *(key.name for key in (NORM, LOGITS)),
)


def _compute(site: Site, tree: Node) -> Compute:
    """The operation by an expression; NaN where that gives no tensor of its shape."""

    def compute(values: Values) -> Array:
        inputs = site.inputs(values)
        try:
            y = np.asarray(value_of(tree, values.__getitem__, len(inputs[0])))
        except (ValueError, IndexError):  # shapes that do not go together
            y = np.empty(0)
        return y if y.ndim == 2 and len(y) == len(inputs[0]) else np.full((len(inputs[0]), 1), np.nan)

    return compute


def _edits(kind: str, site: Site) -> Computes:
    for words, tree in kinds.edits(kind, site):
        yield {"what": words}, _compute(site, tree)


def _families(kind: str, site: Site) -> Iterator[Sought]:
    for family in kinds.families(kind, site):
        yield Sought(family.words, family.grid, partial(_with_number, site, family))


def _with_number(site: Site, family: kinds.Family, number: float) -> Compute:
    return _compute(site, family.of(number))


MISTAKES: tuple[Mistake, ...] = (
    *(Mistake(f"edit.{kind}", "{what}", AT, compute=partial(_edits, kind), fault=kind != "rounded") for kind in kinds.KINDS),
    *(Mistake(f"edit.{kind}", "{what}", AT, search=partial(_families, kind), apart=kind != "numbers") for kind in kinds.FAMILIES),
)
"""One entry for each kind of edit: its sentences bring their own nouns."""
