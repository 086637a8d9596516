"""Activations as llama.cpp's CPU backend rounds them before it multiplies by a matrix: a rounding for each type of matrix."""

import numpy as np
from numpy.typing import NDArray

from ..fast.simd import float_bits
from ..launching import Floats, launch, parallel, serial, shared
from ..scalar import round_half_even, round_to_half
from ..sums import largest_bits

Q8_K, Q8_0 = 256, 32  # numbers that share a scale

# --- Q8_K and Q8_0 --------------------------------------------------------------------------------------------------------------------


@serial
def _largest(numbers):
    """The number of largest magnitude, the first of equal ones; NaN if one is not finite."""
    largest = largest_bits(numbers)
    if largest >= 0x7F800000:
        return np.float32(np.nan)
    for number in numbers:
        if np.int32(float_bits(number) & 0x7FFFFFFF) == largest:
            return number
    return np.float32(0)


@serial
def _as_half(x):
    """x of any size rounded to float16, still as float32."""
    half = round_to_half(np.float32(abs(x)))
    half = np.float32(np.inf) if half > np.float32(65504.0) else half
    return -half if x < 0 else half


@serial
def round_row(numbers, size, codes, scale, sums):
    """A row's codes, its scales, and for Q8_0 what it would have as Q8_1: the sums of codes times their exact scale, in float16."""
    for block in range(scale.size):
        some, codes_of_block = numbers[block * size : (block + 1) * size], codes[block * size : (block + 1) * size]
        largest = _largest(some)
        if size == Q8_K:
            steps = np.float32(-127.0) / largest
            factor = np.float32(1.0) / steps
        else:
            steps = np.float32(127.0) / abs(largest)
            factor = np.float32(abs(largest) / np.float32(127.0))
        if abs(steps) < np.inf:
            for i in range(size):
                codes_of_block[i] = np.int8(round_half_even(np.float32(some[i] * steps)))
        else:  # for zeros, numbers too small for float32 to divide by, and NaN
            factor = np.float32(np.nan) if np.isnan(largest) else np.float32(0.0)
            codes_of_block[:] = 0
        if size == Q8_K:
            scale[block] = factor
        else:
            total = np.int32(0)
            for i in range(size):
                total += np.int32(codes_of_block[i])
            scale[block], sums[block] = _as_half(factor), _as_half(np.float32(np.float32(total) * factor))


@parallel
def _round_rows(team, x, size, codes, scale, sums):
    for r in shared(team, x.shape[0]):
        round_row(x[r], size, codes[r], scale[r], sums[r])


def rounded(x: Floats, size: int) -> tuple[NDArray[np.int8], Floats, Floats]:  # [R, M] -> [R, M], [R, M/size], [R, M/size]
    """Codes and scales of ggml's Q8_K or Q8_0, which have Q8_K or Q8_0 numbers to a scale, and for Q8_0 sums.

    Q8_K's scale has the sign that makes the largest number -127. Q8_0's codes come from the exact scale, which is then rounded to float16.
    The sums, by which llama.cpp multiplies minimums, are those of codes, times their exact scale, rounded to float16. A number that is not
    finite makes the scale of its block NaN.
    """
    codes = np.empty(x.shape, np.int8)
    scale, sums = np.empty((2, x.shape[0], x.shape[1] // size), np.float32)
    launch(_round_rows, x.size, x, size, codes, scale, sums)
    return codes, scale, sums


# --- as floats -------------------------------------------------------------------------------------------------------------------------


def _widened(codes: NDArray[np.int8], scale: Floats, _: Floats) -> Floats:
    rows, n = scale.shape
    with np.errstate(invalid="ignore"):  # a code of 0 times a scale that is not finite is NaN, as it should be
        return (codes.reshape(rows, n, -1) * scale[:, :, None]).reshape(codes.shape)


def round_as_q8_k(x: Floats) -> Floats:  # [R, M] -> [R, M], M a multiple of 256
    """x as llama.cpp sees it when it multiplies by types of 256 weights to a block: K-quants, TQ and IQ types but IQ4_NL."""
    return _widened(*rounded(x, Q8_K))


def round_as_q8_0(x: Floats) -> Floats:  # [R, M] -> [R, M], M a multiple of 32
    """x as llama.cpp sees it when it multiplies by types of fewer weights to a block, such as Q8_0, Q4_0, IQ4_NL or MXFP4.

    With Q4_1 and Q5_1 it sees the same x (as Q8_1). There it multiplies minimums by the sum of each 32 numbers, rounded to float16.
    """
    return _widened(*rounded(x, Q8_0))
