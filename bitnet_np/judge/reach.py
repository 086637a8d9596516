"""The reach of roundings on the model and tokens at hand, measured.

Float32 or float16 roundings move int8 codes across a boundary, and every layer amplifies that: by how much depends on the model. So no
limit for logits holds for all models; this one is measured. The model is run again with the roundings of honest engines, and a dump that
is farther from ours than they are, by the margins of logits.limits, is wrong.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..dialects import DIALECTS, Dialect
from ..model import Blocks, Model
from .logits import Reach, position_nmse, position_scale
from .roundings import to_eleven_bits
from .variant import Floats, Variant

FLOOR = 2.0**-24
"""Least reach: the NMSE of numbers rounded to float16 once is about a third of 2^-22."""

_UNROUNDED = ("inp_embd", "inpL", "ffn_inp", "l_out", "result_output")
"""The tensors that engines with float16 tensors keep in float32: the sums that run through all layers, and the logits."""


def roundings(base: Variant) -> Iterator[Variant]:
    """Yields variants as honest as ours: another dialect, float16 numbers after each norm, or after each operation."""
    for dialect in DIALECTS.values():
        if dialect != base.dialect:
            yield replace(base, text=f"the dialect {dialect.name} (--as {dialect.name})", dialect=dialect)
    yield replace(base, text="float16 norms", edit=lambda name, n, x: to_eleven_bits(x) if "norm" in name else x)
    yield replace(base, text="float16 after each operation", edit=lambda name, n, x: x if name in _UNROUNDED else to_eleven_bits(x))


def reach_of(ours: NDArray, runs: list[Floats], base: Variant) -> Reach:
    """The distance of honest engines' runs from ours: [P, V] each."""
    nmse = np.array([position_nmse(ours, run) for run in runs])
    scale = max(float(np.abs(position_scale(ours, run) - 1).max()) for run in runs)
    return Reach(max(float(nmse.mean(axis=1).max()), FLOOR), nmse.max(axis=0), scale, one_scale(base.model, base.dialect))


def one_scale(model: Model, dialect: Dialect) -> bool:
    """Whether the head's input is rounded to codes that share one scale."""
    return dialect.ggml_activations and isinstance(model.head, Blocks) and model.head.type.block >= model.head.shape[1]
