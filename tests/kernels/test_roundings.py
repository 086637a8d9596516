"""Roundings to half precision. Those to bytes: tests/test_contract.py, tests/engine/test_cache_types.py."""

import gguf
import numpy as np

from bitnet_np.kernels.cpu import round_as


def test_half_precision_rounds_half_to_even():
    """bfloat16 as gguf-py does; both directions of a tie, subnormal numbers, infinity, what overflows, NaN."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, (100, 1000), np.uint32)
    x[50:] = x[50:] & 0xFFFF8000  # ties of bfloat16
    x = x.view(np.float32)
    x[0, :3] = np.inf, -np.inf, 3.4e38
    bits = gguf.quants.quantize(x, gguf.GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(round_as(x, "bfloat16"), gguf.quants.dequantize(bits, gguf.GGMLQuantizationType.BF16))
    assert round_as(x, "bfloat16")[0, 2] == np.inf
    ties = np.float32([1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 2**-25, 3 * 2**-25])[None]
    np.testing.assert_array_equal(round_as(ties, "float16"), np.float32([[1, 1 + 2**-9, 65504, np.inf, 0, 2**-23]]))
