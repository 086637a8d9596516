"""Mistakes in quantising activations to int8. They change as little as roundings do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import Dialect
from ...kernels import cpu
from ...model.records import MATRICES, Model, Ternary
from ...traces.points import MAY_BE_QUANTIZED
from .. import operations as op
from ..graph import FIELDS
from ..variant import Floats, Variant
from .mistake import Array, Compute, Mistake, Site

Quantizer = Callable[[Array], tuple[Array, Array]]
"""[T, M] -> codes [T, M], steps per unit [T, 1]."""

CODES = tuple(name + "_codes" for name in MAY_BE_QUANTIZED)
SCALES = tuple(name + "_scale" for name in MAY_BE_QUANTIZED)
AT = (*FIELDS, *CODES, *SCALES)


def quantises(model: Model, dialect: Dialect) -> bool:
    """Whether some matrix of the model takes int8 codes."""
    linears = (getattr(layer, name) for layer in model.layers for name in MATRICES)
    return any(linear is not None and op.reads_codes(linear, dialect) for linear in linears)


def plain_ternary(site: Site) -> Ternary | None:
    """The matrix of an operation, if it is ternary and nothing else belongs to it."""
    linear = site.linear
    return linear.weights if isinstance(linear.weights, Ternary) and linear.bias is None and linear.scale is None else None


def _with_quantizer(quantize: Quantizer, site: Site) -> Compute | None:
    """The codes, their scale, or the product of a ternary matrix, with another quantiser."""
    if site.name in CODES:
        return site.of(lambda x: quantize(x)[0])
    if site.name in SCALES:
        return site.of(lambda x: quantize(x)[1])
    weights = plain_ternary(site)
    if weights is None:
        return None

    def product(x: Array) -> Array:
        codes, scale = quantize(x)
        return codes @ op.dense(weights).T.astype(np.float64) / scale * float(weights.scale)

    return site.of(product)


def _truncated(x: Array) -> tuple[Array, Array]:
    single = x.astype(np.float32)  # in float32 the largest number may come out below 127
    scale = np.float32(127) / np.maximum(np.float32(1e-5), np.abs(single).max(axis=1, keepdims=True))
    return np.trunc(single * scale).astype(np.float64), scale.astype(np.float64)


def _rounded(rounded: Callable[[Array], Array]) -> Quantizer:
    """The right scale, and another rounding of numbers to codes."""

    def quantize(x: Array) -> tuple[Array, Array]:
        scale = spec.quantize(x)[1]
        return rounded(x * scale), scale

    return quantize


def _per_tensor(x: Array) -> tuple[Array, Array]:
    scale = 127 / np.abs(x).max()
    return np.rint(x * scale), np.full((len(x), 1), scale)


def _in_steps(most: float, low: float, high: float, largest: Callable[[Array], Array] = np.abs) -> Quantizer:
    def quantize(x: Array) -> tuple[Array, Array]:
        scale = most / np.maximum(1e-5, largest(x).max(axis=1, keepdims=True))
        return np.clip(np.rint(x * scale), low, high), scale

    return quantize


def _wrapped_at_128(x: Array) -> tuple[Array, Array]:
    q, scale = _in_steps(128, -128, 128)(x)
    return np.where(q == 128, -128, q), scale


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _engine(rounded: Callable[[Floats], Floats], most: int = 127, axis: int | None = 1) -> Callable[[Variant], Variant]:
    """An engine with another quantiser of float32: largest magnitude over `axis` to `most` steps, `rounded`, cut to int8."""

    def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:
        largest = np.maximum(np.abs(x).max(axis=axis, keepdims=True), np.float32(1e-5))
        scale = np.broadcast_to(np.float32(most) / largest, (len(x), 1))
        return np.clip(rounded(x * scale), -128, 127).astype(np.int8), np.ascontiguousarray(scale[:, 0])

    return lambda base: base.with_operations(quantize=quantize)


_UP = np.float32(1 + 2**-20)  # the largest number is 127, but x * (127 / x) may fall short of it


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


def _mistake(id: str, text: str, quantize: Quantizer | None, engine: Callable[[Variant], Variant] | None = None) -> Mistake:
    compute = None if quantize is None else partial(_with_quantizer, quantize)
    return Mistake("quantiser." + id, text, AT if quantize else (), quantises, compute, engine)


_PER_TENSOR = "one activation scale for the whole tensor instead of one for each token"
_HALF_ADDED = "codes are (int)(x + 0.5): a half is added and the rest cut, which rounds negative numbers towards zero"
_SIGNED = "activations are scaled by their largest number, not by their largest magnitude"
_STEPS = "activations are scaled to {} steps instead of 127"
_reciprocal = partial(Site.of, function=lambda x: 1 / spec.quantize(x)[1])
_half_added = _engine(lambda x: np.trunc(x + np.float32(0.5)))
MISTAKES = (
    _mistake("per_tensor", _PER_TENSOR, _per_tensor, _engine(np.rint, axis=None)),
    _mistake("none", "activations are not quantised to int8", lambda x: (x, np.ones((len(x), 1))), _unquantised),
    _mistake("truncated", "codes are truncated instead of rounded", _truncated, _engine(lambda x: np.trunc(x * _UP))),
    _mistake("truncated_126", "codes are truncated instead of rounded, some of 127 to 126", None, _engine(np.trunc)),
    _mistake("rounded_down", "codes are rounded down", _rounded(np.floor), _engine(np.floor)),
    _mistake("half_added", _HALF_ADDED, _rounded(lambda x: np.trunc(x + 0.5)), _half_added),
    _mistake("128_wraps", f"{_STEPS.format(128)}, and +128 wraps around to -128", _wrapped_at_128),
    _mistake("128", _STEPS.format(128), _in_steps(128, -128, 127), _engine(np.rint, 128)),
    *(_mistake(str(most), _STEPS.format(most), _in_steps(most, -most, most), _engine(np.rint, most)) for most in (126, 63, 7)),
    _mistake("signed_largest", _SIGNED, _in_steps(127, -128, 127, lambda x: x)),
    Mistake("quantiser.reciprocal", "it is the reciprocal, absmax / 127", SCALES, quantises, _reciprocal),
)
