"""What wrong norms, residual sums, activations and elements say by themselves, each made in one tensor of a recorded forward pass."""

import numpy as np
import pytest
from dumps import MODEL, recorded, with_tensor, without_codes
from wrong_tensors import IDS, LAYER, LLAMA, POINTS, QWEN3, T, judged, layer_points, read, read_off

from bitnet_np import EXACT, spec
from bitnet_np.judge import graph
from bitnet_np.judge.precision import FLOAT32
from bitnet_np.judge.readings import places
from bitnet_np.judge.readings.table import cause_of
from bitnet_np.judge.readings.wrong import Wrong
from bitnet_np.judge.roundings import to_bfloat16
from bitnet_np.judge.trace import judge_trace
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key


def points(family, name):
    return layer_points(family)[name]


# --- norms ----------------------------------------------------------------------------------------------------------------------------


def normed(x, gain, eps=1e-5, root=None, power=0.5):
    """x * gain over the mean square of `root`, or of x, to a power."""
    return x * gain / (np.mean((x if root is None else root) ** 2, axis=1, keepdims=True) + eps) ** power


def _inverse_root(x):
    """1 / sqrt(x) as fast engines start it: by the bits of a float32, and one Newton step."""
    x = x.astype(np.float32)
    y = (np.int32(0x5F3759DF) - (x.view(np.int32) >> 1)).view(np.float32)
    return y * (np.float32(1.5) - np.float32(0.5) * x * y * y)


G = LLAMA.layers[LAYER].ffn_norm.astype(np.float64)
X = points("llama", "ffn_inp")
EPS = LLAMA.config.eps


def _root_of(x):
    return np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (normed(X, G, eps=0.123), f"epsilon is 0.123 instead of {EPS:.3g}"),
        (normed(X, G, root=X[:, :48]), "the mean square of the first half instead of"),
        (normed(X, G, root=X[:, :64]), "the mean square of whole groups of 64 numbers instead of"),
        (normed(X, G * G, root=X * G, eps=0), "it is done twice"),
        (normed(X, G, root=X * G), "the norm's weight is applied to ffn_inp first"),
        (normed(X, 1 + G), "1 is added to the norm's weight"),
        (normed(X, LLAMA.layers[0].attn_norm), "the weight of layer 0's attn_norm is used"),
        (normed(X, G.astype(np.float16)), "weights are rounded to float16"),
        (normed(X, np.where(np.arange(96) < 8, 1, G)), "at elements 0 to 7 of 96: the norm's weight is missing"),
        (X * G * _inverse_root(np.mean(X**2, axis=1, keepdims=True) + EPS), "each position is wrong by a factor of its own, from 0.99"),
        (normed(points("llama", "attn_o_out"), G), "attn_o_out is read instead of ffn_inp"),
        (normed(X, to_bfloat16(G)), "weights are rounded to bfloat16"),
        (normed(X, G * G), "the norm's weight is applied twice"),
        (normed(X, 1 / G), "the norm's weight is divided by instead of multiplied"),
        (normed(X, G, root=X * 96**0.5), "the sum of squares is not divided by the width"),
        (normed(X, G, root=X[:, :64] * (64 / 96) ** 0.5), "the mean square with the sum of whole groups of 64 numbers instead of"),
        (normed(X, G, root=X[:, ::2]), "the mean square of every second number instead of"),
        (normed(X, G, root=X[:, ::4]), "the mean square of every fourth number instead of"),
        (normed(X, G, power=1), "the norm divides by the mean square, without the root"),
        (normed(X, G, root=X - X.mean(axis=1, keepdims=True)), "the variance instead of the mean square"),
        (X * G / np.abs(X).mean(axis=1, keepdims=True), "the squared mean magnitude instead of the mean square"),
        (X * G / np.abs(X).max(axis=1, keepdims=True), "the squared largest magnitude instead of the mean square"),
        (X * G / np.sqrt(np.mean(X * X) + EPS), "the mean square of all tokens instead of the mean square"),
        (X * G / _root_of(X[:1]), "the mean square of the first token instead of"),
        (X * G / _root_of(X[-1:]), "the mean square of the last token instead of"),
        (X * G / _root_of(np.concatenate([X[:1], X[:-1]])), "the mean square of the token before instead of"),
        (X * G / _root_of(np.roll(X, -1, axis=0)), "the mean square of the token after instead of"),
        (X * G * np.linspace(0.2, 3, T)[:, None] ** 2, "each position is wrong by a factor of its own, from 0.0796"),
        (X * G, "the norm is missing, only its weight is applied"),
        (normed(X.reshape(-1, 48), 1).reshape(X.shape) * G, "the mean square of each of 2 parts instead of"),
    ],
)
def test_norms_are_read_off(wrong, says):
    assert judged("llama", "ffn_norm", wrong).startswith(says)


GPT2 = random_model(5, family="gpt2", n_layers=2, vocab=90, width=96, heads=4, kv_heads=4, head_dim=24, ffn=120)
GPT2_POINTS = without_codes(recorded(GPT2, IDS["llama"]))


def test_biases_that_are_added_are_told():
    layer, x = GPT2.layers[LAYER], GPT2_POINTS[Key("ffn_inp", LAYER)].astype(np.float64)

    def told(name, wrong):
        return read_off(GPT2, IDS["llama"], GPT2_POINTS, Key(name, LAYER), wrong)

    assert told("ffn_inp", x + layer.ffn_norm_bias) == "ffn_norm's bias is added to every position"
    assert told("ffn_inp", x - layer.attn_output.bias) == "attn_output's bias is subtracted from, or missing in, every position"


def test_norms_over_groups_are_told():
    x, gain = points("bitnet", "kqv_out"), MODEL.layers[LAYER].attn_sub_norm.astype(np.float64)
    wrong = normed(x.reshape(-1, MODEL.config.head_dim), 1).reshape(x.shape) * gain
    assert judged("bitnet", "attn_sub_norm", wrong) == "the mean square of each of 4 parts instead of the mean square"
    x, gain = points("qwen3", "Qcur"), QWEN3.layers[LAYER].attn_q_norm.astype(np.float64)
    whole = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + QWEN3.config.eps) * np.tile(gain, x.shape[1] // gain.size)
    assert judged("qwen3", "Qcur_normed", whole) == "the mean square of all heads instead of the mean square"


def test_a_norm_that_leaves_out_a_head_is_told():
    x, right = points("qwen3", "Qcur"), points("qwen3", "Qcur_normed")
    wrong = np.where(np.arange(x.shape[1]) >= 3 * QWEN3.config.head_dim, x, right)
    assert judged("qwen3", "Qcur_normed", wrong) == "at head 3 of 4: the norm is missing: its input comes out unchanged"


def test_a_layer_that_runs_twice_is_told_at_the_norm_behind_it():
    values = {Key("l_out", 1): POINTS["llama"][Key("l_out", 2)].astype(np.float64)}
    for operation in graph.operations(LLAMA, EXACT):
        if operation.key.layer == 2:
            values[operation.key] = operation.evaluate(*(values[k] for k in operation.inputs)).value
    wrong = normed(values[Key("l_out", 2)], LLAMA.output_norm, EPS)
    assert judged("llama", "result_norm", wrong) == "the last layer runs twice"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: normed(x, 1.0, EPS), "a norm without a weight is applied to it"),
        (lambda x: normed(x, LLAMA.layers[LAYER].ffn_norm, EPS), "a norm is applied to it, with the weight of layer 1 ffn_norm"),
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
        (X_OUT + BRANCH + points("llama", "attn_o_out"), "attn_o_out is added"),
        (1.234 * X_OUT + BRANCH, "the residual, ffn_inp, is 1.234 times what is right"),
        (X_OUT + BRANCH * (np.arange(T) < T - 1)[:, None], "at position 16 of 17: the branch ffn_down is missing"),
        (BRANCH + X_OUT * (np.arange(96) < 48), "at elements 48 to 95 of 96: the residual is missing"),
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


def _interleaved(function, first=0):
    both = np.concatenate([GATE, UP], axis=1)
    return function(both[:, first::2]) * both[:, 1 - first :: 2]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.logaddexp(0, GATE) * UP, "softplus(gate) * up instead of SiLU(gate) * up"),
        (_silu(GATE, 1.3) * UP, "x * sigmoid(1.3 x) instead of SiLU"),
        (_silu(GATE) * (UP + 1), "1 is added to ffn_up"),
        (np.where(GATE > 0, GATE, 0.2 * GATE) * UP, "leaky relu with negative numbers times 0.2 instead of SiLU"),
        (_interleaved(_silu), "ffn_gate and ffn_up are the even elements and the others of both in a row"),
        (_silu(np.clip(GATE, -0.8, 0.8)) * UP, "ffn_gate is clipped beyond 0.8"),
        (_silu(_silu(GATE)) * UP, "SiLU is applied twice"),
        (_silu(GATE) * _silu(UP), "SiLU is applied to ffn_up too"),
        (_silu(GATE) * np.maximum(UP, 0), "relu is applied to ffn_up too"),
        (GATE / (1 + np.exp(GATE)) * UP, "SiLU with the sign lost in the sigmoid(gate) * up instead of"),
        (
            np.where(np.arange(120) < 100, _silu(GATE), GATE) * UP,
            "at elements 100 to 119 of 120: gate * up instead of",
        ),
        (_silu(GATE) * (1 + 0.02 * np.sin(3 * GATE)) * UP, "the activation is approximated: it is off by up to 0.0"),
        ((np.sin(GATE) + GATE**2) * UP, "it is another function of gate, times up instead of SiLU(gate) * up: "),
        (spec.gelu_tanh(GATE) * UP, "GELU(gate) * up instead of"),
        (_silu(GATE, 1.702) * UP, "gate * sigmoid(1.702 gate) * up instead of"),
        (GATE * np.clip(GATE / 6 + 0.5, 0, 1) * UP, "hard SiLU(gate) * up instead of"),
        (_silu(np.minimum(GATE, 0.6)) * UP, "ffn_gate is clipped above 0.6"),
        (_silu(GATE) * np.clip(UP, -0.5, 0.5), "ffn_up is clipped beyond 0.5"),
        (_silu(0.7 * np.tanh(GATE / 0.7)) * UP, "ffn_gate is soft-capped at 0.7"),
        (np.minimum(_silu(GATE), _silu(0.5)) * UP, "ffn_gate is clipped above 0.5"),
        (_interleaved(_silu, 1), "ffn_gate and ffn_up are the odd elements and the others of both in a row"),
        (_silu(GATE) * np.roll(UP, 1, axis=1), "elements of ffn_up are shifted by one, the one before"),
        (_silu(GATE) * np.roll(UP, -1, axis=1), "elements of ffn_up are shifted by one, the next one"),
        (_silu(GATE) * np.roll(UP, 60, axis=1), "elements of ffn_up are with their halves exchanged"),
        (_silu(GATE) * np.roll(UP, 1, axis=0), "rows of ffn_up are shifted by one, the one before"),
        (_silu(np.roll(GATE, 1, axis=0)) * UP, "rows of ffn_gate are shifted by one, the one before"),
    ],
)
def test_activations_are_read_off(wrong, says):
    assert judged("llama", "ffn_out", wrong).startswith(says)


# --- elements -------------------------------------------------------------------------------------------------------------------------


def _fp8(x, digits):
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(np.ldexp(fraction, digits)), exponent - digits)


def _in_codes(x, axis):
    step = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.rint(x / step) * step


def _changed(x, where, change):
    x = x.copy()
    x[where] = change(x[where])
    return x


V = points("llama", "ffn_inp")
COLUMNS = np.arange(V.shape[1])
SHUFFLED = np.random.default_rng(4).permutation(V.shape[1])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (V * (np.random.default_rng(2).random(V.shape) > 0.1) / 0.9, "% of its numbers are 0, the others are 1.1111 times"),
        (np.roll(V, 5, axis=1), "elements are shifted by 5: element 5 has the numbers of element 0"),
        (np.roll(V, 48, axis=1), "the two halves of the elements are exchanged"),
        (V.reshape(T, 4, 2, 12).transpose(0, 1, 3, 2).reshape(V.shape), "the two halves of each 24 elements are interleaved"),
        (V[:, SHUFFLED], "the right numbers in other places: element 0 has those of"),
        (V[:, np.where(COLUMNS < 90, COLUMNS, COLUMNS - 6)], "elements 90 to 95 have the numbers of elements 84 to 89"),
        (V[np.r_[0:5, 6, 5, 7:T]], "positions 5, 6 are exchanged"),
        (V[np.r_[0:9, [8] * 8]], "positions 9 to 16 have the numbers of position 8"),
        (V * LLAMA.output_norm, "every position is multiplied by output_norm"),
        (1.5 * V + 0.25, "everything is 1.5 times what it should be, plus 0.25"),
        (
            V * np.linspace(0.5, 2, 96),
            "each element is wrong by a factor of its own, from 0.5 to 2, the same at every position: a scale for each row of weights",
        ),
        (V * np.where(COLUMNS < 30, np.linspace(0.5, 2, 96), 1), "a scale for each row of weights; 30 of 96 are wrong"),
        (V + np.linspace(-1, 1, T)[:, None], "a constant of its own is added to each position"),
        (V / LLAMA.output_norm, "every position is divided by output_norm"),
        (V + LLAMA.output_norm, "output_norm is added to every position"),
        (V - LLAMA.output_norm, "output_norm is subtracted from, or missing in, every position"),
        (V[:, ::-1], "elements are in the opposite order"),
        (V.reshape(T, 4, 2, 12)[:, :, ::-1].reshape(V.shape), "the two halves of each 24 elements are exchanged"),
        (V.reshape(T, 4, 12, 2).swapaxes(2, 3).reshape(V.shape), "the 12 runs of 2 in each 24 elements are interleaved"),
        (V.reshape(T, 8, 12)[:, ::-1].reshape(V.shape), "the 8 runs of 12 in each 96 elements are in the opposite order"),
        (V.reshape(T, 8, 12).swapaxes(1, 2).reshape(V.shape), "the 8 runs of 12 in each 96 elements are interleaved"),
    ],
)
def test_elements_are_read_off(wrong, says):
    """The tensor is one that has no readings of its own."""
    noise = 0 if "grid" in says or "bits" in says else 1e-7
    theirs = wrong * (1 + noise * np.random.default_rng(1).standard_normal(wrong.shape))
    cause = cause_of(Wrong(LLAMA, EXACT, Key("inpL", None), [V], V, theirs, np.abs(theirs - V) > 1e-6, 0.0, {}))
    assert cause is not None
    assert says in cause.text


def test_elements_that_are_0_are_named_in_few_rows():
    """In more rows they would have a factor of their own, 0."""
    some = V[:3]
    theirs = 1.25 * some * ((COLUMNS < 10) | (COLUMNS > 19))
    cause = cause_of(Wrong(LLAMA, EXACT, Key("inpL", None), [some], some, theirs, np.abs(theirs - some) > 1e-6, 0.0, {}))
    assert cause.text == "10 % of its numbers are 0 (elements 10 to 19 of each position), the others are 1.25 times what they should be"


def _softmax(x):
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _top(x, count):
    return np.where(x >= np.sort(x, axis=1)[:, -count, None], x, -100.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (np.clip(V, -1, 1), "the result is clipped beyond 1"),
        (np.clip(V, None, 1.5), "the result is clipped above 1.5"),
        (np.maximum(V, 0), "negative numbers are set to 0"),
        (2 * np.tanh(V / 2), "the result is soft-capped at 2"),
        (_fp8(V, 4), "the result: rounded to e4m3"),
        (_fp8(V, 3), "the result: rounded to e5m2"),
        (_in_codes(V, 1), "the result: rounded to int8 with a scale for each row"),
        (_in_codes(V, None), "the result: rounded to int8 with one scale"),
        (_changed(V, np.s_[9:], lambda x: 2 * x), "at positions 9 to 16 of 17: everything is 2 times what is right"),
        (_changed(V, np.s_[:, 17], lambda x: x + 5), "at element 17 of 96: 5 is added to every number"),
        (V + 0.25, "0.25 is added to every number"),
    ],
)
def test_results_behind_one_more_step_are_named(wrong, says):
    assert judged("llama", "ffn_inp", wrong).startswith(says)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: x - x.max(axis=1, keepdims=True), "the largest logit of each position is subtracted from all of them"),
        (_softmax, "they are probabilities: the softmax of the logits"),
        (lambda x: np.log(_softmax(x)), "they are logarithms of probabilities: the log-softmax of the logits"),
        (lambda x: _top(x, 9), "90 % of its numbers are -100, the others are right"),
    ],
)
def test_logits_that_a_sampler_has_changed_are_named(wrong, says):
    assert judged("llama", "result_output", wrong(points("llama", "result_output"))).startswith(says)


TABLE = LLAMA.token_embd.astype(np.float64)
LATE = IDS["llama"][:, None] * 96 + np.arange(96) + 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (TABLE.ravel()[LATE % TABLE.size], "rows are read 1 element too late: an offset in the table"),
        (TABLE.reshape(96, -1)[:, IDS["llama"]].T, "the embedding's table is read column by column, as if it were transposed"),
        (TABLE[np.r_[IDS["llama"][:5], IDS["llama"][4:-1]]], "positions 5 to 16 have the numbers of positions 4 to 15"),
        (TABLE[(IDS["llama"] + 2) % 90], "token ids are off by 2"),
    ],
)
def test_rows_of_the_table_in_other_places_are_named(wrong, says):
    assert judged("llama", "inp_embd", wrong) == says


@pytest.mark.parametrize("stride", [80, 130])
def test_rows_at_another_stride_are_named(stride):
    right = points("llama", "attn_norm")
    rows, width = right.shape
    written = np.zeros(rows * max(stride, width) + width)
    for t in range(rows):
        written[t * stride : t * stride + width] = right[t]
    assert read("llama", "attn_norm", written[: right.size].reshape(right.shape)) == f"rows begin {stride} numbers apart, not 96"


def test_penalties_are_named():
    wrong = points("llama", "result_output")
    seen = np.zeros(wrong.shape, bool)
    for t, token in enumerate(IDS["llama"]):
        seen[t:, token] = True
    penalised = np.where(seen, np.where(wrong > 0, wrong / 1.3, wrong * 1.3), wrong)
    assert judged("llama", "result_output", penalised).startswith("a repetition penalty of 1.3 is on the logits of tokens that occurred")
    assert judged("llama", "result_output", wrong - 0.7 * seen).startswith("a presence penalty of 0.7 ")
    whole = judged("llama", "result_output", wrong - 0.7 * seen[-1])
    assert whole.startswith("a presence penalty of 0.7 is on the logits of tokens that occur in the sequence")


@pytest.mark.parametrize("size", [1e-4, 1.0])
@pytest.mark.parametrize("name", ["attn_norm", "ffn_norm", "ffn_inp", "l_out", "ffn_out", "inp_embd", "result_norm", "result_output"])
def test_nothing_is_said_of_random_errors(name, size):
    right = points("llama", name)
    assert read("llama", name, right + size * np.random.default_rng(3).standard_normal(right.shape)) == ""


def test_readings_say_more_than_fitted_factors_and_constants():
    """A factor for each position explains a norm's other divisor as well, and says less."""
    theirs = normed(X, G, root=X[:, 48:])
    report = judge_trace(LLAMA, with_tensor(POINTS["llama"], Key("ffn_norm", LAYER), theirs), IDS["llama"], precision=FLOAT32)
    assert report.first_wrong.hypothesis == "the mean square of the second half instead of the mean square"


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
