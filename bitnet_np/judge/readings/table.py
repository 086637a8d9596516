"""All readings, and the cause that they find."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...traces.points import POOLED
from ..graph import EMBEDDING, FIELDS
from ..mistakes.mistake import Cause
from . import activations, attention_weights, cells, codes, elements, embedding, inputs, matrices, places, rotations
from .wrong import Wrong

PRODUCTS = (*FIELDS, "result_output")
ROTATIONS = ("Qcur_rope", "Kcur_rope")


class Reading(NamedTuple):
    """What may be read off a tensor: an id, the names of tensors, empty for any, and what gives the cause in words."""

    id: str
    at: tuple[str, ...]
    read: Callable[[Wrong], str | None]


FACTS = (
    Reading("one_number", (), places.one_number),
    Reading("never_written", (), places.never_written),
    Reading("rows", (), elements.rows_of_others),
)
"""Readings that need no hypothesis."""

READINGS = (
    Reading("other_tokens", (EMBEDDING.name,), embedding.other_tokens),
    Reading("other_rows", PRODUCTS, matrices.other_rows),
    Reading("misread", tuple(FIELDS), matrices.misread),
    Reading("weighted_inputs", PRODUCTS, inputs.weighted_inputs),
    Reading("narrow_partial_sums", PRODUCTS, codes.narrow_partial_sums),
    Reading("activation_scales", tuple(FIELDS), codes.activation_scales),
    Reading("fitted", (), elements.fitted),
    Reading("rotation", ROTATIONS, rotations.rotation),
    Reading("cells", ("kqv_out",), cells.cells),
    Reading("partial", (), elements.partial),
    Reading("stride", (), elements.other_stride),
    Reading("columns", (), elements.columns_of_others),
)
"""The readings in the order in which they are tried: the first that finds a cause stands."""

LOOSE_READINGS = (
    Reading("values", ("kqv_out",), attention_weights.foreign_values),
    Reading("function", activations.AT, activations.other_function),
)
"""Readings that describe numbers which other causes may give too: whatever gives exactly these numbers comes before."""

LOOSE = tuple(f"read.{reading.id}" for reading in LOOSE_READINGS)
"""Causes that a mistake in a part of the tensor comes before."""
PLACES = ("read.one_number", "read.places")
"""Causes that say where numbers are wrong, and not why."""


def facts_of(wrong: Wrong) -> Cause | None:
    """What a wrong tensor shows whatever its operation is."""
    return _read(wrong, FACTS) if wrong.places.any() and wrong.key.name != POOLED else None


def cause_of(wrong: Wrong) -> Cause | None:
    """The cause that a wrong tensor shows, or the places where it is wrong if they are few."""
    if not wrong.places.any() or wrong.key.name == POOLED:  # which has no rows of tokens
        return None
    return facts_of(wrong) or _read(wrong, [*READINGS, *LOOSE_READINGS, Reading("places", (), places.few_places)])


def _read(wrong: Wrong, readings: Iterable[Reading]) -> Cause | None:
    for reading in readings:
        if not reading.at or wrong.key.name in reading.at:
            text = reading.read(wrong)
            if text is not None:
                return Cause(text, f"read.{reading.id}")
    return None
