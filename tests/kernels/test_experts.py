"""The router's kernels against the contract, bit for bit, and against the definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, normal, seeds

from bitnet_np import contract, spec
from bitnet_np.contract import f32
from bitnet_np.kernels import cpu

counts = st.sampled_from([1, 2, 5, 37, 128])


@settings(max_examples=50)
@given(seed=seeds, rows=st.integers(1, 9), count=counts, part=st.floats(0, 1), ties=st.booleans(), normalized=st.booleans())
def test_router(seed, rows, count, part, ties, normalized):
    logits = 4 * normal(np.random.default_rng(seed), rows, count)
    logits = np.rint(logits) if ties else logits
    k = 1 + int(part * (count - 1))
    experts = cpu.top_experts(logits, k)
    assert experts.dtype == np.int32
    np.testing.assert_array_equal(experts, contract.top_experts(logits, k))
    wide = logits.astype(np.float64)
    np.testing.assert_array_equal(experts, spec.top_experts(wide, k))

    weights = cpu.expert_weights(logits, experts, normalized)
    assert_same_bits(weights, contract.expert_weights(logits, experts, normalized))
    exact = spec.expert_weights(wide, experts, normalized)
    np.testing.assert_allclose(weights, exact, rtol=2e-5, atol=1e-37)
    if normalized:
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)


@settings(max_examples=20)
@given(seed=seeds, rows=st.integers(1, 9), k=st.sampled_from([1, 2, 8]), width=st.integers(1, 70))
def test_sums_of_experts(seed, rows, k, width):
    rng = np.random.default_rng(seed)
    y, weights, gate = normal(rng, rows, k, width), normal(rng, rows, k), normal(rng, rows, 1)
    assert_same_bits(cpu.mix(y, weights), contract.mix(y, weights))
    np.testing.assert_allclose(cpu.mix(y, weights), spec.mix(y, weights), rtol=0, atol=1e-5 * np.abs(y).max() * np.abs(weights).max())
    assert_same_bits(cpu.sigmoid_gate(y[:, 0].copy(), gate), contract.sigmoid_gate(y[:, 0], gate))
    exact = y[:, 0] * spec.sigmoid(np.maximum(gate.astype(np.float64), -80))
    np.testing.assert_allclose(cpu.sigmoid_gate(y[:, 0].copy(), gate), exact, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_choose_experts_that_are_there_and_show_in_the_weights(bad):
    logits = f32([[0, bad, 2, 1], [bad] * 4, [0, 1, 2, 3]])
    experts = cpu.top_experts(logits, 3)
    assert all(sorted(set(row)) == sorted(row) and set(row) <= set(range(4)) for row in experts.tolist())
    weights = cpu.expert_weights(logits, experts, True)
    assert np.isnan(weights[:2]).all()
    assert np.isfinite(weights[2]).all()
