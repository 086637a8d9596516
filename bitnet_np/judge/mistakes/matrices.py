"""Mistakes in products: scales, codes, weights, biases, inputs."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import EXACT, LLAMA_CPP, Dialect
from ...model import packing
from ...model.records import GATE_UP, MATRICES, QKV, Layer, Linear, Model, Ternary
from .. import operations as op
from ..graph import FIELDS
from ..roundings import NARROW, to_float16
from ..variant import Variant, scale_of, times
from .edited import EACH, named
from .mistake import Array, Compute, Computes, Engines, Mistake, Numbers, Site, alike
from .quantiser import plain_ternary

AT = tuple(FIELDS)
_LAYOUT_128 = [6, 4, 2, 0]  # where a byte of I2_S has its four codes


def every(name: str) -> Numbers:
    """The prefix of a whole engine's mistake: the field of the layers that has it."""
    return {"where": f"at {name} of every layer: "}


def right(site: Site, x: Array) -> Array:
    """The product of the site's matrix, as it should be."""
    return op.product(x, site.linear, site.dialect).value


def after(site: Site, change: Callable[[Array], Array]) -> Compute:
    """The right product, changed afterwards."""
    return site.of(lambda x: change(right(site, x)))


BIASES = named(
    "bias",
    AT,
    ("missing", "left_out: the bias is left out", "the bias is missing", EACH),
    ("subtracted", "inverted: the bias is subtracted", "the bias is subtracted"),
)


# --- the dialect ----------------------------------------------------------------------------------------------------------------------


def _other_dialect(site: Site) -> Computes:
    for dialect in (EXACT, LLAMA_CPP):
        if dialect.ggml_activations != site.dialect.ggml_activations:
            yield {"name": dialect.name}, site.of(lambda x, dialect=dialect: op.product(x, site.linear, dialect).value)


_ANOTHER = "activations are rounded as in another dialect: declare {name}"
DIALECTS = (Mistake("dialect.activations", _ANOTHER, AT, compute=_other_dialect, fault=False),)


# --- scales of ternary matrices -------------------------------------------------------------------------------------------------------

Sums = Callable[[Site, Ternary, Array, Array], Array]
"""From a site, its matrix, and an input's codes and scales: the sums of a product, before both scales are applied."""


def _ternary(sums: Sums) -> Callable[[Site], Compute | None]:
    """A mistake that only ternary matrices can have: the sums of its products with codes are others."""

    def compute(site: Site) -> Compute | None:
        weights = plain_ternary(site)
        if weights is None:
            return None

        def product(x: Array) -> Array:
            q, scale = spec.quantize(x)
            return sums(site, weights, q, scale) / scale * float(weights.scale)

        return site.of(product)

    return compute


def _by_matrix(matrix: Callable[[Ternary], NDArray]) -> Callable[[Site], Compute | None]:
    """A mistake that takes another matrix for a ternary one."""
    return _ternary(lambda site, weights, q, scale: q @ matrix(weights).T.astype(np.float64))


def _first(*norms: NDArray | None) -> NDArray | None:
    return next((norm for norm in norms if norm is not None), None)


def _cancelled(base: Variant) -> list[str]:
    """Matrices whose scale a norm behind them divides out, all but epsilon's share."""
    model, w = base.model, base.model.layers[0]
    norms: dict[str, NDArray | None] = {"attn_q": w.attn_q_norm, "attn_k": w.attn_k_norm}
    norms |= {"attn_output": w.post_attention_norm, "ffn_down": w.post_ffw_norm}
    norms["attn_v"] = _first(w.attn_sub_norm, w.attn_output.norm, w.post_attention_norm)
    if model.config.gated and w.ffn_down is not None:
        norms["ffn_up"] = _first(w.ffn_sub_norm, w.ffn_down.norm, w.post_ffw_norm)
    if model.config.activation == "relu2" and "ffn_up" in norms:
        norms["ffn_gate"] = norms["ffn_up"]
    return [name for name, norm in norms.items() if norm is not None and getattr(w, name).bias is None]


def _scaled_matrices(base: Variant) -> list[str]:
    """Matrices that have a scale in every layer."""
    return [name for name in base.present(MATRICES) if all(scale_of(getattr(w, name)) is not None for w in base.model.layers)]


def _with_scale(base: Variant, name: str, other: Callable[[Layer, float], float]) -> Variant:
    """The engine in which one kind of matrix has the scale other(its layer, its own scale)."""

    def changed(layer: Layer) -> Layer:
        linear: Linear = getattr(layer, name)
        own = scale_of(linear) or 1.0
        fields: dict[str, Any] = {name: times(linear, other(layer, own) / own)}
        return replace(layer, **fields)

    return replace(base.with_layers(changed), weak=name in _cancelled(base))


def _engine_scales(change: Callable[[float], float], base: Variant) -> Engines:
    """Yields engines in which the scale s of one kind of matrix is change(s)."""
    for name in _scaled_matrices(base):
        yield every(name), _with_scale(base, name, lambda layer, own: change(own))


def _scale_in(field: str, layer: Layer, own: float) -> float:
    return scale_of(getattr(layer, field)) or own


def _borrowed_scales(base: Variant) -> Engines:
    """Yields engines in which a matrix has the scale of another that engines often fuse with it."""
    matrices = set(_scaled_matrices(base))
    for group in (QKV, GATE_UP):
        for name in group:
            for other in group:
                if other != name and {name, other} <= matrices:
                    borrowed = _with_scale(base, name, partial(_scale_in, other))
                    yield {**every(name), "other": other}, borrowed


SCALES = (
    *named(
        "scale",
        AT,
        ("missing", "left_out: the weight scale is left out", "the weight scale is missing"),
        engine=partial(_engine_scales, lambda s: 1.0),
    ),
    *named(
        "scale",
        AT,
        ("inverted", "inverted: the weight scale is divided by instead of multiplied", "the weight scale divides instead of multiplying"),
        engine=partial(_engine_scales, lambda s: 1 / s),
    ),
    Mistake("scale.borrowed", "the weight scale of {other} is used", engine=_borrowed_scales),
    *named(
        "activation_scale",
        AT,
        ("missing", "left_out: the activation scale is not divided out", "the activation scale is not divided out"),
        (
            "inverted",
            "inverted: the activation scale is multiplied instead of divided by",
            "the activation scale multiplies instead of dividing",
        ),
    ),
)


# --- codes of ternary matrices --------------------------------------------------------------------------------------------------------


def _wrapped(site: Site, weights: Ternary, q: Array, scale: Array) -> Array:
    total = q @ (op.dense(weights) + 1).T.astype(np.float64)
    return ((total + 32768) % 65536 - 32768) - q.sum(axis=1, keepdims=True)


def _in_float16(site: Site, weights: Ternary, q: Array, scale: Array) -> Array:
    return to_float16(q @ op.dense(weights).T.astype(np.float64))


def _relaid(block: int, shifts: list[int], weights: Ternary) -> NDArray:
    """The matrix that another layout reads from the same bytes: blocks of `block` weights, the codes of a byte at `shifts`."""
    n, m = weights.shape
    packed = packing.to_i2s(weights)[: -packing.TRAILER].reshape(-1, 1, block // 4)
    return (packed >> np.array(shifts, np.uint8)[:, None] & 3).reshape(n, -1)[:, :m].astype(np.int8) - 1


def _four_rows(weights: Ternary) -> NDArray:
    """The matrix that the 4-rows layout reads from the same bytes, a column of four rows in each; zeros where it does not fit."""
    n, m = weights.shape
    packed = packing.to_i2s(weights)[: -packing.TRAILER]
    codes = (packed[:, None] >> np.array(_LAYOUT_128, np.uint8) & 3).astype(np.int8) - 1
    width = packing.i2s_row_bytes(m) * 4
    if n % 4 or codes.size != n * width:
        return np.zeros((n, m), np.int8)
    return codes.reshape(n // 4, width, 4).transpose(0, 2, 1).reshape(n, width)[:, :m]


CODES = alike(
    "codes",
    AT,
    ("unshifted", "codes 0, 1, 2 are not shifted to -1, 0, +1", _by_matrix(lambda w: op.dense(w) + 1)),
    ("int16_sums", "sums wrap around in 16 bits", _ternary(_wrapped)),
    ("float16_sums", "sums are kept in float16", _ternary(_in_float16)),
    ("layout_64_16", "I2_S is read in the layout of 64 weights in 16 bytes", _by_matrix(partial(_relaid, 64, _LAYOUT_128))),
    ("layout_4_rows", "I2_S is read in the layout of 4 rows to a byte", _by_matrix(_four_rows)),
    ("pairs_reversed", "code pairs of each byte are read in the opposite order", _by_matrix(partial(_relaid, 128, _LAYOUT_128[::-1]))),
)


# --- inputs and weights ---------------------------------------------------------------------------------------------------------------


def _narrowed(site: Site) -> Computes:
    for kind, narrow in {} if isinstance(site.linear.weights, Ternary) else NARROW.items():
        yield {"kind": kind}, site.of(lambda x, narrow=narrow: right(site, narrow(x)))


def by_matrix(site: Site, other: Linear) -> Compute:
    """The product of another matrix with the same input."""
    return site.of(lambda x: op.product(x, other, site.dialect).value)


def _rotated(site: Site) -> Compute:
    return after(site, lambda y: op.rope(site.model, site.dialect, y).value)


def _activated(site: Site) -> Compute:
    return after(site, lambda y: spec.ACTIVATIONS[site.config.activation](y, 1.0))


def _rows_of_pairs(site: Site) -> Computes:
    """Rows of each head with pairs side by side where halves belong, and the reverse. transformers has halves, Meta's Llama neighbours."""
    for order, rows, columns in (("halves of a head", -1, 2), ("adjacent pairs", 2, -1)):

        def change(product: Array, rows: int = rows, columns: int = columns) -> Array:
            heads = product.reshape(len(product), -1, site.config.head_dim)
            return heads.reshape(*heads.shape[:2], rows, columns).swapaxes(2, 3).reshape(product.shape)

        yield {"order": order}, after(site, change)


def _rotates(model: Model, dialect: Dialect) -> bool:
    return model.config.rope != "none"


_PAIRS = "rows of the weights are in the order of {order}: Hugging Face's order taken for Meta's, or the reverse"
_TRANSPOSED = "the weight matrix is transposed: read column by column, not row by row"
_DUMPED = "it is after {}: dumped from a buffer that was {} in place"
WEIGHTS = (
    Mistake("input.narrow", "the input is rounded to {kind}", AT, compute=_narrowed, fault=False),
    *named(
        "weights",
        AT,
        ("transposed", "transposed: the matrix is read column by column, as if it were transposed", _TRANSPOSED),
        ("other_layer", "other_product: the weights of layer {n} are used", "the weights of layer {n} are used"),
        ("other_matrix", "other_product: the weights of {other} are used", "the weights of {other} are used"),
    ),
    Mistake("weights.rows_of_pairs", _PAIRS, ("Qcur", "Kcur"), _rotates, _rows_of_pairs),
    *named("input", AT, ("unnormed", "other_tensor: {input} is read instead of {x}_norm", "the input is {input}, {x}_norm is skipped")),
    Mistake("dump.rotated", _DUMPED.format("RoPE", "rotated"), ("Qcur", "Kcur"), _rotates, _rotated),
    Mistake("dump.activated", _DUMPED.format("the activation function", "activated"), ("ffn_gate",), compute=_activated),
)
