"""What wrong norms, residual sums, activations and elements say by themselves, each made in one tensor of a recorded forward pass."""

import numpy as np
import pytest
from dumps import MODEL, TOKENS, recorded, with_tensor, without_codes
from wrong_tensors import read_off

from bitnet_np import EXACT, spec
from bitnet_np.judge import graph, operations
from bitnet_np.judge.precision import FLOAT32
from bitnet_np.judge.readings import places
from bitnet_np.judge.readings.table import cause_of
from bitnet_np.judge.readings.wrong import Wrong
from bitnet_np.judge.roundings import to_bfloat16
from bitnet_np.judge.trace import judge_trace
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

LAYER, T = 1, 17
LLAMA = random_model(7, family="llama", n_layers=3, vocab=90, width=96, heads=4, kv_heads=2, head_dim=24, ffn=120)
QWEN3 = random_model(8, family="qwen3", n_layers=2, vocab=90, width=96, heads=4, kv_heads=2, head_dim=24, ffn=120)
MODELS = {"bitnet": MODEL, "llama": LLAMA, "qwen3": QWEN3}
IDS = {"bitnet": TOKENS, "llama": np.random.default_rng(0).permutation(90)[:T], "qwen3": np.random.default_rng(1).permutation(90)[:T]}
POINTS = {name: without_codes(recorded(MODELS[name], IDS[name])) for name in MODELS}
HEADS = {"result_output", "result_norm", "inp_embd"}


def key_of(name):
    return Key(name, None if name in HEADS else LAYER)


def points(family, name, layer=LAYER):
    return POINTS[family][Key(name, None if name in HEADS else layer)].astype(np.float64)


def said(family, name, theirs):
    return read_off(MODELS[family], IDS[family], POINTS[family], key_of(name), theirs)


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
        (normed(X, G, eps=0.123), f"epsilon is about 0.123 instead of {EPS:.3g}"),
        (normed(X, G, root=X * (96 / 80) ** 0.5), "the sum of squares is divided by 80 instead of the width of 96"),
        (normed(X, G, root=X[:, :48]), "the mean square is of elements 0 to 47, the first half, alone"),
        (normed(X, G, root=X[:, :-5]), "the mean square is without the last 5 elements"),
        (normed(X, G, power=0.4), "the mean square is taken to the power 0.4 instead of 0.5"),
        (normed(X, G * G, root=X * G, eps=0), "the norm is taken twice"),
        (normed(X, G, root=X * G), "the weight is applied before the norm"),
        (normed(X, 1 + G), "1 is added to the weight"),
        (normed(X, LLAMA.layers[0].attn_norm), "the weight of layer 0 attn_norm is used"),
        (normed(X, np.random.default_rng(5).permutation(G)), "the weight's elements are in another order"),
        (normed(X, np.tile(G[:48], 2)), "the weight of elements 48 to 95 is that of elements 0 to 47"),
        (normed(X, 1 + np.sin(np.arange(96)) / 2), "the weight is none of this model's norms"),
        (normed(X, G.astype(np.float16)), "the weight is rounded to float16"),
        (normed(X, np.where(np.arange(96) < 8, 1, G)), "the weight is missing at elements 0 to 7"),
        (normed(X, G, eps=EPS) * np.sqrt(np.mean(X**2, axis=1, keepdims=True)) / 3, "all positions are divided by the same number"),
        (X * G * _inverse_root(np.mean(X**2, axis=1, keepdims=True) + EPS), "the inverse root is an approximation"),
        (X, "the norm is missing: its input comes out unchanged"),
        (normed(points("llama", "attn_o_out"), G), "its input is layer 1 attn_o_out instead of layer 1 ffn_inp"),
        (normed(X - X.mean(axis=1, keepdims=True), G), "the mean is subtracted, as in LayerNorm"),
        (normed(X, to_bfloat16(G)), "the weight is rounded to bfloat16"),
        (normed(X, G * G), "the weight is applied twice"),
        (normed(X, 1 / G), "rows are divided by the weight, not multiplied"),
        (normed(X, G, root=X * 96**0.5), "the sum of squares is not divided by the width of 96"),
        (
            normed(X, G, root=X * (96 / 80) ** 0.5, eps=0.123),
            "the sum of squares is divided by 80 instead of the width of 96, and epsilon is",
        ),
        (normed(X, G, root=X[:, :-5] * (91 / 96) ** 0.5), "the sum of squares is without the last 5 elements"),
        (normed(X, G, root=X[:, ::2]), "the mean square is of every second element alone"),
        (normed(X, G, root=X[:, ::4]), "the mean square is of every fourth element alone"),
        (normed(X, G, power=1), "it divides by the mean square, without the root"),
        (normed(X, G, root=X - X.mean(axis=1, keepdims=True)), "it divides by the standard deviation: the mean is subtracted in the root"),
        (X * G / np.abs(X).mean(axis=1, keepdims=True), "it divides by the mean magnitude, not the root mean square"),
        (X * G / np.abs(X).max(axis=1, keepdims=True), "it divides by the largest magnitude, not the root mean square"),
        (X * G / np.sqrt(np.mean(X * X) + EPS), "all positions are divided by the same number, that of all together"),
        (X * G / _root_of(X[:1]), "all positions are divided by the root mean square of the first one"),
        (X * G / _root_of(X[-1:]), "all positions are divided by the root mean square of the last one"),
        (X * G / _root_of(np.roll(X, 1, axis=0)), "each position is divided by the root mean square of the previous one"),
        (X * G / _root_of(np.roll(X, -1, axis=0)), "each position is divided by the root mean square of the next one"),
        (X * G * np.linspace(0.2, 3, T)[:, None] ** 2, "each position is divided by a number of its own that is not its root mean square"),
        (X * G / (_root_of(X) + 0.1), "epsilon is outside the root, about 0.1"),
        (X * G, "the norm is missing, only its weight is applied"),
        (normed(X.reshape(-1, 48), 1).reshape(X.shape) * G, "the norm is taken over each half by itself"),
    ],
)
def test_norms_are_read_off(wrong, says):
    assert said("llama", "ffn_norm", wrong).startswith(says)


GPT2 = random_model(5, family="gpt2", n_layers=2, vocab=90, width=96, heads=4, kv_heads=4, head_dim=24, ffn=120)
GPT2_POINTS = without_codes(recorded(GPT2, IDS["llama"]))


def test_a_mean_that_is_not_subtracted_and_biases_that_are_added_are_told():
    layer, x = GPT2.layers[LAYER], GPT2_POINTS[Key("ffn_inp", LAYER)].astype(np.float64)

    def told(name, wrong):
        return read_off(GPT2, IDS["llama"], GPT2_POINTS, Key(name, LAYER), wrong)

    assert told("ffn_norm", normed(x, layer.ffn_norm) + layer.ffn_norm_bias) == "the mean is not subtracted"
    assert told("ffn_inp", x + layer.ffn_norm_bias) == "ffn_norm's bias is added to every position"
    assert told("ffn_inp", x - layer.attn_output.bias) == "attn_output's bias is subtracted from, or missing in, every position"


def test_a_weight_of_unknown_size_tells_no_divisor():
    assert said("llama", "ffn_norm", normed(X, np.random.default_rng(5).permutation(G), eps=0.3)) == ""


def test_norms_over_groups_are_told():
    x, gain = points("bitnet", "kqv_out"), MODEL.layers[LAYER].attn_sub_norm.astype(np.float64)
    size = MODEL.config.head_dim
    wrong = normed(x.reshape(-1, size), 1).reshape(x.shape) * gain
    assert said("bitnet", "attn_sub_norm", wrong) == "the norm is taken over each head by itself"


def test_norms_of_queries_are_read_off():
    x, gain = points("qwen3", "Qcur"), QWEN3.layers[LAYER].attn_q_norm.astype(np.float64)
    rows = operations.rope(QWEN3, EXACT, x).value.reshape(-1, gain.size)
    assert said("qwen3", "Qcur_normed", normed(rows, gain).reshape(x.shape)) == "its input is rotated already: RoPE comes before the norm"
    whole = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + QWEN3.config.eps) * np.tile(gain, x.shape[1] // gain.size)
    assert said("qwen3", "Qcur_normed", whole) == "the mean square is of all heads together, not of each"


def test_a_norm_that_leaves_out_a_head_is_told():
    x, right = points("qwen3", "Qcur"), points("qwen3", "Qcur_normed")
    wrong = np.where(np.arange(x.shape[1]) >= 3 * QWEN3.config.head_dim, x, right)
    assert said("qwen3", "Qcur_normed", wrong) == "at elements 72 to 95: the norm is missing: its input comes out unchanged"


def test_a_layer_that_runs_twice_is_told_at_the_norm_behind_it():
    values = {Key("l_out", 1): points("llama", "l_out", 2)}
    for operation in graph.operations(LLAMA, EXACT):
        if operation.key.layer == 2:
            values[operation.key] = operation.evaluate(*(values[k] for k in operation.inputs)).value
    wrong = normed(values[Key("l_out", 2)], LLAMA.output_norm, EPS)
    assert said("llama", "result_norm", wrong) == "its input is the output of layer 2 run twice"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: normed(x, 1.0, EPS), "a norm is applied to it, without a weight: each position is divided by its root mean square"),
        (lambda x: normed(x, LLAMA.layers[LAYER].ffn_norm, EPS), "a norm is applied to it, with the weight of layer 1 ffn_norm"),
        (lambda x: x / np.linalg.norm(x, axis=1, keepdims=True), "each position is divided by its length"),
    ],
)
def test_a_norm_where_none_belongs_is_named(wrong, says):
    assert said("llama", "l_out", wrong(points("llama", "l_out"))) == says


# --- sums -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({"ffn_inp": 1, "ffn_down": 0.5}, "it is ffn_inp + 0.5 ffn_down"),
        ({"ffn_inp": 1, "ffn_down": 1, "attn_o_out": 1}, "it is ffn_inp + ffn_down + attn_o_out"),
        ({"ffn_norm": 1, "ffn_down": -1}, "it is -ffn_down + ffn_norm"),
        ({"ffn_inp": 1.234, "ffn_down": 1}, "it is 1.234 ffn_inp + ffn_down"),
    ],
)
def test_the_terms_of_residual_sums_are_told(terms, says):
    wrong = sum(factor * points("llama", name) for name, factor in terms.items())
    assert said("llama", "l_out", wrong) == f"{says} instead of ffn_inp + ffn_down"


def test_a_residual_that_is_not_added_to_one_row_is_told():
    wrong = points("llama", "ffn_inp") + points("llama", "ffn_down") * (np.arange(T) < T - 1)[:, None]
    assert said("llama", "l_out", wrong) == f"position {T - 1} has the numbers of layer {LAYER} ffn_inp"


def test_residuals_of_some_elements_and_of_normed_inputs_are_told():
    x, y = points("llama", "ffn_inp"), points("llama", "ffn_down")
    half = said("llama", "l_out", y + x * (np.arange(96) < 48))
    assert half == "at elements 48 to 95: it is ffn_down instead of ffn_inp + ffn_down"
    normed_input = said("llama", "l_out", x / np.sqrt((x * x).mean(axis=1, keepdims=True)) + y)
    assert normed_input.startswith("it is ffn_down + ffn_inp divided by its root mean square instead of")


@pytest.mark.parametrize(("by", "which"), [(1, "before"), (-1, "after")])
def test_residuals_of_another_token_are_told(by, which):
    wrong = np.roll(points("llama", "ffn_inp"), by, axis=0) + points("llama", "ffn_down")
    assert said("llama", "l_out", wrong).startswith(f"it is ffn_down + ffn_inp of the token {which} instead of")


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
        (_silu(GATE, 1.3) * UP, "gate * sigmoid(1.3 gate) * up instead of"),
        (_silu(GATE) * (UP + 1), "SiLU(gate) * (up + 1) instead of"),
        (np.where(GATE > 0, GATE, 0.2 * GATE) * UP, "leaky_relu(gate), with a slope of 0.2, * up instead of"),
        (_interleaved(_silu), "SiLU(even elements of gate and up in a row) * the odd ones instead of"),
        (_silu(np.clip(GATE, -0.8, 0.8)) * UP, "gate is clipped to -0.8..0.8"),
        (_silu(_silu(GATE)) * UP, "the activation is applied twice instead of SiLU(gate) * up"),
        (_silu(GATE) * _silu(UP), "the activation is applied to gate and up instead of SiLU(gate) * up"),
        (_silu(GATE) * np.maximum(UP, 0), "SiLU(gate) * relu(up) instead of"),
        (GATE / (1 + np.exp(GATE)) * UP, "SiLU with the sign lost in the sigmoid(gate) * up instead of"),
        (np.where(np.arange(120) < 100, _silu(GATE), GATE) * UP, "at elements 100 to 119: gate * up instead of"),
        (_silu(GATE) * (1 + 0.02 * np.sin(3 * GATE)) * UP, "the activation is approximated: it is off by up to 0.0"),
        ((np.sin(GATE) + GATE**2) * UP, "it is another function of gate, times up instead of SiLU(gate) * up: "),
        (np.where(GATE < 1, 0, _silu(GATE)) * UP, "the activation is 0 where gate is below 0.99"),
        (spec.gelu_tanh(GATE) * UP, "GELU(gate) * up instead of"),
        (_silu(GATE, 1.702) * UP, "quick GELU(gate) * up instead of"),
        (GATE * np.clip(GATE / 6 + 0.5, 0, 1) * UP, "hard SiLU(gate) * up instead of"),
        (np.where(GATE > 0, GATE, 0.2 * GATE) ** 2 * UP, "leaky_relu(gate)^2, with a slope of 0.2, * up instead of"),
        (np.logaddexp(0, 2 * GATE) / 2 * UP, "softplus(2 gate) / 2 * up instead of"),
        (_silu(np.minimum(GATE, 0.6)) * UP, "gate is clipped to at most 0.6"),
        (_silu(GATE) * np.clip(UP, -0.5, 0.5), "up is clipped to -0.5..0.5"),
        (_silu(np.minimum(GATE, 0.6)) * np.clip(UP, -0.6, 0.6), "gate is clipped to at most 0.6, and up to -0.6..0.6"),
        (_silu(np.clip(GATE, -0.6, 0.6)) * np.clip(UP, -0.6, 0.6), "gate and up are clipped to -0.6..0.6"),
        (_silu(0.7 * np.tanh(GATE / 0.7)) * UP, "gate is soft-capped at 0.7"),
        (np.minimum(_silu(GATE), _silu(0.5)) * UP, "gate is clipped to at most 0.5"),
        (_silu(GATE + UP), "SiLU(gate + up) instead of"),
        (_interleaved(_silu, 1), "SiLU(odd elements of gate and up in a row) * the even ones instead of"),
        (_silu(GATE) * np.roll(UP, 1, axis=1), "SiLU(gate) * up of the element before instead of"),
        (_silu(GATE) * np.roll(UP, -1, axis=1), "SiLU(gate) * up of the element after instead of"),
        (_silu(GATE) * np.roll(UP, 60, axis=1), "SiLU(gate) * up of the other half instead of"),
        (_silu(GATE) * np.roll(UP, 1, axis=0), "SiLU(gate) * up of the token before instead of"),
        (_silu(np.roll(GATE, 1, axis=0)) * UP, "SiLU(gate of the token before) * up instead of"),
    ],
)
def test_activations_are_read_off(wrong, says):
    assert said("llama", "ffn_out", wrong).startswith(says)


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
        (np.clip(V, -1, 1), "numbers are clipped to -1..1"),
        (np.clip(V, None, 1.5), "numbers above 1.5 are clipped"),
        (np.maximum(V, 0), "negative numbers are set to 0"),
        (2 * np.tanh(V / 2), "numbers are soft-capped at 2"),
        (V * (np.random.default_rng(2).random(V.shape) > 0.1) / 0.9, "% of its numbers are 0, the others are 1.1111 times"),
        (_fp8(V, 4), "its numbers are rounded to 4 significant bits, as fp8 e4m3 has them"),
        (_fp8(V, 3), "its numbers are rounded to 3 significant bits, as fp8 e5m2 has them"),
        (_in_codes(V, 1), "its numbers are rounded to a grid of 127 steps on either side of 0 for each row, as codes of 8 bits do"),
        (_in_codes(V, None), "its numbers are rounded to a grid of 127 steps on either side of 0 for all of it"),
        (_in_codes(V.reshape(-1, 32), 1).reshape(V.shape), "127 steps on either side of 0 for each 32 numbers"),
        (np.roll(V, 5, axis=1), "elements are shifted by 5: element 5 has the numbers of element 0"),
        (np.roll(V, 48, axis=1), "the two halves of the elements are exchanged"),
        (V.reshape(T, 4, 2, 12).transpose(0, 1, 3, 2).reshape(V.shape), "elements are in the order of pairs (i, i + 12) in each 24"),
        (V[:, SHUFFLED], "the right numbers in other places: element 0 has those of"),
        (V[:, np.where(COLUMNS < 90, COLUMNS, COLUMNS - 6)], "elements 90 to 95 have the numbers of elements 84 to 89"),
        (V[np.r_[0:5, 6, 5, 7:T]], "positions 5, 6 are exchanged"),
        (V[np.r_[0:9, [8] * 8]], "positions 9 to 16 have the numbers of position 8"),
        (_changed(V, np.s_[9:], lambda x: 2 * x), "positions 9 to 16 are 2 times what they should be"),
        (_changed(V, np.s_[:, 24:48], lambda x: x / 2), "elements 24 to 47 are 0.5 times what they should be"),
        (V * LLAMA.output_norm, "every position is multiplied by output_norm"),
        (_changed(V, np.s_[:, 17], lambda x: x + 5), "5 is added to element 17 of each position: a bias"),
        (V + 0.25, "0.25 is added to every number"),
        (1.5 * V + 0.25, "everything is 1.5 times what it should be, plus 0.25"),
        (
            V * np.linspace(0.5, 2, 96),
            "each element is wrong by a factor of its own, the same at every position: a scale for each row of weights",
        ),
        (V * np.where(COLUMNS < 30, np.linspace(0.5, 2, 96), 1), "a scale for each row of weights; 30 of 96 are wrong"),
        (V + np.linspace(-1, 1, T)[:, None], "a constant of its own is added to each position"),
        (V / LLAMA.output_norm, "every position is divided by output_norm"),
        (V + LLAMA.output_norm, "output_norm is added to every position"),
        (V - LLAMA.output_norm, "output_norm is subtracted from, or missing in, every position"),
        (V[:, ::-1], "elements are in the opposite order"),
        (V.reshape(T, 4, 2, 12)[:, :, ::-1].reshape(V.shape), "the two halves of the elements are exchanged in each 24"),
        (V.reshape(T, 4, 12, 2).swapaxes(2, 3).reshape(V.shape), "elements are in the order of even ones, then odd ones in each 24"),
        (V.reshape(T, 8, 12)[:, ::-1].reshape(V.shape), "blocks of 12 elements are in the opposite order"),
        (V.reshape(T, 8, 12).swapaxes(1, 2).reshape(V.shape), "elements are transposed: rows of 12 are read as columns"),
    ],
)
def test_elements_are_read_off(wrong, says):
    """The tensor is one that has no readings of its own."""
    operation = graph.Operation(Key("inpL", None), (), lambda: None)
    noise = 0 if "grid" in says or "bits" in says else 1e-7
    theirs = wrong * (1 + noise * np.random.default_rng(1).standard_normal(wrong.shape))
    cause = cause_of(Wrong(LLAMA, EXACT, operation, [V], V, theirs, np.abs(theirs - V) > 1e-6, 0.0, {}))
    assert cause is not None
    assert says in cause.text


def test_elements_that_are_0_are_named_in_few_rows():
    """In more rows they would have a factor of their own, 0."""
    operation = graph.Operation(Key("inpL", None), (), lambda: None)
    some = V[:3]
    theirs = 1.25 * some * ((COLUMNS < 10) | (COLUMNS > 19))
    cause = cause_of(Wrong(LLAMA, EXACT, operation, [some], some, theirs, np.abs(theirs - some) > 1e-6, 0.0, {}))
    assert cause.text == "10 % of its numbers are 0 (elements 10 to 19 of each position), the others are 1.25 times what they should be"


def _softmax(x):
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _top(x, count):
    return np.where(x >= np.sort(x, axis=1)[:, -count, None], x, -100.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda x: x - x.max(axis=1, keepdims=True), "the largest logit of each position is subtracted from all of them"),
        (_softmax, "they are probabilities: the softmax of the logits"),
        (lambda x: np.log(_softmax(x)), "they are logarithms of probabilities: the log-softmax of the logits"),
        (lambda x: _top(x, 9), "only the 9 largest logits of each position are there, -100 stands for the others, as top-k leaves it"),
    ],
)
def test_logits_that_a_sampler_has_changed_are_named(wrong, says):
    assert said("llama", "result_output", wrong(points("llama", "result_output"))).startswith(says)


def _sines(interleaved):
    angle = np.multiply.outer(np.arange(T), 10000.0 ** (-np.arange(48) / 48))
    tables = np.sin(angle), np.cos(angle)
    return 0.3 * (np.stack(tables, axis=2).reshape(T, -1) if interleaved else np.concatenate(tables, axis=1))


def test_rows_read_at_an_offset_are_named():
    table = LLAMA.token_embd.astype(np.float64).ravel()
    rows = IDS["llama"][:, None] * 96 + np.arange(96) + 1
    assert said("llama", "inp_embd", table[rows % table.size]) == "rows are read 1 element too late: an offset in the table"


def test_a_table_in_the_other_layout_is_named():
    table = LLAMA.token_embd.astype(np.float64)
    rows = table.reshape(96, -1)[:, IDS["llama"]].T
    assert said("llama", "inp_embd", rows) == "the table is read column by column, not row by row"


@pytest.mark.parametrize("stride", [80, 130])
def test_rows_at_another_stride_are_named(stride):
    right = points("llama", "attn_norm")
    rows, width = right.shape
    written = np.zeros(rows * max(stride, width) + width)
    for t in range(rows):
        written[t * stride : t * stride + width] = right[t]
    assert said("llama", "attn_norm", written[: right.size].reshape(right.shape)) == f"rows begin {stride} numbers apart, not 96"


@pytest.mark.parametrize("interleaved", [False, True])
def test_sinusoids_are_named(interleaved):
    assert (
        said("llama", "inp_embd", points("llama", "inp_embd") + _sines(interleaved))
        == "sines and cosines of positions are added, times 0.3"
    )


def test_penalties_are_named():
    wrong = points("llama", "result_output")
    seen = np.zeros(wrong.shape, bool)
    for t, token in enumerate(IDS["llama"]):
        seen[t:, token] = True
    penalised = np.where(seen, np.where(wrong > 0, wrong / 1.3, wrong * 1.3), wrong)
    assert said("llama", "result_output", penalised).startswith("a repetition penalty of 1.3 is on the logits of tokens that occurred")
    assert said("llama", "result_output", wrong - 0.7 * seen).startswith("a presence penalty of 0.7 ")
    whole = said("llama", "result_output", wrong - 0.7 * seen[-1])
    assert whole.startswith("a presence penalty of 0.7 is on the logits of tokens that occur in the sequence")


@pytest.mark.parametrize("size", [1e-4, 1.0])
@pytest.mark.parametrize("name", ["attn_norm", "ffn_norm", "ffn_inp", "l_out", "ffn_out", "inp_embd", "result_norm", "result_output"])
def test_nothing_is_said_of_random_errors(name, size):
    right = points("llama", name)
    assert said("llama", name, right + size * np.random.default_rng(3).standard_normal(right.shape)) == ""


def test_readings_say_more_than_fitted_factors_and_constants():
    """A factor for each position explains a norm's other divisor as well, and says less."""
    theirs = normed(X, G, root=X[:, 48:])
    report = judge_trace(LLAMA, with_tensor(POINTS["llama"], Key("ffn_norm", LAYER), theirs), IDS["llama"], precision=FLOAT32)
    assert report.first_wrong.hypothesis == "the mean square of the second half instead of the mean square"


def test_one_number_beyond_the_bound_is_no_cause_where_all_are_a_little_wrong():
    """As in float16, whose roundings hide all but the worst number of a small bias."""
    operation = graph.Operation(Key("inpL", None), (), lambda: None)
    error = np.full(V.shape, 1e-3)
    error[3, 5] = 2e-3
    wrong = Wrong(LLAMA, EXACT, operation, [V], V, V + error, error > 1.5e-3, 1e-7, {})
    assert places.one_number(wrong) is None
    assert places.few_places(wrong) is None
    alone = np.where(error > 1.5e-3, error, 0)
    wrong = Wrong(LLAMA, EXACT, operation, [V], V, V + alone, error > 1.5e-3, 1e-7, {})
    assert places.one_number(wrong) == "one number alone is wrong: position 3, element 5"
