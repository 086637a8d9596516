"""What wrong norms, residual sums, activations and elements say by themselves, each made in one tensor of a recorded forward pass."""

import numpy as np
import pytest
from wrong_tensors import IDS, LAYER, LLAMA, QWEN3, T, judged, layer_points

from bitnet_np import EXACT, spec
from bitnet_np.judge.readings import places
from bitnet_np.judge.readings.table import cause_of
from bitnet_np.judge.readings.wrong import Wrong
from bitnet_np.judge.roundings import to_bfloat16, to_digits
from bitnet_np.traces.points import Key


def points(family, name):
    return layer_points(family)[name]


# --- norms ----------------------------------------------------------------------------------------------------------------------------


def normed(x, gain, eps=1e-5, root=None, power=0.5):
    """x * gain over the mean square of `root`, or of x, to a power."""
    return x * gain / (np.mean((x if root is None else root) ** 2, axis=1, keepdims=True) + eps) ** power


G = LLAMA.layers[LAYER].ffn_norm.astype(np.float64)
X = points("llama", "ffn_inp")
EPS = LLAMA.config.eps


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (normed(X, G, eps=0.123), f"epsilon is 0.123 instead of {EPS:.3g}"),
        (normed(X, G * G, root=X * G, eps=0), "it is done twice"),
        (normed(X, 1 + G), "1 is added to the norm's weight"),
        (normed(X, G.astype(np.float16)), "weights are rounded to float16"),
        (normed(X, np.where(np.arange(96) < 8, 1, G)), "at elements 0 to 7 of 96: the norm's weight is missing"),
        (normed(points("llama", "attn_o_out"), G), "attn_o_out is read instead of ffn_inp"),
        (normed(X, to_bfloat16(G)), "weights are rounded to bfloat16"),
        (normed(X, G * G), "the norm's weight is applied twice"),
        (normed(X, 1 / G), "the norm's weight is divided by instead of multiplied"),
        (normed(X, G, root=X - X.mean(axis=1, keepdims=True)), "the variance instead of the mean square"),
    ],
)
def test_norms_are_read_off(wrong, says):
    assert judged("llama", "ffn_norm", wrong).startswith(says)


def test_a_norm_over_all_heads_is_told():
    x, gain = points("qwen3", "Qcur"), QWEN3.layers[LAYER].attn_q_norm.astype(np.float64)
    whole = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + QWEN3.config.eps) * np.tile(gain, x.shape[1] // gain.size)
    assert judged("qwen3", "Qcur_normed", whole) == "the mean square of all heads instead of the mean square"


def test_a_norm_that_leaves_out_a_head_is_told():
    x, right = points("qwen3", "Qcur"), points("qwen3", "Qcur_normed")
    wrong = np.where(np.arange(x.shape[1]) >= 3 * QWEN3.config.head_dim, x, right)
    assert judged("qwen3", "Qcur_normed", wrong) == "at head 3 of 4: the norm is missing: its input comes out unchanged"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: normed(x, 1.0, EPS), "a norm without a weight is applied to it"),
        (lambda x: x / np.linalg.norm(x, axis=1, keepdims=True), "each position is divided by its length"),
    ],
)
def test_a_norm_where_none_belongs_is_named(wrong, says):
    assert judged("llama", "l_out", wrong(points("llama", "l_out"))) == says


# --- sums -----------------------------------------------------------------------------------------------------------------------------


X_OUT, BRANCH = points("llama", "ffn_inp"), points("llama", "ffn_down")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (X_OUT + 0.5 * BRANCH, "ffn_down is 0.5 times what is right"),
        (1.234 * X_OUT + BRANCH, "the residual, ffn_inp, is 1.234 times what is right"),
        (X_OUT + BRANCH * (np.arange(T) < T - 1)[:, None], "at position 16 of 17: ffn_down is missing"),
        (BRANCH + X_OUT * (np.arange(96) < 48), "at elements 48 to 95 of 96: the residual, ffn_inp, is missing"),
        (np.roll(X_OUT, 1, axis=0) + BRANCH, "rows of the residual, ffn_inp, are shifted by one, the one before in the place"),
        (np.roll(X_OUT, -1, axis=0) + BRANCH, "rows of the residual, ffn_inp, are shifted by one, the next one in the place"),
    ],
)
def test_wrong_sums_are_told(wrong, says):
    assert judged("llama", "l_out", wrong).startswith(says)


# --- activations ----------------------------------------------------------------------------------------------------------------------

GATE, UP = points("llama", "ffn_gate"), points("llama", "ffn_up")


def _silu(x, beta=1.0):
    return x / (1 + np.exp(-beta * x))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (_silu(GATE) * (UP + 1), "1 is added to ffn_up"),
        (_silu(np.clip(GATE, -0.8, 0.8)) * UP, "ffn_gate is clipped beyond 0.8"),
        (_silu(_silu(GATE)) * UP, "SiLU is applied twice"),
        (
            np.where(np.arange(120) < 100, _silu(GATE), GATE) * UP,
            "at elements 100 to 119 of 120: gate * up instead of",
        ),
        (spec.gelu_tanh(GATE) * UP, "GELU(gate) * up instead of"),
        (_silu(GATE, 1.702) * UP, "gate * sigmoid(1.702 gate) * up instead of"),
        (_silu(np.minimum(GATE, 0.6)) * UP, "ffn_gate is clipped above 0.6"),
        (_silu(GATE) * np.clip(UP, -0.5, 0.5), "ffn_up is clipped beyond 0.5"),
        (_silu(GATE) * np.roll(UP, 1, axis=1), "elements of ffn_up are shifted by one, the one before"),
        (_silu(GATE) * np.roll(UP, 1, axis=0), "rows of ffn_up are shifted by one, the one before"),
    ],
)
def test_activations_are_read_off(wrong, says):
    assert judged("llama", "ffn_out", wrong).startswith(says)


# --- elements -------------------------------------------------------------------------------------------------------------------------


def _in_codes(x, axis):
    step = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.rint(x / step) * step


V = points("llama", "ffn_inp")
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
    """The tensor is one that has no readings of its own."""
    theirs = wrong * (1 + 1e-7 * np.random.default_rng(1).standard_normal(wrong.shape))
    cause = cause_of(Wrong(LLAMA, EXACT, Key("inpL", None), [V], V, theirs, np.abs(theirs - V) > 1e-6, 0.0, {}))
    assert cause is not None
    assert says in cause.text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.clip(V, -1, 1), "the result is clipped beyond 1"),
        (np.clip(V, None, 1.5), "the result is clipped above 1.5"),
        (to_digits(V, 3), "the result: rounded to e5m2"),
        (to_digits(V, 4), "the result: rounded to e4m3"),
        (to_digits(V, 8), "the result: rounded to bfloat16"),
        (to_digits(V, 11), "the result: rounded to float16"),
        (_in_codes(V, 1), "the result: rounded to int8 with a scale for each row"),
        (_in_codes(V, None), "the result: rounded to int8 with one scale"),
        (V + 0.25, "0.25 is added to every number"),
    ],
)
def test_results_behind_one_more_step_are_named(wrong, says):
    assert judged("llama", "ffn_inp", wrong).startswith(says)


TABLE = LLAMA.token_embd.astype(np.float64)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (TABLE.reshape(96, -1)[:, IDS["llama"]].T, "the embedding's table is read column by column, as if it were transposed"),
        (TABLE[np.r_[IDS["llama"][:5], IDS["llama"][4:-1]]], "positions 5 to 16 have the numbers of positions 4 to 15"),
        (TABLE[(IDS["llama"] + 2) % 90], "token ids are off by 2"),
    ],
)
def test_rows_of_the_table_in_other_places_are_named(wrong, says):
    assert judged("llama", "inp_embd", wrong) == says


def test_one_number_beyond_the_bound_is_no_cause_where_all_are_a_little_wrong():
    """As in float16, whose roundings hide all but the worst number of a small bias."""
    error = np.full(V.shape, 1e-3)
    error[3, 5] = 2e-3
    wrong = Wrong(LLAMA, EXACT, Key("inpL", None), [V], V, V + error, error > 1.5e-3, 1e-7, {})
    assert places.one_number(wrong) is None
    assert places.few_places(wrong) is None
    alone = np.where(error > 1.5e-3, error, 0)
    wrong = Wrong(LLAMA, EXACT, Key("inpL", None), [V], V, V + alone, error > 1.5e-3, 1e-7, {})
    assert places.one_number(wrong) == "one number alone is wrong: position 3, element 5"
