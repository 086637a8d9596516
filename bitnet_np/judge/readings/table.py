"""All readings, and the cause that they find."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ...traces.points import FIELDS, POOLED, SLOTS, TOP_EXPERTS
from ..hypothesis import Hypothesis
from . import attention, cells, elements, moved_rows, others, rotations, steps, sums
from .wrong import TimeIsOver, Wrong


class Reading(NamedTuple):
    """What may be read off a tensor: an id, the names of tensors, empty for any, and what gives the cause in words."""

    id: str
    at: tuple[str, ...]
    read: Callable[[Wrong], str | None]


FACTS = (
    Reading("choices", (TOP_EXPERTS,), others.choices),
    Reading("one_number", (), elements.one_number),
    Reading("never_written", (), elements.never_written),
    Reading("rows", (), others.rows_of_others),
)
"""Readings that need no hypothesis."""

COLUMNS = Reading("columns", (), others.columns_of_others)
SUMS = Reading("sums", (), sums.wrong_sums)
READINGS = (
    Reading("other_choices", (TOP_EXPERTS,), others.other_choices),
    SUMS,
    Reading("other_rows", (*FIELDS, "result_output"), others.other_rows),
    Reading("scales", tuple(FIELDS), steps.scales_of_others),
    Reading("rotation", ("Qcur_rope", "Kcur_rope"), rotations.rotation),
    Reading("positions", ("Qcur_rope", "Kcur_rope"), rotations.positions),
    Reading("whole_turns", ("Qcur_rope", "Kcur_rope"), rotations.whole_turns),
    Reading("turns", ("Qcur_rope", "Kcur_rope"), rotations.other_turns),
    Reading("pairs", ("Qcur_rope", "Kcur_rope"), rotations.other_pairs),
    Reading("tokens", ("inp_embd",), others.tokens),
    Reading("experts", SLOTS, others.experts),
    Reading("cells", ("kqv_out",), cells.cells),
    COLUMNS,
    Reading("heads", ("kqv_out",), attention.other_heads),
    Reading("added", (), others.added_rows),
    Reading("running", (), elements.running_sums),
    Reading("contents", ("kqv_out",), cells.other_contents),
    Reading("moved_cells", ("kqv_out",), moved_rows.moved_cells),
    Reading("moved_queries", ("kqv_out",), moved_rows.moved_queries),
    Reading("parts", ("kqv_out",), cells.joined_parts),
    Reading("weights", ("kqv_out",), attention.wrong_weights),
    Reading("held", ("kqv_out",), cells.held_cells),
    Reading("own_values", ("kqv_out",), attention.wrong_values),
    Reading("structure", (), steps.structure_of_all),
    Reading("values", ("kqv_out",), attention.foreign_values),
    Reading("step", (), steps.wrong_step),
    Reading("own_numbers", (), steps.own_numbers),
    Reading("rank", (), steps.low_rank),
    Reading("places", (), elements.few_places),
)
"""The readings in the order in which they are tried: the first that finds a cause stands."""

LOOSE = ("read.values", "read.one_number", "read.step", "read.own_numbers", "read.rank", "read.places")
"""Causes that a mistake in a part of the tensor comes before: they say what numbers are, and not why."""


def facts_of(wrong: Wrong, of_columns: bool = False) -> Hypothesis | None:
    """What a wrong tensor shows whatever its operation is, which takes little time. of_columns: its columns in other places, too."""
    return _read(replace(wrong, stop=lambda: False), (*FACTS, *[COLUMNS] * of_columns))


def sums_of(wrong: Wrong) -> Hypothesis | None:
    """The law of the sums of rows, if an operation is right but for them."""
    return _read(wrong, (SUMS,))


def cause_of(wrong: Wrong) -> Hypothesis | None:
    """The cause that a wrong tensor shows, or the places where it is wrong if they are few."""
    return _read(wrong, (*FACTS, *READINGS))


def _read(wrong: Wrong, readings: Iterable[Reading]) -> Hypothesis | None:
    if not wrong.places.any() or wrong.key.name == POOLED:  # which has no rows of tokens
        return None
    with suppress(TimeIsOver):
        for reading in readings:
            if not reading.at or wrong.key.name in reading.at:
                text = reading.read(wrong)
                if text is not None:
                    return Hypothesis(text, f"read.{reading.id}")
                wrong.go_on()
    return None
