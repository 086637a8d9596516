"""All readings, and the cause that they find."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ...traces.points import POOLED
from ..graph import FIELDS, HEAD_NORMS
from ..mistakes.mistake import Cause
from . import (
    activations,
    attention,
    attention_weights,
    cells,
    codes,
    elements,
    embedding,
    inputs,
    matrices,
    norms,
    places,
    rotations,
    sampling,
)
from .wrong import Wrong, runs

PRODUCTS = (*FIELDS, "result_output")
ROTATIONS = ("Qcur_rope", "Kcur_rope")
BY_ELEMENT = (*activations.AT, "ffn_inp", "l_out", *HEAD_NORMS)


class Reading(NamedTuple):
    """What may be read off a tensor: an id, the names of tensors, empty for any, and what gives the cause in words."""

    id: str
    at: tuple[str, ...]
    read: Callable[[Wrong], str | None]


FACTS = (
    Reading("one_number", (), places.one_number),
    Reading("never_written", (), places.never_written),
)
"""Readings that need no hypothesis."""

READINGS = (
    Reading("norm", norms.AT, norms.norm),
    Reading("other_rows", PRODUCTS, matrices.other_rows),
    Reading("misread", tuple(FIELDS), matrices.misread),
    Reading("unwritten", tuple(FIELDS), matrices.unwritten),
    Reading("weighted_inputs", PRODUCTS, inputs.weighted_inputs),
    Reading("narrow_sums", tuple(FIELDS), codes.narrow_sums),
    Reading("narrow_partial_sums", PRODUCTS, codes.narrow_partial_sums),
    Reading("activation_scales", tuple(FIELDS), codes.activation_scales),
    Reading("penalty", ("result_output",), sampling.penalty),
    Reading("cut", ("result_output",), sampling.cut),
    Reading("probabilities", ("result_output",), sampling.probabilities),
    Reading("stale_inputs", (*PRODUCTS, *BY_ELEMENT, *norms.AT), places.stale_inputs),
    Reading("other_bias", tuple(FIELDS), matrices.other_bias),
    Reading("constants", (), elements.constants),
    Reading("low_rank", PRODUCTS, inputs.low_rank),
    Reading("block_factors", PRODUCTS, inputs.block_factors),
    Reading("other_tokens", ("inp_embd",), embedding.other_tokens),
    Reading("misread_rows", ("inp_embd",), embedding.misread_rows),
    Reading("sinusoids", ("inp_embd",), embedding.sinusoids),
    Reading("rotation", ROTATIONS, rotations.rotation),
    Reading("factors", (), elements.factors),
    Reading("heads", ("kqv_out",), attention.other_heads),
    Reading("cells", ("kqv_out",), cells.cells),
    Reading("clipped", (), elements.clipped),
    Reading("soft_capped", (), elements.soft_capped),
    Reading("dropped", (), elements.dropped),
    Reading("grid", (), elements.on_a_grid),
    Reading("rows", (), elements.rows_of_others),
    Reading("stride", (), elements.other_stride),
    Reading("columns", (), elements.columns_of_others),
    Reading("affine", (), elements.affine),
)
"""The readings in the order in which they are tried: the first that finds a cause stands."""

LOOSE_READINGS = (
    Reading("coarse_weights", ("kqv_out",), attention_weights.coarse_weights),
    Reading("values", ("kqv_out",), attention_weights.foreign_values),
    Reading("function", activations.AT, activations.other_function),
)
"""Readings that describe numbers which other causes may give too: whatever gives exactly these numbers comes before."""

_OF_PARTS = {
    "norm",
    "weighted_inputs",
    "other_bias",
}
"""Readings of the wrong rows or elements alone."""
_OF_NUMBERS = {"clipped", "soft_capped", "grid", "columns"}
"""Readings of the wrong rows alone that look at a tensor's own numbers, whatever its operation is."""
_OF_INPUTS = {"norm", "clipped", "dropped", "grid", "rows", "stride", "columns"}
"""Readings of an input that is solved for: by a square matrix other weights would give some input too, but none that these explain."""
LOOSE = tuple(f"read.{reading.id}" for reading in LOOSE_READINGS)
"""Causes that a mistake in a part of the tensor comes before."""
PLACES = ("read.one_number", "read.places")
"""Causes that say where numbers are wrong, and not why."""


def facts_of(wrong: Wrong) -> Cause | None:
    """What a wrong tensor shows whatever its operation is."""
    return _read(wrong, FACTS) if wrong.places.any() and wrong.key.name != POOLED else None


def cause_of(wrong: Wrong) -> Cause | None:
    """The cause that a wrong tensor shows: as a whole, in the part that is wrong, or by its places."""
    if not wrong.places.any() or wrong.key.name == POOLED:  # which has no rows of tokens
        return None
    last = Reading("places", (), places.few_places)
    return facts_of(wrong) or _read(wrong, READINGS) or _of_a_part(wrong) or _of_its_input(wrong) or _read(wrong, [*LOOSE_READINGS, last])


def _read(wrong: Wrong, readings: Iterable[Reading], where: str = "") -> Cause | None:
    for reading in readings:
        if not reading.at or wrong.key.name in reading.at:
            text = reading.read(wrong)
            if text is not None:
                return Cause(where + text, f"read.{reading.id}")
    return None


def _of_its_input(wrong: Wrong) -> Cause | None:
    """What is wrong with the input of a product, where it can be told from the outputs."""
    other = inputs.recovered(wrong) if wrong.key.name in PRODUCTS else None
    if other is None or not other.places.any():
        return None
    return _read(other, [reading for reading in READINGS if reading.id in _OF_INPUTS], f"its input is another {other.key.name}: ")


def _of_a_part(wrong: Wrong) -> Cause | None:
    """The cause in the rows that are wrong, or in the elements, where the others are right: a loop's rest, one path of several."""
    name, readings = wrong.key.name, [reading for reading in READINGS if reading.id in _OF_PARTS]
    rows, columns = (np.flatnonzero(wrong.places.any(axis=axis)) for axis in (1, 0))
    if name in (*PRODUCTS, *norms.AT, *BY_ELEMENT) and 2 * rows.size <= len(wrong.theirs):
        cause = _read(wrong.rows(rows), readings, f"at {runs('position', rows)}: ")
        if cause is not None:
            return cause
    if rows.size < len(wrong.theirs):
        cause = _read(wrong.rows(rows), [reading for reading in READINGS if reading.id in _OF_NUMBERS], f"at {runs('position', rows)}: ")
        if cause is not None:
            return cause
    if name in BY_ELEMENT and 4 * columns.size <= 3 * wrong.theirs.shape[1]:
        return _read(wrong.columns(columns), readings, f"at {runs('element', columns)}: ")
    return None
