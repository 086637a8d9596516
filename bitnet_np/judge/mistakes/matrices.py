"""Mistakes in products: scales, codes, weights, biases, inputs."""

from collections.abc import Callable

from ... import spec
from .. import operations as op
from ..graph import FIELDS, LOGITS, OF_EXPERTS
from . import norms
from .edited import named
from .mistake import Array, Compute, Mistake, Site
from .switches import other_dialects

AT = tuple(FIELDS)
_QUERIES_KEYS, _FUSED, _GATED = ("Qcur", "Kcur"), ("Qcur", "Kcur", "Vcur"), ("ffn_gate", "ffn_up")


def _after(site: Site, change: Callable[[Array], Array]) -> Compute:
    """The right product, changed afterwards."""
    return lambda values: change(values[site.key])


# --- codes, inputs, weights -----------------------------------------------------------------------------------------------------------


def _rotated(site: Site) -> Compute | None:
    return None if site.config.rope == "none" else _after(site, lambda y: op.rope(site.model, site.dialect, y).value)


def _activated(site: Site) -> Compute:
    return _after(site, lambda y: spec.ACTIVATIONS[site.config.activation](y, 1.0))


_PAIRS = "rows of the weights are in the order of {}: Hugging Face's order taken for Meta's, or the reverse"
_NARROW = "weights are rounded to {kind}"
_OF_HEADS = "order: the elements of each head of the result are"
_TRANSPOSED = "the weight matrix is transposed: read column by column, not row by row"
_DUMPED = "it is after {}: dumped from a buffer that was {} in place"
_BORROWED = "other_weight: that of {} instead of the weight scale"
_ANOTHER = "activations are rounded as in another dialect: declare {name}"
MISTAKES = (
    *named("bias", AT, ("missing", "left_out: the bias is left out", "the bias is missing"), likely=True),
    *named("bias", AT, ("subtracted", "inverted: the bias is subtracted", "the bias is subtracted")),
    Mistake("dialect.activations", _ANOTHER, AT, engine=other_dialects("ggml_activations"), fault=False),
    *named(
        "scale",
        AT,
        ("missing", "left_out: the weight scale is left out", "the weight scale is missing"),
        ("inverted", "inverted: the weight scale is divided by instead of multiplied", "the weight scale divides instead of multiplying"),
        likely=True,
    ),
    *named("scale", _FUSED, ("fused", _BORROWED.format("{x}cur"), "the weight scale of {x}cur is used"), likely=True, apart=True),
    *named("scale", _GATED, ("gated", _BORROWED.format("ffn_{x}"), "the weight scale of ffn_{x} is used"), likely=True, apart=True),
    *named("scale", AT, ("other", _BORROWED.format("{A}"), "the weight scale of {A} is used")),
    *named(
        "activation_scale",
        AT,
        ("missing", "left_out: the activation scale is not divided out", ""),
        ("inverted", "inverted: the activation scale is multiplied instead of divided by", ""),
    ),
    *named(
        "codes",
        AT,
        ("unshifted", "codes: codes 0, 1, 2 are read as 0, +1, +2 instead of -1, 0, +1", "codes 0, 1, 2 are not shifted to -1, 0, +1"),
        ("sums", "sums: {A}", ""),
        ("layout", "codes: I2_S is read in the layout {layout}", ""),
    ),
    *named("input", AT, ("narrow", "rounded: {x}: rounded to {kind}", "the input is rounded to {kind}"), fault=False),
    *named(
        "weights",
        AT,
        ("transposed", "transposed: the matrix is read column by column, as if it were transposed", _TRANSPOSED),
        ("others", "other_product: {A}", ""),
    ),
    *named(
        "weights",
        _QUERIES_KEYS,
        ("halves", f"{_OF_HEADS} those of even numbers before those of odd ones", _PAIRS.format("halves of a head")),
        ("pairs", f"{_OF_HEADS} interleaved: those of the second half between those of the first", _PAIRS.format("adjacent pairs")),
    ),
    *named(
        "weights",
        (*AT, LOGITS.name, *OF_EXPERTS, *norms.AT),
        ("narrow", f"narrow_weights: all {_NARROW}", _NARROW),
        ("narrow_blocks", f"fewer_bits: {_NARROW}", _NARROW),
        ("narrow_rows", f"fewer_bits: {_NARROW}, one scale for each row", f"{_NARROW}, one scale for each row"),
        ("narrow_matrices", "rounded: the{X}matrix: rounded to {kind}", "matrices are rounded to {kind}"),
        fault=False,
    ),
    *named("input", AT, ("unnormed", "other_tensor: {input} is read instead of {x}_norm", "the input is {input}, {x}_norm is skipped")),
    Mistake("dump.rotated", _DUMPED.format("RoPE", "rotated"), _QUERIES_KEYS, _rotated),
    Mistake("dump.activated", _DUMPED.format("the activation function", "activated"), ("ffn_gate",), compute=_activated),
)
