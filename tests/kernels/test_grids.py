"""Matrices in types whose weights are rows of a grid: in pieces, the bits of float32 matrices; their scales."""

import numpy as np
import pytest
from models import assert_same_bits

from bitnet_np.base.tensor_types import GRID_TYPES, IQ1_M
from bitnet_np.kernels import cpu
from bitnet_np.kernels.ggml import blocks as kernels
from bitnet_np.kernels.ggml import grids
from bitnet_np.model import widen
from bitnet_np.testing.models import random_table

EACH_TYPE = pytest.mark.parametrize("kind", GRID_TYPES, ids=lambda kind: kind.name)


@EACH_TYPE
def test_products_and_rows_are_those_of_a_float_matrix(kind, monkeypatch):
    monkeypatch.setattr(grids, "_CHUNK", 3 * 512)  # rows come in threes, and one is left
    rng = np.random.default_rng(kind.number)
    table = random_table(rng, kind.name, 7, 512)
    matrix, x = widen.float32(table), rng.standard_normal((4, 512)).astype(np.float32)
    for rows in (0, 1, 4):
        assert_same_bits(kernels.matmul(x[:rows], table.data, kind), cpu.matmul(x[:rows], matrix))
    for tokens in ([], [6], [3, 0, 3]):
        assert_same_bits(kernels.embed(table.data, kind, np.array(tokens, np.int64)), matrix[tokens])


@EACH_TYPE
def test_scales_are_what_all_weights_of_a_block_are_multiples_of(kind):
    """Any bits of float16, in blocks of random bytes: the weights are those of the scale 1, times the scale."""
    rng = np.random.default_rng(kind.number)
    data = rng.integers(0, 256, (128, 2 * kind.block_bytes), np.uint8)
    bits = rng.integers(0, 1 << 16, 256, np.uint16)
    changed = grids.with_scales(data, kind, bits)
    np.testing.assert_array_equal(grids.scales(changed, kind), bits)
    assert (data != changed).sum() <= 256 * (4 if kind is IQ1_M else 2)
    unit = grids.weights(grids.with_scales(data, kind, np.full(256, 0x3C00, np.uint16)), kind).reshape(256, 256)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(
            grids.weights(changed, kind).reshape(256, 256), unit * bits.view(np.float16).astype(np.float32)[:, None]
        )
