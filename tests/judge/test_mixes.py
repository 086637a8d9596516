"""What is mixed into a tensor is solved for: parts of a softmax, what cells hold, values and rows of elsewhere, inputs of some positions.

Places and numbers are drawn; of numbers that follow no such law nothing of it is said.
"""

import re

import numpy as np
import pytest
from dumps import recorded, without_codes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from wrong_tensors import KEY, LLAMA, POINTS, QUERY, C, T, by_weights, heads, judged, layer_points, read, read_off, scores_of, softmax

from bitnet_np import spec
from bitnet_np.judge.dump import other_layers
from bitnet_np.judge.law.formats import EACH
from bitnet_np.judge.law.products import rows_of
from bitnet_np.judge.readings.attention import ROWS
from bitnet_np.judge.report.report import OperationVerdict
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

P = layer_points("llama")
V, RIGHT = heads("Vcur"), softmax(scores_of())
SEEN = np.where(QUERY >= KEY, scores_of(), -np.inf)


def in_parts(size, weigh):
    """Attention whose parts of `size` keys, softmaxes of their own, are joined by weigh(largest scores, sums), [H, T, P, 1] each."""
    part = (np.arange(T) // size) == np.arange(-(-T // size))[:, None]
    seen = np.where(part, SEEN[:, :, None], -np.inf)
    largest = np.nan_to_num(seen.max(axis=-1, keepdims=True), neginf=-1e30)
    e = np.where(np.isfinite(seen), np.exp(seen - np.maximum(largest, -1e9)), 0)
    sums = e.sum(axis=-1, keepdims=True)
    weights = np.where(sums > 0, weigh(np.where(sums > 0, largest, 0), np.maximum(sums, 1e-300)), 0)
    weights = weights / weights.sum(axis=2, keepdims=True)
    return by_weights((weights * e / np.maximum(sums, 1e-300)).sum(axis=2))


@settings(max_examples=10)
@given(st.integers(4, 12), st.sampled_from([0.25, 0.5, 2.0]))
def test_parts_of_a_softmax_that_are_joined_by_wrong_weights_are_told(size, factor):
    told = f"the softmax is computed in parts of {size} keys, and these are joined by wrong weights"
    by_largest = read("llama", "kqv_out", in_parts(size, lambda largest, sums: np.exp(factor * largest) * sums))
    assert by_largest == f"{told}: the largest score of each part is multiplied by {factor:g}"
    by_sums = read("llama", "kqv_out", in_parts(size, lambda largest, sums: np.exp(largest)))
    assert by_sums == f"{told}: the logarithm of its sum of exponentials is left out"
    drawn = np.exp(np.random.default_rng(size).standard_normal((C.heads, T, -(-T // size), 1)))
    assert read("llama", "kqv_out", in_parts(size, lambda largest, sums: drawn)) == told


def test_a_factor_of_each_row_is_no_wrong_part():
    for seed in range(3):
        factor = np.random.default_rng(seed).uniform(1.1, 2, (C.heads, T, 1))
        assert "parts" not in read("llama", "kqv_out", by_weights(RIGHT * factor))


@settings(max_examples=12)
@given(border=st.integers(3, 8), head=st.integers(0, 1), is_empty=st.booleans(), is_late=st.booleans())
def test_what_cells_hold_of_another_head_is_told(border, head, is_empty, is_late):
    """Where a core writes into the cells of another head, its own may stay empty."""
    keys, values = (heads(name).copy() for name in ("Kcur_rope", "Vcur"))
    for x in (keys, values):
        x[:border, head] = x[:border, 1 - head]
        x[:border, 1 - head] *= not is_empty
    wrong = by_weights(softmax(scores_of(k=keys)), values)
    wrong[: border * is_late] = by_weights(RIGHT)[: border * is_late]
    cells = f"the cells of positions 0 to {border - 1} of key-value head"
    texts = {head: f"{cells} {head} hold those of head {1 - head}"}
    texts |= {1 - head: f"{cells} {1 - head} hold keys and values of 0: never written"} if is_empty else {}
    late = f", for tokens from position {border} on" if is_late else ""
    assert read("llama", "kqv_out", wrong) == "; ".join(texts[h] for h in sorted(texts)) + late


def test_nothing_is_solved_for_where_the_first_tokens_are_right():
    """Readings of attention look at the first tokens alone, and the wrong ones may be behind."""
    ids = np.arange(2 * ROWS) % LLAMA.config.vocab
    points = recorded(LLAMA, ids)
    wrong = points[Key("kqv_out", 1)].astype(np.float64)
    wrong[-3:] += np.random.default_rng(1).standard_normal(wrong[-3:].shape)
    assert "hold" not in read_off(LLAMA, ids, points, Key("kqv_out", 1), wrong)


@settings(max_examples=10)
@given(st.integers(20, 60))
def test_many_empty_cells_are_counted(count):
    e = np.exp(SEEN)
    said = read("llama", "kqv_out", by_weights(e / (e.sum(axis=-1, keepdims=True) + count * (QUERY < 9))))
    assert said == f"empty slots, whose keys and values are 0, are read by positions 0 to 8, up to {count} of them"


def test_tokens_ahead_that_are_read_are_said_at_once():
    ahead = (QUERY < 8) & (KEY < 8) | (QUERY >= 8) & (KEY <= QUERY + 3)
    e = np.where((QUERY >= KEY) | ahead, np.exp(scores_of()), 0)
    said = read("llama", "kqv_out", by_weights(e / e.sum(axis=-1, keepdims=True)))
    assert said == "positions 0 to 6, 8 to 15 read tokens ahead of them, up to 7 ahead: the mask"


@settings(max_examples=8)
@given(st.floats(0.02, 0.3), st.floats(0.5, 3))
def test_an_exponential_that_is_another_function_is_told(size, step):
    below = scores_of() - SEEN.max(axis=-1, keepdims=True)
    weights = np.where(QUERY >= KEY, np.exp(below + size * np.sin(below / step)), 0)
    said = read("llama", "kqv_out", by_weights(weights / weights.sum(axis=-1, keepdims=True)))
    assert said.startswith("the exponentials are another function of scores below the largest: ")
    right, at = (float(x) for x in re.search(r"instead of (\S+) at (\S+?),", said).groups())
    assert right == pytest.approx(np.exp(at), rel=0.02)


@settings(max_examples=6)
@given(st.integers(8, 16), st.integers(0, 9))
def test_a_value_that_is_not_of_a_long_sequence_is_told(first, seed):
    """A head has 24 elements, and the sequence 40 tokens."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(90)[:40]
    points = without_codes(recorded(LLAMA, ids))
    q, k, v = (points[Key(name, 1)].astype(np.float64).reshape(40, -1, 24) for name in ("Qcur_rope", "Kcur_rope", "Vcur"))
    k, v = (np.concatenate([x, rng.standard_normal((1, 2, 24))]) for x in (k, v))
    scores = np.einsum("thk,shk->hts", q, spec.by_query_head(k, 4)) / np.sqrt(24)
    seen = np.concatenate([np.tri(40, dtype=bool), np.arange(40)[:, None] >= first], axis=1)
    wrong = np.einsum("hts,shk->thk", softmax(scores, seen), spec.by_query_head(v, 4)).reshape(40, -1)
    said = read_off(LLAMA, ids, points, Key("kqv_out", 1), wrong)
    assert said.startswith(f"at positions from {first} on values that are not of this sequence are summed too, 1 of them: a cache slot")
    late = np.tri(40, dtype=bool) | ((np.arange(40)[:, None] == first) & (np.arange(40) == 39))
    later = np.einsum("hts,shk->thk", softmax(scores[..., :40], late), spec.by_query_head(v[:40], 4)).reshape(40, -1)
    assert "not of this sequence" not in read_off(LLAMA, ids, points, Key("kqv_out", 1), later)


# --- other operations -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(st.data())
def test_rows_that_a_buffer_still_held_are_told(data):
    begin, count = data.draw(st.integers(4, 8)), data.draw(st.integers(3, 8))
    shift = data.draw(st.integers(-begin, T - begin - count).filter(bool))
    rows, source = (np.arange(count) + begin, np.arange(count) + begin + shift)
    key = data.draw(st.sampled_from([Key("l_out", 2), Key("attn_o_out", 1), Key("l_out", 0)]))
    places = [f"positions {some[0]} to {some[-1]}" for some in (source, rows)]
    of = f"{key.place} of {places[0]} is added to {{}} at {places[1]}: a buffer that was not cleared"
    x = P["ffn_inp"].copy()
    x[rows] += POINTS["llama"][key][source]
    assert read("llama", "ffn_inp", x) == of.format("the result")
    normed = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + C.eps) * LLAMA.layers[1].ffn_norm
    assert read("llama", "ffn_norm", normed) == of.format("its input")
    x[rows] += np.random.default_rng(0).standard_normal(x[rows].shape)
    assert "buffer" not in read("llama", "ffn_inp", x)


@settings(max_examples=10)
@given(st.integers(0, 95), st.integers(1, 4))
def test_the_step_of_another_row_is_told_in_one_column(column, shift):
    x = P["ffn_inp"]
    root = np.sqrt((x**2).mean(axis=1) + C.eps)
    wrong = P["ffn_norm"].copy()
    wrong[shift:, column] = x[shift:, column] / root[:-shift] * LLAMA.layers[1].ffn_norm[column]
    moved = f"positions {shift} to {T - 1} have the numbers of positions 0 to {T - 1 - shift}"
    assert read("llama", "ffn_norm", wrong) == f"the root mean square: at element {column}: {moved}; all other steps are right"


@settings(max_examples=6)
@given(st.integers(10, 100))
def test_inputs_that_each_half_of_the_positions_leaves_out_are_told(cut):
    x, linear = P["ffn_out"], LLAMA.layers[1].ffn_down
    kept = np.where((np.arange(T) < 9)[:, None], np.arange(120) < cut, np.arange(120) >= cut)
    wrong = (x * kept) @ rows_of(linear.weights, np.arange(96)).T * (linear.scale or 1) + (0 if linear.bias is None else linear.bias)
    first, second = f"inputs {cut} to 119 are not summed", f"inputs 0 to {cut - 1} are not summed"
    said = read("llama", "ffn_down", wrong)
    assert said == f"at positions 0 to 8: {first}; at positions 9 to {T - 1}: {second}"


EXPERTS = random_model(5, family="qwen3moe", n_layers=2, vocab=90, width=48, heads=2, kv_heads=1, head_dim=24, ffn=32, experts=8)
ROUTED = recorded(EXPERTS, np.random.default_rng(0).permutation(90))


@pytest.mark.parametrize("kind", ["e5m2", "e4m3"])
@pytest.mark.parametrize("equal", ["first", "last"])
@pytest.mark.parametrize("what", ["probabilities", "logits"])
def test_the_rule_by_which_experts_are_chosen_is_told(what, equal, kind):
    logits = ROUTED[Key("ffn_moe_logits", 1)].astype(np.float64)
    x = EACH[kind](spec.softmax(logits) if what == "probabilities" else logits)
    taken = ROUTED[Key("ffn_moe_topk", 1)]
    chosen = spec.top_experts(x, taken.shape[1]) if equal == "first" else 7 - spec.top_experts(x[:, ::-1], taken.shape[1])
    assert (chosen != taken).any()
    said = read_off(EXPERTS, np.arange(90), ROUTED, Key("ffn_moe_topk", 1), chosen.astype(np.float64))
    assert re.fullmatch(rf"experts are chosen by their (probabilities|logits) rounded to {kind}, of equal ones the (first|last)", said)
    for words, by in (("the smallest logits", -logits), ("the magnitude of logits", np.abs(logits))):
        chosen = spec.top_experts(by, taken.shape[1]).astype(np.float64)
        assert read_off(EXPERTS, np.arange(90), ROUTED, Key("ffn_moe_topk", 1), chosen) == f"experts are chosen by {words}"


# --- operations and layers together -----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["", "it is done twice", "the bias is missing"]), min_size=2, max_size=6))
def test_the_layers_that_have_one_cause_are_said_where_they_are_some(causes):
    keys = [Key("ffn_up", n) for n in range(len(causes))]
    verdicts = [
        OperationVerdict(key, Verdict.WRONG if c else Verdict.ROUNDING, hypothesis=c or None) for key, c in zip(keys, causes, strict=True)
    ]
    first = next((o for o in verdicts if o.hypothesis), None)
    assume(first)
    same = [o.key.layer for o in verdicts if o.hypothesis == first.hypothesis]
    other = next((o for o in verdicts if o.hypothesis not in (None, first.hypothesis)), None)
    said = other_layers(verdicts, first)
    assert bool(said) == (1 < len(same) < len(causes))
    if said:
        assert said.startswith(f"; the same in layers {same[1]}")
        assert (f"in layer {other.key.layer}: {other.hypothesis}" in said) if other else "in layer " not in said


@settings(max_examples=3)  # each has the whole search behind it
@given(st.integers(0, 9), st.floats(0.6, 0.9))
def test_a_factor_is_named_where_what_it_leaves_is_noise(seed, factor):
    """As of weights in int8 that are multiplied by the scale of others; what one element has more of is no noise."""
    rng, linear = np.random.default_rng(seed), LLAMA.layers[1].ffn_up
    x, w = P["ffn_norm"], rows_of(linear.weights, np.arange(120))
    w = factor * w * (1 + 2.0**-8 * rng.standard_normal(w.shape))
    wrong = x @ w.T + linear.bias
    said = judged("llama", "ffn_up", wrong)
    left = r"what is left of the error, NMSE \S+, is no more than fewer bits leave"
    assert re.match(rf"the products are (\S+) times what is right; {left}", said)
    assert float(said.split()[3]) == pytest.approx(factor, rel=0.01)
    wrong[:, 7] += rng.standard_normal(T) * np.abs(wrong).mean()
    assert "fewer bits" not in judged("llama", "ffn_up", wrong)
