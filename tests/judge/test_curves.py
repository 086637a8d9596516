"""Functions of one number that stand in the place of the right one: borders, lines and polynomials are drawn, and told."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitnet_np.judge.law.functions import ACTIVATIONS
from bitnet_np.judge.readings.curves import described_function

SILU, GELU = ACTIVATIONS["SiLU"], ACTIVATIONS["GELU's approximation by tanh"]
SEEDS = st.integers(0, 2**32 - 1)


def told(function, right, seed, size=2.0):
    """What is said of a function, solved for behind a product in float32."""
    rng = np.random.default_rng(seed)
    x, up = (size * rng.standard_normal(3000)).astype(np.float32).astype(np.float64), rng.uniform(0.3, 2, 3000).astype(np.float32)
    return described_function(x, (function(x).astype(np.float32) * up).astype(np.float64) / up, right(x), "its input", True) or ""


@given(SEEDS, st.floats(-2.5, -1), st.floats(1, 2.5), st.sampled_from([0.0, -0.125]))
def test_what_a_function_is_beyond_a_border_is_told(seed, low, high, least):
    said = told(lambda x: np.where(x < low, least, np.where(x > high, x, SILU(x))), SILU, seed)
    borders = re.fullmatch(rf"it is {least:g} below (\S+) and its input above (\S+), and right elsewhere", said).groups()
    assert [float(x) for x in borders] == pytest.approx([low, high], abs=0.1)


@given(SEEDS, st.integers(2, 6), st.sampled_from(["it", "factor", "reciprocal"]))
def test_lines_that_a_function_is_made_of_are_told(seed, count, of):
    knots = np.linspace(-2.6, 2, count) if of != "reciprocal" else np.geomspace(1.2, 60, count)

    def function(x):
        if of == "it":
            return np.interp(x, knots, GELU(knots) + 0.1 * np.arange(count) % 0.2)
        u, right = (x, 1 / (1 + np.exp(-knots))) if of == "factor" else (1 + np.exp(-x), 1 / knots)
        return x * np.interp(u, knots, right)

    said = told(function, SILU, seed)
    assert f"is made of {count + 1} straight lines, which end near " in said
    assert said.startswith({"it": "it is", "factor": "what it multiplies its input by is", "reciprocal": "as a function of 1 + "}[of])


@given(SEEDS, st.floats(0.5, 3), st.floats(0.03, 0.3))
def test_the_polynomial_inside_of_a_sigmoid_is_told(seed, a, b):
    said = told(lambda x: x / (1 + np.exp(-a * x - b * x**3)), SILU, seed)
    found = [float(x) for x in re.findall(r"[\d.]+(?= x)", said)]
    assert found == pytest.approx([a, b, 1], rel=1e-3)


@given(SEEDS, st.floats(0.5, 2), st.sampled_from(["1 + |z|", "sqrt(1 + z^2)", "arctan(z)"]))
def test_curves_like_a_sigmoid_are_told(seed, a, which):
    curves = {
        "1 + |z|": lambda z: z / (1 + abs(z)),
        "sqrt(1 + z^2)": lambda z: z / np.hypot(1, z),
        "arctan(z)": lambda z: 2 / np.pi * np.arctan(z),
    }
    said = told(lambda x: x * (1 + curves[which](a * x)) / 2, SILU, seed)
    assert which in said
    assert said.endswith(" x instead of x * sigmoid(1 x)")
    assert float(re.findall(r"of z = ([\d.]+) x", said)[0]) == pytest.approx(a, rel=1e-3)


@given(SEEDS, st.floats(-2, -0.5))
def test_a_border_of_the_number_whose_sigmoid_is_taken_is_told(seed, border):
    said = told(lambda x: x / (1 + np.exp(-np.maximum(x, border))), SILU, seed)
    assert said.startswith("the number whose sigmoid multiplies its input is made of 2 straight lines, which end near -")
    assert float(said.split()[-1]) == pytest.approx(border, abs=0.1)


@given(SEEDS, st.floats(0.005, 0.5))
def test_nothing_is_told_of_noise_and_no_lines_of_what_is_bent(seed, size):
    rng = np.random.default_rng([seed, 1])
    assert not told(lambda x: SILU(x) + size * rng.standard_normal(x.shape), SILU, seed)
    assert told(lambda x: SILU(x) + size * np.sin(x), SILU, seed).startswith("it is another function of its input: ")
