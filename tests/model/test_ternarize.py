"""Ternary matrices out of master weights, by their mean magnitude."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import as_table, seeds, threads

from bitnet_np.kernels import packing as kernels
from bitnet_np.model import packing, ternarize, widen

SIZES = st.integers(1, 40) | st.sampled_from([63, 64, 65, 130])
DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])


@given(seeds, DTYPES, SIZES, SIZES, st.sampled_from([0, 3, 20]))
def test_the_mean_magnitude_is_exact(seed, dtype, n, m, spread):
    """Against rational numbers, with exponents that are near each other or go over the whole range of the dtype."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        values = rng.standard_normal((n, m)) * 2.0 ** rng.integers(-2 * spread, spread // 2 + 1, (n, m)) * (rng.random((n, m)) < 0.9)
    table = as_table(values, dtype)
    exact = sum(map(Fraction, np.abs(widen.float32(table)).ravel().tolist())) / (n * m)
    assert abs(Fraction(ternarize.mean_magnitude(table)) - exact) <= exact * Fraction(1, 2**52)


@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-149, -(2.0**-126), 1.0, np.finfo(np.float32).max])
def test_the_mean_magnitude_of_equal_numbers_is_theirs(value):
    """Long rows, whose pieces fill all that they may."""
    assert ternarize.mean_magnitude(np.full((3, 5000), value, np.float32)) == abs(np.float32(value))
    small = np.full((2, 4096), 2.0**-28, np.float32)  # as far from 1.9999 as one integer can sum
    small[:, ::2] = np.nextafter(np.float32(2), np.float32(0))
    exact = (Fraction(float(small[0, 0])) + Fraction(1, 2**28)) / 2
    assert ternarize.mean_magnitude(small) == float(exact)
    assert ternarize.from_masters(np.zeros((2, 64), np.float32)).scale == np.float32(1e-5)  # the floor that transformers has


@given(seeds, DTYPES, SIZES, SIZES, st.sampled_from([1, 3]))
def test_codes_of_masters(seed, dtype, n, m, count):
    """Those of the definition, also for weights on a tie or far away, packed as packing.py packs them."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, m)) * 2.0 ** rng.integers(-4, 9, (n, m))
    values[rng.random((n, m)) < 0.3] *= 0
    tied = rng.random((n, m)) < 0.3
    values[tied] = rng.choice([-1.5, -0.5, 0.5, 1.5], np.count_nonzero(tied))  # with 1 step per unit
    masters = as_table(values, dtype)
    codes = np.clip(np.rint(widen.float32(masters).astype(np.float64)), -1, 1).astype(np.int8)
    with threads(count):
        np.testing.assert_array_equal(kernels.from_masters(masters, 1.0), packing.pack(codes, 1.0).codes)
