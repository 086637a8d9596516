"""Laws of sums, of places and of factors: each is planted by NumPy at places and sizes that are drawn, and is said as it was planted."""

from dataclasses import replace

import numpy as np
import pytest
from dumps import recorded, without_codes
from hypothesis import assume, example, given
from hypothesis import strategies as st
from wrong_tensors import (
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
    judged,
    layer_points,
    read,
    read_off,
    scores_of,
    softmax,
)

from bitnet_np import spec
from bitnet_np.judge.evidence import SPARE
from bitnet_np.judge.hypothesis import Hypothesis
from bitnet_np.judge.law.roundings import cut_to_digits, to_digits
from bitnet_np.judge.readings.structure import Numbers, loose_structure, structure
from bitnet_np.model.records import Yarn
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

P = layer_points("llama")
X, G, EPS, I96 = P["ffn_inp"], LLAMA.layers[LAYER].ffn_norm.astype(np.float64), LLAMA.config.eps, np.arange(96)
SQUARES, EXP, RIGHT = np.square(X), np.where(QUERY >= KEY, np.exp(scores_of()), 0), softmax(scores_of())
SIZES = st.sampled_from([2, 4, 8, 16])


def told(theirs, right):
    """What is said of the structure of a step, as a cause."""
    text = structure(Numbers(theirs, right, ("position", "element")))
    return Hypothesis(text, "read.structure").text


def of_parts(x, part):
    """For each number of a row the sum of those of its part."""
    return np.stack([x[..., part == p].sum(axis=-1) for p in part], axis=-1)


def normed(mean):
    return read("llama", "ffn_norm", X / np.sqrt(mean + EPS) * G)


def summed(sums):
    return read("llama", "kqv_out", by_weights(EXP / np.where(sums == 0, 1, sums)))


def added(x, n, to):
    total = np.zeros(x.shape[:-1])
    for i in range(0, x.shape[-1], n):
        total = to(total + x[..., i : i + n].sum(axis=-1))
    return total[..., None]


# --- sums -------------------------------------------------------------------------------------------------------------------------------


@given(st.sampled_from([2, 4, 8]))
def test_parts_of_a_row_that_are_summed_by_themselves_are_told(n):
    assert normed(of_parts(SQUARES, I96 % n) * n / 96) == f"the mean square is that of each of {n} lanes, of the numbers i % {n}, by itself"
    assert summed(of_parts(EXP, KEY // n)) == f"the softmax's sum is that of each {n} numbers by itself"
    assert summed(of_parts(EXP, KEY // n % 2)) == f"the softmax's sum is that of each half of every {2 * n} numbers by itself"


@given(st.sampled_from([2, 4, 8]))
def test_numbers_that_a_sum_leaves_out_are_told(n):
    assert summed(EXP[..., ::n].sum(-1, keepdims=True)) == f"the softmax's sum is of every {n}th number alone"
    assert summed(EXP[..., :n].sum(-1, keepdims=True)) == f"the softmax's sum is of the first {n} numbers alone"
    assert summed(EXP[..., :-n].sum(-1, keepdims=True)) == f"the softmax's sum is of all but the last {n}"


@given(st.integers(7, 9).map(lambda k: 2**k))
def test_other_divisors_of_a_mean_are_told(w):
    assert normed(SQUARES.sum(-1, keepdims=True) / w) == f"the mean square is divided by {w} instead of 96"
    assert read("llama", "ffn_norm", X / np.sqrt(SQUARES.sum(-1, keepdims=True) + EPS) * G) == "the mean square is not divided by the width"


@given(SIZES, st.sampled_from([(8, "bfloat16"), (11, "float16")]), st.booleans())
def test_sums_in_fewer_bits_are_told(n, kind, is_cut):
    digits, name = kind
    words = f"is kept in {name}, {'cut' if is_cut else 'rounded'} behind each {n} that are added"
    to = lambda x: (cut_to_digits if is_cut else to_digits)(x, digits)  # noqa: E731
    assert normed(added(SQUARES, n, to) / 96) == f"the mean square {words}"
    e = np.exp(np.where(QUERY >= KEY, scores_of(), -np.inf) - np.where(QUERY >= KEY, scores_of(), -np.inf).max(axis=-1, keepdims=True))
    said = read("llama", "kqv_out", by_weights(e / added(e, n, to)))
    assert said == f"the softmax's sum {words}" or n == 16


def test_a_softmax_along_queries_is_told():
    e = np.where(QUERY >= KEY, np.exp(scores_of()), 0)
    assert summed(e.sum(axis=1, keepdims=True)) == "the softmax's sum is taken along the other axis"


@given(st.sampled_from([2, 4, 8]), st.booleans())
def test_a_sum_that_is_divided_out_again_and_again_is_told(n, is_seen):
    y, total, most = np.zeros((C.heads, T, 24)), np.zeros((C.heads, T, 1)), np.full((C.heads, T, 1), -50.0)
    scores, v = np.where(QUERY >= KEY, scores_of(), -np.inf), spec.by_query_head(heads("Vcur"), C.heads).swapaxes(0, 1)
    for i in range(0, T, n):
        part, is_it = scores[..., i : i + n], np.arange(T)[:, None] >= (i if is_seen else 0)
        new = np.maximum(most, part.max(axis=-1, keepdims=True))
        keep, e = np.exp(most - new), np.exp(part - new)
        total, most = total * keep + e.sum(axis=-1, keepdims=True), new
        y = np.where(is_it, (y * keep + e @ v[:, i : i + n]) / total, y)
    said = read("llama", "kqv_out", y.swapaxes(0, 1).reshape(T, -1))
    assert said == f"the softmax's sum is divided out behind each {n} keys{' that are seen' * is_seen}, not once at the end"


def test_a_coarse_reciprocal_of_the_sums_is_told():
    seen = np.exp(scores_of() - np.where(QUERY >= KEY, scores_of(), -np.inf).max(axis=-1, keepdims=True)) * (QUERY >= KEY)
    m, power = np.frexp(seen.sum(axis=-1, keepdims=True))
    assert read("llama", "kqv_out", by_weights(seen * np.ldexp((2 - m) * (2 - m * (2 - m)), -power))).endswith(
        "they follow the mantissa of the softmax's sum, as where its reciprocal is coarse"
    )


# --- places -----------------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, T - 1), st.sampled_from(["ffn_up", "Qcur", "l_out"]))
def test_rows_that_others_are_added_to_are_told(by, name):
    said = read("llama", name, P[name] + np.roll(P[name], by, axis=0))
    assert said.startswith("to each position another one is added: positions are shifted by ")


def test_sums_of_slices_are_told():
    x = np.random.default_rng(0).standard_normal((6, 30))
    for often, says in (
        (np.tri(6), "each position is the sum of all up to it: sums run on, and are not cleared"),
        (np.tri(6) * np.tile(np.eye(2), (3, 3)), "each position is the sum of all up to it that are a multiple of 2 before it: "),
        (
            np.eye(6) + 0 * np.tri(6) + np.eye(1, 6, 3) * np.eye(6)[:, :1],
            "to each position another one is added: position 0 has the numbers",
        ),
        (
            np.where(np.arange(6)[:, None] < 2, np.arange(6) > 3, np.eye(6)),
            "slices are added up: position 0 is the sum of positions 4 to 5; pos",
        ),
    ):
        assert told(often @ x, x).startswith(says)


@given(st.sampled_from([2, 4, 8]), st.booleans())
@example(24, False)  # two ranks, each with half of the elements
def test_tiles_of_any_axis_are_told(n, is_of_rows):
    x = np.random.default_rng(0).standard_normal((16, 48))
    tiles = x.reshape(16 // n, n, 48).swapaxes(1, 2) if is_of_rows else x.reshape(16, 48 // n, n).swapaxes(0, 1)
    said = told(tiles.reshape(16, 48), x)
    of = f"tile of {n} {'positions' if is_of_rows else 'elements'}"
    assert said.startswith("numbers are laid out as [")
    assert of in said


def test_weights_that_are_all_negative_have_no_logarithms():
    right = softmax(scores_of())
    assert read("llama", "kqv_out", by_weights(-right)) == "values: all numbers are of the other sign; weights are right"
    said = read("llama", "kqv_out", by_weights(-right * np.random.default_rng(0).uniform(0.5, 2, right.shape)))
    assert said.startswith("attention's weights add up to -")


@given(st.integers(2, 5), st.integers(0, 1))
def test_values_of_other_rows_are_told(n, head):
    v, rows = heads("Vcur"), np.minimum(np.arange(T) + np.arange(T) % n, T - 1)
    said = read("llama", "kqv_out", by_weights(RIGHT, v[rows]))
    assert said == f"values: position i has the numbers of i + i % {n}; weights are right"
    strided = v.reshape(-1, 24)[np.arange(T)[:, None] + np.arange(2)]
    said = read("llama", "kqv_out", by_weights(RIGHT, strided))
    assert said == "values: rows of heads 0 to 1 are read by a stride of 1 a position instead of 2; weights are right"
    one = v.copy()
    one[7, head] = v[3, 1 - head]
    said = read("llama", "kqv_out", by_weights(RIGHT, one))
    assert (
        said == f"values: 1 rows are others: head {head} of position 7 has the values of head {1 - head} of position 3; weights are right"
    )


@given(st.integers(1, 3))
def test_queries_of_other_rows_are_told(stride):
    rows = heads("Qcur_rope").reshape(-1, 24)[np.arange(T)[:, None] * np.array([4, *[stride] * 3]) + np.arange(4)]
    said = read("llama", "kqv_out", by_weights(softmax(scores_of(q=rows))))
    assert said == f"queries: rows of heads 1 to 3 are read by a stride of {stride} a position instead of 4; keys and values are right"


@given(st.integers(2, T - 2), st.sampled_from(["keys and values", "keys", "values"]), st.sampled_from([0, 2]))
def test_cells_of_another_layer_are_told(first, what, layer):
    late = first <= QUERY
    k, v = (np.where(np.arange(T)[:, None, None] < first, heads(name, layer), heads(name)) for name in ("Kcur_rope", "Vcur"))
    weights = softmax(scores_of(k=k if "keys" in what else None))
    wrong = np.where(late, by_weights(weights, v if "values" in what else None), by_weights(RIGHT))
    said = read("llama", "kqv_out", wrong)
    assert said == f"{what} of positions before {first} are those of layer {layer}: the cache of another layer is read"


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda x, step: np.rint(x / step), "int8 codes, without the scale of each token and head"),
        (lambda x, step: np.trunc(x / step) * step, "int8 codes that are cut, not rounded, by a scale of each token and head"),
        (lambda x, step: np.floor(x / step) * step, "int8 codes that are rounded down, by a scale of each token and head"),
    ],
)
@pytest.mark.parametrize("first", [0, 6])
def test_codes_that_cells_hold_are_told(rule, says, first):
    k, v = (heads(name).astype(np.float32) for name in ("Kcur_rope", "Vcur"))
    k, v = (np.where(np.arange(T)[:, None, None] < (first or T), rule(x, np.abs(x).max(axis=2, keepdims=True) / 127), x) for x in (k, v))
    wrong = np.where(first <= QUERY, by_weights(softmax(scores_of(k=k)), v), by_weights(RIGHT))
    assert read("llama", "kqv_out", wrong) == f"keys and values{' of positions before 6' if first else ''} are {says}"


def test_keys_that_are_another_tensor_are_told():
    wrong = by_weights(softmax(scores_of(k=np.where(np.arange(T)[:, None, None] < 6, heads("Kcur"), heads("Kcur_rope")))))
    said = read("llama", "kqv_out", np.where(QUERY >= 6, wrong, by_weights(RIGHT)))
    assert said == f"keys of positions before 6 are those of layer {LAYER} Kcur"


@pytest.mark.parametrize("size", [1, 3])
def test_sums_that_are_not_rescaled_are_told(size):
    scores = np.where(QUERY >= KEY, scores_of(), -np.inf)
    so_far = np.maximum.accumulate(scores, axis=-1)[..., np.minimum(KEY // size * size + size, T) - 1]
    e = np.exp(scores - so_far)
    said = read("llama", "kqv_out", by_weights(e / e.sum(axis=-1, keepdims=True)))
    of_parts = (
        f"the softmax is computed in parts of {size} keys, and these are joined by wrong weights: each is less the largest score so far"
    )
    assert said in (
        f"{of_parts}, and not rescaled when that rises",
        "exponentials are of scores less the largest one so far: sums are not rescaled when that rises",
    )
    assert said.startswith("the softmax") == (size > 1)


def test_exponentials_that_are_lost_are_told():
    lost = np.where(0.1 * RIGHT.max(axis=-1, keepdims=True) > RIGHT, 0, RIGHT)
    said = read("llama", "kqv_out", by_weights(lost))
    assert said == "exponentials of scores below the largest: those below 0.1 are 0; their sums are right"


def test_scales_of_other_values_are_told():
    v = heads("Vcur")
    scale = np.abs(v).max(axis=2, keepdims=True)
    said = read("llama", "kqv_out", by_weights(RIGHT, v * scale[::-1] / scale))
    of = "the largest magnitude of each head of Vcur of another place over that of its own, as by the scale of another"
    assert said == f"values: each head of each position is multiplied by {of}; weights are right"


@pytest.mark.parametrize("which", ["a Hadamard matrix", "an orthogonal matrix", "one matrix"])
@pytest.mark.parametrize("size", [8, 16])
def test_a_matrix_that_all_heads_are_multiplied_by_is_told(which, size):
    rng, one = np.random.default_rng(size), np.array([[1.0, 1], [1, -1]])
    matrix = rng.standard_normal((size, size))
    if which != "one matrix":
        matrix = np.linalg.qr(matrix)[0]
    while which == "a Hadamard matrix" and len(one) < size:
        one = np.kron(one, np.array([[1.0, 1], [1, -1]]))
    matrix = one / size**0.5 if which == "a Hadamard matrix" else matrix
    x = rng.standard_normal((12, 4, size))
    numbers = Numbers(x @ matrix, x, ("position", "head", "element"))
    said = loose_structure(numbers) if which == "one matrix" else structure(numbers)
    assert said == (
        f"each head is multiplied by {which}" if which == "one matrix" else f"each head is turned by {which}, and not turned back"
    )


def test_what_tells_wrong_numbers_apart_is_told():
    x = np.random.default_rng(0).standard_normal((40, 30))
    assert told(np.where(x > 1.5, x / 2, x), x) == "those above 1.5 are 0.5 times what is right"
    assert told(np.where(np.abs(x) < 0.5, 3 * x, x), x) == "those of a magnitude below 0.5 are 3 times what is right"
    assert told(np.where(x < -1, x + 2, x), x) == "those below -1 are 2 more than what is right"


@given(st.floats(1.2, 3), st.integers(0, 9))
def test_factors_of_keys_are_told(factor, key):
    said = read("llama", "kqv_out", by_weights(softmax(scores_of() * np.where(key == KEY, factor, 1))))
    assert said.startswith(f"scores of key {key} are multiplied by {factor:.3g}"[:-1])


def test_tokens_that_all_read_the_same_cells_are_told_together():
    chunk = 8
    seen = np.where(chunk > QUERY, QUERY >= KEY, np.minimum(chunk, T - QUERY // chunk * chunk) > KEY)
    said = read("llama", "kqv_out", by_weights(softmax(scores_of(), seen)))
    assert said == "positions 8 to 15 read cells 0 to 7 alone; position 16 reads cell 0 alone"


NAMES = {1: "powers of 2", 8: "bfloat16's 8 significant bits", 11: "float16's 11 significant bits"}
# --- factors and functions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 11])
@pytest.mark.parametrize(
    "rule", [("rounded", np.rint), ("cut", np.trunc), ("rounded up", lambda x: np.sign(x) * np.ceil(np.abs(x)))], ids=lambda rule: rule[0]
)
def test_a_coarser_grid_of_numbers_is_told(bits, rule):
    x = np.random.default_rng(0).standard_normal((20, 40))
    step = 2.0 ** (np.floor(np.log2(np.abs(x))) + 1 - bits)
    said = told(rule[1](x / step) * step, x)
    assert said.startswith(f"numbers are {rule[0]} to {NAMES.get(bits, f'{bits} significant bits')}")


@given(st.integers(2, 8), st.integers(2, 16))
def test_numbers_of_a_corner_that_are_never_written_are_told(rows, columns):
    x = np.random.default_rng(0).standard_normal((40, 64))
    theirs = x.copy()
    theirs[-rows:, -columns:] = 0
    said = told(theirs, x)
    assert said.endswith(f": the wrong ones are at positions {40 - rows} to 39 of 40 and elements {64 - columns} to 63 of 64"), said


BLOCKS = random_model(
    3, family="llama", table="Q8_0", weights="Q8_0", width=128, ffn=128, heads=4, kv_heads=2, head_dim=32, n_layers=1, vocab=90
)
IDS_OF_BLOCKS = np.random.default_rng(0).permutation(90)[:30]
BLOCK_POINTS = without_codes(recorded(BLOCKS, IDS_OF_BLOCKS))


def parts_of(table):
    data = np.ascontiguousarray(table.data).view(np.uint8).reshape(table.shape[0], -1, 34)
    scales = np.ascontiguousarray(data[..., :2]).view(np.float16).astype(np.float64)
    return scales, np.ascontiguousarray(data[..., 2:]).view(np.int8).astype(np.float64)


def test_scales_of_a_table_on_a_coarser_grid_are_told():
    scales, codes = parts_of(BLOCKS.token_embd)
    wrong = (2.0 ** np.ceil(np.log2(np.abs(scales))) * np.sign(scales) * codes).reshape(90, 128)[IDS_OF_BLOCKS]
    said = read_off(BLOCKS, IDS_OF_BLOCKS, BLOCK_POINTS, Key("inp_embd", None), wrong)
    assert said == "Q8_0: scales of blocks of 32 weights of a row: numbers are rounded up to powers of 2"


@given(st.integers(0, 1), st.integers(1, 3))
def test_scales_that_are_read_behind_their_place_are_told(grows, by):
    linear = BLOCKS.layers[0].ffn_gate
    (scales, codes), x = parts_of(linear.weights), BLOCK_POINTS[Key("ffn_norm", 0)].astype(np.float64).reshape(30, 4, 32)
    place = np.arange(512).reshape(1, 128, 4) + np.arange(30)[:, None, None] * grows + by * (1 - grows)
    sums = np.einsum("tbi,nbi->tnb", x, codes) * scales.ravel()[place.clip(0, 511)]
    said = read_off(BLOCKS, IDS_OF_BLOCKS, BLOCK_POINTS, Key("ffn_gate", 0), sums.sum(axis=2) + linear.bias)
    if grows:
        assert said == "Q8_0: scales of blocks are read behind their place, by the number of the position"
    else:
        assert said.startswith("Q8_0: scales of blocks of 32 weights of a row: ")


@pytest.mark.parametrize("order", [np.arange(128) // 8 * 8 + np.arange(128) % 8 // 4 + np.arange(128) % 4 * 2, np.arange(128)[::-1]])
def test_codes_of_other_rows_are_told(order):
    (scales, codes), x = parts_of(BLOCKS.layers[0].ffn_gate.weights), BLOCK_POINTS[Key("ffn_norm", 0)].astype(np.float64)
    wrong = x @ (codes[order] * scales).reshape(128, 128).T + BLOCKS.layers[0].ffn_gate.bias
    said = read_off(BLOCKS, IDS_OF_BLOCKS, BLOCK_POINTS, Key("ffn_gate", 0), wrong)
    assert said.startswith("Q8_0: codes are those of other rows, and scales are right: ")


def test_blocks_that_are_wrong_are_told_one_by_one():
    (scales, codes), x = parts_of(BLOCKS.layers[0].ffn_gate.weights), BLOCK_POINTS[Key("ffn_norm", 0)].astype(np.float64)
    factor = np.ones((128, 4, 1))
    factor[1::2, 1, 0], factor[:, 3] = np.random.default_rng(0).uniform(1.5, 3, 64), 0
    wrong = x @ (codes * scales * factor).reshape(128, 128).T + BLOCKS.layers[0].ffn_gate.bias
    said = read_off(BLOCKS, IDS_OF_BLOCKS, BLOCK_POINTS, Key("ffn_gate", 0), wrong)
    assert said.startswith("Q8_0: scales of blocks of 32 weights of a row: block 1 is 1.5")
    assert said.endswith(" times what is right in every second row from row 1, 64 of 128, block 3 is 0")
    factor[:, 1, 0] = np.where(np.random.default_rng(1).random(128) < 0.5, np.random.default_rng(2).uniform(1.5, 3, 128), 1)
    wrong = x @ (codes * scales * factor).reshape(128, 128).T + BLOCKS.layers[0].ffn_gate.bias
    said = read_off(BLOCKS, IDS_OF_BLOCKS, BLOCK_POINTS, Key("ffn_gate", 0), wrong)
    assert said.endswith(f" times what is right in {(factor[:, 1, 0] > 1).sum()} of 128 rows, block 3 is 0")


def test_a_zero_point_that_takes_other_sums_is_told():
    scales, x = parts_of(BLOCKS.layers[0].ffn_gate.weights)[0][..., 0], BLOCK_POINTS[Key("ffn_norm", 0)].astype(np.float64)
    more = np.abs(x).reshape(30, 4, 32).sum(axis=2) @ scales.T
    said = read_off(BLOCKS, IDS_OF_BLOCKS, BLOCK_POINTS, Key("ffn_gate", 0), BLOCK_POINTS[Key("ffn_gate", 0)] + more)
    assert said == "Q8_0: each block's scale is added times a number of each position, as by a zero point of other sums"


def test_other_borders_of_a_blend_of_frequencies_are_told():
    yarn = Yarn(8.0, 4096)
    model, step = (
        random_model(6, family="qwen3", n_layers=1, width=64, heads=4, kv_heads=2, head_dim=64, yarn=one)
        for one in (yarn, replace(yarn, fast=2.0))
    )
    x = np.random.default_rng(0).standard_normal((60, 256))
    turned = spec.rotate(x.reshape(60, 4, 64), np.multiply.outer(np.arange(60), step.rope_frequency.astype(np.float64)), "halves")
    said = read_off(model, np.arange(60), {Key("Qcur_normed", 0): x}, Key("Qcur_rope", 0), turned.reshape(60, 256))
    assert said.startswith("kept and slowed frequencies are blended by other borders: pairs 0 to ")


def test_a_curve_that_is_not_cut_off_is_told():
    z = np.sqrt(2 / np.pi) * (3 * P["ffn_gate"] + 0.044715 * 27 * P["ffn_gate"] ** 3)
    model, points = LLAMA, {**POINTS["llama"], Key("ffn_gate", LAYER): 3 * P["ffn_gate"]}
    wrong = 3 * P["ffn_gate"] * (1 + np.tanh(z / 2) * 1.05) / 2 * P["ffn_up"]
    said = read_off(model, IDS["llama"], points, Key("ffn_out", LAYER), wrong)
    assert ": what it multiplies its input by goes on to 1.0" in said


@given(st.floats(6.2, 6.28), st.booleans())
def test_a_coarse_number_for_whole_turns_is_told(circle, is_floor):
    x = np.random.default_rng(0).standard_normal((200, 96))
    angle = np.multiply.outer(np.arange(200), LLAMA.rope_frequency.astype(np.float64))
    turns = (np.floor if is_floor else np.rint)(angle / (2 * np.pi))
    turned = spec.rotate(x.reshape(200, -1, 24), angle - circle * turns, C.rope).reshape(200, -1)
    said = read_off(LLAMA, np.arange(200), {Key("Qcur", 1): x}, Key("Qcur_rope", 1), turned)
    assert said.startswith(f"whole turns are taken off angles by {circle:.4g}"[:-1])


EXPERTS = random_model(5, family="qwen3moe", n_layers=1)
EXPERT_POINTS = without_codes(recorded(EXPERTS, np.arange(24)))
CHOSEN = EXPERT_POINTS[Key("ffn_moe_topk", 0)].astype(np.intp)


def of_experts(name, wrong):
    return read_off(EXPERTS, np.arange(24), EXPERT_POINTS, Key(name, 0), wrong)


@given(st.floats(1.1, 4))
def test_factors_of_experts_are_told(factor):
    up = EXPERT_POINTS[Key("ffn_moe_up", 0)].astype(np.float64).reshape(*CHOSEN.shape, -1)
    e = int(CHOSEN[0, 0])
    said = of_experts("ffn_moe_up", (up * np.where(e == CHOSEN, factor, 1)[..., None]).reshape(24, -1))
    assert said == f"numbers of expert {e} are multiplied by {factor:.4g}"
    gates, ups = (
        [np.abs(getattr(one, name).weights.astype(np.float64)).max() for one in EXPERTS.layers[0].experts]
        for name in ("ffn_gate", "ffn_up")
    )
    said = of_experts("ffn_moe_up", (up * np.maximum(np.divide(gates, ups), 1)[CHOSEN][..., None]).reshape(24, -1))
    assert said.endswith(", as where gate and up share the scale of the larger one and its weights are not scaled anew")


@given(st.permutations(range(24)))
def test_scales_of_other_tokens_are_told(order):
    assume((np.array(order) != np.arange(24)).sum() > 8)
    most = np.abs(EXPERT_POINTS[Key("ffn_norm", 0)].astype(np.float64)).max(axis=1)
    gate = EXPERT_POINTS[Key("ffn_moe_gate", 0)].astype(np.float64)
    said = of_experts("ffn_moe_gate", gate * (most[order] / most)[:, None])
    assert said.endswith(
        " is multiplied by the largest magnitude of ffn_norm of another place over that of its own, as by the scale of another"
    )


def test_experts_that_no_rule_chooses_are_told():
    other = np.random.default_rng(0).permuted(np.tile(np.arange(EXPERTS.config.experts), (24, 1)), axis=1)[:, : CHOSEN.shape[1]]
    assert of_experts("ffn_moe_topk", other).startswith("other experts than those of the largest logits are chosen, at positions ")


@given(st.sets(st.integers(0, EXPERTS.config.experts - 1), min_size=1, max_size=2), st.floats(-0.9, 0.9))
def test_laws_of_choices_are_told(never, slope):
    logits, count = EXPERT_POINTS[Key("ffn_moe_logits", 0)].astype(np.float64), CHOSEN.shape[1]
    wrong = spec.top_experts(np.where(np.isin(np.arange(logits.shape[1]), [*never]), -np.inf, logits), count)
    said, are = of_experts("ffn_moe_topk", wrong), "are" if len(never) > 1 else "is"
    off = (np.sort(wrong) != np.sort(CHOSEN)).any(axis=1).sum()
    assert said.endswith(f" {are} never chosen: those of the largest logits among the others are") or off < SPARE or " in the order" in said
    said = of_experts("ffn_moe_topk", spec.top_experts(logits + slope * np.arange(logits.shape[1]), count))
    assert not said.startswith("the number") or float(said.split()[6]) * slope > 0


@given(st.integers(0, 99))
def test_factors_of_the_rows_of_experts_are_told(seed):
    up = EXPERT_POINTS[Key("ffn_moe_up", 0)].astype(np.float64).reshape(*CHOSEN.shape, -1)
    factors = np.random.default_rng(seed).uniform(0.5, 2, (EXPERTS.config.experts, up.shape[2]))
    assert of_experts("ffn_moe_up", (up * factors[CHOSEN]).reshape(24, -1)).startswith("rows of experts 0 to ")
    largest = np.array([np.abs(one.ffn_up.weights.astype(np.float64)).max(axis=1) for one in EXPERTS.layers[0].experts])
    said = of_experts("ffn_moe_up", (up * (largest.mean(axis=0) / largest)[CHOSEN]).reshape(24, -1))
    assert said.endswith(", as where all experts have the same scales")


def weighted(weights):
    """What is said of experts' results that are summed with these weights [T, k]."""
    results = EXPERT_POINTS[Key("ffn_moe_down", 0)].astype(np.float64).reshape(*CHOSEN.shape, -1)
    return of_experts("ffn_moe_out", (results * weights[..., None]).sum(axis=1))


@given(st.integers(1, EXPERTS.config.experts - 2), st.sampled_from([0.0, 2.0]))
def test_weights_that_follow_the_experts_are_told(first, factor):
    right = EXPERT_POINTS[Key("ffn_moe_weights", 0)].astype(np.float64)
    said = weighted(np.where(first <= CHOSEN, factor * right, right))
    assert said.startswith(f"the weights of experts: those of experts {first} to {EXPERTS.config.experts - 1} of each row are {factor:g}")
    said = weighted(np.where(CHOSEN.max(axis=1, keepdims=True) == CHOSEN, factor * right, right))
    assert f"those of place by expert number {CHOSEN.shape[1] - 1} of each row are {factor:g}" in said
    place = np.arange(24)[:, None] * CHOSEN.shape[1] + CHOSEN
    said = weighted(right.ravel()[place.clip(max=right.size - 1)])
    assert "the number of each expert is taken for the place, from the start of each row, of what belongs to it" in said


@given(st.sampled_from([2, 4, 8]), st.integers(0, 3))
def test_parts_that_a_mean_of_squares_takes_otherwise_are_told(n, part):
    tail = np.append(SQUARES[:, :-n], X[:, -n:], axis=1).mean(-1, keepdims=True)
    assert normed(tail) == f"the mean square has the last {n} numbers themselves, and not their squares"
    some = part + 1 != I96 // 16
    assert normed(SQUARES @ some[:, None] / 96).startswith(f"the mean square is of all but numbers {16 * part + 16} to {16 * part + 31}")
    assert normed(SQUARES[:, :16].mean(-1, keepdims=True)) == "the mean square is of the first 16 numbers alone, and divided by their count"


# --- edits ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["packed in tiles of {}, and read row by row", "read in tiles of {}, and lies row by row"])
@pytest.mark.parametrize(
    ("of", "shape", "order"),
    [("8 inputs", (120, 12, 8), (1, 0, 2)), ("8 rows", (15, 8, 96), (0, 2, 1)), ("4 rows and 8 inputs", (30, 4, 12, 8), (0, 2, 1, 3))],
)
def test_matrices_in_tiles_are_told(how, of, shape, order):
    matrix = LLAMA.layers[LAYER].ffn_up.weights.astype(np.float64)
    place = np.arange(matrix.size).reshape(shape).transpose(order).ravel()
    other = matrix.ravel()[np.argsort(place) if how.startswith("read") else place].reshape(matrix.shape)
    assert judged("llama", "ffn_up", P["ffn_up"] + P["ffn_norm"] @ (other - matrix).T) == f"the matrix is {how.format(of)}"


@given(st.sampled_from(["row", "element"]), st.integers(1, 3))
def test_cells_in_another_layout_are_told(unit, by):
    """Each query head reads keys and values from another row, or heads are padded in memory; behind the end are zeros."""
    width, groups = C.head_dim, C.kv_heads
    begin = np.arange(C.heads) * width if unit == "row" else np.arange(C.heads) // 2 * (width + by)
    stride = groups * width if unit == "row" else groups * (width + by)
    at = (begin + stride * QUERY)[..., None] + np.arange(width)  # [T, H, K]
    k, v = (np.append(heads(name), np.zeros(at.max()))[at] for name in ("Kcur_rope", "Vcur"))
    scores = np.einsum("thk,shk->hts", heads("Qcur_rope"), k) / np.sqrt(width)
    wrong = np.einsum("hts,shk->thk", softmax(scores), v).reshape(T, -1)
    padded = f"rows of heads 0 to 1 are read from element 0, {24 + by} on instead of 0, 24"
    said = {
        "row": "rows of query heads 1 to 3 are read from row 1, 2, 3 on instead of 0, 1, 1",
        "element": f"{padded} by a stride of {48 + 2 * by} elements a position instead of 48",
    }
    assert read("llama", "kqv_out", wrong) == f"keys and values: {said[unit]}"
