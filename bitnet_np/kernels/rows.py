"""Kernels over rows: norms and RoPE. And functions that make a kernel of a rule for one number; the rules are in cpu.py."""

from collections.abc import Callable
from functools import lru_cache, partial, update_wrapper
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import scalar
from .fast.simd import fma
from .launching import Floats, Kernel, inlined, launch, parallel, read_only, shared, variant
from .scalar import WIDE_LANES, cos_sin
from .sums import wide_dot
from .workspace import empty

# --- norms ----------------------------------------------------------------------------------------------------------------------------


@inlined
def normed(row, gain, eps, lanes, out):
    """Write the RMS norm of a row."""
    mean = np.float32(wide_dot(row, row, lanes) / row.size)
    factor = np.float32(1.0) / np.sqrt(mean + eps)
    if mean == np.inf:  # the squares left float32's range: say so, instead of giving zeros
        factor = np.float32(np.nan)
    for i in range(row.size):
        out[i] = np.float32(row[i] * factor) * gain[i]


@parallel
def _rms_norm(team, x, gain, eps, out):
    lanes = np.empty(WIDE_LANES, np.float64)
    for r in shared(team, x.shape[0]):
        normed(x[r], gain, eps, lanes, out[r])


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
    """`value`, `count` times; read-only."""
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


STEP = 1  # from the first element of a pair to the first of the next


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


# --- numbers one by one ---------------------------------------------------------------------------------------------------------------


def of_one(*numbers):
    """A placeholder for the rule that launching.variant puts here."""


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


def _each_column(team, x, row, out):
    for r in shared(team, x.shape[0]):
        for i in range(x.shape[1]):
            out[r, i] = of_one(x[r, i], row[i])


class OfNumbers:
    """An operation that applies a rule to every number of x, alone or together with other arguments. CUDA has loops of the same names."""

    def __init__(self, loop: Callable, taken: Callable[[Any], Any], steps: int, rule: Any) -> None:
        update_wrapper(self, rule)
        self.loop, self.rule, self.taken, self.steps = loop.__name__, rule, taken, steps
        self.kernel = variant(loop, f"_{rule.__name__}", of_one=rule)

    def __call__(self, x: Floats, *beside: Any) -> Floats:
        return _result(self.kernel, self.steps, x, *map(self.taken, beside))


def _kind(loop: Callable, taken: Callable[[Any], Any] = lambda beside: beside) -> Callable[[int], Callable[[Any], OfNumbers]]:
    """The decorator that turns a rule of `steps` elementary steps into an operation. taken: converts further arguments for the kernel."""
    return lambda steps: partial(OfNumbers, loop, taken, steps)


each, each_pair = _kind(_each), _kind(_each_pair)  # (x), and with another array of that shape
each_with, each_column = _kind(_each_with, np.float32), _kind(_each_column, read_only)  # with one number for all, or one for each column
_exponential = each(16)(scalar.exp)


def _result(kernel: Kernel, steps: int, x: Floats, *others: Any) -> Floats:
    """The result, shaped like x, of a kernel that takes `steps` elementary steps per number."""
    out = empty(x.shape)
    launch(kernel, steps * out.size, x, *others, out)
    return out


def exponential(x: Floats) -> Floats:  # [V] -> [V]
    """e^x by the polynomial of the arithmetic contract."""
    return _exponential(x[None])[0]
