"""All readings, and the cause that they find."""

from collections.abc import Callable
from typing import NamedTuple

from ..graph import FIELDS
from ..mistakes.mistake import Cause
from . import (
    accumulators,
    activations,
    attention,
    blocks,
    elements,
    embedding,
    inputs,
    matrices,
    norms,
    places,
    residuals,
    rotations,
    rows,
    scales,
    weights,
)
from .wrong import Wrong

PRODUCTS = (*FIELDS, "result_output")
ROTATIONS = ("Qcur_rope", "Kcur_rope")


class Reading(NamedTuple):
    """What may be read off a tensor: an id, the names of tensors, empty for any, and what gives the cause in words."""

    id: str
    at: tuple[str, ...]
    read: Callable[[Wrong], str | None]


READINGS = (
    Reading("one_number", (), places.one_number),
    Reading("never_written", (), places.never_written),
    Reading("norm", norms.AT, norms.norm),
    Reading("terms", residuals.AT, residuals.terms),
    Reading("activation", activations.AT, activations.activation),
    Reading("other_rows", PRODUCTS, rows.other_rows),
    Reading("misread", tuple(FIELDS), matrices.misread),
    Reading("cut_short", PRODUCTS, matrices.cut_short),
    Reading("shared_scales", tuple(FIELDS), matrices.shared_scales),
    Reading("weighted_inputs", PRODUCTS, inputs.weighted_inputs),
    Reading("misread_blocks", PRODUCTS, blocks.misread_blocks),
    Reading("rounded_weights", PRODUCTS, weights.rounded_weights),
    Reading("narrow_sums", tuple(FIELDS), accumulators.narrow_sums),
    Reading("activation_scales", tuple(FIELDS), scales.activation_scales),
    Reading("constants", (), elements.constants),
    Reading("low_rank", PRODUCTS, inputs.low_rank),
    Reading("block_factors", PRODUCTS, blocks.block_factors),
    Reading("other_tokens", ("inp_embd",), embedding.other_tokens),
    Reading("misread_rows", ("inp_embd",), embedding.misread_rows),
    Reading("penalty", ("result_output",), elements.penalty),
    Reading("rotation", ROTATIONS, rotations.rotation),
    Reading("factors", (), elements.factors),
    Reading("heads", ("kqv_out",), attention.other_heads),
    Reading("moved_heads", ("kqv_out",), attention.moved_heads),
    Reading("other_layers", ("kqv_out",), attention.other_layers),
    Reading("score_cap", ("kqv_out",), attention.score_cap),
    Reading("values", ("kqv_out",), attention.foreign_values),
    Reading("clipped", (), elements.clipped),
    Reading("soft_capped", (), elements.soft_capped),
    Reading("dropped", (), elements.dropped),
    Reading("grid", (), elements.on_a_grid),
    Reading("rows", (), elements.rows_of_others),
    Reading("columns", (), elements.columns_of_others),
    Reading("affine", (), elements.affine),
    Reading("places", (), places.few_places),
)
"""The readings in the order in which they are tried: the first that finds a cause stands."""

PLACES = ("read.one_number", "read.places")
"""Causes that say where numbers are wrong, and not why."""


def cause_of(wrong: Wrong) -> Cause | None:
    """The cause that a wrong tensor shows."""
    if not wrong.places.any():
        return None
    for reading in READINGS:
        if not reading.at or wrong.key.name in reading.at:
            text = reading.read(wrong)
            if text is not None:
                return Cause(text, f"read.{reading.id}")
    return None
