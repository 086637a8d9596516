"""Kernels that work on single rows or single numbers: norms, RoPE, residuals, gates."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from . import scalar
from .fast.simd import fma
from .launching import Floats, Kernel, elementwise, inlined, launch, parallel, read_only, shared
from .scalar import WIDE_LANES, cos_sin
from .sums import wide_dot
from .workspace import empty

# --- norms ----------------------------------------------------------------------------------------------------------------------------


@parallel
def _rms_norm(team, x, gain, eps, out):
    lanes = np.empty(WIDE_LANES, np.float64)
    for r in shared(team, x.shape[0]):
        row = x[r]
        mean = np.float32(wide_dot(row, row, lanes) / row.size)
        factor = np.float32(1.0) / np.sqrt(mean + eps)
        if mean == np.inf:  # the squares left float32's range: say so, instead of giving zeros
            factor = np.float32(np.nan)
        for i in range(row.size):
            out[r, i] = np.float32(row[i] * factor) * gain[i]


def rms_norm(x: Floats, gain: Floats, eps: float) -> Floats:  # [R, D], [D] -> [R, D]
    """x / sqrt(mean(x^2) + eps) * gain: the mean from float64, then ggml's steps in float32: 1 / root, times x, times gain."""
    out = empty(x.shape)
    launch(_rms_norm, x.size, x, read_only(gain), np.float32(eps), out)
    return out


@parallel
def _layer_norm(team, x, ones, gain, bias, eps, out):
    lanes = np.empty(WIDE_LANES, np.float64)
    for r in shared(team, x.shape[0]):
        row, centred = x[r], out[r]
        mean = wide_dot(row, ones, lanes) / row.size
        for i in range(row.size):
            centred[i] = np.float32(row[i] - mean)
        variance = np.float32(wide_dot(centred, centred, lanes) / row.size)
        factor = np.float32(1.0) / np.sqrt(variance + eps)
        if variance == np.inf:  # as in _rms_norm
            factor = np.float32(np.nan)
        for i in range(row.size):
            centred[i] = np.float32(np.float32(centred[i] * factor) * gain[i]) + bias[i]


def layer_norm(x: Floats, gain: Floats, bias: Floats | None, eps: float) -> Floats:  # [R, D], [D], [D] -> [R, D]
    """(x - mean) / sqrt(variance + eps) * gain + bias.

    The mean is in float64, the difference is rounded to float32, its squares are summed in float64. Then in float32: 1 / root, times the
    difference, times gain, plus bias. None for the bias means zeros.
    """
    bias = _constants(x.shape[1], 0) if bias is None else bias
    out = empty(x.shape)
    launch(_layer_norm, x.size, x, _constants(x.shape[1], 1), read_only(gain), read_only(bias), np.float32(eps), out)
    return out


@lru_cache
def _constants(count: int, value: float) -> Floats:
    """The same number so many times; read-only."""
    return read_only(np.full(count, value, np.float32))


# --- positions ------------------------------------------------------------------------------------------------------------------------


@parallel
def _rotations(team, angle, cos, sin):
    for r in shared(team, angle.shape[0]):
        for i in range(angle.shape[1]):
            c, s = cos_sin(angle[r, i])
            cos[r, i], sin[r, i] = c, s


def rotations(angle: NDArray[np.float64]) -> tuple[Floats, Floats]:  # [R, J] radians -> 2 x [R, J]
    """Cosines and sines, worked out in float64 and rounded once to float32."""
    cos, sin = np.empty(angle.shape, np.float32), np.empty(angle.shape, np.float32)
    launch(_rotations, 16 * cos.size, angle, cos, sin)
    return cos, sin


@inlined
def _rotate(x, cos, sin, step, out):
    """Rotate J pairs in the heads [H, K] of one row: (i, i + J) with step 1, (2i, 2i + 1) with step 2. Elements after the pairs stay."""
    pairs = cos.size
    distance = pairs if step == 1 else 1  # set here, LLVM knows that it is not negative: passed by the caller, it took 4 times as long
    for h in range(x.shape[0]):
        for i in range(pairs):
            a, b, c, s = x[h, i * step], x[h, i * step + distance], cos[i], sin[i]
            out[h, i * step] = fma(a, c, -np.float32(b * s))
            out[h, i * step + distance] = fma(a, s, np.float32(b * c))
        for i in range(x.shape[1] - 2 * pairs):
            out[h, 2 * pairs + i] = x[h, 2 * pairs + i]


@parallel
def _rope(team, x, cos, sin, out):
    for r in shared(team, x.shape[0]):
        _rotate(x[r], cos[r], sin[r], 1, out[r])


def rope(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    """Rotate the pairs (i, i + J), as GPT-NeoX does: fma(a, cos, -(b * sin)), fma(a, sin, b * cos). Elements after them stay."""
    out = empty(x.shape)
    launch(_rope, x.size, x, cos, sin, out)
    return out


@parallel
def _rope_adjacent(team, x, cos, sin, out):
    for r in shared(team, x.shape[0]):
        _rotate(x[r], cos[r], sin[r], 2, out[r])


def rope_adjacent(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    """`rope` for the pairs (2i, 2i + 1)."""
    out = empty(x.shape)
    launch(_rope_adjacent, x.size, x, cos, sin, out)
    return out


# --- residuals ------------------------------------------------------------------------------------------------------------------------


@parallel
def _add(team, a, b, out):
    for r in shared(team, a.shape[0]):
        for i in range(a.shape[1]):
            out[r, i] = a[r, i] + b[r, i]


def add(a: Floats, b: Floats) -> Floats:  # [R, D], [R, D] -> [R, D]
    out = empty(a.shape)
    launch(_add, a.size, a, b, out)
    return out


@parallel
def _add_bias(team, x, bias, out):
    for r in shared(team, x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = x[r, i] + bias[i]


def add_bias(x: Floats, bias: Floats) -> Floats:  # [R, N], [N] -> [R, N]
    out = empty(x.shape)
    launch(_add_bias, x.size, x, read_only(bias), out)
    return out


@parallel
def _scaled(team, x, factor, out):
    for r in shared(team, x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = x[r, i] * factor


def scaled(x: Floats, factor: np.float32) -> Floats:  # [R, N] -> [R, N]
    out = empty(x.shape)
    launch(_scaled, x.size, x, np.float32(factor), out)
    return out


# --- rows -----------------------------------------------------------------------------------------------------------------------------


def take(x: Floats, rows: NDArray[np.int64]) -> Floats:  # [R, D], [B] -> [B, D]
    return x[rows]


def spread(x: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], shape: tuple[int, ...]) -> Floats:
    # [R, G, K], [R], [R], (B, T) -> [B, T, G, K]
    """Keys or values of whole sequences as a cache would hold them, with zeros where no row goes."""
    out = np.zeros((*shape, *x.shape[1:]), np.float32)
    out[slot, position] = x
    return out


# --- gates ----------------------------------------------------------------------------------------------------------------------------


def of_one(x):
    """In place of a rule: see launching.elementwise."""


def _each(team, x, out):
    for r in shared(team, x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = of_one(x[r, i])


def _each_times(team, gate, up, out):
    for r in shared(team, gate.shape[0]):
        for i in range(gate.shape[1]):
            out[r, i] = of_one(gate[r, i]) * up[r, i]


_relu2_gate = elementwise(_each_times, scalar.relu2, "_relu2_gate")
_silu_gate = elementwise(_each_times, scalar.silu, "_silu_gate")
_gelu_gate = elementwise(_each_times, scalar.gelu_tanh, "_gelu_gate")
_gelu = elementwise(_each, scalar.gelu, "_gelu")
_gelu_tanh = elementwise(_each, scalar.gelu_tanh, "_gelu_tanh")
_exponential = elementwise(_each, scalar.exp, "_exponential")


def _result(kernel: Kernel, steps: int, *arrays: Floats) -> Floats:
    """The result of a kernel of so many elementary steps for each number."""
    out = empty(arrays[0].shape)
    launch(kernel, steps * out.size, *arrays, out)
    return out


def relu2_gate(gate: Floats, up: Floats) -> Floats:  # [R, F], [R, F] -> [R, F]
    """max(gate, 0)^2 * up."""
    return _result(_relu2_gate, 1, gate, up)


def silu_gate(gate: Floats, up: Floats) -> Floats:  # [R, F], [R, F] -> [R, F]
    """gate / (1 + e^-gate) * up."""
    return _result(_silu_gate, 16, gate, up)


def gelu_gate(gate: Floats, up: Floats) -> Floats:  # [R, F], [R, F] -> [R, F]
    """The tanh approximation of GELU of the gate, times up."""
    return _result(_gelu_gate, 16, gate, up)


def gelu(x: Floats) -> Floats:  # [R, F] -> [R, F]
    """The exact GELU: x times the normal distribution's value at x."""
    return _result(_gelu, 32, x)


def gelu_tanh(x: Floats) -> Floats:  # [R, F] -> [R, F]
    """The tanh approximation of GELU."""
    return _result(_gelu_tanh, 16, x)


# --- logits ---------------------------------------------------------------------------------------------------------------------------


@parallel
def _soft_cap(team, x, cap, out):
    for r in shared(team, x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = scalar.soft_cap(x[r, i], cap)


def soft_cap(x: Floats, cap: np.float32) -> Floats:  # [R, V] -> [R, V]
    """cap * tanh(x / cap)."""
    out = empty(x.shape)
    launch(_soft_cap, 16 * x.size, x, cap, out)
    return out


# --- sampling -------------------------------------------------------------------------------------------------------------------------


def exponential(x: Floats) -> Floats:  # [V] -> [V]
    """e^x by the polynomial of the arithmetic contract."""
    return _result(_exponential, 16, x[None])[0]
