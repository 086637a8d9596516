"""Mistakes in products: scales, codes, weights, biases, inputs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import packing, spec, widen
from ...dialects import EXACT, LLAMA_CPP, Dialect
from ...families import MATRICES, QKV
from ...model import Layer, Linear, Model, Ternary, Weights
from ...traces.points import Key
from .. import operations as op
from ..graph import FIELDS
from ..roundings import NARROW, to_float16
from ..variant import Variant, scale_of, times
from .mistake import Array, Compute, Mistake, Numbers, Site, Values
from .quantiser import plain_ternary, quantises

AT = tuple(FIELDS)
_LAYOUT_128 = [6, 4, 2, 0]  # where a byte of I2_S has its four codes


def every(name: str) -> Numbers:
    """The prefix of a whole engine's mistake: the field of the layers that has it."""
    return {"where": f"at {name} of every layer: "}


def _each(base: Variant, names: tuple[str, ...], change: Callable[[Linear], Linear]) -> Iterator[tuple[Numbers, Variant]]:
    for name in base.present(names):
        yield every(name), base.with_field(name, change)


# --- biases ---------------------------------------------------------------------------------------------------------------------------


def _has_bias(model: Model, dialect: Dialect) -> bool:
    return any(getattr(layer, name) is not None and getattr(layer, name).bias is not None for layer in model.layers for name in MATRICES)


def _bias_times(factor: float, site: Site) -> Iterator[tuple[Numbers, Compute]]:
    """The product minus `factor` times its bias."""
    linear = site.linear
    bias = linear.bias
    if bias is not None:
        yield {}, site.of(lambda x: op.product(x, linear, site.dialect).value - factor * bias)


def _without_bias(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    names = tuple(name for name in base.present(MATRICES) if getattr(base.model.layers[0], name).bias is not None)
    yield from _each(base, names, partial(replace, bias=None))


BIASES = (
    Mistake("bias.missing", "the bias is missing", AT, _has_bias, partial(_bias_times, 1.0), _without_bias),
    Mistake("bias.subtracted", "the bias is subtracted", AT, _has_bias, partial(_bias_times, 2.0)),
)


# --- the dialect ----------------------------------------------------------------------------------------------------------------------


def _other_dialect(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    for dialect in (EXACT, LLAMA_CPP):
        if dialect.ggml_activations != site.dialect.ggml_activations:
            yield {"name": dialect.name}, site.of(lambda x, dialect=dialect: op.product(x, site.linear, dialect).value)


DIALECTS = (
    Mistake(
        "dialect.activations", "activations are rounded as in another dialect: declare {name}", AT, compute=_other_dialect, fault=False
    ),
)


# --- scales of ternary matrices -------------------------------------------------------------------------------------------------------


def _product(site: Site, weights: Ternary, matrix: NDArray, factor: Callable[[Array], Array | float] = lambda scale: 1.0) -> Compute:
    """The product of another matrix with the codes; factor: from the steps per unit [T, 1], a further factor of the products."""
    w_scale = float(weights.scale)

    def compute(x: Array) -> Array:
        q, scale = spec.quantize(x)
        return q @ matrix.T.astype(np.float64) / scale * w_scale * factor(scale)

    return site.of(compute)


def _ternary(change: Callable[[Site, Ternary], Compute]) -> Callable[[Site], Iterator[tuple[Numbers, Compute]]]:
    """A mistake that only ternary matrices can have."""

    def compute(site: Site) -> Iterator[tuple[Numbers, Compute]]:
        weights = plain_ternary(site)
        if weights is not None:
            yield {}, change(site, weights)

    return compute


def _rescaled(factor: Callable[[Array, float], Array | float]) -> Callable[[Site], Iterator[tuple[Numbers, Compute]]]:
    """A mistake that multiplies products by factor(the activations' steps per unit, the weights' scale)."""
    return _ternary(lambda site, w: _product(site, w, op.dense(w), lambda scale: factor(scale, float(w.scale))))


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


def _engine_scales(change: Callable[[float], float], base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    """Yields engines in which the scale s of one kind of matrix is change(s)."""

    def changed(linear: Linear) -> Linear:
        scale = scale_of(linear) or 1.0
        return times(linear, change(scale) / scale)

    cancelled = _cancelled(base)
    for name in _scaled_matrices(base):
        yield every(name), replace(base.with_field(name, changed), weak=name in cancelled)


def _borrowed_scales(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    """Yields engines in which a matrix has the scale of another that engines often fuse with it."""
    matrices, cancelled = set(_scaled_matrices(base)), _cancelled(base)
    for group in (QKV, ("ffn_gate", "ffn_up")):
        for name in group:
            for other in group:
                if other != name and {name, other} <= matrices:
                    yield {**every(name), "other": other}, replace(_with_scale_of(base, name, other), weak=name in cancelled)


def _with_scale_of(base: Variant, name: str, other: str) -> Variant:
    def changed(layer: Layer) -> Layer:
        linear: Linear = getattr(layer, name)
        own = scale_of(linear) or 1.0
        fields: dict[str, Any] = {name: times(linear, (scale_of(getattr(layer, other)) or own) / own)}
        return replace(layer, **fields)

    return base.with_layers(changed)


SCALES = (
    Mistake(
        "scale.missing",
        "the weight scale is missing",
        AT,
        compute=_rescaled(lambda scale, w: 1 / w),
        engine=partial(_engine_scales, lambda s: 1.0),
    ),
    Mistake(
        "scale.inverted",
        "the weight scale divides instead of multiplying",
        AT,
        compute=_rescaled(lambda scale, w: w**-2),
        engine=partial(_engine_scales, lambda s: 1 / s),
    ),
    Mistake("scale.borrowed", "the weight scale of {other} is used", engine=_borrowed_scales),
    Mistake("activation_scale.missing", "the activation scale is not divided out", AT, quantises, _rescaled(lambda scale, w: scale)),
    Mistake(
        "activation_scale.inverted",
        "the activation scale multiplies instead of dividing",
        AT,
        quantises,
        _rescaled(lambda scale, w: scale * scale),
    ),
)


# --- codes of ternary matrices --------------------------------------------------------------------------------------------------------


def _wrapped(site: Site, weights: Ternary) -> Compute:
    def compute(x: Array) -> Array:
        q, scale = spec.quantize(x)
        total = q @ (op.dense(weights) + 1).T.astype(np.float64)
        return (((total + 32768) % 65536 - 32768) - q.sum(axis=1, keepdims=True)) / scale * float(weights.scale)

    return site.of(compute)


def _in_float16(site: Site, weights: Ternary) -> Compute:
    def compute(x: Array) -> Array:
        q, scale = spec.quantize(x)
        return to_float16(q @ op.dense(weights).T.astype(np.float64)) / scale * float(weights.scale)

    return site.of(compute)


def _relaid(weights: Ternary, block: int, shifts: list[int]) -> NDArray:
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


CODES = (
    Mistake(
        "codes.unshifted",
        "codes 0, 1, 2 are not shifted to -1, 0, +1",
        AT,
        compute=_ternary(lambda site, w: _product(site, w, op.dense(w) + 1)),
    ),
    Mistake("codes.int16_sums", "sums wrap around in 16 bits", AT, compute=_ternary(_wrapped)),
    Mistake("codes.float16_sums", "sums are kept in float16", AT, compute=_ternary(_in_float16)),
    Mistake(
        "codes.layout_64_16",
        "I2_S is read in the layout of 64 weights in 16 bytes",
        AT,
        compute=_ternary(lambda site, w: _product(site, w, _relaid(w, 64, _LAYOUT_128))),
    ),
    Mistake(
        "codes.layout_4_rows",
        "I2_S is read in the layout of 4 rows to a byte",
        AT,
        compute=_ternary(lambda site, w: _product(site, w, _four_rows(w))),
    ),
    Mistake(
        "codes.pairs_reversed",
        "code pairs of each byte are read in the opposite order",
        AT,
        compute=_ternary(lambda site, w: _product(site, w, _relaid(w, 128, _LAYOUT_128[::-1]))),
    ),
)


# --- inputs and weights ---------------------------------------------------------------------------------------------------------------


def _narrowed(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if not isinstance(site.linear.weights, Ternary):
        for kind, narrow in NARROW.items():
            yield {"kind": kind}, site.of(lambda x, narrow=narrow: op.product(narrow(x), site.linear, site.dialect).value)


def _by(site: Site, other: Linear) -> Compute:
    """The product of another matrix with the same input."""
    return site.of(lambda x: op.product(x, other, site.dialect).value)


def _misread_as(weights: Weights, matrix: NDArray) -> Weights:
    """Weights of the same kind that are another matrix."""
    if isinstance(weights, Ternary):
        return packing.pack(np.ascontiguousarray(matrix).astype(np.int8), float(weights.scale))
    return np.ascontiguousarray(matrix)


def _transposed(square: bool, site: Site) -> Iterator[tuple[Numbers, Compute]]:
    linear = site.linear
    if (linear.shape[0] == linear.shape[1]) != square:
        return

    def compute(x: Array) -> Array:
        weights = linear.weights
        matrix = op.dense(weights) if isinstance(weights, Ternary) else widen.float32(weights)
        other = _misread_as(weights, matrix.reshape(matrix.shape[::-1]).T)
        return op.product(x, replace(linear, weights=other), site.dialect).value

    yield {}, site.of(compute)


def _other_matrix(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    for other, field in FIELDS.items():
        linear: Linear | None = getattr(site.layer, field)
        if other != site.name and linear is not None and linear.shape == site.linear.shape:
            yield {"other": other}, _by(site, linear)


def _other_layer(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    for which, layer in site.neighbours():
        yield {"which": which}, _by(site, getattr(layer, FIELDS[site.name]))


def _norm_skipped(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    source = site.operation.inputs[0].name
    before = {"attn_norm": site.layer_input, "attn_sub_norm": Key("kqv_out", site.index), "ffn_sub_norm": Key("ffn_out", site.index)}
    if not site.config.parallel_residual:
        before["ffn_norm"] = Key("ffn_inp", site.index)
    if source in before:
        raw = before[source]

        def compute(values: Values) -> Array:
            return op.product(values[raw], site.linear, site.dialect).value

        yield {"input": "the layer input" if source == "attn_norm" else raw.name, "norm": source}, compute


def _rotated(site: Site) -> Compute:
    return site.of(lambda x: op.rope(site.model, site.dialect, op.product(x, site.linear, site.dialect).value).value)


def _activated(site: Site) -> Compute:
    gate = spec.ACTIVATIONS[site.config.activation]
    return site.of(lambda x: gate(op.product(x, site.linear, site.dialect).value, 1.0))


def _rows_of_pairs(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    """Rows of each head with pairs side by side where halves belong, and the reverse. transformers has halves, Meta's Llama neighbours."""
    for order, rows, columns in (("halves of a head", -1, 2), ("adjacent pairs", 2, -1)):

        def compute(x: Array, rows: int = rows, columns: int = columns) -> Array:
            product = op.product(x, site.linear, site.dialect).value
            heads = product.reshape(len(product), -1, site.config.head_dim)
            return heads.reshape(*heads.shape[:2], rows, columns).swapaxes(2, 3).reshape(product.shape)

        yield {"order": order}, site.of(compute)


def _rotates(model: Model, dialect: Dialect) -> bool:
    return model.config.rope != "none"


WEIGHTS = (
    Mistake("input.narrow", "the input is rounded to {kind}", AT, compute=_narrowed, fault=False),
    Mistake("weights.transposed", "the weight matrix is transposed", AT, compute=partial(_transposed, True)),
    Mistake(
        "weights.column_by_column", "the weight matrix is read column by column, not row by row", AT, compute=partial(_transposed, False)
    ),
    Mistake("weights.other_matrix", "the weights of {other} are used", AT, compute=_other_matrix),
    Mistake("weights.other_layer", "the weights of the {which} layer are used", AT, compute=_other_layer),
    Mistake(
        "weights.rows_of_pairs",
        "rows of the weights are in the order of {order}: Hugging Face's order taken for Meta's, or the reverse",
        ("Qcur", "Kcur"),
        _rotates,
        _rows_of_pairs,
    ),
    Mistake("input.unnormed", "the input is {input}, {norm} is skipped", AT, compute=_norm_skipped),
    Mistake("dump.rotated", "it is after RoPE: dumped from a buffer that was rotated in place", ("Qcur", "Kcur"), _rotates, _rotated),
    Mistake(
        "dump.activated",
        "it is after the activation function: dumped from a buffer that was activated in place",
        ("ffn_gate",),
        compute=_activated,
    ),
)
