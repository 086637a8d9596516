"""Roundings of activations: llama.cpp's own, number by number, and every edge of the formats."""

import gguf
import numpy as np
import pytest

from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, BF16, F16, F32
from bitnet_np.kernels import activations


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
