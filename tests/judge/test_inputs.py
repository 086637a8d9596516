"""Few inputs, or weights of them, that make all of a product's error: planted by NumPy at places that are drawn, and said as planted."""

import numpy as np
from dumps import recorded, without_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_tensors import LAYER, LLAMA, T, layer_points, read, read_off

from bitnet_np.judge.law.products import rows_of
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

X, UP = (layer_points("llama")[name] for name in ("ffn_norm", "ffn_up"))  # [17, 96], [17, 120]
W = rows_of(LLAMA.layers[LAYER].ffn_up.weights, np.arange(120))
INPUT = st.integers(0, 90)
RNG = np.random.default_rng(5)
BLOCKS = random_model(
    3, family="llama", table="Q4_0", weights="Q4_0", width=128, ffn=128, heads=4, kv_heads=2, head_dim=32, n_layers=1, vocab=90
)
IDS = np.random.default_rng(0).permutation(90)[:30]
POINTS = without_codes(recorded(BLOCKS, IDS))


def said(error):
    """What is said of ffn_up with an error [T, 120]."""
    return read("llama", "ffn_up", UP + error)


@settings(max_examples=6)
@given(INPUT, st.integers(1, 5))
def test_inputs_whose_weights_are_others_are_told_though_positions_are_fewer_than_inputs(first, count):
    some = np.arange(first, first + count)
    text = said(X[:, some] @ RNG.standard_normal((120, count)).T)
    assert text == f"weights of {f'inputs {first} to {some[-1]}' if count > 1 else f'input {first}'} are others"


@settings(max_examples=6)
@given(INPUT, st.integers(3, 30))
def test_weights_of_other_inputs_are_told(at, by):
    other = (at + by) % 96
    assert said(np.outer(X[:, at], W[:, other] - W[:, at])) == f"weights of input {at} are others: input {at} has those of input {other}"


def test_factors_of_few_weights_are_told():
    text = said(X[:, 5:8] @ (W[:, 5:8] * np.where(np.arange(120)[:, None] < 60, 1.5, 0)).T)
    assert text == "at elements 0 to 59 of 120: inputs 5 to 7 are multiplied by 2.5"
    factors = np.where(np.arange(120)[:, None] % 3 > 0, 0.5, 0.25)
    text = said(X[:, 5:8] @ (W[:, 5:8] * (factors - 1)).T)
    assert text.startswith("weights of inputs 5 to 7 are others: ")


@settings(max_examples=6)
@given(INPUT, st.integers(1, 5))
def test_codes_that_are_written_over_are_told(first, count):
    linear, some = BLOCKS.layers[0].ffn_gate, np.arange(first, first + count)
    scale = np.ascontiguousarray(linear.weights.data).view(np.uint8).reshape(128, -1, 18)[..., :2].copy().view(np.float16)[..., 0]
    off = np.random.default_rng(first).integers(1, 6, (128, count))
    more = POINTS[Key("ffn_norm", 0)].astype(np.float64)[:, some] @ (off * scale[:, some // 32].astype(np.float64)).T
    text = read_off(BLOCKS, IDS, POINTS, Key("ffn_gate", 0), POINTS[Key("ffn_gate", 0)] + more)
    which = f"inputs {first} to {some[-1]}" if count > 1 else f"input {first}"
    assert text.startswith(f"weights of {which} are others: they have other codes of Q4_0, "), text
    assert text.endswith(", as if these were written over")


@settings(max_examples=6)
@given(INPUT, st.integers(1, 6))
def test_inputs_that_are_others_are_told(first, count):
    some = np.arange(first, first + count)
    text = said(RNG.standard_normal((T, count)) @ W[:, some].T)
    assert text == (f"inputs {first} to {some[-1]} are others" if count > 1 else f"input {first} is another")
    assert said((3 - X[:, some]) @ W[:, some].T).endswith(": all numbers are 3" if count > 1 else "")


def test_a_number_that_is_added_to_all_inputs_is_told():
    text = said(np.outer(np.linspace(-1, 1, T) * (np.arange(T) > 7), W.sum(axis=1)))
    why = "a zero point that is not corrected for, or corrected twice"
    assert text == f"at positions 9 to 16 of 17: a number is added to all inputs, 0.125 to 1 by position: {why}"


@settings(max_examples=6)
@given(st.integers(1, 12))
def test_sums_that_go_on_into_the_next_row_or_begin_in_the_one_before_are_told(count):
    text = said(np.append(X[1:, :count], 0 * X[:1, :count], axis=0) @ np.append(W[1:, :count], 0 * W[:1, :count], axis=0).T)
    which = ("inputs 0 to {0}", "weights 0 to {0}") if count > 1 else ("input 0", "weight 0")
    inputs, weights = (words.format(count - 1) for words in which)
    assert text == f"products of {inputs} of the next position with {weights} of the next row are summed too"
    text = said(np.append(0 * X[:1, -count:], X[:-1, -count:], axis=0) @ np.append(0 * W[:1, -count:], W[:-1, -count:], axis=0).T)
    assert " of the position before with weight" in text
    assert text.endswith(" of the row before are summed too")


def test_errors_in_all_directions_are_no_inputs():
    assert "inputs" not in said(RNG.standard_normal(UP.shape))


def test_an_input_of_which_some_numbers_wrap_around_is_told():
    wrapped = np.where(X > 2, X - 4.03, np.where(X < -2, X + 4.03, X))
    how = "those above 2 are -4.03 more than what is right, those below -2 are 4.03 more than what is right"
    assert said((wrapped - X) @ W.T) == f"ffn_norm: {how}, as where codes wrap around; all other steps are right"
