"""The layouts of ternary matrices, I2_S and packed."""

from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import seeds, threads

from bitnet_np.base.errors import ShapeError
from bitnet_np.kernels import packing as kernels
from bitnet_np.kernels.checks import has_code_three
from bitnet_np.model import packing, ternarize

SIZES = st.integers(1, 40) | st.sampled_from([63, 64, 65, 130])
matrices = st.tuples(
    st.integers(1, 5) | st.sampled_from([15, 16, 17, 33]),
    st.integers(1, 400) | st.sampled_from([127, 128, 129, 255, 256, 257]),
    st.integers(0, 2**32 - 1),
)


@given(shape=matrices, scale=st.floats(0, 100, width=32))
def test_packed_is_the_released_layout(shape, scale):
    n, m, seed = shape
    matrix = np.random.default_rng(seed).integers(-1, 2, (n, m)).astype(np.int8)
    packed = packing.pack(matrix, scale)
    np.testing.assert_array_equal(packing.unpack(packed), matrix)
    assert packing.unpack(packed).dtype == np.int8
    assert (packed.shape, packed.scale) == ((n, m), np.float32(scale))
    blocks = -(-m // 128)
    assert packing.i2s_row_bytes(m) == 32 * blocks
    i2s = packing.to_i2s(packed)
    assert i2s.size == 32 * blocks * n + 32
    assert i2s[-32:-28].view("<f4")[0] == np.float32(scale)
    row, column = np.divmod(np.arange(n * blocks * 128), blocks * 128)
    element = column % 128
    byte = i2s[row * blocks * 32 + column // 128 * 32 + element % 32]
    codes = (byte >> (6 - 2 * (element // 32)) & 3).reshape(n, -1)
    np.testing.assert_array_equal(codes[:, :m], matrix + 1)
    assert (codes[:, m:] == 1).all()  # zero weights fill the last block
    again = ternarize.from_i2s(i2s, scale, (n, m))
    assert (again.shape, again.scale) == (packed.shape, packed.scale)
    np.testing.assert_array_equal(again.codes, packed.codes)


@given(shape=matrices)
def test_packed_rows_are_side_by_side(shape):
    """16 columns of 16 rows in 64 bytes: column c in byte 4 * row + c % 4 at bits 6 - 2 * (c // 4), and zero weights around the matrix."""
    n, m, seed = shape
    matrix = np.random.default_rng(seed).integers(-1, 2, (n, m)).astype(np.int8)
    codes = packing.pack(matrix, 1.0).codes
    groups, steps = -(-n // 16), -(-m // 16)
    row, column = np.divmod(np.arange(groups * 16 * steps * 16), steps * 16)
    byte = codes[(row // 16 * steps + column // 16) * 64 + row % 16 * 4 + column % 4]
    whole = np.zeros((groups * 16, steps * 16), np.int8)
    whole[:n, :m] = matrix
    np.testing.assert_array_equal((byte >> (6 - 2 * (column % 16 // 4)) & 3).reshape(whole.shape), whole + 1)
    assert codes.size == groups * steps * 64


def test_too_few_bytes_are_refused():
    with pytest.raises(ShapeError, match=r"shape \(2, 130\) has 127 bytes of I2_S codes, expected 128"):
        ternarize.from_i2s(np.zeros(127, np.uint8), 1.0, (2, 130))


@pytest.mark.parametrize(
    "matrix", [[[2]], [[-2, 0]], [[0.5]], [[nan]], [[1, 0], [0, 3]], [1, 0], 1, [[]], np.zeros((0, 4)), np.zeros((1, 1, 1))]
)
def test_only_ternary_matrices_can_be_packed(matrix):
    with pytest.raises(ShapeError, match="a ternary matrix has"):
        packing.pack(np.array(matrix), 1.0)


def test_packed_matrices_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        packing.pack(np.ones((1, 1)), 1.0).codes[0] = 0


@given(seeds, SIZES, SIZES, st.sampled_from([1, 3]))
def test_codes_of_four_quarters(seed, n, m, count):
    """Row i * ceil(N / 4) + r is in bits 2i and 2i + 1 of row r. Beyond N is padding, whatever is in it; a 3 before stays one."""
    rng = np.random.default_rng(seed)
    height = -(-n // 4)
    rows = rng.integers(0, 4, (4 * height, m))
    rows[:n] = rng.integers(0, 3, (n, m))

    def bytes_of(rows):
        return sum(rows[i * height : (i + 1) * height] << 2 * i for i in range(4)).astype(np.uint8)

    with threads(count):
        packed = kernels.from_quarters(bytes_of(rows), n)
        assert not has_code_three(packed)
        np.testing.assert_array_equal(packed, packing.pack(rows[:n].astype(np.int8) - 1, 1.0).codes)
        rows[rng.integers(n), rng.integers(m)] = 3
        assert has_code_three(kernels.from_quarters(bytes_of(rows), n))
