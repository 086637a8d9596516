"""What wrong norms, residual sums, activations and elements say by themselves, each made in one tensor of a recorded forward pass."""

import numpy as np
import pytest
from wrong_tensors import IDS, LAYER, LLAMA, QWEN3, T, judged, layer_points, read

from bitnet_np import EXACT, spec
from bitnet_np.judge.readings import elements
from bitnet_np.judge.readings.wrong import Wrong
from bitnet_np.judge.roundings import to_digits
from bitnet_np.traces.points import Key


def points(family, name):
    return layer_points(family)[name]


# --- edits: numbers that are sought, parts, and functions that no other test computes ---------------------------------------------------


def normed(x, gain, eps=1e-5, root=None):
    """x * gain over the root mean square of `root`, or of x."""
    return x * gain / (np.mean((x if root is None else root) ** 2, axis=1, keepdims=True) + eps) ** 0.5


def _silu(x, beta=1.0):
    return x / (1 + np.exp(-beta * x))


def _in_codes(x, axis):
    step = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.rint(x / step) * step


G, EPS = LLAMA.layers[LAYER].ffn_norm.astype(np.float64), LLAMA.config.eps
X, BRANCH, GATE, UP = (points("llama", name) for name in ("ffn_inp", "ffn_down", "ffn_gate", "ffn_up"))
TABLE = LLAMA.token_embd.astype(np.float64)


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("ffn_norm", normed(X, G, eps=0.123), f"epsilon is 0.123 instead of {EPS:.3g}"),
        ("ffn_norm", normed(X, G * G, root=X * G, eps=0), "it is done twice"),
        ("ffn_norm", normed(X, np.where(np.arange(96) < 8, 1, G)), "at elements 0 to 7 of 96: the norm's weight is missing"),
        ("ffn_norm", normed(points("llama", "attn_o_out"), G), "attn_o_out is read instead of ffn_inp"),
        ("ffn_norm", normed(X, G, root=X - X.mean(axis=1, keepdims=True)), "the variance instead of the mean square"),
        ("l_out", normed(points("llama", "l_out"), 1.0, EPS), "a norm without a weight is applied to it"),
        ("l_out", 1.234 * X + BRANCH, "the residual, ffn_inp, is 1.234 times what is right"),
        ("l_out", X + BRANCH * (np.arange(T) < T - 1)[:, None], "at position 16 of 17: ffn_down is missing"),
        ("l_out", np.roll(X, -1, axis=0) + BRANCH, "rows of the residual, ffn_inp, are shifted by one, the next one in the place"),
        ("ffn_out", _silu(GATE) * (UP + 1), "1 is added to ffn_up"),
        ("ffn_out", _silu(np.clip(GATE, -0.8, 0.8)) * UP, "ffn_gate is clipped beyond 0.8"),
        ("ffn_out", np.where(np.arange(120) < 100, _silu(GATE), GATE) * UP, "at elements 100 to 119 of 120: gate * up instead of"),
        ("ffn_out", spec.gelu_tanh(GATE) * UP, "GELU(gate) * up instead of"),
        ("ffn_out", _silu(GATE, 1.702) * UP, "gate * sigmoid(1.702 gate) * up instead of"),
        ("ffn_out", _silu(np.minimum(GATE, 0.6)) * UP, "ffn_gate is clipped above 0.6"),
        ("ffn_out", _silu(GATE) * np.roll(UP, 1, axis=1), "elements of ffn_up are shifted by one, the one before"),
        ("ffn_inp", to_digits(X, 3), "the result: rounded to e5m2"),
        ("ffn_inp", to_digits(X, 4), "the result: rounded to e4m3"),
        ("ffn_inp", _in_codes(X, 1), "the result: rounded to int8 with a scale for each row"),
        ("ffn_inp", _in_codes(X, None), "the result: rounded to int8 with one scale"),
        ("inp_embd", TABLE.reshape(96, -1)[:, IDS["llama"]].T, "the embedding's table is read column by column, as if it were transposed"),
        ("inp_embd", TABLE[np.r_[IDS["llama"][:5], IDS["llama"][4:-1]]], "positions 5 to 16 have the numbers of positions 4 to 15"),
    ],
)
def test_what_is_wrong_in_one_operation_is_named(name, wrong, says):
    assert judged("llama", name, wrong).startswith(says)


def test_a_norm_over_all_heads_is_told():
    x, gain = points("qwen3", "Qcur"), QWEN3.layers[LAYER].attn_q_norm.astype(np.float64)
    whole = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + QWEN3.config.eps) * np.tile(gain, x.shape[1] // gain.size)
    assert judged("qwen3", "Qcur_normed", whole) == "the mean square of all heads instead of the mean square"


# --- elements -------------------------------------------------------------------------------------------------------------------------


V = X
COLUMNS = np.arange(V.shape[1])
SHUFFLED = np.random.default_rng(4).permutation(V.shape[1])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.roll(V, 5, axis=1), "elements are shifted by 5: element 5 has the numbers of element 0"),
        (V[:, SHUFFLED], "the right numbers in other places: element 0 has those of"),
        (V[:, np.where(COLUMNS < 90, COLUMNS, COLUMNS - 6)], "elements 90 to 95 have the numbers of elements 84 to 89"),
        (V[np.r_[0:5, 6, 5, 7:T]], "positions 5, 6 are exchanged"),
        (V[np.r_[0:9, [8] * 8]], "positions 9 to 16 have the numbers of position 8"),
    ],
)
def test_elements_are_read_off(wrong, says):
    assert says in read("llama", "ffn_inp", wrong)


def test_one_number_beyond_the_bound_is_no_cause_where_all_are_a_little_wrong():
    """As in float16, whose roundings hide all but the worst number of a small bias."""
    error = np.full(V.shape, 1e-3)
    error[3, 5] = 2e-3
    wrong = Wrong(LLAMA, EXACT, Key("inpL", None), [V], V, V + error, error > 1.5e-3, 1e-7, {})
    assert elements.one_number(wrong) is None
    assert elements.few_places(wrong) is None
    alone = np.where(error > 1.5e-3, error, 0)
    wrong = Wrong(LLAMA, EXACT, Key("inpL", None), [V], V, V + alone, error > 1.5e-3, 1e-7, {})
    assert elements.one_number(wrong) == "one number alone is wrong: position 3, element 5"
