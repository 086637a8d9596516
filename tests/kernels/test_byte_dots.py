"""Ternary products of many tokens, whose codes are unpacked once: the bits, the largest sums, and the instructions of each path."""

from unittest import mock

import contract
import numpy as np
import pytest
from assembly import ARM, X86, assembly, lowered
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import assert_same_bits, seeds
from numba import njit, types

from bitnet_np import packing
from bitnet_np.kernels import cpu, launching, ternary_product
from bitnet_np.kernels.fast import amx, byte_dots, simd


@pytest.fixture(scope="module", autouse=True)
def many():
    """One token is many, here, on any processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx, "unit", lambda: None)
        patch.setattr(ternary_product, "LEAST", 1)
        yield


@pytest.mark.parametrize("small", [0, 1 << 60], ids=["shared", "alone"])
@given(
    seed=seeds,
    rows=st.integers(1, 20),
    width=st.integers(1, 800),
    heights=st.lists(st.integers(1, 140), min_size=1, max_size=3),
)
@example(seed=0, rows=5, width=257, heights=[65, 16, 1])  # one step more than words hold
@example(seed=0, rows=4, width=256, heights=[64])
@settings(max_examples=30)
def test_products_have_the_bits_of_the_contract(small, seed, rows, width, heights):
    rng = np.random.default_rng(seed)
    q, scale = rng.integers(-127, 128, (rows, width)).astype(np.int8), np.exp2(rng.uniform(-5, 20, rows)).astype(np.float32)
    matrices = [rng.integers(-1, 2, (height, width)) for height in heights]
    packed = [packing.pack(matrix, rng.uniform(0.01, 2)) for matrix in matrices]
    with mock.patch.object(launching, "SMALL", small):
        results = cpu.ternary_matmuls(q, scale, *((p.codes, p.scale, p.shape[0]) for p in packed))
    for result, matrix, weights in zip(results, matrices, packed, strict=True):
        assert_same_bits(result, contract.ternary_matmul(q, scale, matrix, weights.scale))


@pytest.mark.parametrize("code", [-128, -127, 127])
def test_the_largest_sums_fit(code):
    """Words hold 16 bits. A code of -128 comes from no quantiser, but from callers."""
    q, ones = np.full((5, 1024), code, np.int8), np.ones((40, 1024), int)
    weights = packing.pack(ones, 1.0)
    assert (cpu.ternary_matmul(q, np.ones(5, np.float32), weights.codes, weights.scale, 40) == 1024 * code).all()


# --- read, not run --------------------------------------------------------------------------------------------------------------------

GROUPS, TOKENS = 2, 2


@njit
def _steps(count, codes, q, x, stride, valid, out):
    tile = simd.tile_i32(GROUPS, TOKENS)
    sums = byte_dots.open_sums(tile)
    for _ in range(count):
        sums = byte_dots.dot_sixteen(sums, codes, 4096, q, x, stride, valid)
        codes += 256
        x += 16
    simd.store_tile(byte_dots.close_sums(tile, sums), out, 0, 32)


@pytest.mark.parametrize(
    ("path", "triple", "processor", "features", "instruction", "count"),
    [
        ("avx512-vnni", X86, "icelake-server", "", "vpdpbusd", 16),
        ("avx512", X86, "skylake-avx512", "", "vpmaddubsw", 16),
        ("avx-vnni", X86, "alderlake", "", "vpdpbusd", 32),
        ("avx2", X86, "haswell", "", "vpmaddubsw", 32),
        ("ssse3", X86, "nehalem", "", "pmaddubsw", 64),
        ("neon-dotprod", ARM, "generic", "+dotprod", "sdot", 64),
    ],
)
def test_a_step_is_one_product_for_each_register(path, triple, processor, features, instruction, count):
    """Of 2 x 2 sums, four registers of codes each. Sums of words are added up after the loop, by as many instructions as they have
    registers; nothing else in the loop adds up, and nothing is put in order there."""
    n, q, out = types.intp, types.Array(types.int8, 2, "C"), types.Array(types.int32, 1, "C")
    lines = assembly(lowered(_steps, (n, n, q, n, n, n, out), path), triple, processor, features)
    names = [line[1] if line[0] == "{vex}" else line[0] for line in lines if line]
    assert names.count(instruction) == count
    added_up = [name for name in names if name in ("vpmaddwd", "pmaddwd")]
    assert len(added_up) == (count // 4 if "maddubsw" in instruction else 0)
    first, last = names.index(instruction), len(names) - names[::-1].index(instruction)
    between = names[first:last]
    orders = [name for name in between if name.startswith(("zip", "uzp", "trn", "tbl", "ext", "vpshuf", "vpunpck", "vperm"))]
    assert orders == []
