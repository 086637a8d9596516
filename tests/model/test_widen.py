"""Tables as float32: every float type exactly, and blocks as gguf-py reads them (tests/kernels/test_quants.py: those that it cannot)."""

import gguf
import numpy as np
import pytest
from models import assert_same_bits

from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, FEW_BITS
from bitnet_np.model import widen
from bitnet_np.model.records import Blocks
from bitnet_np.testing.models import random_table

KINDS = ["float32", "float16", "bfloat16", *(kind.name for kind in ALL_BLOCK_TYPES)]


def by_gguf(table):
    """The same by gguf-py, from the bytes."""
    if isinstance(table, Blocks):
        return gguf.quants.dequantize(table.data, gguf.GGMLQuantizationType[table.type.name])
    kind = {"float32": "F32", "float16": "F16", "uint16": "BF16"}[str(table.dtype)]
    return gguf.quants.dequantize(table.view(np.uint8), gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {few.name for few in FEW_BITS}])
def test_a_table_is_what_gguf_reads(kind):
    table = random_table(np.random.default_rng(0), kind, 5, 512)
    assert_same_bits(widen.float32(table), by_gguf(table).reshape(5, 512))


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
