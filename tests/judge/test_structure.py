"""What a step must have been is solved for, and the reader of structure says what it has in common with the right one.

Shapes, places and numbers are drawn: a law is told of any tensor, rows and heads, and nothing is told of numbers that follow none.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from dumps import recorded, without_codes
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from wrong_tensors import (
    EVERY,
    IDS,
    KEY,
    LAYER,
    LLAMA,
    POINTS,
    QUERY,
    C,
    T,
    by_weights,
    heads,
    layer_points,
    read,
    read_off,
    scores_of,
    softmax,
)

from bitnet_np import spec
from bitnet_np.base.block_formats import FORMATS
from bitnet_np.contract.blocks import weights_as
from bitnet_np.judge.edits.blocks import orders
from bitnet_np.judge.evidence import SPARE
from bitnet_np.judge.law.codes import Planes
from bitnet_np.judge.law.functions import ACTIVATIONS
from bitnet_np.judge.law.products import rows_of
from bitnet_np.judge.readings.curves import described_function
from bitnet_np.judge.readings.structure import POWERS, Numbers, loose_structure, rank, structure
from bitnet_np.judge.words import moves_in_words
from bitnet_np.model.records import LongRope, Yarn
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

SEEDS = st.integers(0, 2**32 - 1)
FACTORS = st.floats(0.1, 9).filter(lambda x: abs(x - 1) > 0.01)
P = layer_points("llama")
LINEAR = LLAMA.layers[LAYER].ffn_up
MATRIX = rows_of(LINEAR.weights, np.arange(120))


@st.composite
def cubes(draw):
    """Right numbers [T, H, K]."""
    shape = draw(st.tuples(st.integers(5, 20), st.integers(2, 6), st.integers(5, 20)))
    return np.random.default_rng(draw(SEEDS)).standard_normal(shape)


def told(theirs, right):
    """What the reader says of numbers with the noise of float32."""
    noise = 1 + 1e-7 * np.random.default_rng(1).standard_normal(right.shape)
    return structure(Numbers(theirs * noise, right, ("position", "head", "element"))) or ""


# --- laws -------------------------------------------------------------------------------------------------------------------------------


@given(cubes(), FACTORS, st.data())
def test_a_factor_is_told_wherever_it_is(x, factor, data):
    axis = data.draw(st.integers(0, 2))
    at = data.draw(st.integers(0, x.shape[axis] - 1))
    scaled = x.copy()
    scaled[(*[slice(None)] * axis, at)] *= factor
    said = told(scaled, x)
    assert said.startswith(f"{('position', 'head', 'element')[axis]} {at} is ")
    assert float(said.split()[3]) == pytest.approx(factor, rel=1e-5)


@given(cubes(), st.data())
def test_a_constant_is_told_wherever_it_is(x, data):
    axis = data.draw(st.integers(0, 2))
    at = data.draw(st.integers(0, x.shape[axis] - 1))
    more = x.copy()
    more[(*[slice(None)] * axis, at)] += 1.5
    assert told(more, x).startswith("1.5")
    assert told(more, x).endswith(f"is added to {('position', 'head', 'element')[axis]} {at}")


@given(cubes(), st.data())
def test_two_that_are_exchanged_are_told(x, data):
    axis = data.draw(st.integers(0, 2))
    a, b = sorted(data.draw(st.sets(st.integers(0, x.shape[axis] - 1), min_size=2, max_size=2)))
    order = np.arange(x.shape[axis])
    order[[a, b]] = b, a
    what = ("position", "head", "element")[axis]
    said = told(np.take(x, order, axis), x)
    assert said == f"{what}s {a} and {b} are exchanged" or len(order) == 2


@given(cubes(), FACTORS)
def test_functions_of_each_number_are_told(x, limit):
    y = 3 * limit * x
    y.flat[:2] = limit, -limit  # all that are cut off then are these right numbers
    assume((np.abs(y) > limit).sum() > 20 and (y > limit).sum() > 2 * SPARE)  # fewer would be taken for copies of that number
    assert told(np.clip(y, -limit, limit), y).startswith("numbers are clipped to -")
    assert told(np.minimum(y, limit), y).startswith(f"numbers above {limit:.4g}"[:-1])
    assert told(limit * np.tanh(y / limit), y).startswith(f"numbers are soft-capped at {limit:.4g}"[:-1])
    assert told(ACTIVATIONS["SiLU"](x), x) == "SiLU of them stands there"


@given(st.integers(0, 99), st.integers(2, 6))
def test_a_function_is_shown_by_numbers_at_which_it_is_wrong(seed, eighths):
    """It may be right at most of them, as a table is of which one entry is wrong."""
    right = np.random.default_rng(seed).integers(0, 8, 800) / 8.0
    said = described_function(right, right + (right == eighths / 8), right, "what is right")
    assert said == f"it is another function of what is right: {1 + eighths / 8:.4g} instead of {eighths / 8:.4g} at {eighths / 8:.4g}"


@pytest.mark.parametrize(
    ("law", "says"),
    [
        (lambda x: 2 * x, "all numbers are 2 times what is right"),
        (lambda x: x + 0.5, "0.5 is added to all numbers"),
        (
            lambda x: x.transpose(1, 0, 2).reshape(x.shape),
            "numbers are laid out as [head, position, element], and read as [position, head,",
        ),
        (lambda x: np.roll(x.ravel(), 2).reshape(x.shape), "numbers are read 2 before their place"),
    ],
)
def test_laws_of_all_numbers_are_told(law, says):
    assert told(law(SOME), SOME).startswith(says)


SOME, MANY = np.random.default_rng(0).standard_normal((12, 4, 16)), np.random.default_rng(1).random((12, 4, 16))


X, DROPPED = P["ffn_inp"], np.random.default_rng(2).random((T, 96)) < 0.1
SORTED = np.argsort(np.argsort(-P["result_output"], axis=1), axis=1)  # the rank of each logit
RESULTS = [
    ("ffn_up", 0 * P["ffn_up"] + LLAMA.layers[LAYER].ffn_up.bias, "the products: all numbers are 0; all other steps are right"),
    ("ffn_inp", 0 * X + 3, "all numbers are 3"),
    ("ffn_inp", X * np.where(np.arange(96) < 40, -1, 1), "elements 0 to 39 are of the other sign"),
    ("ffn_inp", X + np.where(np.arange(96) < 40, 2, 0), "2 is added to elements 0 to 39"),
    ("ffn_inp", X * np.linspace(1.1, 2, 96), "each element is multiplied by a number of its own, 1.1 to 2"),
    ("ffn_inp", X + np.linspace(0.1, 2, 96), "a number is added to each element, 0.1 to 2"),
    ("ffn_inp", np.where(DROPPED, 0, X / (1 - DROPPED.mean())), "of the numbers "),
    ("ffn_inp", np.append(X, np.ones(20))[np.arange(T)[:, None] * 97 + np.arange(96)], "rows are read by a stride that is 1 too large"),
    ("ffn_inp", np.roll(X.ravel(), -3).reshape(X.shape), "numbers are read 3 behind their place"),
    ("ffn_inp", np.clip(X, -0.5, 0.7), "numbers are clipped to -0.5 and 0.7"),
    ("ffn_inp", np.minimum(X, 0.7), "numbers above 0.7 are clipped to it"),
    ("ffn_inp", 2 * np.tanh(X / 2), "numbers are soft-capped at 2"),
    ("ffn_inp", ACTIVATIONS["SiLU"](X), "SiLU of them stands there"),
    ("ffn_inp", X / X.sum(axis=1, keepdims=True), "each row is divided by its sum"),
    ("ffn_inp", X / np.abs(X).max(axis=1, keepdims=True), "each row is divided by its largest magnitude"),
    ("ffn_inp", X - 0.3 * X.std() * np.sin(9 * X / X.std()) / 3, "it is another function of what is right: "),
    ("result_output", spec.softmax(P["result_output"]), "they are the softmax of each row"),
    ("result_output", np.log(spec.softmax(P["result_output"])), "they are the logarithms of each row's softmax"),
    ("result_output", P["result_output"] - P["result_output"].max(axis=1, keepdims=True), "the largest number of each row is subtracted"),
    ("result_output", P["result_output"] - P["result_output"].mean(axis=1, keepdims=True), "the mean of each row is subtracted"),
    (
        "result_output",
        np.where(SORTED < 20, P["result_output"], -1e4),
        "78 % of the numbers are -10000, and the others are right: the smaller",
    ),
    ("ffn_inp", X[:, np.arange(96) // 2], "element i has the numbers of i // 2"),
    ("ffn_inp", X[:, np.arange(96) % 24], "element i has the numbers of i % 24"),
    ("ffn_inp", X[:, np.arange(96) // 4 * 4], "element i has the numbers of i - i % 4"),
    ("ffn_inp", X[:, np.arange(96) ^ 1], "element i has the numbers of i ^ 1"),
    ("ffn_inp", X[:, ::-1], "element i has the numbers of i from the end"),
    ("ffn_inp", X[:, np.arange(96).reshape(-1, 4).T.ravel()], "element i has the numbers of 4 * (i % 24) + i // 24: rows of 4 are read as"),
]


@pytest.mark.parametrize(("name", "wrong", "says"), RESULTS, ids=[says for *_, says in RESULTS])
def test_laws_of_any_tensor_are_told(name, wrong, says):
    assert read("llama", name, wrong).startswith(says)


def test_dropout_and_penalties_are_told_by_their_ratios():
    assert told(np.where(MANY < 0.1, 0, SOME / (1 - (MANY < 0.1).mean())), SOME).endswith("times what is right, as dropout leaves them")
    assert "are of the other sign, 9" in told(np.where(MANY < 0.1, -SOME, SOME), SOME)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (np.r_[4:8, 0:4, 8:12], "heads 0 to 3 have the numbers of heads 4 to 7, heads 4 to 7 have the numbers of heads 0 to 3"),
        (np.r_[0, 0, 0, 0, 4:12], "heads 1 to 3 have the numbers of head 0"),
    ],
)
def test_orders_that_follow_no_rule_are_said_by_runs(source, says):
    assert moves_in_words(source, "head") == says


@given(cubes(), SEEDS)
def test_nothing_is_told_of_numbers_without_a_law(x, seed):
    rng = np.random.default_rng([seed, 1])
    numbers = Numbers(x + 0.3 * rng.standard_normal(x.shape), x, ("position", "head", "element"))
    assert structure(numbers) is loose_structure(numbers) is rank(numbers.theirs - numbers.right, 0.0) is None


def test_each_thing_with_a_number_of_its_own_is_told_without_them():
    factors = np.linspace(1.1, 2, 16)
    assert loose_structure(Numbers(SOME * factors, SOME, ("position", "head", "element"))) == (
        "each element is multiplied by a number of its own, 1.1 to 2"
    )
    assert loose_structure(Numbers(SOME + np.linspace(0, 2, 12)[:, None, None], SOME, ("position", "head", "element"))) == (
        "a number is added to each position, 0.1818 to 2, at positions 1 to 11 of 12"
    )


# --- attention --------------------------------------------------------------------------------------------------------------------------

V = heads("Vcur")
RIGHT, EXP = softmax(scores_of()), np.where(QUERY >= KEY, np.exp(scores_of()), 0)


@settings(max_examples=20)
@given(st.lists(st.integers(0, C.kv_heads - 1), min_size=C.heads, max_size=C.heads))
def test_any_key_value_heads_that_query_heads_read_are_named(rule):
    own = np.arange(C.heads) // (C.heads // C.kv_heads)
    assume(rule != own.tolist())
    said = read("llama", "kqv_out", by_weights(softmax(scores_of(k=heads("Kcur_rope")[:, rule])), V[:, rule]))
    assert said == f"query heads read other key-value heads: {', '.join(map(str, rule))} instead of {', '.join(map(str, own))}"


SINKS = np.array([0.5, 2.0, -1.0, 0.3])
SLOPES = 2.0 ** -np.arange(1, C.heads + 1)[:, None, None]
QUERIES, KEYS, PLACE = heads("Qcur_rope"), heads("Kcur_rope"), np.arange(24)
ATTENTION = {
    "query heads read the keys of other heads: 1, 1, 0, 0 instead of 0, 0, 1, 1": by_weights(softmax(scores_of(k=KEYS[:, ::-1]))),
    "query heads read the values of other heads: 1, 1, 0, 0 instead of": by_weights(RIGHT, V[:, ::-1]),
    "heads have the queries of others: 0, 2, 1, 3 instead of 0, 1, 2, 3": by_weights(softmax(scores_of(q=QUERIES[:, [0, 2, 1, 3]]))),
    "one key more is in the softmax's sum, without a value, as a sink: its scores are 0.5, 2, -1, 0.3 by head": by_weights(
        EXP / (EXP.sum(axis=-1, keepdims=True) + np.exp(SINKS)[:, None, None])
    ),
    "1 is added to the softmax's sum of exponentials": by_weights(EXP / (EXP.sum(axis=-1, keepdims=True) + 1)),
    "attention's weights add up to 1": by_weights(RIGHT * (1.1 + np.random.default_rng(0).random((C.heads, T, 1)))),
    "scores are 1.5 times what is right": by_weights(softmax(1.5 * scores_of())),
    "scores of heads 1, 3 of 4 are multiplied by 2": by_weights(softmax(scores_of() * np.array([1, 2, 1, 2])[:, None, None])),
    "scores have a bias that grows with distance, as ALiBi: slopes of heads are 0.5, 0.25, 0.125, 0.0625": by_weights(
        softmax(scores_of() - SLOPES * (QUERY - KEY))
    ),
    "scores of positions 8 to 16 are multiplied by 1.9": by_weights(softmax(scores_of() * np.where(QUERY > 7, 1.9, 1))),
    "a number is added to the scores of key 0, 1.5": by_weights(softmax(scores_of() + 1.5 * (KEY == 0))),
    "elements 20 to 23 of 24 of each head are left out of q . k": by_weights(softmax(scores_of(q=QUERIES * (np.arange(24) < 20)))),
    "elements 0 to 5 of 24 of each head are multiplied by 2 in q . k": by_weights(
        softmax(scores_of(q=QUERIES * np.where(PLACE < 6, 2, 1)))
    ),
    "scores are soft-capped at 3": by_weights(softmax(3 * np.tanh(scores_of() / 3))),
    "each element of each head is multiplied by a number of its own in q . k, 1": by_weights(
        softmax(scores_of(q=QUERIES * np.linspace(1, 2, 4 * 24).reshape(4, 24)))
    ),
    "values are summed that a token must not see: position 0 reads positions 1 to": by_weights(
        spec.softmax(0.1 * np.random.default_rng(8).standard_normal((C.heads, T, T)))
    ),
    "sums of the right values with wrong weights: scores or softmax are wrong": by_weights(
        softmax(scores_of() + np.random.default_rng(8).standard_normal((C.heads, T, T)))
    ),
    "a part of 0.00": by_weights(softmax(scores_of() + np.random.default_rng(8).standard_normal((C.heads, T, T))), np.rint(V * 150) / 150),
    "values: numbers are laid out as [head, position, element]": by_weights(RIGHT, V.transpose(1, 0, 2).reshape(V.shape)),
    "values: head 1 is 1.3 times what is right; weights are right": by_weights(RIGHT, V * np.array([1, 1.3])[:, None]),
    "values: those of position 4 are others; weights are right": by_weights(
        RIGHT, np.where(np.arange(T)[:, None, None] == 4, np.random.default_rng(3).standard_normal(V.shape), V)
    ),
}


@pytest.mark.parametrize("says", ATTENTION)
def test_what_attention_does_otherwise_is_solved_for(says):
    assert read("llama", "kqv_out", ATTENTION[says]).startswith(says)


def test_cells_that_hold_a_run_of_others_are_said_together():
    order = np.r_[0:3, 8:11, 6:T]
    keys, values = heads("Kcur_rope")[order], V[order]
    late = np.where(QUERY < 11, RIGHT, 0), np.where(QUERY < 11, 0, softmax(scores_of(k=keys)))
    said = read("llama", "kqv_out", by_weights(late[0]) + by_weights(late[1], values))
    assert said.startswith("the cells of positions 3 to 5 hold positions 8 to 10 where positions 11 to 16 read them: they were written")


# --- rotations --------------------------------------------------------------------------------------------------------------------------

WIDE = random_model(9, family="stablelm", n_layers=2, vocab=90, width=96, heads=4, kv_heads=2, head_dim=24, rope_width=16, ffn=120)
WIDE_POINTS = without_codes(recorded(WIDE, IDS["llama"]))


def rotated(first, second, frequency):
    """Queries of a partial rotation by other pairs and frequencies."""
    x = WIDE_POINTS[Key("Qcur", 1)].astype(np.float64).reshape(T, -1, 24)
    turns, y = np.exp(1j * np.multiply.outer(np.arange(T), frequency))[:, None], x.copy()
    z = (x[..., first] + 1j * x[..., second]) * turns
    y[..., first], y[..., second] = z.real, z.imag
    return y.reshape(T, -1)


def of_pairs(first, second, frequency):
    return read_off(WIDE, IDS["llama"], WIDE_POINTS, Key("Qcur_rope", 1), rotated(first, second, frequency))


@settings(max_examples=20)
@given(st.integers(2, 6), st.integers(0, 6), st.integers(4, 12).map(lambda n: 2 * n))
def test_any_pairs_with_the_frequencies_of_any_width_are_told(count, more, width):
    first, half = np.arange(count), min(count + more, 24 - count)
    assume(half != 8 and width != 16 and WIDE.config.rope == "halves")
    assume(1e4 ** (-2 * (count - 1) / width) > 2e-5)  # in 20 positions, slower pairs turn by no more than roundings
    said = of_pairs(first, first + half, 1e4 ** (-2 * first / width))
    assert said.startswith(f"pairs are {f'(i, i + {half})' if half > 1 else 'neighbours'} instead of (i, i + 8)")
    if count > 2 and 1e4 ** (-2 * (count - 1) / width) > 1e-3:  # slower ones do not turn enough to be seen
        assert f"; frequencies are those of a width of {width} instead of 16, or powers of " in said


def test_frequencies_are_said_by_their_law():
    own, i = WIDE.rope_frequency.astype(np.float64), np.arange(8)
    assert of_pairs(i, i + 8, 0.3 * own) == "frequencies are 0.3 times what they should be"
    assert of_pairs(i, i + 8, 7e4 ** (-i / 8)) == "frequencies are powers of 70000 instead of 10000"
    assert of_pairs(i, i + 8, 1.5 * 7e4 ** (-i / 8)) == "frequencies are powers of 70000 instead of 10000, times 1.5"
    scaled = own * np.array([1, 1, 1, 0.8, 0.5, 0.25, 0.25, 0.25])
    slow = "frequencies of slow pairs are scaled: right up to pair 2, 0.25 times what they should be at pair 7"
    assert of_pairs(i, i + 8, scaled) == slow
    assert "not rotated" not in of_pairs(i, i + 8, own * np.where(i == 2, -1, 1))  # the other way round
    assert of_pairs(i, i + 8, own[[1, 0, 2, 3, 4, 5, 6, 7]]) == "pairs 0 and 1 are exchanged"
    assert of_pairs(i, i + 8, own[[0, 0, 2, 2, 4, 5, 6, 7]]) == "pair 1 has the frequency of pair 0, pair 3 has the frequency of pair 2"
    fast = "frequencies of fast pairs are scaled: 0.25 times what they should be at pair 0, right from pair 3 on"
    assert of_pairs(i, i + 8, own * np.array([0.25, 0.25, 0.5, 1, 1, 1, 1, 1])) == fast
    assert of_pairs(2 * np.arange(4), 2 * np.arange(4) + 1, own[:4]) == "pairs are neighbours (2i, 2i + 1) instead of (i, i + 8)"
    assert of_pairs(i, i + 8, np.where(i < 4, 1e4 ** (-i / 4), 0)).startswith(
        "pairs 4 to 7 of each head are not rotated; frequencies are those of a width of 8 instead of 16"
    )
    assert of_pairs([0, 1, 4], [9, 7, 20], own[:3]).startswith("pairs are (0, 9), (1, 7), (4, 20) instead of (i, i + 8)")


@given(st.floats(1.5, 40))
def test_factors_of_frequencies_that_are_used_otherwise_are_told(factor):
    def by(frequency):
        return read("llama", "Qcur_rope", spec.rotate(heads("Qcur"), np.multiply.outer(np.arange(T), frequency), C.rope).reshape(T, -1))

    assert by(LLAMA.rope_factors) == "frequencies are the factors that they should be divided by"
    said = by(C.rope_base ** (-np.arange(12) / 12) / factor)
    assert said.endswith(f" times powers of {C.rope_base:g}, and none is scaled otherwise")


def test_heads_that_are_rotated_by_other_positions_are_told():
    x, own = WIDE_POINTS[Key("Qcur", 1)].astype(np.float64).reshape(T, -1, 24), WIDE.rope_frequency.astype(np.float64)

    def by(positions):  # [T, H]
        each = [spec.rotate(x[:, [h]], positions[:, [h]] * own, WIDE.config.rope) for h in range(4)]
        return read_off(WIDE, IDS["llama"], WIDE_POINTS, Key("Qcur_rope", 1), np.concatenate(each, axis=1).reshape(T, -1))

    head, token = np.arange(4), np.arange(T)[:, None]
    assert by(head + 0 * token) == "every token is rotated by the number of the head instead of its position"
    assert by(token + 3 * (head == 2)) == "head 2 alone is rotated by other positions: position 0 as 3"


@settings(max_examples=6)
@given(st.integers(2, 4), st.floats(0.2, 0.8))
@example(1, 0.5)
def test_two_angles_of_a_pair_are_told(step, factor):
    own, i = WIDE.rope_frequency.astype(np.float64), np.arange(8)
    first, second = rotated(i, i + 8, own[i // step]).reshape(T, -1, 24), rotated(i, i + 8, factor * own).reshape(T, -1, 24)
    both = np.where(np.arange(24) < 8, first, second).reshape(T, -1)
    said = read_off(WIDE, IDS["llama"], WIDE_POINTS, Key("Qcur_rope", 1), both)
    assert said.startswith("the two numbers of a pair are turned by two angles: of the first ")
    law = "frequencies are right" if step == 1 else f"pair i has the frequency of i // {step}"
    assert f" {law}; of the second frequencies are {factor:.3g}"[:-1] in said


# --- products and experts -----------------------------------------------------------------------------------------------------------------

BLOCKS = random_model(3, family="llama", weights="Q8_0", width=256, ffn=256, heads=4, kv_heads=2, head_dim=64, n_layers=1, vocab=90)
MANY_IDS = np.random.default_rng(0).integers(0, 90, 26)
BLOCK_POINTS = without_codes(recorded(BLOCKS, MANY_IDS))


def with_scales(change):
    """What is read off a product of which the scales [N, blocks] of the matrix are others."""
    linear = BLOCKS.layers[0].attn_q
    blocks = linear.weights.data.view(np.uint8).reshape(256, -1, 34)
    scales, codes = (np.ascontiguousarray(blocks[..., part]) for part in (slice(0, 2), slice(2, None)))
    weights = codes.view(np.int8) * change(scales.view(np.float16).astype(np.float64)[..., 0])[..., None]
    x = BLOCK_POINTS[Key("attn_norm", 0)].astype(np.float64)
    wrong = x @ weights.reshape(256, 256).T * (linear.scale or 1) + (0 if linear.bias is None else linear.bias)
    return read_off(BLOCKS, MANY_IDS, BLOCK_POINTS, Key("Qcur", 0), wrong)


@settings(max_examples=8)
@given(st.sampled_from([2, 3, 4, 6]), st.integers(0, 5), st.integers(1, 119), st.sampled_from(["position", "element"]))
def test_sums_over_a_part_of_the_inputs_are_told(count, which, by, what):
    """The other rows' or, shifted by as many, the other tokens' sums over one of the parts."""
    part = np.arange(96).reshape(count, -1)[which % count]
    sums, by = P["ffn_norm"][:, part] @ MATRIX[:, part].T, by % T or 1
    said = read("llama", "ffn_up", P["ffn_up"] - sums + np.roll(sums, by, axis=int(what == "element")))
    assert said.startswith(f"sums over inputs {part[0]} to {part[-1]} alone are wrong: {what}s are shifted by")


@settings(max_examples=8)
@given(st.permutations(range(8)))
def test_any_order_of_the_scales_of_blocks_is_told(order):
    assume(order != sorted(order))
    says = f"Q8_0: scales of blocks of 32 weights of a row: {moves_in_words(np.array(order), 'block')}"
    assert with_scales(lambda scales: scales[:, order]) == says


def test_scales_of_blocks_that_are_stuck_or_of_other_rows_are_told():
    says = "Q8_0: scales of blocks of 32 weights of a row: "
    assert with_scales(lambda scales: np.repeat(scales[:, :1], 8, axis=1)) == f"{says}blocks 1 to 7 have the numbers of block 0"
    assert with_scales(lambda scales: np.roll(scales, -1, axis=0)) == f"{says}rows are shifted by 1: row 0 has the numbers of row 1"
    rng = np.random.default_rng(0)
    assert "100 % of them are 1" in with_scales(lambda scales: scales * (1.1 + rng.random(scales.shape)))


@pytest.mark.parametrize(("weights", "of"), [("Q6_K", ("scales",)), ("Q4_K", ("minimums", "scales"))])
def test_scales_inside_blocks_that_are_of_other_runs_are_told(weights, of):
    """Some scales are 0, so that no factor of theirs makes the others."""
    model = random_model(3, family="llama", weights=weights, width=256, ffn=256, heads=4, kv_heads=2, head_dim=64, n_layers=1)
    ids, form, linear = np.random.default_rng(0).permutation(48), FORMATS[weights], model.layers[0].attn_q
    points, count = without_codes(recorded(model, ids)), len(set(form.scale.lanes))

    def stuck(factor):
        every = list(dict.fromkeys(factor.lanes)) if factor else []
        return factor and replace(factor, lanes=tuple(every[every.index(lane) // 2 * 2] for lane in factor.lanes))

    other = replace(form, scale=stuck(form.scale), minimum=stuck(form.minimum))
    matrix = weights_as(linear.weights.data.view(np.uint8), other).astype(np.float64)
    wrong = points[Key("attn_norm", 0)] @ matrix.T * (linear.scale or 1) + (0 if linear.bias is None else linear.bias)
    size = form.weights // count
    says = [f"{noun} of blocks of {size} weights of a row: {moves_in_words(np.arange(256 // size) // 2 * 2, 'block')}" for noun in of]
    assert read_off(model, ids, points, Key("Qcur", 0), wrong) == f"{weights}: {'; '.join(says)}"


def test_another_zero_point_of_a_type_with_minimums_is_told():
    model = random_model(3, family="llama", weights="Q4_1", width=128, ffn=128, heads=4, kv_heads=2, head_dim=32, n_layers=1)
    ids, linear = np.random.default_rng(0).permutation(40), model.layers[0].attn_q
    points, factors = without_codes(recorded(model, ids)), linear.weights.data.view(np.uint8).reshape(128, 4, 20)[..., :2]
    zero = np.repeat(3.0 * np.ascontiguousarray(factors).view(np.float16).astype(np.float64)[..., 0], 32, axis=1)
    matrix = rows_of(linear.weights, np.arange(128)) - zero
    wrong = points[Key("attn_norm", 0)] @ matrix.T * (linear.scale or 1) + (0 if linear.bias is None else linear.bias)
    said = read_off(model, ids, points, Key("Qcur", 0), wrong)
    assert said == "Q4_1: a number is added to the weights of each block of 32, 3 times its factor, as by another zero point or minimum"


TYPES = {
    name: random_model(3, family="llama", weights=name, width=256, ffn=256, heads=4, kv_heads=2, head_dim=64, n_layers=1, vocab=90)
    for name in ("Q3_K", "Q5_K", "Q6_K", "Q8_0")
}
NORMED = {name: without_codes(recorded(model, MANY_IDS)) for name, model in TYPES.items()}
ORDERS = [order[:2] for order in orders(256)]


def with_planes(name, change):
    """Queries by the matrix that is made otherwise of the planes of its bits."""
    linear, x = TYPES[name].layers[0].attn_q, NORMED[name][Key("attn_norm", 0)].astype(np.float64)
    made, right = Planes.of(linear.weights, np.arange(256)), rows_of(linear.weights, np.arange(256))
    np.testing.assert_allclose(made.read(), right, atol=1e-6)
    return x @ change(made).T * (linear.scale or 1) + (0 if linear.bias is None else linear.bias)


@pytest.mark.parametrize("width", [96, 256, 640])
def test_no_order_has_two_names(width):
    every = [order for order, _, _ in orders(width)], {source.tobytes() for _, source, _ in orders(width)}
    assert len(set(every[0])) == len(every[0]) == len(every[1])


def each_kind_of_order(test):
    """The test with an example of each kind of order, which few draws may miss."""
    for order in {re.sub(r"\d+", "", words): (words, source) for words, source in ORDERS}.values():
        test = example(order, True)(test)
    return test


@settings(max_examples=12)
@given(st.sampled_from(["Q3_K", "Q5_K", "Q6_K"]), st.sampled_from(ORDERS), st.sampled_from(ORDERS))
def test_bits_that_are_read_in_any_two_orders_are_told(name, low, upper):
    wrong = with_planes(name, lambda made: made.read(upper[1], low=low[1]))
    said = read_off(TYPES[name], MANY_IDS, NORMED[name], Key("Qcur", 0), wrong)
    of_bits = [words.format(f"{which} bits of codes") for which, (words, _) in (("low", low), ("upper", upper))]
    assert said == f"{name}: bits are read in another order: {'; '.join(of_bits)}"


@settings(max_examples=12)
@given(st.sampled_from(ORDERS), st.booleans())
@each_kind_of_order
def test_codes_and_scales_in_any_order_are_told_by_few_positions(order, is_of_codes):
    words, source = order
    assume(is_of_codes or (source // 32 != np.arange(256) // 32).any())  # else scales are the same
    wrong = with_planes("Q8_0", lambda made: made.read(source) if is_of_codes else made.read(scales=source))[:7]
    said = read_off(TYPES["Q8_0"], MANY_IDS[:7], {key: x[:7] for key, x in NORMED["Q8_0"].items()}, Key("Qcur", 0), wrong)
    if is_of_codes:
        assert said == f"Q8_0: codes are read in another order: {words.format('codes')}"
    else:  # some orders of weights are the same of scales
        assert said.startswith("Q8_0: scales are those of other weights: ")


@settings(max_examples=8)
@given(st.integers(2, 200), st.integers(2, 8).filter(lambda n: n != 4))
def test_scales_of_a_row_by_a_wrong_stride_are_told(border, stride):
    i = np.arange(256)
    said = with_scales(lambda scales: np.where(i[:, None] < border, scales, scales[i * stride % 256]))
    assert said.endswith(f"have those of {stride} * i % 256, for row i")


def test_reciprocals_and_roots_are_told():
    assert with_scales(lambda scales: 1 / scales).endswith("a row: they are 1 / what is right")
    assert with_scales(lambda scales: np.sign(scales) * np.abs(scales) ** 0.5).endswith("a row: they are the root of what is right")


NORM = P["ffn_norm"]
GROUPS = np.arange(96) // 32


def of_matrix(matrix):
    return NORM @ matrix.T + LINEAR.bias


def test_zero_points_and_factors_of_blocks_of_any_matrix_are_told():
    rng = np.random.default_rng(0)
    added = read("llama", "ffn_up", of_matrix(MATRIX + (1 + rng.random((120, 3)))[:, GROUPS]))
    assert added.startswith("the matrix: a number is added to the weights of each block of 32, 1")
    both = read("llama", "ffn_up", of_matrix(MATRIX * np.array([2, 1, 1])[GROUPS] + (1 + rng.random((120, 3)))[:, GROUPS]))
    assert both.endswith("; factors of blocks of 32 weights of a row: block 0 is 2 times what is right")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            of_matrix(MATRIX * ((np.arange(120)[:, None] < 60) == (np.arange(96) < 48))),
            "at elements 0 to 59: inputs 48 to 95 are not summed; at",
        ),
        (
            np.roll(NORM.ravel(), -2).reshape(NORM.shape) @ MATRIX.T + LINEAR.bias,
            "ffn_norm: numbers are read 2 behind their place; all other",
        ),
        (
            NORM[:, np.r_[32:64, 0:32, 64:96]] @ MATRIX.T + LINEAR.bias,
            "ffn_norm: elements 0 to 31 have the numbers of elements 32 to 63, el",
        ),
    ],
)
def test_inputs_of_a_product_are_solved_for(wrong, says):
    assert read("llama", "ffn_up", wrong).startswith(says)


def test_an_error_of_low_rank_is_told():
    rng = np.random.default_rng(0)
    wrong = P["Qcur"] + (NORM @ rng.standard_normal((96, 3))) @ rng.standard_normal((3, 96))
    assert read("llama", "Qcur", wrong) == "what is wrong is of rank 3, as few inputs or a low-rank adapter make it"


EXPERTS = random_model(5, family="qwen3moe", n_layers=1)
EXPERT_POINTS = without_codes(recorded(EXPERTS, np.arange(12)))


@settings(max_examples=20)
@given(SEEDS)
def test_experts_weighted_by_any_numbers_of_the_table_are_told(seed):
    weights = EXPERT_POINTS[Key("ffn_moe_weights", 0)].astype(np.float64)
    results = EXPERT_POINTS[Key("ffn_moe_down", 0)].astype(np.float64).reshape(*weights.shape, -1)
    used = weights.ravel()[np.random.default_rng(seed).integers(0, weights.size, weights.shape)]
    said = read_off(EXPERTS, np.arange(12), EXPERT_POINTS, Key("ffn_moe_out", 0), (results * used[..., None]).sum(axis=1))
    assert said.startswith("the weights of experts: numbers of other places: position ")


def test_the_slot_whose_weight_is_lost_is_told():
    weights = EXPERT_POINTS[Key("ffn_moe_weights", 0)].astype(np.float64)
    results = EXPERT_POINTS[Key("ffn_moe_down", 0)].astype(np.float64).reshape(*weights.shape, -1)
    wrong = (results * (weights * np.array([1, 0]))[..., None]).sum(axis=1)
    said = read_off(EXPERTS, np.arange(12), EXPERT_POINTS, Key("ffn_moe_out", 0), wrong)
    assert said == "the weights of experts: slot 1 is 0; all other steps are right"


# --- numbers that are known -------------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(st.sampled_from(sorted(POWERS)), st.sampled_from(["ffn_moe_gate", "ffn_moe_up", "ffn_moe_down", "ffn_moe_swiglu"]))
def test_factors_that_stand_in_another_tensor_are_told(power, name):
    weights, x = (EXPERT_POINTS[Key(n, 0)].astype(np.float64) for n in ("ffn_moe_weights", name))
    wrong = (x.reshape(*weights.shape, -1) * weights[..., None] ** power).reshape(x.shape)
    said = read_off(EXPERTS, np.arange(12), EXPERT_POINTS, Key(name, 0), wrong)
    assert said == f"each slot of each position is multiplied by {POWERS[power].format('ffn_moe_weights')}"


@settings(max_examples=12)
@given(st.sampled_from(sorted(POWERS)), st.floats(0.2, 5).filter(lambda x: abs(x - 1) > 0.1))
def test_numbers_of_rows_and_weights_of_elements_are_told_as_factors(power, times):
    largest = np.abs(P["ffn_down"]).max(axis=1, keepdims=True)
    said = read("llama", "l_out", P["l_out"] * times * largest**power)
    assert said.startswith("each position is multiplied by ")
    assert said.endswith(f" times {POWERS[power].format('the largest magnitude of ffn_down')}")
    said = read("llama", "l_out", P["l_out"] + LLAMA.layers[LAYER].attn_norm)
    assert said == "the weight attn_norm is added to each element"


@settings(max_examples=12)
@given(st.sets(st.integers(0, 96), min_size=2, max_size=2), st.booleans())
def test_any_run_that_a_sum_of_squares_leaves_out_is_told(ends, is_twice):
    first, end = sorted(ends)
    assume(4 <= end - first < 92)
    tiles = {(begin, begin + n) for n in (16, 32, 64) for begin in range(0, 97 - n, n)}
    tails = {(begin, 96) for k in range(7) for begin in (2**k, 96 - 2**k)}
    assume(is_twice or (first, end) not in tiles | tails)  # the laws of sums name these
    some = np.where((np.arange(96) >= first) & (np.arange(96) < end), 2.0 * is_twice, 1)
    root = np.sqrt((np.square(X) * some).mean(axis=1, keepdims=True) + C.eps)
    said = read("llama", "ffn_norm", X / root * LLAMA.layers[LAYER].ffn_norm)
    how = "counted twice" if is_twice else "left out"
    assert said == f"the mean square: elements {first} to {end - 1} are {how}; all other steps are right"


def test_a_mean_of_fewer_squares_is_told():
    root = np.sqrt(np.square(X[:, 30:]).mean(axis=1, keepdims=True) + C.eps)
    said = read("llama", "ffn_norm", X / root * LLAMA.layers[LAYER].ffn_norm)
    assert said == "the mean square: elements 0 to 29 are left out, and not counted; all other steps are right"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (0.0, "epsilon: it is epsilon times the square of the largest magnitude of ffn_inp; all other steps are right"),
        (0.3, "the mean square with epsilon: 0.3 times the square of the largest magnitude of ffn_inp is added to each position; all"),
    ],
)
def test_an_epsilon_in_units_of_the_row_is_told(more, says):
    model, most = replace(LLAMA, config=replace(C, eps=0.05)), np.square(X).max(axis=1, keepdims=True)
    root = np.sqrt(np.square(X).mean(axis=1, keepdims=True) + (more * most + 0.05 if more else 0.05 * most))
    said = read_off(model, IDS["llama"], POINTS["llama"], Key("ffn_norm", LAYER), X / root * LLAMA.layers[LAYER].ffn_norm)
    assert said.startswith(says)


SHARED = random_model(4, family="llama", n_layers=1, vocab=90, width=96, heads=4, kv_heads=1, head_dim=24, ffn=64)
SHARED_POINTS = without_codes(recorded(SHARED, np.arange(20)))


@settings(max_examples=12)
@given(st.integers(0, 8), SEEDS)
def test_the_position_whose_keys_are_others_is_told(position, seed):
    q, k, v = (SHARED_POINTS[Key(name, 0)].astype(np.float64).reshape(20, -1, 24) for name in ("Qcur_rope", "Kcur_rope", "Vcur"))
    k[position] += np.random.default_rng(seed).standard_normal(24) / 2
    scores = np.where(np.tri(20, dtype=bool), np.einsum("thk,sgk->hts", q, k) / 24**0.5, -np.inf)
    wrong = np.einsum("hts,sgk->thk", spec.softmax(scores), v).reshape(20, -1)
    said = read_off(SHARED, np.arange(20), SHARED_POINTS, Key("kqv_out", 0), wrong)
    assert said == f"keys: those of position {position} are others; values, and all other keys, are right"


@settings(max_examples=12)
@given(st.integers(2, T - 3), st.floats(0.2, 0.8))
def test_frequencies_from_a_position_on_are_told(first, factor):
    own, i = WIDE.rope_frequency.astype(np.float64), np.arange(8)
    some = np.where(np.arange(T)[:, None] < first, rotated(i, i + 8, own), rotated(i, i + 8, factor * own))
    said = read_off(WIDE, IDS["llama"], WIDE_POINTS, Key("Qcur_rope", 1), some)
    assert said.startswith(f"from position {first} on frequencies are {factor:.3g}"[:-1])


def test_positions_that_are_rounded_or_too_large_are_told():
    x, own, token = np.random.default_rng(0).standard_normal((300, 96)), WIDE.rope_frequency.astype(np.float64), np.arange(300)
    points, rounded = {Key("Qcur", 1): x}, np.where(token < 256, token, np.rint(token / 2) * 2)
    for positions, says in (
        (rounded, "positions are rounded to bfloat16"),
        (
            token + 16 * (token > 99) + 4 * (token > 120),
            "tokens are rotated by other positions: 16 too large at positions 100 to 120, 20 too",
        ),
    ):
        turned = spec.rotate(x.reshape(300, -1, 24), positions[:, None] * own, WIDE.config.rope).reshape(300, -1)
        assert read_off(WIDE, token, points, Key("Qcur_rope", 1), turned).startswith(says)


@pytest.mark.parametrize("first", [0, 7])
def test_the_other_factors_of_frequencies_are_told(first):
    both = LongRope(64, (1.0, 1.02, 1.05, 1.1, 1.2, 1.3), (1.1, 1.6, 2.5, 4.0, 6.5, 11.0))
    model = random_model(6, family="phi3", rope_width=12, longrope=both, n_layers=1, width=64, heads=4, kv_heads=2, head_dim=16, context=64)
    x, token = np.random.default_rng(0).standard_normal((40, 64)), np.arange(40)[:, None]
    long = np.where(token < first, model.rope_frequency, model.rope_frequency * np.array(both.short) / np.array(both.long))
    turned = spec.rotate(x.reshape(40, 4, 16), token * long, model.config.rope).reshape(40, 64)
    said = read_off(model, token.ravel(), {Key("Qcur", 0): x}, Key("Qcur_rope", 0), turned)
    assert said == f"{f'from position {first} on ' * (first > 0)}frequencies are those of the long factors"


@given(st.sets(st.integers(0, 4), min_size=2, max_size=2), st.sets(st.integers(0, 11), min_size=1, max_size=11))
def test_ranks_of_experts_that_are_chosen_are_told(ranks, positions):
    chosen, rows = sorted(ranks), sorted(positions)
    assume(chosen[1] > 2)  # two that are nearly equal may be exchanged by roundings
    order = np.argsort(-EXPERT_POINTS[Key("ffn_moe_logits", 0)], axis=1)
    theirs = order[:, :2].copy()
    theirs[rows] = order[rows][:, chosen]
    said = read_off(EXPERTS, np.arange(12), EXPERT_POINTS, Key("ffn_moe_topk", 0), theirs)
    assert said.startswith(f"experts {chosen[0] + 1}, {chosen[1] + 1} in the order of their logits are chosen instead of 1 to 2, ")


YARN = random_model(6, family="qwen3", n_layers=1, width=64, heads=4, kv_heads=2, head_dim=64, yarn=Yarn(8.0, 4096))


@settings(max_examples=8)
@given(st.floats(2, 30), st.floats(0, 1))
def test_a_blend_of_frequencies_that_is_turned_round_is_told(factor, power):
    part = np.linspace(1, 0, 32) ** (1 + power)  # of the pairs' own frequencies
    own, x = 1e4 ** (-np.arange(32) / 32), np.random.default_rng(0).standard_normal((60, 256))
    model = replace(YARN, rope_frequency=np.float32(own * (part + (1 - part) / factor)))
    turned = spec.rotate(x.reshape(60, 4, 64), np.multiply.outer(np.arange(60), own * (1 - part + part / factor)), "halves")
    said = read_off(model, np.arange(60), {Key("Qcur_normed", 0): x}, Key("Qcur_rope", 0), turned.reshape(60, 256))
    assert said == "kept and slowed frequencies are mixed the wrong way round: pairs that should keep theirs are slowed"


@pytest.mark.usual(1)
@pytest.mark.parametrize("family", EVERY)
def test_nothing_is_solved_for_in_noise(family):
    rng = np.random.default_rng(3)
    for name in ("Qcur", "ffn_up", "kqv_out", "ffn_down"):
        x = layer_points(family)[name]
        said = read(family, name, x + 0.3 * rng.standard_normal(x.shape))
        assert not said or said.endswith("are no sums of their values"), said
