"""Division without the GPU's own: on the CPU, by the same lines."""

from types import FunctionType

import numpy as np
import pytest
from gpu_marks import needs_package
from models import assert_same_bits
from numba import njit

from bitnet_np.kernels.fast import simd

pytestmark = needs_package


@pytest.fixture(scope="module")
def here():
    """The functions of quotients.py, compiled for the CPU."""
    from bitnet_np.kernels.cuda import quotients

    names = {"np": np, "bits_float": simd.bits_float, "float_bits": simd.float_bits, "fma": simd.fma, "times": njit(lambda a, b: a * b)}
    for name in ("mantissa", "power", "_miss", "inverse_of", "quotient"):
        names[name] = njit(FunctionType(getattr(quotients, name).py_func.__code__, names, name))
    return names


def test_inverses_are_rounded_to_the_nearest(here):
    """All of them."""
    inverse_of = here["inverse_of"]

    @njit(error_model="numpy")
    def wrong():
        count = 0
        for bits in range(1 << 23):
            m = simd.bits_float(np.int32(0x3F800000 | bits))
            count += inverse_of(m) != np.float32(1) / m
        return count

    assert wrong() == 0


def test_quotients_have_the_bits_of_divisions(here):
    mantissa, power, inverse_of, quotient = (here[name] for name in ("mantissa", "power", "inverse_of", "quotient"))

    @njit(error_model="numpy")
    def both(a, d, out):
        for i in range(a.size):
            m = mantissa(d[i])
            out[0, i], out[1, i] = quotient(a[i], m, inverse_of(m), power(d[i])), a[i] / d[i]

    rng = np.random.default_rng(0)
    a = (rng.integers(-(2**31), 2**31, 1 << 20) >> rng.integers(0, 32, 1 << 20)).astype(np.float32)
    d = np.exp2(rng.uniform(-126, 80, a.size)).astype(np.float32)
    a[:3], d[-2:] = 0, np.nan
    out = np.empty((2, a.size), np.float32)
    both(a, d, out)
    assert np.isinf(out).any()
    assert np.isnan(out[:, -2:]).all()
    assert_same_bits(out[0, :-2], out[1, :-2])
