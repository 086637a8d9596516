"""Mistakes in quantising activations to int8. They change as little as roundings do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.dialects import Dialect
from ...kernels import cpu
from ...model.records import MATRICES, Model
from ...traces.points import MAY_BE_QUANTIZED
from ..edits.definition import CODED
from ..edits.expression import Node, nodes, replaced, tensor
from ..graph import FIELDS
from ..products import reads_codes
from ..variant import Floats, Variant
from .mistake import Array, Compute, Mistake, Site

Quantizer = Callable[[Floats], tuple[Floats, Floats]]
"""[T, M] -> codes [T, M], steps per unit [T, 1], in float32 as engines compute them."""

CODES = tuple(name + "_codes" for name in MAY_BE_QUANTIZED)
SCALES = tuple(name + "_scale" for name in MAY_BE_QUANTIZED)
AT = (*FIELDS, *CODES, *SCALES)


def quantises(model: Model, dialect: Dialect) -> bool:
    """Whether some matrix of the model takes int8 codes."""
    linears = (getattr(layer, name) for layer in model.layers for name in MATRICES)
    return any(linear is not None and reads_codes(linear, dialect) for linear in linears)


def _quantizer(
    rounded: Callable[[Floats], Floats] = np.rint, most: int = 127, least: int = -128, axis: int | None = 1, size: Callable = np.abs
) -> Quantizer:
    """Another quantiser: the largest `size` over an axis to `most` steps, rounded, cut to int8."""

    def quantize(x: Floats) -> tuple[Floats, Floats]:
        largest = np.maximum(size(x).max(axis=axis, keepdims=True), np.float32(1e-5))
        scale = np.broadcast_to(np.float32(most) / largest, (len(x), 1))
        return np.clip(rounded(x * scale), least, 127), scale

    return quantize


def _with_quantizer(quantize: Quantizer, site: Site) -> Compute | None:
    """The codes, their scale, or the product of a ternary matrix, with another quantiser."""
    if site.name in (*CODES, *SCALES):
        return site.of(lambda x: quantize(x.astype(np.float32))[site.name in SCALES].astype(np.float64))
    tree = site.tree
    assert tree is not None  # it is a product
    for node, _ in nodes(tree):
        if node.noun == CODED:
            others = Node("opaque", (tensor(site.inputs[0]),), node.noun, partial(_dequantised, quantize))
            return site.edited(replaced(tree, node, others))
    return None


def _dequantised(quantize: Quantizer, x: Array) -> Array:
    codes, scale = (part.astype(np.float64) for part in quantize(x.astype(np.float32)))
    return codes / scale


def _engine(quantize: Quantizer, base: Variant) -> Variant:
    def in_bytes(x: Floats) -> tuple[NDArray[np.int8], Floats]:
        codes, scale = quantize(x)
        return codes.astype(np.int8), np.ascontiguousarray(scale[:, 0])

    return base.with_operations(quantize=in_bytes)


def _unquantised(base: Variant) -> Variant:
    """The engine without quantisation, but for 1 / 254 of the rounding errors: it adds a second int8 product of these."""
    rest: list[tuple[NDArray, NDArray]] = []

    def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:
        q, scale = cpu.quantize(x)
        rest[:] = [(q, np.rint((x * scale[:, None] - q) * 254).astype(np.int8))]
        return q, scale

    def ternary_matmul(q: NDArray[np.int8], scale: Floats, *weights: Any) -> Floats:
        (codes, remainder) = rest[0]
        y = cpu.ternary_matmul(q, scale, *weights)
        return y + cpu.ternary_matmul(remainder, scale * np.float32(254), *weights) if codes is q else y

    def ternary_matmuls(q: NDArray[np.int8], scale: Floats, *matrices: Any) -> list[Floats]:
        return [ternary_matmul(q, scale, *weights) for weights in matrices]

    return base.with_operations(quantize=quantize, ternary_matmul=ternary_matmul, ternary_matmuls=ternary_matmuls)


def _mistake(id: str, text: str, quantize: Quantizer, engine: Callable[[Variant], Variant] | None = None) -> Mistake:
    make = engine or partial(_engine, quantize)
    compute = partial(_with_quantizer, quantize)
    return Mistake(f"quantiser.{id}", text, AT, compute, lambda base: make(base) if quantises(base.model, base.dialect) else None)


_PER_TENSOR = "one activation scale for the whole tensor instead of one for each token"
_HALF_ADDED = "codes are (int)(x + 0.5): a half is added and the rest cut, which rounds negative numbers towards zero"
_SIGNED = "activations are scaled by their largest number, not by their largest magnitude"
_STEPS = "activations are scaled to {} steps instead of 127"
_UP = np.float32(1 + 2**-20)  # the largest number is 127, but x * (127 / x) may fall short of it
MISTAKES = (
    _mistake("per_tensor", _PER_TENSOR, _quantizer(axis=None)),
    _mistake("none", "activations are not quantised to int8", lambda x: (x, np.ones((len(x), 1), np.float32)), _unquantised),
    _mistake("truncated", "codes are truncated instead of rounded", _quantizer(np.trunc)),
    _mistake("truncated_127", "codes are truncated instead of rounded, but none of 127 to 126", _quantizer(lambda x: np.trunc(x * _UP))),
    _mistake("rounded_down", "codes are rounded down", _quantizer(np.floor)),
    _mistake("half_added", _HALF_ADDED, _quantizer(lambda x: np.trunc(x + np.float32(0.5)))),
    _mistake(
        "128_wraps", f"{_STEPS.format(128)}, and +128 wraps around to -128", _quantizer(lambda x: (np.rint(x) + 128) % 256 - 128, 128)
    ),
    _mistake("128", _STEPS.format(128), _quantizer(most=128)),
    *(_mistake(str(most), _STEPS.format(most), _quantizer(most=most, least=-most)) for most in (126, 63, 7)),
    _mistake("signed_largest", _SIGNED, _quantizer(size=np.asarray)),
)
