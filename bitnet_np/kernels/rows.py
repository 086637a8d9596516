"""Kernels that work on single rows or single numbers: norms, RoPE, residuals, gates."""

import operator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import scalar
from .fast.simd import fma
from .launching import Floats, Kernel, launch, parallel, read_only, shared, variant
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
    return _result(_rms_norm, 1, x, read_only(gain), np.float32(eps))


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
    return _result(_layer_norm, 1, x, _constants(x.shape[1], 1), read_only(gain), read_only(bias), np.float32(eps))


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


STEP = 1  # from the first element of a pair to that of the next


def _rotated(team, x, cos, sin, out):
    """Rotate J pairs in each head: (i, i + J) with STEP 1, (2i, 2i + 1) with STEP 2. Elements after the pairs stay."""
    for r in shared(team, x.shape[0]):
        pairs = cos.shape[1]
        distance = pairs if STEP == 1 else 1
        for h in range(x.shape[1]):
            head, to = x[r, h], out[r, h]
            for i in range(pairs):
                a, b, c, s = head[i * STEP], head[i * STEP + distance], cos[r, i], sin[r, i]
                to[i * STEP] = fma(a, c, -np.float32(b * s))
                to[i * STEP + distance] = fma(a, s, np.float32(b * c))
            for i in range(head.size - 2 * pairs):
                to[2 * pairs + i] = head[2 * pairs + i]


_rope, _rope_adjacent = variant(_rotated, "_rope"), variant(_rotated, "_rope_adjacent", STEP=2)


def rope(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    """Rotate the pairs (i, i + J), as GPT-NeoX does: fma(a, cos, -(b * sin)), fma(a, sin, b * cos). Elements after them stay."""
    return _result(_rope, 1, x, cos, sin)


def rope_adjacent(x: Floats, cos: Floats, sin: Floats) -> Floats:  # [R, H, K], [R, J] x 2 -> [R, H, K]
    """`rope` for the pairs (2i, 2i + 1)."""
    return _result(_rope_adjacent, 1, x, cos, sin)


# --- rows -----------------------------------------------------------------------------------------------------------------------------


def take(x: Floats, rows: NDArray[np.int64]) -> Floats:  # [R, D], [B] -> [B, D]
    return x[rows]


def spread(x: Floats, slot: NDArray[np.int64], position: NDArray[np.int64], shape: tuple[int, ...]) -> Floats:
    # [R, G, K], [R], [R], (B, T) -> [B, T, G, K]
    """Keys or values of whole sequences as a cache would hold them, with zeros where no row goes."""
    out = np.zeros((*shape, *x.shape[1:]), np.float32)
    out[slot, position] = x
    return out


# --- numbers one by one ---------------------------------------------------------------------------------------------------------------


def of_one(*numbers):
    """In place of a rule: see launching.variant."""


def _each(team, x, out):
    for r in shared(team, x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = of_one(x[r, i])


def _each_pair(team, a, b, out):
    for r in shared(team, a.shape[0]):
        for i in range(a.shape[1]):
            out[r, i] = of_one(a[r, i], b[r, i])


def _each_with(team, x, number, out):
    for r in shared(team, x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = of_one(x[r, i], number)


def _each_times(team, gate, up, out):
    for r in shared(team, gate.shape[0]):
        for i in range(gate.shape[1]):
            out[r, i] = of_one(gate[r, i]) * up[r, i]


@parallel
def _add_bias(team, x, bias, out):
    for r in shared(team, x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = x[r, i] + bias[i]


_add, _scaled = variant(_each_pair, "_add", of_one=operator.add), variant(_each_with, "_scaled", of_one=operator.mul)
_relu2_gate = variant(_each_times, "_relu2_gate", of_one=scalar.relu2)
_silu_gate = variant(_each_times, "_silu_gate", of_one=scalar.silu)
_gelu_gate = variant(_each_times, "_gelu_gate", of_one=scalar.gelu_tanh)
_gelu = variant(_each, "_gelu", of_one=scalar.gelu)
_gelu_tanh = variant(_each, "_gelu_tanh", of_one=scalar.gelu_tanh)
_soft_cap = variant(_each_with, "_soft_cap", of_one=scalar.soft_cap)
_exponential = variant(_each, "_exponential", of_one=scalar.exp)


def _result(kernel: Kernel, steps: int, x: Floats, *others: Any) -> Floats:
    """The result, like x, of a kernel of so many elementary steps for each number."""
    out = empty(x.shape)
    launch(kernel, steps * out.size, x, *others, out)
    return out


def add(a: Floats, b: Floats) -> Floats:  # [R, D], [R, D] -> [R, D]
    return _result(_add, 1, a, b)


def add_bias(x: Floats, bias: Floats) -> Floats:  # [R, N], [N] -> [R, N]
    return _result(_add_bias, 1, x, read_only(bias))


def scaled(x: Floats, factor: np.float32) -> Floats:  # [R, N] -> [R, N]
    return _result(_scaled, 1, x, np.float32(factor))


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


def soft_cap(x: Floats, cap: np.float32) -> Floats:  # [R, V] -> [R, V]
    """cap * tanh(x / cap)."""
    return _result(_soft_cap, 16, x, cap)


def exponential(x: Floats) -> Floats:  # [V] -> [V]
    """e^x by the polynomial of the arithmetic contract."""
    return _result(_exponential, 16, x[None])[0]
