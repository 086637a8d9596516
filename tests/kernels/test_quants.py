"""ggml's block types: the tables, gguf-py's answers, and ternary matrices in TQ1_0 and TQ2_0. And I2_S's other layouts."""

from unittest import mock

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, seeds

from bitnet_np.base.block_formats import FORMATS
from bitnet_np.base.errors import FileFormatError, ShapeError
from bitnet_np.base.tensor_types import (
    ALL_BLOCK_TYPES,
    BLOCK_TYPES,
    BY_NUMBER,
    FEW_BITS,
    GRID_TYPES,
    MXFP4,
    NVFP4,
    Q1_0,
    READABLE,
    REFUSED,
    TERNARY_TYPES,
    TQ2_0,
    TensorType,
)
from bitnet_np.kernels.ggml import blocks as kernels
from bitnet_np.model import packing, ternarize, widen
from bitnet_np.model.records import Blocks, frozen


def random_blocks(rng: np.random.Generator, kind: TensorType, n: int, per_row: int) -> Blocks:
    """Random bytes: any scale, NaN and infinity too."""
    data = rng.integers(0, 256, (n, per_row * kind.block_bytes), np.uint8)
    return frozen(Blocks(data, kind, (n, per_row * kind.block)))


def quantized(matrix: np.ndarray, kind: TensorType) -> Blocks:
    """By gguf-py."""
    data = gguf.quants.quantize(matrix.astype(np.float32), gguf.GGMLQuantizationType(kind.number))
    return frozen(Blocks(data, kind, matrix.shape))


# --- tables ---------------------------------------------------------------------------------------------------------------------------


def test_what_can_be_read_is_what_the_tables_say():
    assert {kind.name for kind in READABLE} == {"F32", "F16", "BF16", "F64", "I2_S"} | FORMATS.keys() | {kind.name for kind in GRID_TYPES}
    assert not REFUSED.keys() & BY_NUMBER.keys()
    assert {kind.name for kind in BY_NUMBER.values()} >= {kind.name for kind in gguf.GGMLQuantizationType}


# --- weights --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_weights_are_those_of_gguf_py(kind):
    """And those of `widen`, where gguf-py has not the type. Of random bytes: every code with every scale, in bits; NaN as such."""
    rng = np.random.default_rng(kind.number)
    blocks = random_blocks(rng, kind, 64000 // kind.block, 3)
    data = blocks.data.copy()
    records = data.view(FORMATS[kind.name].layout)
    for column, half in enumerate(FORMATS[kind.name].float16_fields):  # in one block the scale, in another the minimum
        records[half][:4, column] = [0x7C00, 0xFC00, 0x0001, 0x8000]  # infinities, the least subnormal, -0
    expected = widen.float32(Blocks(data, kind, blocks.shape))
    tokens = rng.permutation(len(expected))
    rows, expected = kernels.embed(data, kind, tokens), expected[tokens]
    nan = np.isnan(expected)
    assert nan.any() == bool(FORMATS[kind.name].float16_fields)
    assert np.isinf(expected).any() or kind is NVFP4
    assert (nan == np.isnan(rows)).all()
    assert_same_bits(np.where(nan, np.float32(0), rows), np.where(nan, np.float32(0), expected))


def few_bits(block: np.ndarray, kind: TensorType) -> list[float]:
    """The weights of a block, one by one, as ggml-quants.c has them: dequantize_row_q1_0 and dequantize_row_q2_0."""
    scale = float(block[:2].view(np.float16)[0])
    if kind is Q1_0:
        return [scale if block[2 + j // 8] >> j % 8 & 1 else -scale for j in range(kind.block)]
    return [scale * (int(block[2 + j // 4] >> j % 4 * 2 & 3) - 1) for j in range(kind.block)]


@pytest.mark.parametrize("kind", FEW_BITS, ids=lambda kind: kind.name)
def test_weights_of_types_that_gguf_py_has_not(kind):
    data = np.random.default_rng(0).integers(0, 256, (3, 2 * kind.block_bytes), np.uint8)
    data.view(FORMATS[kind.name].layout)["d"] &= 0xBFFF  # no infinity, no NaN
    expected = [[*few_bits(row[: kind.block_bytes], kind), *few_bits(row[kind.block_bytes :], kind)] for row in data]
    np.testing.assert_array_equal(widen.float32(Blocks(data, kind, (3, 2 * kind.block))), expected)
    assert len({value for row in expected for value in row}) == 6 * (2 if kind is Q1_0 else 4) - (kind is not Q1_0) * 5  # one zero


@pytest.mark.parametrize("kind", ALL_BLOCK_TYPES, ids=lambda kind: kind.name)
@given(seed=seeds, n=st.integers(1, 4))
@settings(max_examples=40)
def test_scales_show_whether_a_weight_is_not_finite(kind, seed, n):
    """One scale in 32 is infinite or none, wherever it is: five blocks are looked at together."""
    blocks = random_blocks(np.random.default_rng(seed), kind, n, 4)
    with mock.patch.object(kernels, "_CHECKED", 5):
        assert kernels.has_non_finite(blocks.data, kind) == (not np.isfinite(widen.float32(blocks)).all())


def test_powers_of_two_that_make_a_weight_infinite_are_found(monkeypatch):
    """Of MXFP4, whose largest code is 12. The check looks at the codes of such blocks alone."""
    monkeypatch.setattr(kernels, "_CHECKED", 5)
    for byte, code, found in ((252, 7, False), (253, 5, False), (253, 6, True), (253, 15, True), (255, 9, False), (255, 2, True)):
        for at in (0, 4, 5, 11):
            data = np.full((4, 3 * MXFP4.block_bytes), 0x11, np.uint8)
            data.view(FORMATS["MXFP4"].layout).reshape(-1)[at] = (byte, [code << 4] * 16)
            assert kernels.has_non_finite(data, MXFP4) == found
            assert np.isfinite(widen.float32(Blocks(data, MXFP4, (4, 96)))).all() != found


# --- ternary matrices -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TERNARY_TYPES, ids=lambda kind: kind.name)
@given(seed=seeds, scale=st.sampled_from([0x3555, 0x0100, 0x0001]))
def test_any_bytes_are_the_weights_that_ggml_reads_in_them(kind, seed, scale):
    """Bytes of TQ1_0 that nothing writes too, and codes in blocks that have the scale 0; the least scale is not 0."""
    rng = np.random.default_rng(seed)
    blocks = random_blocks(rng, kind, 7, 2)
    data = blocks.data.copy()
    records = data.view(FORMATS[kind.name].layout)
    records["d"] = rng.choice(np.array([0, 0x8000, scale], np.uint16), records.shape, p=[0.1, 0.1, 0.8])
    if kind is TQ2_0:
        records["qs"] &= ~(records["qs"] & 0xAA & records["qs"] << 1)  # 3 becomes 1
    blocks = Blocks(data, kind, blocks.shape)
    found = ternarize.from_blocks(blocks)
    np.testing.assert_array_equal(packing.unpack(found) * found.scale, widen.float32(blocks))


@pytest.mark.parametrize("kind", TERNARY_TYPES, ids=lambda kind: kind.name)
def test_all_zeros_are_ternary_and_other_scales_are_not(kind):
    matrix = np.ones((2, 512))
    zeros = ternarize.from_blocks(quantized(0 * matrix, kind))
    assert zeros.scale == 0
    assert not packing.unpack(zeros).any()
    assert ternarize.from_blocks(quantized(matrix, kind)) is not None
    matrix[1, 300:] = 2
    assert ternarize.from_blocks(quantized(matrix, kind)) is None
    for bits in (0xBC00, 0x7C00, 0x7E00):  # -1, infinity, NaN
        blocks = quantized(np.ones((1, 256)), kind)
        data = blocks.data.copy()
        data.view(FORMATS[kind.name].layout)["d"] = bits
        assert ternarize.from_blocks(Blocks(data, kind, blocks.shape)) is None


@pytest.mark.parametrize("lane", range(4))
def test_the_code_three_is_refused(lane, monkeypatch):
    """Where the bits of two codes that are not 3 make up two ones, none is found."""
    monkeypatch.setattr(kernels, "_CHECKED", 3)
    data = np.full((4, 2 * TQ2_0.block_bytes), 0b01100110, np.uint8)
    data.view(FORMATS["TQ2_0"].layout)["d"] = 0x3C00
    assert not kernels.has_code_three(data)
    for at in np.ndindex(4, 2):
        damaged = data.copy()
        damaged[at[0], at[1] * TQ2_0.block_bytes + 4] |= 3 << 2 * lane
        assert kernels.has_code_three(damaged)
    data[2, 4] |= 3 << 2 * lane
    with pytest.raises(FileFormatError, match="code 3"):
        ternarize.from_blocks(Blocks(data, TQ2_0, (4, 512)))


# --- the other layouts of I2_S --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [packing.from_arm_layout, packing.from_four_row_layout])
def test_bytes_that_do_not_fit_the_shape_are_refused(convert):
    with pytest.raises(ShapeError, match="expected 160"):
        convert(np.zeros(161, np.uint8), (4, 128))
    with pytest.raises(ShapeError, match="192 weights"):
        convert(np.zeros(4 * 48 + 32, np.uint8), (4, 192))


def test_four_rows_to_a_byte_need_fours_of_rows():
    with pytest.raises(ShapeError, match="6 rows"):
        packing.from_four_row_layout(np.zeros(6 * 32 + 32, np.uint8), (6, 128))
