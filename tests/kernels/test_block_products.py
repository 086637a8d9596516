"""Products of ggml's blocks by bytes: the bits of the definition in plain NumPy, at every edge, and llama.cpp's own recordings."""

from unittest import mock

import numpy as np
import pytest
from block_samples import MODELS, ROUNDINGS, activations, of_code, random_blocks, recorded, rounded, same_bytes
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import assert_same_bits, seeds, threads

from bitnet_np.base.block_formats import FORMATS
from bitnet_np.base.tensor_types import BLOCK_TYPES, F16, MXFP4, NVFP4, Q4_K, Q8_0
from bitnet_np.contract import blocks as definition
from bitnet_np.kernels import launching
from bitnet_np.kernels.ggml import blocks, products

ALL = pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)


@ALL
@given(seed=seeds, rows=st.integers(1, 70), per_row=st.integers(1, 9), tokens=st.integers(1, 35))
@example(seed=0, rows=65, per_row=9, tokens=33)
@example(seed=0, rows=16, per_row=4, tokens=16)
@settings(max_examples=15)
def test_products_have_the_bits_of_the_definition(kind, seed, rows, per_row, tokens):
    rng = np.random.default_rng(seed)
    matrix = random_blocks(rng, kind, rows, per_row)
    x = activations(rng, tokens, matrix.shape[1])
    expected = definition.product(*rounded(x, kind), matrix.data, kind)
    assert_same_bits(products.products(x, [matrix.data], kind)[0], expected)
    assert_same_bits(products.products(x[-1:], [matrix.data], kind)[0], expected[-1:])


@ALL
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x7F])
@pytest.mark.parametrize("code", [-127, 127, 0])
def test_the_largest_codes_of_both_sides_overflow_nothing(kind, byte, code):
    """All bytes of the blocks are alike, and all codes of the activations; the scales are 1, so that no rounding hides a wrong integer."""
    data = same_bytes(kind, byte)
    for tokens in (1, 5, 17):
        x = of_code(kind, tokens, code)
        q, scale, sums = rounded(x, kind)
        assert (np.delete(q, (0, 256), axis=1) == code).all()
        assert (scale == bool(code)).all()
        found = products.products(x, [data], kind)[0]
        assert_same_bits(found, definition.product(q, scale, sums, data, kind))


@ALL
@pytest.mark.parametrize("rows", [1, 17])
def test_scales_of_zero_and_not_finite_reach_their_rows_alone(kind, rows):
    """What is beyond the end of a row may be anything: one more infinity of the last block would not show, but one times a scale of 0."""
    rng = np.random.default_rng(0)
    matrix = random_blocks(rng, kind, 40, 3)
    data = matrix.data.copy()
    records = data.view(FORMATS[kind.name].layout)
    if kind is MXFP4:
        records["e"][3] = 0
    elif kind is NVFP4:
        records["d"][3] = 0
    else:
        records["d"][3], records["d"][17, 1], records["d"][20, 2], records["d"][39, 2] = 0, 0x7E00, 0x7C00, 0xFC00
    x = activations(rng, rows, matrix.shape[1])
    x[0] *= np.float32(1e30)  # whose scale is infinite in float16
    x[-1, :256] = 0
    expected = definition.product(*rounded(x, kind), data, kind)
    found = products.products(x, [data], kind)[0]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert_same_bits(found[~np.isnan(found)], expected[~np.isnan(expected)])
    if kind not in (MXFP4, NVFP4) and rows > 1:
        assert np.isnan(found[1:-1, 17]).all()
        assert np.isinf(found[1:-1, 20]).any()
        assert np.isfinite(np.delete(found[1:-1], (17, 20, 39), axis=1)).all()  # infinite units of both signs make row 39 NaN


@pytest.mark.parametrize("kind", [Q4_K, Q8_0], ids=lambda kind: kind.name)
def test_threads_do_not_change_a_bit(kind):
    rng = np.random.default_rng(0)
    matrix = random_blocks(rng, kind, 200, 2048 // kind.block)
    x = activations(rng, 130, 2048)
    expected = definition.product(*rounded(x, kind), matrix.data, kind)
    for count in (1, 4):
        with mock.patch.object(launching, "SMALL", 0), threads(count):
            for tokens in (1, 130):
                assert_same_bits(products.products(x[:tokens], [matrix.data], kind)[0], expected[:tokens])


@pytest.mark.parametrize("name", MODELS)
def test_recordings_of_llama_cpp_are_met_as_nearly_as_by_floats(name):
    """Nearer to them than rounded activations times dequantised weights in float32 are, over all matrices of a type."""
    integers, floats = {}, {}
    for tensor, x, output in recorded(name):
        if tensor.type is not F16:
            data = tensor.data.reshape(tensor.shape[0], -1)
            size = np.sqrt(np.mean(output.astype(np.float64) ** 2))
            found = blocks.matmuls_as_llama_cpp(x, (data, tensor.type))[0]
            other = blocks.matmul(ROUNDINGS[tensor.type](x), data, tensor.type)
            integers.setdefault(tensor.type, []).append(np.abs(found - output).max() / size)
            floats.setdefault(tensor.type, []).append(np.abs(other - output).max() / size)
    assert integers
    for kind, errors in integers.items():
        assert max(errors) < 2e-6
        assert max(errors) < max(floats[kind])
