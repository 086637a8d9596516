"""The one wrong step of an operation, solved for: steps of rows, weights that all tokens share, functions, and sums of inputs."""

import numpy as np
import pytest
from wrong_tensors import LAYER, LLAMA, T, judged, layer_points

from bitnet_np.judge import operations as op
from bitnet_np.judge.bounds import within
from bitnet_np.judge.verdict import Verdict

POINTS = layer_points("llama")
NORM = POINTS["attn_norm"]
GATE, UP = POINTS["ffn_gate"], POINTS["ffn_up"]
GAIN = LLAMA.layers[LAYER].attn_norm.astype(np.float64)
ROW = np.arange(T)[:, None]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: NORM * (1 + 0.01 * ROW), "the root mean square: {} instead of {} at position 1, {} instead of {} at position 2; wrong at"),
        (lambda: NORM * np.where(ROW > 11, 0.5, 1), "the root mean square: 2 times what is right at positions 12 to 16 of 17"),
        (lambda: NORM / GAIN * np.roll(GAIN, 3), "the norm's weight: elements are shifted by 3: element 3 has the numbers of element 0"),
        (lambda: NORM * np.where(np.arange(96) < 40, np.linspace(1, 2, 96), 1), "the norm's weight: {} instead of {} at element 1"),
        (lambda: NORM * np.where(np.arange(96) % 32 < 9, 3, 1), "the norm's weight: 3 times what is right at elements 0 to 8 of each 32"),
        (lambda: GATE * np.tanh(np.logaddexp(0, GATE)) * UP, "the activation is another function of its input: {} instead of {} at -"),
    ],
)
def test_a_step_that_explains_the_output_is_named(wrong, says):
    """Whatever made it: the numbers that the step must have given are the same at all elements that it reaches."""
    name = "ffn_out" if "activation" in says else "attn_norm"
    said, texts = judged("llama", name, wrong()), says.split("{}")
    assert said.startswith(texts[0])
    assert all(text in said for text in texts)


def summed(factors, columns=slice(None), rows=slice(None)):
    """A product whose inputs are summed so many times, at some outputs of some tokens."""
    wrong, linear = POINTS["ffn_up"].copy(), LLAMA.layers[LAYER].ffn_up
    products = (POINTS["ffn_norm"] * factors) @ op.rows_of(linear.weights, np.arange(120)).T
    wrong[rows, columns] = (products + linear.bias)[rows, columns]
    return wrong


INPUT = np.arange(96)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: summed(np.where(INPUT < 37, 0.0, 1.0)), "inputs 0 to 36 are not summed"),
        (lambda: summed(np.where(INPUT % 32 < 3, 2.0, 1.0)), "inputs 0 to 2 of each 32 are summed twice"),
        (
            lambda: summed(np.where(INPUT == 5, -1.0, np.where(INPUT > 90, 0.25, 1.0))),
            "input 5 is subtracted, inputs 91 to 95 are multiplied by 0.25",
        ),
        (lambda: summed(np.linspace(1.5, 2, 96)), "inputs 0 to 95 are multiplied by other numbers, 1.5 to 2"),
        (lambda: summed(np.where(INPUT == 7, 0.0, 1.0), slice(10, 50)), "at elements 10 to 49 of 120: input 7 is not summed"),
        (lambda: summed(np.where(INPUT == 7, 0.0, 1.0), rows=slice(4, 12)), "at positions 4 to 11 of 17: input 7 is not summed"),
    ],
)
def test_inputs_that_are_summed_otherwise_are_named(wrong, says):
    assert judged("llama", "ffn_up", wrong()) == says


def test_noise_is_no_step():
    noise = np.random.default_rng(0).standard_normal((T, 96))
    assert judged("llama", "attn_norm", NORM * (1 + 0.01 * noise)) == ""
    assert judged("llama", "ffn_down", POINTS["ffn_down"] + 0.01 * noise) == ""


def test_a_sigmoid_taken_from_tanh_is_honest():
    """As compilers do: 1 + tanh(x / 2) is as wrong as 1 is, where the sigmoid is small, too."""
    gate, up = np.float32(GATE) * np.float32(3), np.float32(UP)
    theirs = np.float32(0.5) * gate * (1 + np.tanh(gate / 2)) * up
    assert within(op.silu_gate(gate.astype(np.float64), up.astype(np.float64)), theirs.astype(np.float64))[0] is Verdict.ROUNDING
