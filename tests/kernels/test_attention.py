"""Attention whose work is shared out by chunks, and its roundings to float16. The bits of each kernel: tests/test_contract.py."""

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same_bits, normal, seeds
from numba import njit

from bitnet_np.contract import f32
from bitnet_np.kernels import attention, cpu, launching, scalar


@given(
    seed=seeds,
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (5, 1), (8, 4), (20, 1), (34, 2)]),
    head_dim=st.sampled_from([1, 2, 6, 16, 20, 33, 64, 100, 128]),
    positions=st.lists(st.integers(0, 24) | st.sampled_from([60, 63, 64, 65, 126, 127, 128, 190, 260]), min_size=1, max_size=3),
    window=st.none() | st.sampled_from([1, 2, 5, 63, 64, 65, 128, 1000]),
)
def test_attention_of_single_rows_shared_out_by_chunks_is_the_same(seed, heads, head_dim, positions, window):
    """As where there are many threads and few heads. Windows begin anywhere in a chunk."""
    rng = np.random.default_rng(seed)
    q = normal(rng, len(positions), heads[0], head_dim) * f32(2)
    k, v = rng.standard_normal((2, len(positions), max(positions) + 1, heads[1], head_dim)).astype(np.float32)
    slot, position = np.arange(len(positions)), np.array(positions)
    expected, launched = cpu.attend(q, k, v, slot, position, window), []

    def launch(kernel, *args):
        launched.append(kernel)
        kernel.run((launching._ALONE, 0), *args[1:])

    with mock.patch.multiple(attention, _LONG=0, get_num_threads=lambda: 1000, launch=launch, empty=full_of_nan):
        assert_same_bits(cpu.attend(q, k, v, slot, position, window), expected)
    assert launched == [attention._attend_chunks, attention._fold_chunks]


def full_of_nan(shape, dtype=np.float32):
    return np.full(shape, np.nan, dtype)


@njit
def rounded_to_half(x, out):
    for i in range(x.size):
        out[i] = scalar.round_to_half(x[i])


def test_round_to_half():
    """At every float16, at every boundary between two, and beside those; and at numbers in between."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    rng = np.random.default_rng(0)
    random = rng.integers(0, f32(65504).view(np.uint32), 200_000, np.uint32).view(np.float32)
    x = np.concatenate([halves, middles, np.nextafter(middles, f32(0)), np.nextafter(middles, f32(1e9)), random])
    out = np.empty_like(x)
    rounded_to_half(x, out)
    assert_same_bits(out, x.astype(np.float16).astype(np.float32))
