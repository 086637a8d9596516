"""Operations on rows, each for itself: norms, rotations, roundings, sums and activations."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import Q8_0
from .arrays import Places
from .blocks import rounded
from .numbers import WIDE_LANES, Floats, cos_sin, exp, f32, fma, lane_sum, normal_cdf, tanh

GELU_LINEAR, GELU_CUBIC = f32(1.5957691216057308), f32(0.07135481282553)  # 2 sqrt(2 / pi), 0.044715 times it

# --- norms --------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:  # [R, D], [D] -> [R, D]
    """x * (1 / sqrt(mean(x^2) + eps)) * gain. NaN where the squares leave float32's range."""
    squares = x.astype(np.float64) ** 2
    mean = lane_sum(squares, WIDE_LANES) / x.shape[1]
    mean = mean.astype(f32)
    factor = f32(1) / np.sqrt(mean + f32(eps))
    factor = np.where(mean == np.inf, f32(np.nan), factor)
    return x * factor[:, None] * gain


@np.errstate(all="ignore")
def layer_norm(x: Floats, gain: Floats, bias: Floats | None, eps: float) -> Floats:
    # [R, D], [D], [D] -> [R, D]
    """x less its mean, in float64 and rounded once, then as `rms_norm`, plus the bias or +0."""
    mean = lane_sum(x.astype(np.float64), WIDE_LANES) / x.shape[1]
    centred = (x - mean[:, None]).astype(f32)
    return rms_norm(centred, gain, eps) + (f32(0) if bias is None else bias)


# --- positions ----------------------------------------------------------------------------------------------


def rotations(angle: NDArray[np.float64]) -> tuple[Floats, Floats]:
    # float64 [R, J] -> cosines and sines [R, J]
    cos, sin = cos_sin(angle)
    return cos.astype(f32), sin.astype(f32)


def rope(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    pairs = cos.shape[1]
    return _rotated(x, cos, sin, slice(0, pairs), slice(pairs, 2 * pairs))


def rope_adjacent(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    pairs = cos.shape[1]
    return _rotated(x, cos, sin, slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))


@np.errstate(all="ignore")
def _rotated(x: Floats, cos: Floats, sin: Floats, first: slice, second: slice) -> Floats:
    """Each pair (a, b) becomes (fma(a, cos, -(b * sin)), fma(a, sin, b * cos)). What is in no pair stays."""
    out = x.copy()
    a, b = x[..., first], x[..., second]
    cos, sin = cos[:, None], sin[:, None]
    out[..., first] = fma(a, cos, -(b * sin))
    out[..., second] = fma(a, sin, b * cos)
    return out


# --- sums and roundings -------------------------------------------------------------------------------------


def add(a: Floats, b: Floats) -> Floats:  # [R, D] x 2 -> [R, D]
    return a + b


def add_bias(x: Floats, bias: Floats) -> Floats:  # [R, N], [N] -> [R, N]
    return x + bias


def scaled(x: Floats, factor: f32) -> Floats:  # [R, N], float32 -> [R, N]
    return x * factor


def take(x: Floats, rows: Places) -> Floats:  # [R, D], [B] -> [B, D]
    return x[rows]


@np.errstate(all="ignore")
def round_as(x: Floats, kind: str) -> Floats:  # [..., M], a type -> [..., M]
    """x rounded to the numbers that a type can hold. int8 has one step for M numbers;
    ggml's blocks have one for 32 numbers."""
    rows = x.reshape(-1, x.shape[-1])
    kept: Any
    if kind == "float16":
        kept = rows.astype(np.float16).astype(f32)
    elif kind == "bfloat16":
        upper = _upper_half(rows.view(np.uint32)) << 16
        kept = np.where(np.isnan(rows), rows, upper.view(f32))
    elif kind == "int8":
        step = np.abs(rows).max(axis=1, keepdims=True) / f32(127)
        kept = np.rint(rows / np.where(step > 0, step, f32(1))) * step
    elif kind == "q8_0":
        codes, scale, _ = rounded(rows, Q8_0)
        kept = codes * np.repeat(scale, 32, axis=1)
    else:
        kept = _in_q4_0(rows.reshape(-1, 32))
    return kept.reshape(x.shape)


def _upper_half(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The upper 16 bits, rounded half to even by the lower ones."""
    upper, lower = bits >> 16, bits & 0xFFFF
    is_odd = upper & 1 == 1
    goes_up = (lower > 0x8000) | ((lower == 0x8000) & is_odd)
    return upper + goes_up


def _in_q4_0(x: Floats) -> Floats:  # [blocks, 32] -> [blocks, 32]
    """Codes -8 to 7, by the exact step that makes the first of the largest -8. Half a step goes up. The step
    is then rounded to float16."""
    place = np.abs(x).argmax(axis=1)
    largest = x[np.arange(len(x)), place, None]
    step = largest / f32(-8)
    per_unit = np.where(step == 0, f32(0), f32(1) / step)
    codes = np.floor(x * per_unit + f32(8.5))
    codes = codes.clip(0, 15) - f32(8)
    return codes * step.astype(np.float16).astype(f32)


# --- activations --------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def relu2_gate(gate: Floats, up: Floats) -> Floats:  # [R, F] x 2 -> [R, F]
    positive = np.maximum(gate, f32(0))
    return positive * positive * up


@np.errstate(all="ignore")
def silu_gate(gate: Floats, up: Floats) -> Floats:  # [R, F] x 2 -> [R, F]
    return gate / (f32(1) + exp(-gate)) * up


@np.errstate(all="ignore")
def gelu_gate(gate: Floats, up: Floats) -> Floats:  # [R, F] x 2 -> [R, F]
    return gelu_tanh(gate) * up


@np.errstate(all="ignore")
def gelu(x: Floats) -> Floats:  # [R, F] -> [R, F]
    return x * normal_cdf(x)


@np.errstate(all="ignore")
def gelu_tanh(x: Floats) -> Floats:  # [R, F] -> [R, F]
    """x (1 + tanh(y / 2)) / 2 with y / 2 = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-y):
    nothing cancels."""
    y = x * fma(x * x, GELU_CUBIC, GELU_LINEAR)
    return x / (f32(1) + exp(-y))


@np.errstate(all="ignore")
def soft_cap(x: Floats, cap: f32) -> Floats:  # [R, V], float32 -> [R, V]
    return cap * tanh(x / cap)
