"""What wrong numbers say by themselves: mistakes with a number in them, each made in one tensor of a recorded forward pass."""

import numpy as np
import pytest
from dumps import MODEL, TOKENS, recorded, trace, with_tensor, without_codes
from wrong_tensors import IDS, LAYER, LLAMA, POINTS, T, judged, key_of, layer_points, read, read_off

from bitnet_np import BITNET_CPP, spec
from bitnet_np.judge.precision import FLOAT32
from bitnet_np.judge.trace import judge_trace
from bitnet_np.model import packing, widen
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key
from scripts import mutations


def with_step(key, compute, ids=TOKENS):
    """A dump of an engine that computes one tensor in another way."""
    return trace(mutations.Engine(MODEL, ids, {key.name: compute}, (key.layer,)).run())


# --- matrices -------------------------------------------------------------------------------------------------------------------------


OTHER_ROWS = "weights of other rows are used:"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: np.where(np.arange(96) < 64, w, 0), "the last 32 inputs are not summed"),
        (lambda w: np.where(np.arange(96) // 16 == 3, 2 * w, w), "inputs 48 to 63 are summed twice"),
        (lambda w: w.reshape(w.shape[::-1]).T, "the matrix is read column by column, as if it were transposed"),
        (lambda w: np.roll(w, 7, axis=0), f"{OTHER_ROWS} rows are shifted by 7: row 7 has the numbers of row 0"),
        (lambda w: np.concatenate([w[:16], w[:16], w[32:]]), f"{OTHER_ROWS} rows 16 to 31 have the numbers of rows 0 to 15"),
        (lambda w: np.concatenate([w[:5], w[7:8], w[6:]]), f"{OTHER_ROWS} row 5 has the numbers of row 7"),
        (lambda w: w[[1, 0, *range(2, 120)]], f"{OTHER_ROWS} rows 0, 1 are exchanged"),
        (lambda w: w[np.random.default_rng(2).permutation(120)], f"{OTHER_ROWS} the right numbers in other places: row 0 has those of "),
    ],
)
def test_products_of_changed_weights_are_read(change, says):
    linear, x, right = LLAMA.layers[LAYER].ffn_up, layer_points("llama")["ffn_norm"], layer_points("llama")["ffn_up"]
    assert judged("llama", "ffn_up", right + x @ (change(dense(linear)) - dense(linear)).T).startswith(says)


def test_activations_in_steps_of_their_own_are_recognised():
    linear, x = MODEL.layers[LAYER].attn_q, layer_points("bitnet")["attn_norm"]
    scale = 128 / np.abs(x).max(axis=1, keepdims=True)
    codes = np.where(np.rint(x * scale) == 128, -128, np.rint(x * scale))
    wrong = spec.ternary_matmul(codes, scale, packing.unpack(linear.weights).astype(np.float64), float(linear.weights.scale))
    assert judged("bitnet", "Qcur", wrong) == "activations are scaled to 128 steps instead of 127, and +128 wraps around to -128"


# --- products: rows, inputs, blocks, roundings, scales ----------------------------------------------------------------------------------

BLOCKS = random_model(
    5, family="llama", weights="Q4_K", table="Q4_K", tied=True, n_layers=2, vocab=300, width=256, heads=4, kv_heads=2, head_dim=64, ffn=256
)


def dense(linear):
    return widen.float32(getattr(linear, "weights", linear)).astype(np.float64)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda value, bias: value - np.where(np.arange(bias.size) < 40, bias, 0), "at elements 0 to 39 of 120: the bias is missing"),
        (lambda value, bias: value - bias + bias[::-1], "the elements of the bias are in the opposite order"),
        (lambda value, bias: value - bias * (np.arange(T) > 0)[:, None], "at positions 1 to 16 of 17: the bias is missing"),
    ],
)
def test_biases_in_part_or_in_other_places_are_named(change, says):
    bias = LLAMA.layers[LAYER].ffn_up.bias.astype(np.float64)
    assert judged("llama", "ffn_up", change(layer_points("llama")["ffn_up"], bias)) == says


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (0, "the weights of attn_q are used in the place of rows 0 to 47"),
        (48, "weights of other rows are used, of attn_q: rows 0 to 47 have the numbers of rows 48 to 95"),
    ],
)
def test_rows_of_another_matrix_of_the_layer_are_named(begin, says):
    other = LLAMA.layers[1].attn_q
    assert read("llama", "Kcur", (layer_points("llama")["attn_norm"] @ dense(other).T + other.bias)[:, begin : begin + 48]) == says


@pytest.mark.parametrize("tokens", [1, 3, 6, T])
def test_nothing_is_fitted_to_few_tokens(tokens):
    """Fewer tokens than unknowns: any rows, blocks' scales or low rank would fit."""
    rng = np.random.default_rng(9)
    for model, name in ((LLAMA, "ffn_up"), (MODEL, "ffn_up"), (BLOCKS, "ffn_up"), (LLAMA, "result_output")):
        points = {key: x[:tokens] for key, x in recorded(model, IDS["llama"]).items()}
        key = key_of(name)
        said = read_off(model, IDS["llama"][:tokens], points, key, points[key] + rng.standard_normal(points[key].shape))
        assert not said or said.startswith("only "), said


# --- attention ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"scale": 0.1}, "the score scale is 0.1 instead of 0.125"),
        ({"allowed": lambda i, j: (j <= i) & ((i < 4) | (j >= 4))}, "tokens from position 4 on do not see those before"),
    ],
)
def test_repeated_tokens_are_told_together(how, says):
    """Equal tokens have equal values in the first layer: only the sum of their weights can be told."""
    ids = np.array([5, 9, 11, 5, 7, 9, 8, 5, 6])
    dump = with_step(Key("kqv_out", 0), lambda e, n: e.attend(n, **how), ids)
    assert says in judge_trace(MODEL, dump, ids, precision=FLOAT32).first_wrong.hypothesis


def test_values_of_another_sequence_are_told_where_heads_are_narrow():
    """Fewer numbers than tokens: how many values they are cannot be told."""
    model = random_model(2, n_layers=2, head_dim=8)
    ids = np.arange(17)
    points = without_codes(recorded(model, ids))
    wrong = points[Key("kqv_out", LAYER)] + np.random.default_rng(0).standard_normal((17, 1)) * np.sin(
        np.arange(points[Key("kqv_out", 1)].shape[1])
    )
    said = read_off(model, ids, points, Key("kqv_out", LAYER), wrong)
    assert said.startswith("outputs are no sums of the values that tokens see: ")


def test_values_of_another_sequence_are_counted():
    other = mutations.Engine(MODEL, np.arange(100, 105)).run()
    key = Key("kqv_out", 1)
    dump = with_step(key, lambda e, n: e.attend(n, extra=(other[Key("Kcur_rope", n)], other[Key("Vcur", n)])))
    first_wrong = judge_trace(MODEL, dump, TOKENS, precision=FLOAT32).first_wrong
    assert (first_wrong.key, first_wrong.hypothesis.split(",")[1]) == (key, " 5 of them: a cache slot that was not cleared")


def test_repeated_tokens_have_no_values_of_others():
    ids = np.full(9, 7)
    dump = with_step(Key("kqv_out", 0), lambda e, n: e.attend(n) * np.float32(1.5), ids)
    first_wrong = judge_trace(MODEL, dump, ids, precision=FLOAT32).first_wrong
    assert "1.5 times" in first_wrong.hypothesis


# --- dumps ----------------------------------------------------------------------------------------------------------------------------


def test_a_tensor_of_a_buffer_that_was_written_to_again_is_recognised():
    dump = trace(POINTS["llama"] | {Key("l_out", 0): POINTS["llama"][Key("l_out", 2)]})
    hypothesis = judge_trace(LLAMA, dump, IDS["llama"], precision=FLOAT32).first_wrong.hypothesis
    assert hypothesis == "it has the numbers of layer 2 l_out: its buffer was written to again before it was dumped"


def test_a_known_mistake_is_not_given_up_for_a_fitted_factor():
    """The roundings of a norm's root are a factor of each position, so a fitted factor leaves even less than the mistake does."""
    x = POINTS["bitnet"][Key("l_out", LAYER - 1)].astype(np.float64)
    wrong = spec.rms_norm(x, MODEL.layers[LAYER].attn_norm, 1e-3) * (1 + 2e-7 * np.random.default_rng(0).standard_normal((T, 1)))
    assert judged("bitnet", "attn_norm", wrong) == f"epsilon is 0.001 instead of {MODEL.config.eps:.3g}"


def test_an_exact_engine_declared_as_bitnet_cpp_is_told_so():
    report = judge_trace(MODEL, trace(POINTS["bitnet"]), TOKENS, BITNET_CPP, precision=FLOAT32)
    assert report.first_wrong.hypothesis == "float16 roundings are not there: declare the dialect exact"


@pytest.mark.parametrize("size", [0.1, 1.0])
def test_nothing_is_said_of_what_nothing_explains(size):
    rng = np.random.default_rng(3)
    for key, value in POINTS["llama"].items():
        if key.layer == LAYER or key.name == "result_output":
            said = read_off(LLAMA, IDS["llama"], POINTS["llama"], key, value + size * rng.standard_normal(value.shape))
            assert not said or "no sums of the values that tokens see" in said, key


# --- where wrong numbers are ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "says"),
    [
        (slice(None), [3, 70], "only elements 3, 70 of each position: the rest of the tensor is right"),
        ([4], slice(None, None, 3), "only position 4: the other 16 are right"),
        ([4, 5, 6, 7, 8, 9], slice(None, None, 3), None),
    ],
)
def test_places_of_wrong_numbers(rows, columns, says):
    points = recorded()
    key = Key("ffn_up", 1)
    noise = np.random.default_rng(0).normal(0, 1, points[key].shape).astype(np.float32)
    mask = np.zeros(noise.shape, bool)
    mask[rows, columns] = True
    first_wrong = judge_trace(MODEL, with_tensor(points, key, points[key] + noise * mask), TOKENS, precision=FLOAT32).first_wrong
    assert first_wrong.key == key
    assert first_wrong.hypothesis is None if says is None else says in first_wrong.hypothesis
