"""Matmuls by matrices in block types: the bits of float32 matrices, and llama.cpp's roundings of activations against its own recordings."""

import numpy as np
import pytest
from block_samples import MODELS, ROUNDINGS, random_blocks, recorded
from models import assert_same_bits

from bitnet_np.base.block_formats import FORMATS
from bitnet_np.base.tensor_types import F16, Q4_1, Q5_K, Q8_0
from bitnet_np.kernels import cpu
from bitnet_np.kernels.ggml import blocks as kernels
from bitnet_np.kernels.tiles import DEPTH, PART
from bitnet_np.model import widen

# --- matmul ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Q5_K, Q8_0], ids=lambda kind: kind.name)
def test_wide_matrices_are_multiplied_strip_by_strip(kind):
    rng = np.random.default_rng(0)
    blocks = random_blocks(rng, kind, 50, (2 * DEPTH + 256) // kind.block)
    x = rng.standard_normal((PART + 3, blocks.shape[1])).astype(np.float32)
    out = kernels.matmul(x, blocks.data, kind)
    assert_same_bits(out, cpu.matmul(x, widen.float32(blocks)))
    for rows in (1, 5):
        assert_same_bits(kernels.matmul(x[:rows], blocks.data, kind), out[:rows])


@pytest.mark.parametrize("kind", [Q4_1, Q5_K], ids=lambda kind: kind.name)
def test_a_weight_that_is_not_finite_reaches_the_result(kind):
    blocks = random_blocks(np.random.default_rng(0), kind, 40, 2)
    data = blocks.data.copy()
    data.view(FORMATS[kind.name].layout)["d"][33, 1] = 0x7E00
    for rows in (1, 3):
        out = kernels.matmul(np.ones((rows, blocks.shape[1]), np.float32), data, kind)
        assert (np.isnan(out) == (np.arange(40) == 33)).all()


# --- llama.cpp's own matmuls ----------------------------------------------------------------------------------------------------------


def error(tensor, x, output):
    """The largest difference from llama.cpp's output, in units of its root mean square."""
    if tensor.type is F16:
        found = cpu.matmul(x, tensor.data.view(np.float16).reshape(tensor.shape))
    else:
        found = kernels.matmul(x, tensor.data.reshape(tensor.shape[0], -1), tensor.type)
    return np.abs(found - output).max() / np.sqrt(np.mean(output.astype(np.float64) ** 2))


@pytest.mark.parametrize("name", MODELS)
def test_rounded_activations_give_what_llama_cpp_recorded(name):
    """To what a sum in another order differs by; without the rounding, or with another, by a hundred times that."""
    seen = set()
    for tensor, x, output in recorded(name):
        seen.add(tensor.type.name)
        assert error(tensor, ROUNDINGS[tensor.type](x), output) < 5e-6
        for other in set(ROUNDINGS.values()) - {ROUNDINGS[tensor.type]}:
            assert error(tensor, other(x), output) > 2e-4
    assert seen == MODELS[name]
