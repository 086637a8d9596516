"""The attention kernels against exact arithmetic, and against each other to the bit."""

from unittest import mock

import bounds
import numpy as np
import pytest
from bounds import assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, normal, seeds
from numba import njit

from bitnet_np import contract, spec
from bitnet_np.contract import f32
from bitnet_np.kernels import attention, cpu, scalar
from bitnet_np.kernels.masks import attend_masked


def attention_case(rng, heads, kv_heads, head_dim, sequences, capacity):
    """q, k, v and the rows' slots and positions. `sequences`: (slot, first position, rows) of each; NaN wherever no query may look."""
    slot = np.repeat([s for s, _, _ in sequences], [n for _, _, n in sequences])
    position = np.concatenate([np.arange(first, first + n) for _, first, n in sequences])
    q = normal(rng, len(slot), heads, head_dim) * f32(2)
    k, v = rng.standard_normal((2, max(slot) + 1, capacity, kv_heads, head_dim)).astype(np.float32)
    for s, first, n in sequences:
        k[s, first + n :] = v[s, first + n :] = np.nan
    return q, k, v, slot, position


attentions = {
    "seed": seeds,
    "heads": st.sampled_from([(1, 1), (4, 4), (6, 2), (5, 1), (8, 4), (20, 1), (34, 2)]),
    "head_dim": st.sampled_from([1, 2, 6, 16, 20, 33, 64, 100, 128]),
    "firsts": st.lists(st.integers(0, 5) | st.sampled_from([60, 63, 64, 65, 126, 127, 128, 190]), min_size=1, max_size=3),
    "count": st.integers(1, 20) | st.just(70),  # 70 rows may be one run of queries that chunks end within
}


@settings(max_examples=150)
@given(**attentions, window=st.none() | st.sampled_from([1, 2, 5, 63, 64, 65, 128, 1000]))
def test_attend(seed, heads, head_dim, firsts, count, window):
    """Ragged sequences in permuted slots. No row sees the future, another sequence, or past its window: there NaN lies in wait."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(len(firsts) + 1)
    sequences = [(int(s), first, int(rng.integers(1, count + 1))) for s, first in zip(slots, firsts, strict=False)]
    q, k, v, slot, position = attention_case(rng, *heads, head_dim, sequences, capacity=max(firsts) + count)
    out = cpu.attend(q, k, v, slot, position, window)
    assert_within(out, *bounds.attend(q, k, v, slot, position, window))
    some = rng.permutation(len(slot))[:4]
    assert_same_bits(out[some], contract.attend(q[some], k, v, slot[some], position[some], window))

    order = rng.permutation(len(slot))  # rows need not be neighbours
    assert_same_bits(cpu.attend(q[order], k, v, slot[order], position[order], window), out[order])


@settings(max_examples=40)
@given(
    **attentions,
    window=st.none() | st.sampled_from([2, 64, 65]),
    scale=st.none() | st.sampled_from([0.05, 0.5]),
    cap=st.sampled_from([0.5, 3.0, 50.0]),
)
def test_attend_with_another_scale_and_capped_scores(seed, heads, head_dim, firsts, count, window, scale, cap):
    rng = np.random.default_rng(seed)
    sequences = [(slot, first, count) for slot, first in enumerate(firsts)]
    q, k, v, slot, position = attention_case(rng, *heads, head_dim, sequences, capacity=max(firsts) + count)
    how = None if scale is None else f32(scale), f32(cap)
    exact = None if scale is None else float(how[0]), float(how[1])
    out, halves = cpu.attend(q, k, v, slot, position, window, *how), cpu.attend_float16(q, k, v, slot, position, window, *how)
    assert_within(out, *bounds.attend(q, k, v, slot, position, window, *exact))
    some = rng.permutation(len(slot))[:3]
    rest = q[some], k, v, slot[some], position[some], window, *how
    assert_same_bits(out[some], contract.attend(*rest))
    assert_same_bits(halves[some], contract.attend_float16(*rest))
    if window is None:
        seen = np.where(np.tri(k.shape[1], dtype=bool), f32(0), f32(-np.inf))[None]
        finite = np.nan_to_num(k), np.nan_to_num(v)
        assert_same_bits(attend_masked(q, *finite, slot, position, seen, *how), cpu.attend(q, *finite, slot, position, None, *how))


@pytest.mark.parametrize("window", [None, 3, 64])
@pytest.mark.parametrize(("kept", "value"), [("k", np.nan), ("v", np.nan), ("v", np.inf)])
@pytest.mark.parametrize("at", [0, 1, 62, 64, 99])
def test_what_a_later_position_holds_reaches_no_row_before_it(at, kept, value, window):
    """Rows of one tile share a reading of keys that some of them do not see: 0 * NaN is NaN."""
    rng = np.random.default_rng(at)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((100, 4, 6), (1, 100, 2, 6), (1, 100, 2, 6)))
    rows = np.zeros(100, np.int64), np.arange(100)
    expected = cpu.attend(q, k, v, *rows, window)
    (k if kept == "k" else v)[0, at, :, 2] = value
    out = cpu.attend(q, k, v, *rows, window)
    assert_same_bits(out[:at], expected[:at])
    assert not np.isfinite(out[at]).all()


@given(**attentions, window=st.none() | st.sampled_from([1, 2, 5, 63, 64, 65, 128, 1000]))
def test_attention_of_single_rows_shared_out_by_chunks_is_the_same(seed, heads, head_dim, firsts, count, window):
    """As where there are many threads and few heads. `count` moves the first positions, so that windows begin anywhere in a chunk."""
    rng = np.random.default_rng(seed)
    sequences = [(s, first + count - 1, 1) for s, first in enumerate(firsts)]
    q, k, v, slot, position = attention_case(rng, *heads, head_dim, sequences, capacity=max(firsts) + count)
    expected, launched = cpu.attend(q, k, v, slot, position, window), []

    def launch(kernel, *args):
        launched.append(kernel)
        kernel.alone(*args[1:])

    with mock.patch.multiple(attention, _LONG=1, get_num_threads=lambda: 1000, launch=launch, empty=full_of_nan):
        assert_same_bits(cpu.attend(q, k, v, slot, position, window), expected)
    assert launched == [attention._attend_split]


def full_of_nan(shape, dtype=np.float32):
    return np.full(shape, np.nan, dtype)


@settings(max_examples=80)
@given(**attentions, window=st.none() | st.sampled_from([1, 2, 64, 65, 1000]))
def test_attend_float16(seed, heads, head_dim, firsts, count, window):
    """Bit for bit as the contract's, and the probabilities of the definition to one rounding to float16 each."""
    rng = np.random.default_rng(seed)
    sequences = [(s, first, int(rng.integers(1, count + 1))) for s, first in enumerate(firsts)]
    q, k, v, slot, position = attention_case(rng, *heads, head_dim, sequences, capacity=max(firsts) + count)
    out = cpu.attend_float16(q, k, v, slot, position, window)
    some = rng.permutation(len(slot))[:4]
    assert_same_bits(out[some], contract.attend_float16(q[some], k, v, slot[some], position[some], window))
    exact, rounding = bounds.attend(q, k, v, slot, position, window)
    for r, (s, p) in enumerate(zip(slot, position, strict=True)):
        values, mask = np.abs(v[s, : p + 1].astype(np.float64)), spec.causal_mask(1, p + 1, p, window)
        absolute = spec.attend(q[r : r + 1].astype(np.float64), k[s, : p + 1].astype(np.float64), values, mask)[0]
        subnormal = 2.0**-25 * np.repeat(values.sum(axis=0), heads[0] // heads[1], axis=0)
        assert_within(out[r], exact[r], (1 + 2.0**-11) * rounding[r] + 2.0**-11 * absolute + subnormal)


def test_attend_float16_rounds_probabilities_to_float16():
    """Against NumPy in float64 with the rounding written out: equal in float32, but where a probability sits at a rounding boundary."""
    rng = np.random.default_rng(3)
    q, (k, v) = rng.standard_normal((100, 4, 64)).astype(np.float32), rng.standard_normal((2, 1, 100, 2, 64)).astype(np.float32)
    out = cpu.attend_float16(q, k, v, np.zeros(100, np.int64), np.arange(100))
    wide_k, wide_v = (np.repeat(x[0], 2, axis=1).astype(np.float64) for x in (k, v))
    near = []
    for r in range(100):
        scores = np.einsum("hk,shk->hs", q[r], wide_k[: r + 1]) / 8
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        expected = np.einsum("hs,shk->hk", p.astype(np.float16).astype(np.float64), wide_v[: r + 1])
        unrounded = np.einsum("hs,shk->hk", p, wide_v[: r + 1])
        near.append(np.abs(out[r] - expected).max(axis=1) <= 1e-6)
        if r > 2:
            assert np.abs(expected - unrounded).max() > 1e-5
    assert np.mean(near) > 0.9


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
