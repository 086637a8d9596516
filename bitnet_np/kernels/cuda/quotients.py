"""Division without the GPU's own, which calls a subroutine for rare numbers: products of warpgroups wait for each other beside a call.

A divisor is taken apart once: d = m * 2^e with m in [1, 2). Its inverse is 1 / m rounded to the nearest. The quotient a / m of an integer
then takes three fused operations (Markstein; the proof is that of ternary_steps.py's `_by_reciprocal`), and 2^-e times it rounds nothing,
unless it overflows, as the quotient does.
"""

import numpy as np

from .ptx import bits_float, float_bits, fma, times
from .target import device


@device
def mantissa(d):
    """m of a positive, normal float32; NaN of a NaN."""
    return bits_float(np.int32((float_bits(d) & 0x7FFFFF) | 0x3F800000)) if d == d else d


@device
def power(d):
    """2^-e of a positive float32 of 2^-126 to 2^126."""
    return bits_float(np.int32(np.int32(254 << 23) - (float_bits(d) & 0x7F800000)))


@device
def _miss(m, inverse):
    return abs(fma(-m, inverse, np.float32(1)))


@device
def inverse_of(m):
    """1 / m rounded to the nearest, for m in [1, 2). Newton's steps from a line end there or, of all m, just below."""
    inverse = fma(m, np.float32(-8 / 17), np.float32(24 / 17))  # off by at most 1/17
    for _ in range(3):
        inverse = fma(inverse, fma(-m, inverse, np.float32(1)), inverse)
    above = bits_float(np.int32(float_bits(inverse) + np.int32(1)))
    return above if _miss(m, above) < _miss(m, inverse) else inverse


@device
def quotient(a, m, inverse, power):
    """a / (m / power), rounded once, for an integer a."""
    first = times(a, inverse)
    return times(fma(fma(-first, m, a), inverse, first), power)
