"""Products of ggml's blocks by bytes: the bits of the definition in plain NumPy, at every edge, and llama.cpp's own recordings."""

import ctypes
import mmap
import sys

import numpy as np
import pytest
from block_samples import MODELS, activations, of_code, random_blocks, recorded, rounded, same_bytes
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same_bits, seeds, threads

from bitnet_np.base.tensor_types import BLOCK_TYPES, F16, GRID_TYPES, MXFP4, NVFP4, Q4_K, Q6_K, Q8_0
from bitnet_np.contract import blocks as definition
from bitnet_np.kernels import activations as roundings
from bitnet_np.kernels import block_products, blocks, grids
from bitnet_np.kernels.block_formats import FORMATS
from bitnet_np.kernels.block_plans import PLANS
from bitnet_np.kernels.fast import amx

ALL = pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)


@ALL
@given(seed=seeds, n=st.integers(1, 70), per_row=st.integers(1, 9), rows=st.integers(1, 14))
def test_products_have_the_bits_of_the_definition(kind, seed, n, per_row, rows):
    rng = np.random.default_rng(seed)
    matrix = random_blocks(rng, kind, n, per_row)
    x = activations(rng, rows, matrix.shape[1])
    expected = definition.product(*rounded(x, kind), matrix.data, kind)
    assert_same_bits(blocks.matmuls_as_llama_cpp(x, (matrix.data, kind))[0], expected)
    for row in range(rows):
        assert_same_bits(blocks.matmuls_as_llama_cpp(x[row : row + 1], (matrix.data, kind))[0], expected[row : row + 1])


@ALL
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x7F])
@pytest.mark.parametrize("code", [-127, 127, 0])
def test_the_largest_codes_of_both_sides_overflow_nothing(kind, byte, code):
    """All bytes of the blocks are alike, and all codes of the activations; the scales are 1, so that no rounding hides a wrong integer."""
    data = same_bytes(kind, byte)
    for rows in (1, 5):
        x = of_code(kind, rows, code)
        q, scale, sums = rounded(x, kind)
        assert (np.delete(q, (0, 256), axis=1) == code).all()
        assert (scale == bool(code)).all()
        expected = definition.product(q, scale, sums, data, kind)
        assert_same_bits(block_products.products(x, [data], kind)[0], expected)


@ALL
@pytest.mark.parametrize("rows", [1, 7])
def test_scales_of_zero_and_not_finite_reach_their_rows_alone(kind, rows):
    rng = np.random.default_rng(0)
    matrix = random_blocks(rng, kind, 40, 3)
    data = matrix.data.copy()
    records = data.view(FORMATS[kind.name].layout)
    if kind is MXFP4:
        records["e"][3] = 0
    elif kind is NVFP4:
        records["d"][3] = 0
    else:
        records["d"][3], records["d"][17, 1], records["d"][39, 2] = 0, 0x7E00, 0xFC00
    x = activations(rng, rows, matrix.shape[1])
    x[0] *= np.float32(1e30)  # whose scale is infinite in float16
    x[-1, :256] = 0
    expected = definition.product(*rounded(x, kind), data, kind)
    found = blocks.matmuls_as_llama_cpp(x, (data, kind))[0]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    assert_same_bits(found[~np.isnan(found)], expected[~np.isnan(expected)])
    if kind not in (MXFP4, NVFP4) and rows > 1:
        assert np.isnan(found[1:-1, 17]).all()
        assert np.isfinite(np.delete(found[1:-1], (17, 39), axis=1)).all()  # infinite units of both signs make row 39 NaN


@pytest.mark.parametrize("kind", [Q4_K, Q8_0], ids=lambda kind: kind.name)
def test_a_number_that_is_not_finite_makes_its_row_nan(kind):
    rng = np.random.default_rng(0)
    matrix = random_blocks(rng, kind, 40, 16)
    x = activations(rng, 5, matrix.shape[1])
    x[2, 300] = np.inf
    assert (np.isnan(blocks.matmuls_as_llama_cpp(x, (matrix.data, kind))[0]) == (np.arange(5) == 2)[:, None]).all()
    assert np.isnan(blocks.matmuls_as_llama_cpp(x[2:3], (matrix.data, kind))[0]).all()


@pytest.mark.parametrize("kind", [Q4_K, Q6_K, Q8_0], ids=lambda kind: kind.name)
def test_threads_do_not_change_a_bit(monkeypatch, kind):
    monkeypatch.setattr(amx, "unit", lambda: None)
    rng = np.random.default_rng(0)
    matrix = random_blocks(rng, kind, 200, 2048 // kind.block)
    x = activations(rng, 130, 2048)
    expected = definition.product(*rounded(x, kind), matrix.data, kind)
    for count in (1, 4):
        with threads(count):
            assert_same_bits(blocks.matmuls_as_llama_cpp(x, (matrix.data, kind))[0], expected)
            assert_same_bits(blocks.matmuls_as_llama_cpp(x[:1], (matrix.data, kind))[0], expected[:1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="takes access to a page away as Linux does")
@ALL
def test_nothing_after_the_last_block_is_read(kind):
    """It lies at the end of a page, and the next page may not be touched."""
    pages = mmap.mmap(-1, 5 * mmap.PAGESIZE)
    whole = np.frombuffer(pages, np.uint8)
    matrix = random_blocks(np.random.default_rng(0), kind, 5, 3)
    data = whole[4 * mmap.PAGESIZE - matrix.data.size : 4 * mmap.PAGESIZE].reshape(matrix.data.shape)
    data[:] = matrix.data
    guard = ctypes.c_void_p(whole.ctypes.data + 4 * mmap.PAGESIZE)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    x = activations(np.random.default_rng(1), 3, matrix.shape[1])
    for rows in (1, 3):
        expected = blocks.matmuls_as_llama_cpp(x[:rows], (matrix.data, kind))[0]
        assert_same_bits(blocks.matmuls_as_llama_cpp(x[:rows], (data, kind))[0], expected)


@pytest.mark.parametrize("name", MODELS)
def test_recordings_of_llama_cpp_are_met_as_nearly_as_by_floats(name):
    """Nearer to them than rounded activations times dequantised weights in float32 are, over all matrices of a type."""
    integers, floats = {}, {}
    for tensor, x, output in recorded(name):
        if tensor.type is not F16:
            data = tensor.data.reshape(tensor.shape[0], -1)
            size = np.sqrt(np.mean(output.astype(np.float64) ** 2))
            found = blocks.matmuls_as_llama_cpp(x, (data, tensor.type))[0]
            other = blocks.matmul(roundings.ROUNDINGS[tensor.type](x), data, tensor.type)
            integers.setdefault(tensor.type, []).append(np.abs(found - output).max() / size)
            floats.setdefault(tensor.type, []).append(np.abs(other - output).max() / size)
    assert integers
    for kind, errors in integers.items():
        assert max(errors) < 2e-6
        assert max(errors) < max(floats[kind])


@pytest.mark.parametrize("kind", GRID_TYPES, ids=lambda kind: kind.name)
def test_types_of_a_grid_multiply_rounded_numbers_as_floats(kind):
    rng = np.random.default_rng(0)
    data = grids.with_scales(rng.integers(0, 256, (9, 2 * kind.block_bytes), np.uint8), kind, np.full(18, 0x2C00, np.uint16))
    x = activations(rng, 3, 512)
    assert_same_bits(blocks.matmuls_as_llama_cpp(x, (data, kind))[0], blocks.matmul(roundings.round_as_q8_k(x), data, kind))


@ALL
def test_a_plan_takes_each_run_once(kind):
    plan = PLANS[kind.name]
    assert sorted(plan.order) == list(range(plan.weights // 16))
    assert plan.unit * plan.units == plan.weights
    assert max(map(abs, plan.code_range)) <= 128
