"""Mistakes in products: scales, codes, weights, biases, inputs."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import EXACT, LLAMA_CPP, Dialect
from ...model import packing, widen
from ...model.records import GATE_UP, MATRICES, QKV, Layer, Linear, Model, Ternary, Weights
from ...traces.points import Key
from .. import operations as op
from ..graph import FIELDS
from ..roundings import NARROW, to_float16
from ..variant import Variant, scale_of, times
from .mistake import Array, Compute, Computes, Engines, Mistake, Numbers, Site, alike
from .quantiser import plain_ternary, quantises

AT = tuple(FIELDS)
_LAYOUT_128 = [6, 4, 2, 0]  # where a byte of I2_S has its four codes


def every(name: str) -> Numbers:
    """The prefix of a whole engine's mistake: the field of the layers that has it."""
    return {"where": f"at {name} of every layer: "}


def in_fields(base: Variant, names: Iterable[str], change: Callable[[Any], Any]) -> Engines:
    """Yields engines in which one of these fields is changed in every layer that has it."""
    for name in base.present(tuple(names)):
        yield every(name), base.with_field(name, change)


def right(site: Site, x: Array) -> Array:
    """The product of the site's matrix, as it should be."""
    return op.product(x, site.linear, site.dialect).value


def after(site: Site, change: Callable[[Array], Array]) -> Compute:
    """The right product, changed afterwards."""
    return site.of(lambda x: change(right(site, x)))


# --- biases ---------------------------------------------------------------------------------------------------------------------------


def _has_bias(model: Model, dialect: Dialect) -> bool:
    return any(getattr(layer, name) is not None and getattr(layer, name).bias is not None for layer in model.layers for name in MATRICES)


def _bias_times(factor: float, site: Site) -> Compute | None:
    """The product minus `factor` times its bias."""
    bias = site.linear.bias
    return None if bias is None else after(site, lambda y: y - factor * bias)


def _without_bias(base: Variant) -> Engines:
    biased = (name for name in base.present(MATRICES) if getattr(base.model.layers[0], name).bias is not None)
    return in_fields(base, biased, partial(replace, bias=None))


BIASES = (
    Mistake("bias.missing", "the bias is missing", AT, _has_bias, partial(_bias_times, 1.0), _without_bias),
    Mistake("bias.subtracted", "the bias is subtracted", AT, _has_bias, partial(_bias_times, 2.0)),
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


def _rescaled(factor: Callable[[Array, float], Array | float]) -> Callable[[Site], Compute | None]:
    """A mistake that multiplies products by factor(the activations' steps per unit [T, 1], the weights' scale)."""

    def compute(site: Site) -> Compute | None:
        weights = plain_ternary(site)
        if weights is None:
            return None

        def product(x: Array) -> Array:
            q, scale = spec.quantize(x)
            w_scale = float(weights.scale)
            return q @ op.dense(weights).T.astype(np.float64) / scale * w_scale * factor(scale, w_scale)

        return site.of(product)

    return compute


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
    *alike(
        "scale",
        AT,
        ("missing", "the weight scale is missing", _rescaled(lambda scale, w: 1 / w), partial(_engine_scales, lambda s: 1.0)),
        (
            "inverted",
            "the weight scale divides instead of multiplying",
            _rescaled(lambda scale, w: w**-2),
            partial(_engine_scales, lambda s: 1 / s),
        ),
    ),
    Mistake("scale.borrowed", "the weight scale of {other} is used", engine=_borrowed_scales),
    *alike(
        "activation_scale",
        AT,
        ("missing", "the activation scale is not divided out", _rescaled(lambda scale, w: scale)),
        ("inverted", "the activation scale multiplies instead of dividing", _rescaled(lambda scale, w: scale * scale)),
        when=quantises,
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


def _misread_as(weights: Weights, matrix: NDArray) -> Weights:
    """Weights of the same kind that are another matrix."""
    if isinstance(weights, Ternary):
        return packing.pack(np.ascontiguousarray(matrix).astype(np.int8), float(weights.scale))
    return np.ascontiguousarray(matrix)


def _transposed(square: bool, site: Site) -> Compute | None:
    linear = site.linear
    if (linear.shape[0] == linear.shape[1]) != square:
        return None

    def compute(x: Array) -> Array:
        weights = linear.weights
        matrix = op.dense(weights) if isinstance(weights, Ternary) else widen.float32(weights)
        other = _misread_as(weights, matrix.reshape(matrix.shape[::-1]).T)
        return op.product(x, replace(linear, weights=other), site.dialect).value

    return site.of(compute)


def _other_matrix(site: Site) -> Computes:
    for other, field in FIELDS.items():
        linear: Linear | None = getattr(site.layer, field)
        if other != site.name and linear is not None and linear.shape == site.linear.shape:
            yield {"other": other}, by_matrix(site, linear)


def _other_layer(site: Site) -> Computes:
    for which, layer in site.neighbours():
        yield {"which": which}, by_matrix(site, getattr(layer, FIELDS[site.name]))


def _norm_skipped(site: Site) -> Computes:
    source = site.operation.inputs[0].name
    before = {"attn_norm": site.layer_input, "attn_sub_norm": Key("kqv_out", site.index), "ffn_sub_norm": Key("ffn_out", site.index)}
    if not site.config.parallel_residual:
        before["ffn_norm"] = Key("ffn_inp", site.index)
    if source in before:
        raw = before[source]
        yield {"input": "the layer input" if source == "attn_norm" else raw.name, "norm": source}, lambda values: right(site, values[raw])


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
_DUMPED = "it is after {}: dumped from a buffer that was {} in place"
WEIGHTS = (
    Mistake("input.narrow", "the input is rounded to {kind}", AT, compute=_narrowed, fault=False),
    *alike(
        "weights",
        AT,
        ("transposed", "the weight matrix is transposed", partial(_transposed, True)),
        ("column_by_column", "the weight matrix is read column by column, not row by row", partial(_transposed, False)),
        ("other_matrix", "the weights of {other} are used", _other_matrix),
        ("other_layer", "the weights of the {which} layer are used", _other_layer),
    ),
    Mistake("weights.rows_of_pairs", _PAIRS, ("Qcur", "Kcur"), _rotates, _rows_of_pairs),
    Mistake("input.unnormed", "the input is {input}, {norm} is skipped", AT, compute=_norm_skipped),
    Mistake("dump.rotated", _DUMPED.format("RoPE", "rotated"), ("Qcur", "Kcur"), _rotates, _rotated),
    Mistake("dump.activated", _DUMPED.format("the activation function", "activated"), ("ffn_gate",), compute=_activated),
)
