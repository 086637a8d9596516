"""Mistakes in products: scales, codes, weights, biases, inputs."""

from ..graph import FIELDS, LOGITS, OF_EXPERTS
from . import norms
from .edited import named
from .mistake import Mistake
from .switches import other_dialects

AT = tuple(FIELDS)
_FUSED, _GATED = ("Qcur", "Kcur", "Vcur"), ("ffn_gate", "ffn_up")


_NARROW = "weights are rounded to {kind}"
_TRANSPOSED = "the weight matrix is transposed: read column by column, not row by row"
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
        "codes",
        AT,
        ("unshifted", "codes: codes 0, 1, 2 are read as 0, +1, +2 instead of -1, 0, +1", "codes 0, 1, 2 are not shifted to -1, 0, +1"),
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
        (*AT, LOGITS.name, *OF_EXPERTS, *norms.AT),
        ("narrow", f"narrow_weights: all {_NARROW}", _NARROW),
        ("narrow_blocks", f"fewer_bits: {_NARROW}", _NARROW),
        ("narrow_rows", f"fewer_bits: {_NARROW}, one scale for each row", f"{_NARROW}, one scale for each row"),
        ("narrow_matrices", "rounded: the{X}matrix: rounded to {kind}", "matrices are rounded to {kind}"),
        fault=False,
    ),
    *named("input", AT, ("unnormed", "other_tensor: {input} is read instead of {x}_norm", "the input is {input}, {x}_norm is skipped")),
)
