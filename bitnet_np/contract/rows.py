"""Operations on rows, each for itself: norms, rotations, roundings, sums and activations."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import Q8_0
from .arrays import Places
from .blocks import rounded
from .numbers import WIDE_LANES, Doubles, Floats, cos_sin, exp, f32, fma, lane_sum, normal_cdf, tanh

GELU_LINEAR, GELU_CUBIC = f32(1.5957691216057308), f32(0.07135481282553)  # 2 sqrt(2 / pi), 0.044715 times it

# --- norms --------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:  # [R, D], [D] -> [R, D]
    """x * (1 / sqrt(mean(x^2) + eps)) * gain. NaN where the squares leave float32's range."""
    squares = x.astype(np.float64) ** 2
    mean = _mean(squares).astype(f32)
    root = np.sqrt(mean + f32(eps))
    factor = np.where(mean == np.inf, f32(np.nan), f32(1) / root)
    return x * factor[:, None] * gain


@np.errstate(all="ignore")
def layer_norm(x: Floats, gain: Floats, bias: Floats | None, eps: float) -> Floats:
    # [R, D], [D], [D] -> [R, D]
    """x less its mean, in float64 and rounded once, then as `rms_norm`, plus the bias or +0."""
    wide = x.astype(np.float64)
    centred = wide - _mean(wide)[:, None]
    normed = rms_norm(centred.astype(f32), gain, eps)
    return normed + (f32(0) if bias is None else bias)


def _mean(x: Doubles) -> Doubles:  # [R, n] -> [R]
    return lane_sum(x, WIDE_LANES) / x.shape[1]


# --- positions ----------------------------------------------------------------------------------------------


def rotations(angle: Doubles) -> tuple[Floats, Floats]:
    # float64 [R, J] -> cosines and sines [R, J]
    cos, sin = cos_sin(angle)
    return cos.astype(f32), sin.astype(f32)


def rope(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    pairs = cos.shape[1]
    places = np.arange(pairs)
    return _rotated(x, cos, sin, places, places + pairs)


def rope_adjacent(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    pairs = cos.shape[1]
    places = 2 * np.arange(pairs)
    return _rotated(x, cos, sin, places, places + 1)


@np.errstate(all="ignore")
def _rotated(x: Floats, cos: Floats, sin: Floats, first: Places, second: Places) -> Floats:
    """Each pair (a, b) becomes (fma(a, cos, -(b * sin)), fma(a, sin, b * cos)). What is in no pair stays."""
    out = x.copy()
    a = x[..., first]
    b = x[..., second]
    cos = cos[:, None]
    sin = sin[:, None]
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
    kept = ROUNDINGS[kind](rows)
    return kept.reshape(x.shape)


def _in_float16(x: Floats) -> Floats:
    return x.astype(np.float16).astype(f32)


def _in_bfloat16(x: Floats) -> Floats:
    upper = _upper_half(x.view(np.uint32)) << 16
    return np.where(np.isnan(x), x, upper.view(f32))


def _in_int8(x: Floats) -> Floats:
    magnitude = np.abs(x)
    step = magnitude.max(axis=1, keepdims=True) / f32(127)
    divisor = np.where(step > 0, step, f32(1))
    return np.rint(x / divisor) * step


def _in_q8_0(x: Floats) -> Floats:
    codes, scale, _ = rounded(x, Q8_0)
    return codes.astype(f32) * np.repeat(scale, 32, axis=1)


def _upper_half(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The upper 16 bits, rounded half to even by the lower ones."""
    upper = bits >> 16
    lower = bits & 0xFFFF
    is_odd = upper & 1 == 1
    is_tie = lower == 0x8000
    goes_up = (lower > 0x8000) | (is_tie & is_odd)
    return upper + goes_up


def _in_q4_0(x: Floats) -> Floats:
    """Codes -8 to 7 of blocks of 32, by the exact step that makes the first of the largest -8. Half a step
    goes up. The step is then rounded to float16."""
    blocks = x.reshape(-1, 32)
    place = np.abs(blocks).argmax(axis=1)
    largest = blocks[np.arange(len(blocks)), place, None]
    step = largest / f32(-8)
    per_unit = np.where(step == 0, f32(0), f32(1) / step)
    codes = np.floor(blocks * per_unit + f32(8.5))
    codes = codes.clip(0, 15) - f32(8)
    return codes * _in_float16(step)


ROUNDINGS: dict[str, Callable[[Floats], Floats]] = {
    "float16": _in_float16,
    "bfloat16": _in_bfloat16,
    "int8": _in_int8,
    "q8_0": _in_q8_0,
    "q4_0": _in_q4_0,
}


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
