"""Tables as float32: every float type exactly. Blocks are read by gguf-py, or as tests/kernels/test_quants.py says."""

import numpy as np
import pytest
from models import assert_same_bits

from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES
from bitnet_np.model import widen
from bitnet_np.testing.models import random_table

KINDS = ["float32", "float16", "bfloat16", *(kind.name for kind in ALL_BLOCK_TYPES)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[3, 0, 3], slice(1, 4)], ids=["list", "slice"])
def test_some_rows_are_those_of_the_whole(kind, rows):
    table = random_table(np.random.default_rng(1), kind, 5, 256)
    assert_same_bits(widen.take(table, rows), widen.float32(table)[rows])


def test_every_half_and_every_bfloat16_is_exact():
    bits = np.arange(2**16, dtype=np.uint16).reshape(1, -1)
    halves = widen.float32(bits.view(np.float16))
    np.testing.assert_array_equal(halves, bits.view(np.float16).astype(np.float64))
    assert (widen.float32(bits).view(np.uint32) == bits.astype(np.uint32) << 16).all()
