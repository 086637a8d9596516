"""The rules by which engines round, in plain NumPy. Kernels and dialects that round so share nothing with this file; tests tie the two.

Sources: IEEE 754 for float16; for activations ggml's quantize_row_q8_0, quantize_row_q8_1 and quantize_row_q8_K (ggml-quants.c); for
stepped angles its ggml_rope_cache_init.
"""

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...base.block_formats import FORMATS
from ...base.tensor_types import Q4_1, Q5_1
from ...model.records import Blocks, Model, Table

Array = NDArray[np.float64]
Floats = NDArray[np.float32]


def to_float16(x: Array) -> Array:
    """x rounded to float32 and then to float16, half to even, as an engine of float32 does."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float16).astype(np.float64)


def to_bfloat16(x: Array) -> Array:
    """x rounded to float32 and then to bfloat16, half to even: the upper 16 bits of a float32."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def to_digits(x: Array, digits: int) -> Array:
    """x rounded to this many significant bits, half to even, with float64's range."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(fraction, digits)), exponent - digits)


def cut_to_digits(x: Array, digits: int) -> Array:
    """x cut to this many significant bits."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(fraction, digits)), exponent - digits)


def to_eleven_bits(x: Floats) -> Floats:
    """x rounded to float16's 11 significant bits, half up, with float32's range: a float16 that neither overflows nor underflows."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


# --- activations, as llama.cpp's CPU backend rounds them to the type of a matrix -------------------------------------------------------


def _blocks(x: Floats, size: int, signed: bool) -> tuple[Floats, Floats]:
    """int8 codes [R, M / size, size] and steps [R, M / size, 1], float32. signed: the largest number becomes -127, whatever its sign."""
    blocks = x.reshape(len(x), -1, size)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2, keepdims=True), axis=2)
    with np.errstate(divide="ignore", over="ignore"):
        if signed:
            steps = np.float32(-127) / largest
            step = np.float32(1) / steps
        else:
            steps = np.float32(127) / np.abs(largest)
            step = (np.abs(largest) / np.float32(127)).astype(np.float16).astype(np.float32)
    fits = np.isfinite(steps)
    return np.where(fits, np.rint(blocks * np.where(fits, steps, 0)), 0), np.where(fits, step, 0)


def matrix_input(x: Array, table: Table) -> Array:  # [T, M] -> [T, M]
    """The input of a matrix of this type: Q8_K for types of 256 weights to a block, Q8_0 for fewer, else the type of the numbers."""
    single = x.astype(np.float32)
    if isinstance(table, Blocks):
        size = 256 if table.type.block == 256 else 32
        codes, step = _blocks(single, size, signed=size == 256)
        return (codes * step).astype(np.float32).reshape(x.shape).astype(np.float64)
    if table.dtype == np.float16:
        return to_float16(x)
    return to_bfloat16(x) if table.dtype == np.uint16 else single.astype(np.float64)


MINIMUM_TYPES = (Q4_1, Q5_1)
"""The types whose minimums llama.cpp multiplies by rounded sums."""


def _sums(x: Array) -> tuple[Array, Array]:  # [T, M] -> [T, M / 32] each
    """The sums of 32 numbers in steps, times the exact step and times the step that is kept."""
    single = x.astype(np.float32)
    codes, step = _blocks(single, 32, signed=False)
    exact = np.abs(single.reshape(codes.shape)).max(axis=2) / np.float32(127)
    totals = codes.sum(axis=2, dtype=np.float32)
    return (totals * exact).astype(np.float64), (totals * step[:, :, 0]).astype(np.float64)


def rounded_sums(x: Array) -> Array:  # [T, M] -> [T, M / 32]
    """Q8_1's float16 sums of 32 numbers, minus the sums of their codes times the step: the minimums are multiplied by it."""
    exact, kept = _sums(x)
    return to_float16(exact) - kept


def ambiguous_sums(x: Array) -> Array:  # [T, M] -> [T, M / 32]
    """float16's spacing at each of these sums that is nearly on a rounding boundary, or 0."""
    exact = _sums(x)[0]
    spacing = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64)
    return (np.abs(np.abs(exact - to_float16(exact)) - spacing / 2) <= 2.0**-9 * np.abs(exact)) * spacing


def minimums(blocks: Blocks) -> Array:  # -> [N, M / 32]
    """The minimums of a Q4_1 or Q5_1 matrix."""
    return np.ascontiguousarray(blocks.data.view(FORMATS[blocks.type.name].layout)["m"]).view(np.float16).astype(np.float64)


def gelu_of_table(x: Array) -> Array:
    """GELU by tanh of numbers below 10, from ggml's table of float16."""
    return np.where(np.abs(x) < 10, to_float16(spec.gelu_tanh(to_float16(np.where(np.abs(x) < 10, x, 0)))), spec.gelu_tanh(x))


# --- angles ---------------------------------------------------------------------------------------------------------------------------


def stepped_angles(model: Model, position: Array) -> Array:  # [T] -> [T, J]
    """RoPE's angles of these positions in radians, stepped from pair to pair in float32."""
    c = model.config
    step = np.float32(c.rope_base ** (-min(1, c.rope_pairs - 1) / c.rope_pairs))
    angle = np.empty((len(position), c.rope_pairs), np.float32)
    for pair in range(c.rope_pairs):
        angle[:, pair] = position if pair == 0 else angle[:, pair - 1] * step
    if c.yarn is not None:
        ramp, shrunk = spec.yarn_ramp(c.rope_base, c.rope_pairs, c.yarn).astype(np.float32), angle * np.float32(1 / c.yarn.factor)
        return (shrunk * (1 - ramp) + angle * ramp).astype(np.float64)
    factors = np.float32(1) if model.rope_factors is None else model.rope_factors
    return (angle / factors * np.float32(1 / c.rope_scaling)).astype(np.float64)
