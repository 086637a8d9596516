"""Arithmetic that has the same bits everywhere is right, and refuses what it does not know."""

import math

import numpy as np
import pytest

from bitnet_np.vectors.portable import portable


def ulps(x, right):
    return np.abs(np.asarray(x) - right) / np.spacing(np.maximum(np.abs(right), 1e-300))


@pytest.mark.parametrize(
    ("function", "right", "low", "high"),
    [
        (np.exp, math.exp, -700, 700),
        (np.expm1, math.expm1, -50, 50),
        (np.tanh, math.tanh, -45, 45),
        (np.log, math.log, 1e-9, 1e9),
        (np.vectorize(math.erfc), math.erfc, -6, 26),
        (np.cos, math.cos, -1e4, 1e4),
        (np.sin, math.sin, -1e4, 1e4),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions_are_those_of_the_math_library(function, right, low, high):
    """To two units in the last place; sines near a multiple of pi to one of 1."""
    x = np.concatenate([np.linspace(low, high, 101), [0.0, 1e-3, 0.5][: 3 if low < 0 else 0]])
    expected = np.array([right(number) for number in x])
    computed = np.asarray(function(portable(x)))
    if function in (np.cos, np.sin):
        assert np.abs(computed - expected).max() < 3e-16
    else:
        assert ulps(computed, expected).max() <= 2


def test_ends_of_functions():
    x = portable([-np.inf, -1e9, 1e9, np.inf, np.nan])
    np.testing.assert_array_equal(np.exp(x), [0, 0, np.inf, np.inf, np.nan])
    np.testing.assert_array_equal(np.tanh(x), [-1, -1, 1, 1, np.nan])
    np.testing.assert_array_equal(np.log(portable([0.0, np.inf])), [-np.inf, np.inf])


def test_products_of_matrices_are_summed_in_order():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 5, 2))
    expected = np.zeros((3, 4, 2))
    for k in range(5):
        expected = expected + a[:, :, k, None] * b[:, None, k]
    np.testing.assert_array_equal(portable(a) @ b, expected)
    np.testing.assert_array_equal(a[0] @ portable(b[0, :, 0]), expected[0, :, 0])


def test_powers():
    x = portable([0.5, 3.0])
    np.testing.assert_array_equal(x**2, [0.25, 9])
    np.testing.assert_array_equal(x**3, [0.125, 27])
    np.testing.assert_array_equal(np.power(x, portable([-0.5, 0.25])), [2**0.5, 3**0.25])


@pytest.mark.parametrize("use", [np.sinh, np.log2, lambda x: np.einsum("i,i->", x, x), lambda x: np.dot(x, x)])
def test_what_may_differ_between_machines_is_refused(use):
    with pytest.raises(TypeError, match="may give other bits on another machine"):
        use(portable([1.0, 2.0]))


def test_what_is_made_of_them_is_one_of_them():
    """Or the next function would be NumPy's own."""
    x = portable([1.0, -2.0])
    for y in (x + 1, np.where(x > 0, x, 0), np.abs(x), x.sum(keepdims=True), np.stack([x, x]), x[None], np.exp(x), x.astype(np.float64)):
        assert type(y) is type(x)
