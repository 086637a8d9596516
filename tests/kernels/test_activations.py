"""Roundings of activations: llama.cpp's own, number by number, and every edge of the formats."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same_bits, seeds

from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, BF16, F16, F32
from bitnet_np.kernels import activations


def ggml_q8_k(x):
    """quantize_row_q8_K, number by number, for numbers that it can divide by."""
    codes, scales = np.zeros(x.shape, np.int8), np.zeros((len(x), x.shape[1] // 256), np.float32)
    for r, block in np.ndindex(scales.shape):
        part = x[r, block * 256 :][:256]
        largest = part[np.abs(part).argmax()]  # the first of several
        if largest:
            steps = np.float32(-127) / largest
            codes[r, block * 256 :][:256] = np.minimum(127, np.rint(steps * part))
            scales[r, block] = np.float32(1) / steps
    return codes, scales


def ggml_q8_0(x):
    """quantize_row_q8_0 as it is with SIMD."""
    codes, scales = np.zeros(x.shape, np.int8), np.zeros((len(x), x.shape[1] // 32), np.float32)
    for r, block in np.ndindex(scales.shape):
        part = x[r, block * 32 :][:32]
        largest = np.abs(part).max()
        if largest:
            codes[r, block * 32 :][:32] = np.rint(part * (np.float32(127) / largest))
            with np.errstate(over="ignore"):
                scales[r, block] = np.float16(largest / np.float32(127))
    return codes, scales


@pytest.mark.parametrize(
    ("quantize", "expected", "rounded"),
    [(activations.q8_k, ggml_q8_k, activations.round_as_q8_k), (activations.q8_0, ggml_q8_0, activations.round_as_q8_0)],
)
@given(seed=seeds, rows=st.integers(1, 3), per_row=st.integers(1, 3), exponent=st.integers(-30, 30), steps=st.sampled_from([0, 4, 254]))
def test_activations_are_rounded_as_ggml_does(quantize, expected, rounded, seed, rows, per_row, exponent, steps):
    """Also multiples of a number: rounding ties, several numbers of the largest magnitude, blocks of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 256 * per_row)).astype(np.float32)
    if steps:
        x = rng.integers(-steps, steps + 1, x.shape).astype(np.float32) * np.float32(0.5)
        x[:, :256] *= rng.integers(0, 2, (rows, 1)).astype(np.float32)
    x = np.ldexp(x, exponent).astype(np.float32)
    codes, scales = expected(x)
    found = quantize(x)
    np.testing.assert_array_equal(found[0], codes)
    assert_same_bits(found[1], scales)
    with np.errstate(invalid="ignore"):  # where a scale of Q8_0 overflows
        assert_same_bits(rounded(x), codes * np.repeat(scales, x.shape[1] // scales.shape[1], axis=1))


@pytest.mark.parametrize(
    ("quantize", "rounded", "size"), [(activations.q8_k, activations.round_as_q8_k, 256), (activations.q8_0, activations.round_as_q8_0, 32)]
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_visible_in_its_block(quantize, rounded, size, value):
    x = np.ones((2, 512), np.float32)
    x[1, 300] = value
    expected = (np.arange(512) // size == 300 // size) & (np.arange(2) == 1)[:, None]
    np.testing.assert_array_equal(np.isnan(rounded(x)), expected)
    codes, scale = quantize(x)
    np.testing.assert_array_equal(codes == 0, expected)
    np.testing.assert_array_equal(np.isnan(scale), expected[:, ::size])


@pytest.mark.parametrize("rounded", [activations.round_as_q8_k, activations.round_as_q8_0])
def test_numbers_too_small_to_divide_by_become_zeros(rounded):
    assert not rounded(np.full((1, 256), 1e-40, np.float32)).any()


def test_half_precision_rounds_half_to_even():
    """bfloat16 as gguf-py does; both directions of a tie, subnormal numbers, infinity, what overflows, NaN."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, (100, 1000), np.uint32)
    x[50:] = x[50:] & 0xFFFF8000  # ties of bfloat16
    x = x.view(np.float32)
    x[0, :3] = np.inf, -np.inf, 3.4e38
    bits = gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(activations.round_as_bf16(x), gguf.quants.dequantize(bits, gguf.GGMLQuantizationType.BF16))
    assert activations.round_as_bf16(x)[0, 2] == np.inf
    ties = np.float32([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 2**-25, 3 * 2**-25])[None]
    np.testing.assert_array_equal(activations.round_as_f16(ties), np.float32([[1, 1 + 2**-9, 65504, np.inf, 0, 2**-23]]))


def test_every_matrix_that_llama_cpp_multiplies_by_has_a_rounding():
    assert activations.ROUNDINGS.keys() == {F32, F16, BF16, *ALL_BLOCK_TYPES}
    x = np.float32([[1.00001, 3.14159]])
    assert activations.ROUNDINGS[F32](x) is x


@given(seed=seeds, exponent=st.integers(-30, 30))
def test_sums_are_those_of_codes_times_their_exact_scale(seed, exponent):
    x = np.ldexp(np.random.default_rng(seed).standard_normal((3, 96)), exponent).astype(np.float32)
    x[1, 32:64] = 0
    x[2] = 6e4  # sums beyond float16
    codes = ggml_q8_0(x)[0].reshape(3, 3, 32).sum(axis=2, dtype=np.int32)
    exact = np.abs(x.reshape(3, 3, 32)).max(axis=2) / np.float32(127)
    with np.errstate(over="ignore"):
        expected = (codes.astype(np.float32) * exact).astype(np.float16).astype(np.float32)
    assert_same_bits(activations.q8_1_sums(x), expected)
    assert np.isinf(expected[2]).all()
