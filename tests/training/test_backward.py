"""The kernels of the backward pass (kernels/backward.py): the contract's bits, and the definition within derived bounds."""

from itertools import pairwise

import gradient_bounds
import numpy as np
import pytest
from gradient_bounds import assert_within
from gradient_models import WIDTHS, WINDOW, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, seeds

from bitnet_np import contract, spec
from bitnet_np.kernels import backward, cpu

CUTS = st.lists(st.integers(1, 5) | st.sampled_from([63, 64, 65, 130]), min_size=1, max_size=4).map(lambda rows: np.cumsum([0, *rows]))


def folded(a, b, cuts):
    """The contract's sum over the first axis of both: a chain for each part, parts added in order."""
    total = None
    for first, end in pairwise(cuts):
        chain = np.zeros((a.shape[1], b.shape[1]), np.float32)
        for k in range(first, end):
            chain = contract.fma(a[k][:, None], b[k], chain)
        total = chain if total is None else total + chain
    return total


@given(seed=seeds, cuts=CUTS, n=WIDTHS, m=WIDTHS)
def test_transposed_product(seed, cuts, n, m):
    rng = np.random.default_rng(seed)
    a, b = normal(rng, cuts[-1], n), normal(rng, cuts[-1], m)
    out = backward.transposed_product(a, b, cuts)
    assert_same_bits(out, folded(a, b, cuts))
    np.testing.assert_allclose(out, a.astype(float).T @ b, rtol=0, atol=1e-4 * (np.abs(a).T @ np.abs(b)).max())
    more = normal(rng, n, m)
    both = backward.transposed_product(a, b, cuts[:2], more.copy())
    assert_same_bits(both, more + folded(a, b, cuts[:2]))


@given(seed=seeds, rows=WIDTHS, n=WIDTHS | st.sampled_from([256, 257, 600]), m=WIDTHS)
def test_product(seed, rows, n, m):
    rng = np.random.default_rng(seed)
    a, b = normal(rng, rows, n), normal(rng, n, m)
    out = backward.product(a, b)
    cuts = backward.parts(n)
    assert np.diff(cuts).max() <= backward.PART
    assert_same_bits(out, folded(a.T, b, cuts))


def rms_norm_back(rng, rows, width):
    x, dy, gain = normal(rng, rows, width), normal(rng, rows, width), normal(rng, 1, width)[0]
    cuts = np.unique([0, *rng.integers(0, rows, 3), rows])
    return backward.rms_norm_back(x, gain, 1e-5, dy, cuts), gradient_bounds.rms_norm_back(x, gain, 1e-5, dy, cuts)


def gate_back(name):
    def both(rng, rows, width):
        arguments = [normal(rng, rows, width) for _ in range(3)]
        return getattr(backward, name)(*arguments), getattr(gradient_bounds, name)(*arguments)

    return both


def cross_entropy(rng, rows, width):
    logits, targets, factor = normal(rng, rows, width), rng.integers(0, width, rows), float(np.float32(rng.choice([1, 0.125, 1 / 2047])))
    gradient = logits.copy()
    losses = backward.cross_entropy_in_place(gradient, targets, factor)
    return (losses, gradient), gradient_bounds.cross_entropy(logits, targets, factor)


@pytest.mark.parametrize("both", [rms_norm_back, gate_back("relu2_gate_back"), gate_back("silu_gate_back"), cross_entropy])
@given(seed=seeds, rows=st.integers(1, 5) | st.sampled_from([64, 65, 130]), width=WIDTHS)
def test_gradients_of_rows(both, seed, rows, width):
    for actual, bounded in zip(*both(np.random.default_rng(seed), rows, width), strict=True):
        assert_within(actual, *bounded)


@settings(max_examples=25)
@given(
    seed=seeds,
    cuts=CUTS,
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    width=st.sampled_from([2, 20, 64, 80]),
    window=WINDOW,
)
def test_attend_back(seed, cuts, kv_heads, group, width, window):
    """Each sequence attends to itself only. Rows are of one size, because scores of hundreds would give one key all of the probability."""
    rng = np.random.default_rng(seed)
    q, dy = rng.normal(size=(2, cuts[-1], kv_heads * group, width)).astype(np.float32)
    k, v = rng.normal(size=(2, cuts[-1], kv_heads, width)).astype(np.float32)
    k *= 3
    attended = np.concatenate(
        [cpu.attend(q[i:j], k[None, i:j], v[None, i:j], np.zeros(j - i, np.int64), np.arange(j - i), window) for i, j in pairwise(cuts)]
    )
    gradients = backward.attend_back(q, k, v, attended, dy, cuts, window)
    for i, j in pairwise(cuts):
        expected = gradient_bounds.attend_back(q[i:j], k[i:j], v[i:j], dy[i:j], spec.causal_mask(j - i, j - i, window=window))
        for actual, bounded in zip(gradients, expected, strict=True):
            assert_within(actual[i:j], *bounded)


@given(seed=seeds, cuts=CUTS, width=WIDTHS, vocab=st.sampled_from([1, 2, 40]))
def test_add_rows_and_column_sums(seed, cuts, width, vocab):
    rng = np.random.default_rng(seed)
    x, tokens, before = normal(rng, cuts[-1], width), rng.integers(0, vocab, cuts[-1]), normal(rng, vocab, width)
    out = before.copy()
    backward.add_rows(out, x, tokens, cuts)
    total = before.copy()
    for i, j in pairwise(cuts):
        for token in range(vocab):
            rows = x[i:j][tokens[i:j] == token]
            if len(rows):
                total[token] += np.add.accumulate(rows)[-1]
    np.testing.assert_array_equal(out, total)
    parts = [np.add.accumulate(x[i:j])[-1] for i, j in pairwise(cuts)]
    np.testing.assert_array_equal(backward.column_sums(x, cuts), np.add.accumulate(parts)[-1])
