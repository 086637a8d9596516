"""Mistakes in products: scales, codes, weights, biases, inputs."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ... import spec
from ...engine.dialects import Dialect
from ...model.records import Model
from .. import operations as op
from ..graph import FIELDS, LOGITS, OF_EXPERTS
from ..variant import scale_of
from . import norms
from .edited import EACH, named
from .mistake import Array, Compute, Computes, Mistake, Numbers, Site
from .switches import other_dialects

AT = tuple(FIELDS)
_QUERIES_KEYS = ("Qcur", "Kcur")


def _after(site: Site, change: Callable[[Array], Array]) -> Compute:
    """The right product, changed afterwards."""
    return lambda values: change(values[site.key])


# --- scales ---------------------------------------------------------------------------------------------------------------------------


def _is_cancelled(site: Site) -> bool:
    """Whether a norm behind a matrix divides its scale out, all but epsilon's share."""
    w, name = site.layer, FIELDS[site.name]
    assert w is not None
    norms = {"attn_q": w.attn_q_norm, "attn_k": w.attn_k_norm, "attn_output": w.post_attention_norm, "ffn_down": w.post_ffw_norm}
    norms["attn_v"] = next((x for x in (w.attn_sub_norm, w.attn_output.norm, w.post_attention_norm) if x is not None), None)
    if site.config.gated and w.ffn_down is not None:
        norms["ffn_up"] = next((x for x in (w.ffn_sub_norm, w.ffn_down.norm, w.post_ffw_norm) if x is not None), None)
    if site.config.activation == "relu2":
        norms["ffn_gate"] = norms.get("ffn_up")
    return norms.get(name) is not None and site.linear.bias is None


def _by_scale(others: Callable[[Site, float], Iterator[tuple[Numbers, float]]], site: Site) -> Computes:
    """Products with another scale of the matrix, where it has one."""
    own = scale_of(site.linear)
    if own is not None:
        for numbers, other in others(site, own):
            yield numbers, _after(site, partial(_scaled, site, other / own))


def _scaled(site: Site, factor: float, y: Array) -> Array:
    bias = 0.0 if site.linear.bias is None else site.linear.bias.astype(np.float64)
    return (y - bias) * factor + bias


def _borrowed(site: Site, own: float) -> Iterator[tuple[Numbers, float]]:
    """Yields the scales of matrices that engines often fuse with one."""
    for group in (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")):
        for other in group if FIELDS[site.name] in group else ():
            linear = getattr(site.layer, other)
            if other != FIELDS[site.name] and linear is not None and (scale := scale_of(linear)) is not None:
                yield {"other": other}, scale


def _scale(id: str, text: str, others: Callable[[Site, float], Iterator[tuple[Numbers, float]]]) -> Mistake:
    return Mistake(f"scale.{id}", text, AT, compute=partial(_by_scale, others), everywhere=EACH, weak=_is_cancelled)


SCALES = (
    _scale("missing", "the weight scale is missing", lambda site, own: iter([({}, 1.0)])),
    _scale("inverted", "the weight scale divides instead of multiplying", lambda site, own: iter([({}, 1 / own)])),
    _scale("borrowed", "the weight scale of {other} is used", _borrowed),
    *named(
        "activation_scale",
        AT,
        ("missing", "left_out: the activation scale is not divided out", ""),
        ("inverted", "inverted: the activation scale is multiplied instead of divided by", ""),
    ),
)


# --- codes, inputs, weights -----------------------------------------------------------------------------------------------------------


def _rotated(site: Site) -> Compute:
    return _after(site, lambda y: op.rope(site.model, site.dialect, y).value)


def _activated(site: Site) -> Compute:
    return _after(site, lambda y: spec.ACTIVATIONS[site.config.activation](y, 1.0))


def _rotates(model: Model, dialect: Dialect) -> bool:
    return model.config.rope != "none"


_PAIRS = "rows of the weights are in the order of {}: Hugging Face's order taken for Meta's, or the reverse"
_NARROW = "weights are rounded to {kind}"
_OF_HEADS = "order: the elements of each head of the result are"
_TRANSPOSED = "the weight matrix is transposed: read column by column, not row by row"
_DUMPED = "it is after {}: dumped from a buffer that was {} in place"
_ANOTHER = "activations are rounded as in another dialect: declare {name}"
MISTAKES = (
    *named(
        "bias",
        AT,
        ("missing", "left_out: the bias is left out", "the bias is missing", EACH),
        ("subtracted", "inverted: the bias is subtracted", "the bias is subtracted"),
    ),
    Mistake("dialect.activations", _ANOTHER, AT, engine=other_dialects("ggml_activations"), fault=False),
    *SCALES,
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
        when=_rotates,
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
    Mistake("dump.rotated", _DUMPED.format("RoPE", "rotated"), _QUERIES_KEYS, _rotates, _rotated),
    Mistake("dump.activated", _DUMPED.format("the activation function", "activated"), ("ffn_gate",), compute=_activated),
)
