"""What is said of one wrong tensor of a recorded forward pass, which NumPy makes: edits, in all of it or in a part, and what is solved for.

No function of the judge makes these numbers, so a text is what it says. test_planted.py has every text, by the judge's own functions.
"""

import numpy as np
import pytest
from dumps import MODEL, TOKENS, family_dump, only, recorded, trace, with_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_tensors import (
    IDS,
    KEY,
    LAYER,
    LLAMA,
    POINTS,
    QUERY,
    QWEN3,
    C,
    T,
    by_weights,
    heads,
    judged,
    key_of,
    layer_points,
    read,
    read_off,
    scores_of,
    softmax,
    turned,
)

from bitnet_np import BITNET_CPP, EXACT, check, spec
from bitnet_np.judge.bounds import within
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.law.functions import pairs
from bitnet_np.judge.law.graph import TOKENS as TOKENS_KEY
from bitnet_np.judge.law.graph import operations
from bitnet_np.judge.law.precision import FLOAT32
from bitnet_np.judge.law.products import linear_of, rows_of
from bitnet_np.judge.law.roundings import to_bfloat16, to_digits
from bitnet_np.judge.readings import elements
from bitnet_np.judge.readings.table import cause_of
from bitnet_np.judge.readings.wrong import Wrong
from bitnet_np.judge.verdict import Verdict
from bitnet_np.judge.words import instead, places_of, runs
from bitnet_np.model import packing
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import TOP_EXPERTS, Key
from scripts import mutations

P = layer_points("llama")
LINEAR, UP, GATE, BRANCH, X, NORM = (
    LLAMA.layers[LAYER].ffn_up,
    *(P[n] for n in ("ffn_up", "ffn_gate", "ffn_down", "ffn_inp", "attn_norm")),
)
TABLE, MATRIX, BIAS = LLAMA.token_embd.astype(np.float64), rows_of(LINEAR.weights, np.arange(120)), LINEAR.bias.astype(np.float64)
G, EPS, GAIN = LLAMA.layers[LAYER].ffn_norm.astype(np.float64), LLAMA.config.eps, LLAMA.layers[LAYER].attn_norm.astype(np.float64)
ROW, WIDE, INPUT, OUTPUT = np.arange(T)[:, None], np.arange(96), np.arange(96), np.arange(120)
RNG = np.random.default_rng(4)


def changed(x, where, values):
    """A copy of x with other values at some places."""
    x = x.copy()
    x[where] = values
    return x


# --- products -------------------------------------------------------------------------------------------------------------------------


def of_weights(change):
    return UP + P["ffn_norm"] @ (change(MATRIX) - MATRIX).T


def summed(factors, columns=slice(None), rows=slice(None)):
    """A product whose inputs are summed so many times, at some outputs of some tokens."""
    return changed(UP, (rows, columns), ((P["ffn_norm"] * factors) @ MATRIX.T + BIAS)[rows, columns])


OTHER_ROWS = "weights of other rows are used:"
PRODUCTS = {
    "the last 32 inputs are not summed": of_weights(lambda w: np.where(INPUT < 64, w, 0)),
    "inputs 48 to 63 are summed twice": of_weights(lambda w: np.where(INPUT // 16 == 3, 2 * w, w)),
    "the matrix is read column by column, as if it were transposed": of_weights(lambda w: w.reshape(w.shape[::-1]).T),
    f"{OTHER_ROWS} rows are shifted by 7: row 7 has the numbers of row 0": of_weights(lambda w: np.roll(w, 7, axis=0)),
    f"{OTHER_ROWS} rows 16 to 31 have the numbers of rows 0 to 15": of_weights(lambda w: np.concatenate([w[:16], w[:16], w[32:]])),
    f"{OTHER_ROWS} row 5 has the numbers of row 7": of_weights(lambda w: np.concatenate([w[:5], w[7:8], w[6:]])),
    f"{OTHER_ROWS} rows 0 and 1 are exchanged": of_weights(lambda w: w[[1, 0, *range(2, 120)]]),
    f"{OTHER_ROWS} the right numbers in other places: row 0 has the numbers of ": of_weights(lambda w: w[RNG.permutation(120)]),
    "at elements 0 to 39 of 120: the bias is missing": UP - np.where(OUTPUT < 40, BIAS, 0),
    "the elements of the bias are in the opposite order": UP - BIAS + BIAS[::-1],
    "at positions 1 to 16 of 17: the bias is missing": UP - BIAS * (ROW > 0),
    "inputs 0 to 36 are not summed": summed(np.where(INPUT < 37, 0.0, 1.0)),
    "inputs 0 to 2 of each 32 are summed twice": summed(np.where(INPUT % 32 < 3, 2.0, 1.0)),
    "input 5 is subtracted, inputs 91 to 95 are multiplied by 0.25": summed(np.where(INPUT == 5, -1.0, np.where(INPUT > 90, 0.25, 1.0))),
    "inputs 0 to 95 are multiplied by other numbers, 1.5 to 2": summed(np.linspace(1.5, 2, 96)),
    "at elements 10 to 49 of 120: input 7 is not summed": summed(np.where(INPUT == 7, 0.0, 1.0), slice(10, 50)),
    "at positions 4 to 11 of 17: input 7 is not summed": summed(np.where(INPUT == 7, 0.0, 1.0), rows=slice(4, 12)),
    "elements 100 to 119 of positions 6 to 16 are 0: never written": changed(UP, np.s_[6:, 100:], 0),
    "all wrong numbers are 0, at positions 5 to 16, elements 0 to 39, 100 to 119: never written": changed(
        changed(UP, np.s_[6:, 100:], 0), np.s_[5, :40], 0
    ),
}

# --- norms, activations, sums, the embedding ------------------------------------------------------------------------------------------


def normed(x, gain, eps=1e-5, root=None):
    """x * gain over the root mean square of `root`, or of x."""
    return x * gain / (np.mean((x if root is None else root) ** 2, axis=1, keepdims=True) + eps) ** 0.5


def silu(x, beta=1.0):
    return x / (1 + np.exp(-beta * x))


def in_codes(x, axis):
    step = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.rint(x / step) * step


def of_tokens(ids):
    return LLAMA.token_embd[np.asarray(ids)]


FFN_NORM = {
    f"epsilon is 0.123 instead of {EPS:.3g}": normed(X, G, eps=0.123),
    "it is done twice": normed(X, G * G, root=X * G, eps=0),
    "at elements 0 to 7 of 96: the norm's weight is missing": normed(X, np.where(WIDE < 8, 1, G)),
    "attn_o_out is read instead of ffn_inp": normed(P["attn_o_out"], G),
    "the variance instead of the mean square": normed(X, G, root=X - X.mean(axis=1, keepdims=True)),
}
SUM = {
    "a norm without a weight is applied to it": normed(P["l_out"], 1.0, EPS),
    "the residual, ffn_inp, is 1.234 times what is right": 1.234 * X + BRANCH,
    "at position 16 of 17: ffn_down is missing": X + BRANCH * (ROW < T - 1),
    "rows of the residual, ffn_inp, are shifted by one, the next one in the place": np.roll(X, -1, axis=0) + BRANCH,
}
RECIPROCAL = np.interp(1 + np.exp(-GATE), *np.array([1.2, 1.6, 2.2, 3]) ** [[1], [-1]])


def by_parts(x):
    """An activation that is 0 below a border and its input above another one."""
    return np.where(GATE < -0.5, 0, np.where(GATE > 0.7, GATE, x))


ACTIVATION = {
    "1 is added to ffn_up": silu(GATE) * (UP + 1),
    "ffn_gate is clipped beyond 0.8": silu(np.clip(GATE, -0.8, 0.8)) * UP,
    "at elements 100 to 119 of 120: gate * up instead of": np.where(OUTPUT < 100, silu(GATE), GATE) * UP,
    "GELU(gate) * up instead of": spec.gelu_tanh(GATE) * UP,
    "gate * sigmoid(1.702 gate) * up instead of": silu(GATE, 1.702) * UP,
    "ffn_gate is clipped above 0.6": silu(np.minimum(GATE, 0.6)) * UP,
    "elements of ffn_up are shifted by one, the one before": silu(GATE) * np.roll(UP, 1, axis=1),
    "the activation: it is another function of its input: {} instead of {} at -": GATE * np.tanh(np.logaddexp(0, GATE)) * UP,
    "the activation: it is 0 below -0.5{} and its input above 0.7{}, and right elsewhere": by_parts(silu(GATE)) * UP,
    "the activation: as a function of 1 + exp(-x), what it multiplies its input by is made of 5 straight lines": GATE * RECIPROCAL * UP,
    "the activation: it is x * (1 + z / (1 + |z|)) / 2 of z = 1 x instead of": GATE * (1 + GATE / (1 + np.abs(GATE))) / 2 * UP,
    "the activation: it is x * (1 + z / sqrt(1 + z^2)) / 2 of z = 1 x instead of": GATE * (1 + GATE / np.hypot(1, GATE)) / 2 * UP,
    "the activation: it is x * (1/2 + arctan(z) / pi) of z = 1 x instead of": GATE * (0.5 + np.arctan(GATE) / np.pi) * UP,
    "the activation: the number whose sigmoid multiplies its input is made of": GATE / (1 + np.exp(-np.maximum(GATE, -1))) * UP,
    "numbers are 0 where ffn_gate is below -0.5": np.where(GATE < -0.5, 0, silu(GATE)) * UP,
    "the activation: it is x * sigmoid(1 x + {} x^3) instead of x * sigmoid(1 x)": GATE / (1 + np.exp(-GATE - 0.1 * GATE**3)) * UP,
}
RESIDUAL = {
    "the result: rounded to e5m2": to_digits(X, 3),
    "the result: rounded to e4m3": to_digits(X, 4),
    "the result: rounded to int8 with a scale for each row": in_codes(X, 1),
    "the result: rounded to int8 with one scale": in_codes(X, None),
}
EMBEDDING = {
    "the embedding's table is read column by column, as if it were transposed": TABLE.reshape(96, -1)[:, IDS["llama"]].T,
    "positions 5 to 16 have the numbers of positions 4 to 15": of_tokens(np.r_[IDS["llama"][:5], IDS["llama"][4:-1]]),
    "rows of other tokens: position 3 has the row of token {} instead of {}, position 8 has the row of token 0 instead of ": changed(
        P["inp_embd"], [3, 8], of_tokens([IDS["llama"][3] ^ 64, 0])
    ),
}
STEPS = {
    "the root mean square: {} instead of {} at position 1, {} instead of {} at position 2; wrong at": NORM * (1 + 0.01 * ROW),
    "the norm's weight: {} instead of {} at element 0, {} instead of {} at element 1": NORM * (1 + 3e-5 * np.cos(WIDE)),
    "at positions 12 to 16 of 17: everything is 0.5 times what is right": NORM * np.where(ROW > 11, 0.5, 1),
    "the norm's weight: elements are shifted by 3: element 3 has the numbers of element 0": NORM / GAIN * np.roll(GAIN, 3),
    "the norm's weight: {} instead of {} at element 1": NORM * np.where(WIDE < 40, np.linspace(1, 2, 96), 1),
    "at elements 0 to 8 of each 32: everything is 3 times what is right": NORM * np.where(WIDE % 32 < 9, 3, 1),
}
MOVED = {
    "elements 40 to 59 have the numbers of elements 0 to 19, and elements 0 to 19 have the numbers of layer 1 ffn_norm": changed(
        changed(BRANCH, np.s_[:, 40:60], BRANCH[:, :20]), np.s_[:, :20], P["ffn_norm"][:, :20]
    )
}

RUNNING = {
    "elements 32 to 63: sums run on from position 5, and are not cleared between positions": changed(
        P["attn_o_out"], np.s_[5:, 32:64], P["attn_o_out"][5:, 32:64].cumsum(axis=0)
    )
}

# --- rotations and attention ----------------------------------------------------------------------------------------------------------

PAIRS, FREQUENCY = np.arange(C.head_dim // 2), LLAMA.rope_frequency.astype(np.float64)


def partly(width):
    x = P["Qcur"].reshape(T, C.heads, C.head_dim)
    return spec.rope(x, np.arange(T), C.rope_base, C.rope, width).reshape(T, -1)


def by_frequencies(frequency, positions=KEY, narrow=lambda x: x):
    """Queries turned by these frequencies at these positions, by cosines and sines that are rounded."""
    x = P["Qcur"].reshape(T, C.heads, C.head_dim)
    turns = np.exp(1j * np.multiply.outer(positions, frequency))
    cos, sin = (narrow(part)[:, None] for part in (turns.real, turns.imag))
    first, second = pairs(C.rope, C.rope_pairs, C.head_dim)
    y, a, b = x.copy(), x[..., first], x[..., second]
    y[..., first], y[..., second] = a * cos - b * sin, a * sin + b * cos
    return y.reshape(T, -1)


ROTATIONS = {
    "at heads 1 to 3 of 4: the rotation is missing": turned(QUERY * (np.arange(C.heads) == 0)),
    "at head 3 of 4: positions are too large by 1": turned(QUERY + (np.arange(C.heads) == 3)),
    "pair 4 of each head is not rotated": by_frequencies(FREQUENCY * (PAIRS != 4)),
    "frequencies are wrong: that of pair 3 is 1.3 times what it should be, for the first of them": by_frequencies(
        FREQUENCY * np.where(PAIRS == 3, 1.3, 1)
    ),
    "pairs 6 to 11 of each head are not rotated": partly(C.head_dim // 2),
    "positions restart at position 8": by_frequencies(FREQUENCY, np.r_[0:8, 0:9]),
    "positions from 8 on are too large by 1": by_frequencies(FREQUENCY, np.r_[0:8, 9:18]),
    "sines and cosines: rounded to bfloat16": by_frequencies(FREQUENCY, narrow=to_bfloat16),
    "tokens are rotated by other positions: positions 9 to 11 as position 8, positions 13 to 15 as position 12": turned(
        np.where((ROW > 8) & (ROW % 4 > 0), ROW // 4 * 4, ROW)
    ),
}

BEGIN = 10  # of a second chunk
RIGHT = softmax(scores_of())
EXP = np.where(QUERY >= KEY, np.exp(scores_of()), 0)
PAST = (QUERY >= BEGIN) & (KEY < BEGIN)
LATER = spec.rotate(heads("Kcur_rope"), np.full((T, 1), 3) * FREQUENCY, C.rope)  # keys, three positions later
FACTORS = 1 + np.random.default_rng(0).random((C.heads, T, 1))
SHARP = RIGHT ** np.array([1, 2, 1, 3])[:, None, None]
IN_TURN = np.arange(C.heads) % C.kv_heads
SCORE_SCALE = C.head_dim**-0.5
SLOTS = np.where(np.arange(T) > 11, 3, 0)[:, None]  # keys of zeros have scores of 0, take their part and give nothing


def by_matrix(matrix):
    """Attention's output, each head times a matrix."""
    return (P["kqv_out"].reshape(T, -1, 24) @ matrix).reshape(T, -1)


SQUARES, OF_23 = {n * n % 23 for n in range(1, 23)}, np.subtract.outer(np.arange(23), np.arange(23)) % 23
PALEY = np.ones((24, 24))  # a Hadamard matrix of an order that is no power of 2
PALEY[1:, 1:] = np.where(OF_23 == 0, 1, np.where(np.isin(OF_23, [*SQUARES]), 1, -1))
PALEY[1:, 0] = -1
SQUARE = np.random.default_rng(2).standard_normal((24, 24))
ATTENTION = {
    "each head is turned by a Hadamard matrix, and not turned back": by_matrix(PALEY / 24**0.5),
    "each head is turned by an orthogonal matrix, and not turned back": by_matrix(np.linalg.qr(SQUARE)[0]),
    "each head is multiplied by one matrix": by_matrix(SQUARE),
    "keys and values of layer 0 are read: the cache of another": by_weights(softmax(scores_of(k=heads("Kcur_rope", 0))), heads("Vcur", 0)),
    "values of layer 0 are read: the cache of another layer": by_weights(RIGHT, heads("Vcur", 0)),
    "the first 5 tokens are seen by all, as a prefix is": by_weights(softmax(scores_of(), (QUERY >= KEY) | (KEY < 5))),
    f"tokens from position {BEGIN} on see each other's future: a later chunk is not masked inside": by_weights(
        softmax(scores_of(), (QUERY >= KEY) | (QUERY >= BEGIN))
    ),
    "the mask comes after the softmax: weights of what is seen": by_weights(np.where(QUERY >= KEY, spec.softmax(scores_of()), 0)),
    "exp2 instead of exp": by_weights(softmax(np.log(2) * scores_of())),
    "attention's weights add up to 0.{} to 0.{} instead of 1, and are right but for that: the softmax's sum": by_weights(RIGHT / FACTORS),
    "attention's weights add up to 1{} instead of 1, and are right but for that": by_weights(RIGHT * FACTORS),
    "scores of heads 1, 3 of 4 are multiplied by 2, 3": by_weights(SHARP / SHARP.sum(axis=-1, keepdims=True)),
    "a part of {} is no sum of the values that tokens see: these, or their sums, are rounded": by_weights(
        RIGHT, np.rint(heads("Vcur") * 150) / 150
    ),
    f"keys before position {BEGIN} are rotated by 3 positions more than they should be, for tokens behind it": by_weights(
        softmax(np.where(PAST, scores_of(k=LATER), scores_of()))
    ),
    "heads of the queries, before they are shared, are interleaved": by_weights(softmax(scores_of(q=heads("Qcur_rope")[:, [0, 2, 1, 3]]))),
    "empty slots, whose keys and values are 0, are read by positions 12 to 16, up to 3 of them": by_weights(
        EXP / (EXP.sum(axis=2, keepdims=True) + SLOTS)
    ),
    f"at positions 9 to 16 of 17: the score scale is {0.7 * SCORE_SCALE:.6g} instead of {SCORE_SCALE:.6g}": np.where(
        ROW > 8, by_weights(softmax(0.7 * scores_of())), P["kqv_out"]
    ),
}

# --- one assertion for all ------------------------------------------------------------------------------------------------------------

TENSORS = {
    "ffn_up": PRODUCTS,
    "ffn_norm": FFN_NORM,
    "l_out": SUM,
    "ffn_out": ACTIVATION,
    "ffn_inp": RESIDUAL,
    "inp_embd": EMBEDDING,
    "attn_norm": STEPS,
    "ffn_down": MOVED,
    "attn_o_out": RUNNING,
    "Qcur_rope": ROTATIONS,
    "kqv_out": ATTENTION,
}


@pytest.mark.parametrize(("name", "says"), [(name, says) for name, rows in TENSORS.items() for says in rows])
def test_what_is_wrong_in_one_tensor_is_named(name, says):
    said, texts = judged("llama", name, TENSORS[name][says]), says.split("{}")
    assert said.startswith(texts[0])
    assert all(text in said for text in texts)


OTHER = LLAMA.layers[LAYER].attn_q
OF_QUERIES = NORM @ rows_of(OTHER.weights, np.arange(96)).T + OTHER.bias
READ = [
    ("Kcur", OF_QUERIES[:, :48], "the weights of attn_q are used in the place of rows 0 to 47"),
    ("Kcur", OF_QUERIES[:, 48:], "weights of other rows are used, of attn_q: rows 0 to 47 have the numbers of rows 48 to 95"),
    ("ffn_inp", np.roll(X, 5, axis=1), "elements are shifted by 5: element 5 has the numbers of element 0"),
    ("ffn_inp", X[:, RNG.permutation(96)], "the right numbers in other places: element 0 has the numbers of"),
    ("ffn_inp", X[:, np.where(WIDE < 90, WIDE, WIDE - 6)], "elements 90 to 95 have the numbers of elements 84 to 89"),
    ("ffn_inp", X[np.r_[0:5, 6, 5, 7:T]], "positions 5 and 6 are exchanged"),
    ("ffn_inp", X[np.r_[0:9, [8] * 8]], "positions 9 to 16 have the numbers of position 8"),
    ("kqv_out", by_weights(softmax(scores_of() + 3e-3 * RNG.standard_normal((C.heads, T, T)))), "attention's weights are right to 0.00"),
    ("ffn_up", changed(UP, np.s_[:, [3, 70]], UP[:, [3, 70]] + 1 + ROW**2), "only elements 3, 70 of each position: the rest of the tensor"),
    ("ffn_inp", changed(X, np.s_[4, ::3], RNG.standard_normal(32)), "only position 4: the other 16 are right"),
    ("ffn_up", changed(UP, np.s_[4:10, ::3], RNG.standard_normal((6, 40))), ""),
]


@pytest.mark.parametrize(("name", "wrong", "says"), READ, ids=[says or "nothing" for *_, says in READ])
def test_what_numbers_show_without_known_mistakes_is_read_off(name, wrong, says):
    said = read("llama", name, wrong)
    assert said.startswith(says)
    assert bool(said) == bool(says)


# --- in some rows, heads or numbers ---------------------------------------------------------------------------------------------------

WHOLE = {
    "Qcur_rope": (turned(-QUERY), "the rotation turns the other way"),
    "kqv_out": (
        by_weights(softmax(scores_of(k=heads("Kcur_rope")[:, IN_TURN])), heads("Vcur")[:, IN_TURN]),
        "key-value heads are dealt out in turn (h % G) instead of in groups",
    ),
    "ffn_out": (spec.ACTIVATIONS[C.activation](UP, GATE), "ffn_up and ffn_gate are exchanged"),
}
"""Mistakes of a whole tensor: the wrong tensor, and the cause in words."""


@settings(max_examples=8)  # each has the whole search behind it
@given(rows=st.sets(st.integers(2, T - 1), min_size=9, max_size=T - 4), name=st.sampled_from(sorted(WHOLE)))
def test_mistake_in_some_rows_is_named_with_them(rows, name):
    (wrong, words), rows = WHOLE[name], np.array(sorted(rows))
    said = judged("llama", name, changed(P[name], rows, wrong[rows]))
    assert said in (f"at {places_of(rows, T, 'position')}: {words}", f"at {runs('position', rows)}: {words}")


@settings(max_examples=8)
@given(head=st.integers(0, C.heads - 1), rows=st.sets(st.integers(2, T - 1), min_size=2, max_size=T - 4))
def test_mistake_in_a_head_of_some_rows_is_named_with_both(head, rows):
    rows = np.array(sorted(rows))
    mixed = changed(heads("Qcur_rope"), (rows, head), turned(-QUERY).reshape(T, C.heads, -1)[rows, head])
    said = judged("llama", "Qcur_rope", mixed.reshape(T, -1))
    assert said == f"at {places_of(rows, T, 'position')} and head {head} of {C.heads}: the rotation turns the other way"


def test_parts_of_each_head_written_over_others_are_named():
    mixed, half = heads("kqv_out"), C.head_dim // 2
    mixed[12:, :, :half], mixed[12:, :, half:] = mixed[12:, :, half:].copy(), 0
    said = judged("llama", "kqv_out", mixed.reshape(T, -1))
    moved = f"elements 0 to {half - 1} have the numbers of elements {half} to {2 * half - 1}"
    assert said.startswith(f"at positions 12 to {T - 1}: in each {2 * half} elements: {moved}, and elements {half} to ")
    assert "have the numbers of elements 12 to 23" in said
    assert said.endswith("are 0")


def test_largest_number_of_float16_is_named_where_numbers_are_clipped_to_it():
    scale, key = 65504.0 / np.sort(np.abs(P["ffn_out"]).ravel())[-50], Key("ffn_up", LAYER)
    points = POINTS["llama"] | {key: (POINTS["llama"][key] * scale).astype(np.float32)}
    clipped = with_tensor(points, Key("ffn_out", LAYER), np.clip(P["ffn_out"] * scale, -65504.0, 65504.0))
    found = {verdict.key: verdict for verdict in judge_trace(LLAMA, clipped, IDS["llama"], precision=FLOAT32).operations}
    assert found[Key("ffn_out", LAYER)].hypothesis == "the result is clipped beyond 65504"


def test_one_number_beyond_the_bound_is_no_cause_where_all_are_a_little_wrong():
    """As in float16, whose roundings hide all but the worst number of a small bias."""
    error = np.full(X.shape, 1e-3)
    error[3, 5] = 2e-3
    wrong, alone = (
        Wrong(next(operations(LLAMA, EXACT)), [], X, X + e, error > 1.5e-3, 1e-7, {}) for e in (error, np.where(error > 1.5e-3, error, 0))
    )
    assert elements.one_number(wrong) is elements.few_places(wrong) is None
    assert elements.one_number(alone) == "one number alone is wrong: position 3, element 5"


def test_of_one_position_alone_nothing_is_said_about_others():
    """All of it is wrong, and none is left that is right."""
    x = np.random.default_rng(0).standard_normal((1, 96))
    assert elements.few_places(Wrong(next(operations(LLAMA, EXACT)), [], x, x + 1, x < np.inf, 1e-7, {})) is None


# --- what nothing explains ------------------------------------------------------------------------------------------------------------


def test_random_numbers_in_some_rows_have_no_cause():
    out, noise = P["kqv_out"], np.random.default_rng(0).standard_normal((3, P["kqv_out"].shape[1]))
    said = judged("llama", "kqv_out", changed(out, [0, 5, 9], noise * np.abs(out).mean()))
    assert not said.startswith("at "), said


def test_what_follows_from_a_tensor_is_not_where_its_numbers_come_from():
    """Behind a branch that is far too large, the sums of layers have its numbers."""
    huge, sums = 1e7 * np.random.default_rng(0).standard_normal(BRANCH.shape), (Key("l_out", LAYER), Key("ffn_inp", LAYER + 1))
    points = POINTS["llama"] | {key: (POINTS["llama"][key] + huge).astype(np.float32) for key in sums}
    assert read_off(LLAMA, IDS["llama"], points, Key("ffn_down", LAYER), huge) == ""


def test_numbers_that_have_nothing_to_do_with_the_right_ones_have_no_factor():
    assert "times" not in judged("llama", "result_output", 1e-3 * np.random.default_rng(0).standard_normal(P["result_output"].shape))


def test_noise_is_no_step():
    noise = np.random.default_rng(0).standard_normal((T, 96))
    assert judged("llama", "attn_norm", NORM * (1 + 0.01 * noise)) == judged("llama", "ffn_down", BRANCH + 0.01 * noise) == ""


def test_a_sigmoid_taken_from_tanh_is_honest():
    """As compilers do: 1 + tanh(x / 2) is as wrong as 1 is, where the sigmoid is small, too."""
    gate, up = np.float32(GATE) * np.float32(3), np.float32(UP)
    theirs = np.float32(0.5) * gate * (1 + np.tanh(gate / 2)) * up
    operation = next(o for o in operations(LLAMA, EXACT) if o.key == Key("ffn_out", LAYER))
    assert within(operation.evaluate(gate.astype(np.float64), up.astype(np.float64)), theirs.astype(np.float64))[0] is Verdict.ROUNDING


def test_nothing_is_said_of_what_nothing_explains():
    rng = np.random.default_rng(3)
    for key, value in POINTS["llama"].items():
        if key.layer == LAYER or key.name == "result_output":
            said = read_off(LLAMA, IDS["llama"], POINTS["llama"], key, value + rng.standard_normal(value.shape))
            assert not said or "no sums of their values" in said, key


@pytest.mark.parametrize(("factor", "said"), [(1.0000003, "1.0000003"), (0.99999951, "0.9999995"), (1.25, "1.25")])
def test_a_factor_is_never_said_to_be_1(factor, said):
    wrong = np.float32(P["ffn_norm"]) * np.float64(factor)
    report = judge_trace(LLAMA, with_tensor(POINTS["llama"], Key("ffn_norm", LAYER), wrong), IDS["llama"], precision=FLOAT32)
    assert report.first_wrong.hypothesis == f"everything is {said} times what it should be"


@pytest.mark.parametrize(("family", "name"), [("llama", "ffn_norm"), ("llama", "Qcur"), ("llama", "ffn_up"), ("bitnet", "attn_sub_norm")])
def test_no_step_is_fitted_to_one_wrong_position(family, name):
    """Any row is right with some weight of a norm, or some bias: one equation for each unknown."""
    right = POINTS[family][Key(name, LAYER)].astype(np.float64)
    wrong = changed(right, 3, right[3] * (1 + np.random.default_rng(0).uniform(0.1, 1, right.shape[1])))
    assert read(family, name, wrong) == f"only position 3: the other {T - 1} are right"


BLOCKS = random_model(
    5, family="llama", weights="Q4_K", table="Q4_K", tied=True, n_layers=2, vocab=300, width=256, heads=4, kv_heads=2, head_dim=64, ffn=256
)


@pytest.mark.usual(2)
@pytest.mark.parametrize("tokens", [1, 3, 6, T])
def test_nothing_is_fitted_to_few_tokens(tokens):
    """Fewer tokens than unknowns: any rows, blocks' scales or low rank would fit."""
    rng = np.random.default_rng(9)
    for model, name in ((LLAMA, "ffn_up"), (MODEL, "ffn_up"), (BLOCKS, "ffn_up"), (LLAMA, "result_output")):
        points = {key: x[:tokens] for key, x in recorded(model, IDS["llama"]).items()}
        key = key_of(name)
        said = read_off(model, IDS["llama"][:tokens], points, key, points[key] + rng.standard_normal(points[key].shape))
        assert not said or said.startswith("only "), said


# --- other models ---------------------------------------------------------------------------------------------------------------------


def test_a_norm_over_all_heads_is_told():
    x, gain = layer_points("qwen3")["Qcur"], QWEN3.layers[LAYER].attn_q_norm.astype(np.float64)
    whole = normed(x, np.tile(gain, x.shape[1] // gain.size), QWEN3.config.eps)
    assert judged("qwen3", "Qcur_normed", whole) == "the mean square of all heads instead of the mean square"


QUERIES, CODED = MODEL.layers[LAYER].attn_q, layer_points("bitnet")["attn_norm"]


def of_codes(codes, scale):
    """The ternary model's queries of these codes."""
    return spec.ternary_matmul(codes, scale, packing.unpack(QUERIES.weights).astype(np.float64), float(QUERIES.weights.scale))


def test_activations_in_steps_of_their_own_are_recognised():
    scale = 128 / np.abs(CODED).max(axis=1, keepdims=True)
    codes = np.where(np.rint(CODED * scale) == 128, -128, np.rint(CODED * scale))
    said = "activations are scaled to 128 steps instead of 127, and +128 wraps around to -128"
    assert judged("bitnet", "Qcur", of_codes(codes, scale)) == said


def test_the_scale_of_another_token_is_named():
    scales = spec.quantize(CODED)[1]
    least, source = np.argsort(scales.ravel())[:2]  # the first would be that of the whole tensor
    rows = np.array([t for t in range(len(CODED)) if t not in (least, source)])[:8]
    wrong = changed(layer_points("bitnet")["Qcur"], rows, of_codes(np.rint(CODED[rows] * scales[source]), np.tile(scales[source], (8, 1))))
    said = f"activations are quantised by the scale of another token: {runs('position', rows)} by that of position {source}"
    assert judged("bitnet", "Qcur", wrong) == said


@given(st.sampled_from(["ffn_up", "Qcur_rope", "kqv_out", "ffn_norm"]), st.integers(0, 12))
def test_readings_end_when_the_time_is_over(name, count):
    """They ask before each comparison, so that none goes on for long, whatever it tries."""
    operation, asked = next(o for o in operations(LLAMA, EXACT) if o.key == key_of(name)), []
    tensors = {k: x.astype(np.float64) for k, x in POINTS["llama"].items()} | {TOKENS_KEY: IDS["llama"]}
    inputs = [tensors[k] for k in operation.inputs]
    value, stop = operation.evaluate(*inputs).value, lambda: asked.append(1) or len(asked) > count
    theirs = np.random.default_rng(0).standard_normal(value.shape)
    assert cause_of(Wrong(operation, inputs, value, theirs, theirs < np.inf, 0.0, tensors, stop)) is None
    assert len(asked) == count + 1


def test_a_known_mistake_is_not_given_up_for_a_fitted_factor():
    """The roundings of a norm's root are a factor of each position, so a fitted factor leaves even less than the mistake does."""
    x = POINTS["bitnet"][Key("l_out", LAYER - 1)].astype(np.float64)
    wrong = spec.rms_norm(x, MODEL.layers[LAYER].attn_norm, 1e-3) * (1 + 2e-7 * np.random.default_rng(0).standard_normal((T, 1)))
    assert judged("bitnet", "attn_norm", wrong) == f"epsilon is 0.001 instead of {MODEL.config.eps:.3g}"


def test_an_exact_engine_declared_as_bitnet_cpp_is_told_so():
    report = judge_trace(MODEL, trace(POINTS["bitnet"]), TOKENS, BITNET_CPP, precision=FLOAT32)
    assert report.first_wrong.hypothesis == "float16 roundings are not there: declare the dialect exact"


def test_a_tensor_of_a_buffer_that_was_written_to_again_is_recognised():
    dump = trace(POINTS["llama"] | {Key("l_out", 0): POINTS["llama"][Key("l_out", 2)]})
    hypothesis = judge_trace(LLAMA, dump, IDS["llama"], precision=FLOAT32).first_wrong.hypothesis
    assert hypothesis == "it has the numbers of layer 2 l_out: its buffer was written to again before it was dumped"


# --- values of attention that depend on each other, or are not of this sequence -------------------------------------------------------


def attending(attend, n, ids=TOKENS):
    """What is said of an engine of MODEL whose attention in layer n is another."""
    dump = trace(mutations.Engine(MODEL, ids, {"kqv_out": attend}, (n,)).run())
    first = judge_trace(MODEL, dump, ids, precision=FLOAT32).first_wrong
    assert first.key == Key("kqv_out", n)
    return first.hypothesis


@pytest.mark.parametrize(
    ("how", "factor", "says"),
    [
        ({"scale": 0.1}, 1, "the score scale is 0.1 instead of 0.125"),
        ({"allowed": lambda i, j: (j <= i) & ((i < 4) | (j >= 4))}, 1, "tokens from position 4 on do not see those before"),
        ({}, 1.5, "1.5 times"),
    ],
)
def test_repeated_tokens_are_told_together(how, factor, says):
    """Equal tokens have equal values in the first layer: only the sum of their weights can be told."""
    for ids in (np.array([5, 9, 11, 5, 7, 9, 8, 5, 6]), *[np.full(9, 7)] * (factor != 1)):
        assert says in attending(lambda e, n: e.attend(n, **how) * np.float32(factor), 0, ids)


def test_values_of_another_sequence_are_counted():
    other = mutations.Engine(MODEL, np.arange(100, 105)).run()
    said = attending(lambda e, n: e.attend(n, extra=(other[Key("Kcur_rope", n)], other[Key("Vcur", n)])), 1)
    assert said.split(",")[1] == " 5 of them: a cache slot that was not cleared"


def test_values_of_another_sequence_are_told_where_heads_are_narrow():
    """Fewer numbers than tokens: how many values they are cannot be told."""
    model, ids, key = random_model(2, n_layers=2, head_dim=8), np.arange(17), Key("kqv_out", LAYER)
    points = recorded(model, ids)
    wrong = points[key] + np.random.default_rng(0).standard_normal((17, 1)) * np.sin(np.arange(points[key].shape[1]))
    assert read_off(model, ids, points, key, wrong).startswith("outputs of the first 6 positions are no sums of their values")


def test_token_that_is_read_is_told_though_values_depend_on_each_other():
    """Sums of values alone do not tell it: the scores do."""
    key = Key("Vcur", LAYER)
    values = changed(POINTS["llama"][key], 3, POINTS["llama"][key][2] * np.float32(1 + 5e-5))
    wrong = by_weights(
        softmax(scores_of(), (QUERY >= KEY) | ((QUERY == 5) & (KEY == 9))), values.astype(np.float64).reshape(T, -1, C.head_dim)
    )
    said = read_off(LLAMA, IDS["llama"], POINTS["llama"] | {key: values}, Key("kqv_out", LAYER), wrong)
    assert said == "position 9 is read by position 5, which must not see it: the mask"


@pytest.mark.usual(2)
@pytest.mark.parametrize("name", ["Qcur", "Kcur", "Vcur", "ffn_gate", "ffn_up"])
def test_a_mistake_in_what_one_operation_alone_reads_is_named(name):
    """As of a kernel that norms its input by itself: the norm in the dump is right."""
    norm, x = ("attn_norm", POINTS["llama"][Key("l_out", 0)].astype(np.float64)) if "cur" in name else ("ffn_norm", X)
    linear = linear_of(LLAMA, key_of(name))
    read = normed(x, getattr(LLAMA.layers[LAYER], norm), root=x - x.mean(axis=1, keepdims=True))
    wrong = read @ rows_of(linear.weights, np.arange(linear.shape[0])).T + linear.bias
    said = f"it reads other numbers than the dump has: at {norm}: the variance instead of the mean square"
    assert judged("llama", name, wrong) == said


# --- experts --------------------------------------------------------------------------------------------------------------------------

MIXED, MIXED_IDS, MIXED_POINTS = family_dump("qwen3moe")
CHOSEN = MIXED_POINTS[Key(TOP_EXPERTS, 1)]
FIRST, EXPERTS = CHOSEN[0, 0], len(MIXED.layers[1].experts)


def mixture(name, change, points=MIXED_POINTS):
    """What is said of a tensor of experts after a change of its slots [T, k, N]."""
    wrong = points[Key(name, 1)].reshape(*CHOSEN.shape, -1).astype(np.float64)
    change(wrong)
    dump = with_tensor(points, Key(name, 1), wrong.reshape(len(MIXED_IDS), -1))
    return judge_trace(MIXED, dump, MIXED_IDS).first_wrong.hypothesis


def test_the_expert_whose_products_are_wrong_is_named():
    def scaled(wrong):
        wrong[CHOSEN == FIRST] *= np.random.default_rng(0).uniform(0.5, 2, wrong[CHOSEN == FIRST].shape)

    assert mixture("ffn_moe_up", scaled) == f"numbers of expert {FIRST} alone are wrong, wherever a token takes it"
    without_choice = {k: x for k, x in MIXED_POINTS.items() if k.name != TOP_EXPERTS}
    assert mixture("ffn_moe_swiglu", scaled, without_choice) is None


@pytest.mark.parametrize(
    ("slots", "says"),
    [
        (
            [(t, 0, (CHOSEN[t, 0] + t + 1) % EXPERTS, t) for t in range(4)],
            f"0 has that of expert {(FIRST + 1) % EXPERTS} instead of {FIRST}, ",
        ),
        ([(t, 1, CHOSEN[t, 1], o) for t, o in ((1, 5), (2, 0), (3, 7))], "1 has that of position 5, position 2 has that of position 0, "),
    ],
)
def test_products_of_other_experts_and_of_other_tokens_are_named(slots, says):
    """slots: the token and the place of each, and the expert and the token whose product stands there."""
    every = [MIXED_POINTS[Key("ffn_norm", 1)].astype(np.float64) @ expert.ffn_up.weights.T for expert in MIXED.layers[1].experts]

    def exchanged(wrong):
        for t, place, expert, other in slots:
            wrong[t, place] = every[expert][other]

    assert mixture("ffn_moe_up", exchanged).startswith(f"products of others: position {says}")


@pytest.mark.usual(2)
@pytest.mark.parametrize("other", range(EXPERTS))
def test_weights_of_the_other_matrix_of_any_expert_are_named(other):
    products = MIXED_POINTS[Key("ffn_norm", 1)].astype(np.float64) @ MIXED.layers[1].experts[other].ffn_gate.weights.T

    def read_instead(wrong):
        for t, place in np.argwhere(CHOSEN == FIRST):
            wrong[t, place] = products[t]

    said = f"weights of other experts are used: expert {FIRST} has those of ffn_gate of expert {other}"
    assert mixture("ffn_moe_up", read_instead) == said


@pytest.mark.parametrize(
    ("expert", "token", "begin", "says"),
    [
        (1, 0, 0, "those of the next expert"),
        (-1, 1, 0, "those of the expert before, other positions"),
        (2, 1, 0, "those of other experts, other positions"),
        (0, 0, 8, "those of elements 8 to 15"),
        (None, 0, 0, "those of the next expert, or 0"),
    ],
)
def test_runs_of_products_that_are_other_ones_are_named(expert, token, begin, says):
    """The other expert, token and first element whose products stand in elements 0 to 7; of no other expert 0 in some slots."""
    every = [MIXED_POINTS[Key("ffn_norm", 1)].astype(np.float64) @ one.ffn_up.weights.T for one in MIXED.layers[1].experts]

    def moved(wrong):
        for t, place in np.ndindex(CHOSEN.shape):
            source = every[(int(CHOSEN[t, place]) + (1 if expert is None else expert)) % EXPERTS][(t + token) % len(MIXED_IDS)]
            wrong[t, place, :8] = 0 if expert is None and t % 2 else source[begin : begin + 8]
        if expert in (1, -1, None):  # the last one has no next
            last = (0 if expert == -1 else EXPERTS - 1) == CHOSEN
            wrong[last] = MIXED_POINTS[Key("ffn_moe_up", 1)].reshape(*CHOSEN.shape, -1)[last]

    assert mixture("ffn_moe_up", moved) == f"elements 0 to 7 of each expert's products are {says}"


def test_two_numbers_are_written_with_digits_that_differ():
    assert instead(-0.26891234, -0.26894142, 4) == "-0.26891 instead of -0.26894"
    assert instead(1.5, 2.0) == "1.5 instead of 2"


@pytest.mark.usual("1-0.0001")
@pytest.mark.parametrize("size", [1e-6, 1e-4])
@pytest.mark.parametrize("seed", [1, 2])
def test_values_that_are_right_within_a_thousandth_are_not_said_to_be_others(seed, size):
    """Where first tokens are equal, the values that explain attention's numbers differ from the right ones by roundings alone."""
    model = random_model(seed, family="qwen3", weights="float32", n_layers=1, width=64, heads=1, kv_heads=1, head_dim=32, ffn=64, vocab=64)
    ids = np.array([5, 5, 5, 5, 9, 2, 7, 1, 3])
    points = recorded(model, ids)
    q, k, v = (points[Key(name, 0)].reshape(len(ids), -1).astype(np.float64) for name in ("Qcur_rope", "Kcur_rope", "Vcur"))
    weights = softmax(q @ k.T / np.sqrt(32), np.tri(len(ids)) > 0)
    v[:3] += size * np.abs(v).max() * np.random.default_rng(seed).standard_normal(v[:3].shape)
    assert "are others" not in read_off(model, ids, points, Key("kqv_out", 0), weights @ v)


def test_a_rotation_by_position_0_is_no_buffer_that_was_written_to_again():
    """It leaves the numbers of queries as they are, so both tensors are equal in a prompt of one token."""
    model = random_model(0, family="qwen2", weights="float32", n_layers=1, width=64, heads=2, kv_heads=2, head_dim=32, ffn=64, vocab=64)
    ids = np.array([5])
    points = dict(recorded(model, ids))
    points[Key("Qcur", 0)] = points[Key("Qcur", 0)] + model.layers[0].attn_q.bias
    points[Key("Qcur_rope", 0)] = points[Key("Qcur", 0)].reshape(points[Key("Qcur_rope", 0)].shape)
    report = check(model, ids, only(points, "attn_norm", "Qcur", "Qcur_rope"))
    assert report.reason.startswith("WRONG at layer 0 Qcur: the bias is applied twice")
