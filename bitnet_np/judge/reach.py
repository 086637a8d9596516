"""The reach of roundings on the model and tokens at hand, measured.

Roundings move int8 codes across a boundary, and every layer amplifies that: by how much depends on the model. So no limit for logits holds
for all models; this one is measured. The model is run again with the roundings of honest engines of the same precision, and a dump that is
farther from ours than they are, by the margins of logits.limits, is wrong.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..dialects import DIALECTS, Dialect
from ..model import Blocks, Model
from .logits import Reach, position_nmse, position_scale
from .narrow import rounded
from .operations import next_experts, row_blocks
from .precision import DIGITS, FLOAT32, FLOATS, ROUNDOFF, Precision
from .roundings import to_digits, to_eleven_bits
from .variant import Floats, Variant

FLOOR = 2.0**-24
"""Least reach: the NMSE of numbers rounded to float16 once is about a third of 2^-22."""

_UNROUNDED = ("inp_embd", "inpL", "ffn_inp", "l_out", "result_output")
"""The tensors that engines with float16 tensors keep in float32: the sums that run through all layers, and the logits."""


def roundings(base: Variant, precision: Precision = FLOAT32) -> Iterator[Variant]:
    """Yields variants as honest as ours: float16 numbers after each norm or each operation, or the roundings of a declared precision."""
    if precision == FLOAT32:
        yield replace(base, text="float16 norms", edit=lambda name, n, x: to_eleven_bits(x) if "norm" in name else x)
        yield replace(base, text="float16 after each operation", edit=_halved)
    else:
        yield in_precision(base, precision)


def _halved(name: str, layer: int | None, x: NDArray) -> NDArray:
    """A tensor rounded to float16, unless engines with float16 tensors keep it; numbers of experts stay as they are."""
    return x if name in _UNROUNDED or x.dtype != np.float32 else to_eleven_bits(x)


_OPEN = 16
"""Roundings of a router's logits, of the largest one's size, that all layers before it make about."""


def other_choices(base: Variant, precision: Precision = FLOAT32) -> Variant | None:
    """Our engine where the last expert of a token is the next best one, wherever roundings may make that the better; None without experts.

    Which experts a token takes is discrete, as codes are: another choice between nearly equal ones is no fault, and changes much.
    """
    if not base.model.config.has_choice:
        return None
    error = _OPEN * ROUNDOFF["float16" if precision.act == "float32" else precision.act]

    def top_experts(logits: Floats, k: int) -> NDArray[np.int32]:
        return next_experts(logits, k, error * np.abs(logits).max(axis=1)).astype(np.int32)

    return replace(base.with_operations(top_experts=top_experts), text="other choices between nearly equal experts")


def with_choices(reach: Reach, ours: NDArray, run: Floats) -> Reach:
    """The reach with that of a run of `other_choices`: [P, V]."""
    scale = float(np.abs(position_scale(ours, run) - 1).max())
    return replace(reach, choices=position_nmse(ours, run), scale=max(reach.scale, scale))


def dialects(base: Variant) -> Iterator[Variant]:
    """Yields our engine in the other dialects."""
    for dialect in DIALECTS.values():
        if dialect != base.dialect:
            yield replace(base, text=f"the dialect {dialect.name} (--as {dialect.name})", dialect=dialect)


def in_precision(base: Variant, precision: Precision) -> Variant:
    """Our engine with every recorded tensor, the KV cache and the head in the types of a precision."""
    c, layer = base.model.config, base.model.layers[0]
    plain = "Kcur" if layer.attn_k_norm is None else "Kcur_normed"

    def edit(name: str, n: int | None, x: NDArray) -> NDArray:
        if precision.act != "float32" and x.dtype == np.float32:
            x = _to_type(x, precision.act)
        if precision.kv != "float32" and n is not None and name in ("Kcur_rope" if c.rotates(n) else plain, "Vcur"):
            x = _to_type(x.reshape(-1, c.head_dim), precision.kv).reshape(x.shape)
        return x

    variant = replace(base, text=f"the precision {precision}", edit=edit)
    if precision.head == "float32":
        return variant
    head = np.empty(base.model.head.shape, np.float32)
    for rows, matrix in row_blocks(base.model.head):
        head[rows] = rounded(matrix, precision.head)
    return variant.with_model(head=head)


def _to_type(x: NDArray, kind: str) -> Floats:
    """Float32 numbers rounded to a type; to float16 with float32's range."""
    wide = x.astype(np.float64)
    return (to_digits(wide, DIGITS[kind]) if kind in FLOATS else rounded(wide, kind)).astype(np.float32)


def reach_of(ours: NDArray, runs: list[Floats], base: Variant, precision: Precision = FLOAT32) -> Reach:
    """The distance of honest engines' runs from ours: [P, V] each."""
    nmse = np.array([position_nmse(ours, run) for run in runs])
    scale = max(float(np.abs(position_scale(ours, run) - 1).max()) for run in runs)
    name = "float16 roundings" if precision == FLOAT32 else f"roundings of {precision}"
    return Reach(max(float(nmse.mean(axis=1).max()), FLOOR), nmse.max(axis=0), scale, name, one_scale(base.model, base.dialect))


def one_scale(model: Model, dialect: Dialect) -> bool:
    """Whether the head's input is rounded to codes that share one scale."""
    return dialect.ggml_activations and isinstance(model.head, Blocks) and model.head.type.block >= model.head.shape[1]
