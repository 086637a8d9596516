"""The sum of a row in float64 by the lane rule, and its largest magnitude."""

import numpy as np

from .fast.simd import float_bits, multiply_add
from .launching import inlined
from .scalar import WIDE_LANES


@inlined
def wide_dot(a, b, lanes):
    """sum a[i] * b[i] of float32 in WIDE_LANES lanes of float64.

    Inlined, so that the compiler sees when a caller's two factors are one array, whose conversion to float64 is half the work. Two products
    at a time, so that lanes are read and written half as often.
    """
    for lane in range(WIDE_LANES):
        lanes[lane] = 0
    pairs = a.size - a.size % (2 * WIDE_LANES)
    for start in range(0, pairs, 2 * WIDE_LANES):
        for lane in range(WIDE_LANES):
            i, j = start + lane, start + lane + WIDE_LANES
            total = multiply_add(np.float64(a[i]), np.float64(b[i]), lanes[lane])
            lanes[lane] = multiply_add(np.float64(a[j]), np.float64(b[j]), total)
    for start in range(pairs, a.size, WIDE_LANES):
        left, right = a[start : start + WIDE_LANES], b[start : start + WIDE_LANES]
        for lane in range(left.size):
            lanes[lane] = multiply_add(np.float64(left[lane]), np.float64(right[lane]), lanes[lane])
    half = WIDE_LANES // 2
    while half:  # the lanes are added by halving
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@inlined
def largest_bits(row):
    """The bits of the largest |x|: these order like the numbers, infinity and NaN, from 0x7F800000 on, above all of them."""
    largest = np.int32(0)
    for i in range(row.size):
        largest = max(largest, np.int32(float_bits(row[i]) & 0x7FFFFFFF))
    return largest
