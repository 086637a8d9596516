"""What wrong rotations and attention say by themselves, head by head and layer by layer."""

import numpy as np
import pytest
from dumps import MODEL, recorded, with_tensor, without_codes
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
    turned,
)

from bitnet_np import EXACT, spec
from bitnet_np.judge import graph
from bitnet_np.judge.operations import pair_slices
from bitnet_np.judge.precision import FLOAT32
from bitnet_np.judge.roundings import to_bfloat16, to_digits, to_q8_0
from bitnet_np.judge.trace import judge_trace
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key


@pytest.mark.parametrize(
    ("position", "says"),
    [
        (QUERY * (np.arange(C.heads) == 0), "at heads 1 to 3 of 4: the rotation is missing"),
        (QUERY * (np.arange(C.heads) != 2), "at head 2 of 4: the rotation is missing"),
        (QUERY + (np.arange(C.heads) == 3), "at head 3 of 4: positions are too large by 1"),
    ],
)
def test_heads_that_are_rotated_otherwise_are_named(position, says):
    assert judged("llama", "Qcur_rope", turned(position)) == says


HALF = C.head_dim // 2
TIMES = np.arange(T)


def partly(width):
    x = layer_points("llama")["Qcur"].reshape(T, C.heads, C.head_dim)
    return spec.rope(x, np.arange(T), C.rope_base, C.rope, width).reshape(T, -1)


def by_frequencies(frequency, positions=TIMES, narrow=lambda x: x):
    """Queries turned by these frequencies at these positions, by cosines and sines that are rounded."""
    x = layer_points("llama")["Qcur"].reshape(T, C.heads, C.head_dim)
    turns = np.exp(1j * np.multiply.outer(positions, frequency))
    cos, sin = (narrow(part)[:, None] for part in (turns.real, turns.imag))
    first, second = pair_slices(C)
    y, a, b = x.copy(), x[..., first], x[..., second]
    y[..., first], y[..., second] = a * cos - b * sin, a * sin + b * cos
    return y.reshape(T, -1)


PAIRS = np.arange(HALF)
FREQUENCY = LLAMA.rope_frequency.astype(np.float64)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: by_frequencies(to_digits(FREQUENCY, 8)), "the divided frequencies: rounded to bfloat16"),
        (lambda: by_frequencies(FREQUENCY * (PAIRS != 4)), "pair 4 of each head is not rotated"),
        (lambda: by_frequencies(np.pi / 180 * FREQUENCY), "the angles are 0.0174533 times what is right"),
        (
            lambda: by_frequencies(FREQUENCY * np.where(PAIRS == 3, 1.3, 1)),
            "frequencies are wrong: that of pair 3 is 1.3 times what it should be, for the first of them",
        ),
        (lambda: partly(HALF), "pairs 6 to 11 of each head are not rotated"),
        (lambda: by_frequencies(FREQUENCY, np.r_[0:8, 0:9]), "positions restart at position 8"),
        (lambda: by_frequencies(FREQUENCY, np.r_[0:8, 9:18]), "positions from 8 on are too large by 1"),
        (lambda: by_frequencies(FREQUENCY * (C.rope_base / 123400) ** (PAIRS / HALF)), "the frequency base is 123400 instead of"),
        (lambda: by_frequencies(FREQUENCY, narrow=to_bfloat16), "sines and cosines: rounded to bfloat16"),
    ],
)
def test_rotations_by_another_rule_are_named(wrong, says):
    assert judged("llama", "Qcur_rope", wrong()).startswith(says)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ((0, 0), "keys and values of layer 0 are read: the cache of another layer"),
        ((2, LAYER), "keys of layer 2 are read: the cache of another layer"),
        ((LAYER, 0), "values of layer 0 are read: the cache of another layer"),
    ],
)
def test_caches_of_other_layers_are_named(layers, says):
    keys, values = layers
    assert judged("llama", "kqv_out", by_weights(softmax(scores_of(k=heads("Kcur_rope", keys))), heads("Vcur", values))) == says


# --- rules ----------------------------------------------------------------------------------------------------------------------------

BEGIN = 10  # of a second chunk
PAST = (QUERY >= BEGIN) & (KEY < BEGIN)


def powers():
    scores = np.where(QUERY >= KEY, scores_of(), -np.inf)
    return np.exp(scores - scores.max(axis=-1, keepdims=True))


def times(factor):
    """The right weights times factors of each query in each head, from 1 to 2 or their inverses."""
    return by_weights(softmax(scores_of()) * (1 + np.random.default_rng(0).random((C.heads, T, 1))) ** factor)


def sharpened():
    p = softmax(scores_of()) ** np.array([1, 2, 1, 3])[:, None, None]
    return by_weights(p / p.sum(axis=-1, keepdims=True))


def later_by(positions):
    return spec.rotate(heads("Kcur_rope"), positions * LLAMA.rope_frequency[None].astype(np.float64), C.rope)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) | (KEY < 5))), "the first 5 tokens are seen by all, as a prefix is"),
        (
            lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) | (QUERY >= BEGIN))),
            f"tokens from position {BEGIN} on see each other's future: a later chunk is not masked inside",
        ),
        (lambda: by_weights(softmax(np.log(2) * scores_of())), "exp2 instead of exp"),
        (lambda: times(-1), "instead of 1: empty slots or a sink"),
        (lambda: times(1), "instead of 1: they are not divided"),
        (sharpened, "sums of the right values with wrong weights: scores or softmax are wrong"),
        (lambda: by_weights(to_bfloat16(softmax(scores_of()))), "the probabilities: rounded to bfloat16"),
        (
            lambda: by_weights(softmax(scores_of(k=to_bfloat16(heads("Kcur_rope")))), to_bfloat16(heads("Vcur"))),
            "keys and values are rounded, as a cache of bfloat16 does",
        ),
        (lambda: by_weights(softmax(scores_of()), np.rint(heads("Vcur") * 150) / 150), "are rounded: a part of"),
        (lambda: by_weights(to_digits(softmax(scores_of()), 4)), "the probabilities: rounded to e4m3"),
        (
            lambda: by_weights(softmax(np.where(PAST, scores_of(k=later_by(3)), scores_of()))),
            f"keys before position {BEGIN} are rotated by 3 positions more than they should be, for tokens behind it",
        ),
        (
            lambda: by_weights(softmax(scores_of(q=heads("Qcur_rope")[:, [0, 2, 1, 3]]))),
            "heads of the queries, before they are shared, are interleaved",
        ),
        (lambda: by_weights(powers()), "the softmax's sum is not divided out"),
        (
            lambda: by_weights(softmax(scores_of()), np.roll(heads("Vcur"), 1, axis=0)),
            "rows of Vcur are shifted by one, the one before in the place of each",
        ),
    ],
)
def test_attention_by_another_rule_is_named(wrong, says):
    assert says in judged("llama", "kqv_out", wrong())


def test_coarse_weights_are_named():
    noise = np.random.default_rng(0).standard_normal((C.heads, T, T))
    assert read("llama", "kqv_out", by_weights(softmax(scores_of() + 3e-3 * noise))).startswith("attention's weights are right to 0.00")


def test_keys_before_their_norm_are_named():
    model = random_model(8, family="qwen3", rope="none", n_layers=2, vocab=90, width=96, heads=4, kv_heads=2, head_dim=24, ffn=120)
    points = without_codes(recorded(model, IDS["llama"]))
    operation = next(o for o in graph.operations(model, EXACT) if o.key == Key("kqv_out", LAYER))
    q, k, v = (points[Key(name, LAYER)].astype(np.float64) for name in (operation.inputs[0].name, "Kcur", "Vcur"))
    wrong = operation.evaluate(q, k, v).value
    report = judge_trace(model, with_tensor(points, operation.key, wrong), IDS["llama"], precision=FLOAT32)
    assert (report.first_wrong.key, report.first_wrong.hypothesis) == (operation.key, "Kcur is read instead of Kcur_normed")


def test_token_that_is_read_is_told_though_values_depend_on_each_other():
    """Sums of values alone do not tell it: the scores do."""
    key = Key("Vcur", LAYER)
    values = POINTS["llama"][key].copy()
    values[3] = values[2] * np.float32(1 + 5e-5)
    points = POINTS["llama"] | {key: values}
    v = values.astype(np.float64).reshape(T, -1, C.head_dim)
    wrong = by_weights(softmax(scores_of(), (QUERY >= KEY) | ((QUERY == 5) & (KEY == 9))), v)
    said = read_off(LLAMA, IDS["llama"], points, Key("kqv_out", LAYER), wrong)
    assert said == "position 9 is read by position 5, which must not see it: the mask"


def test_values_of_a_cache_in_blocks_are_named():
    c, values = MODEL.config, layer_points("bitnet")["Vcur"]
    q, k = (layer_points("bitnet")[name].reshape(T, -1, c.head_dim) for name in ("Qcur_rope", "Kcur_rope"))
    wrong = spec.attend(q, k, to_q8_0(values).reshape(T, -1, c.head_dim), spec.causal_mask(T, T))
    assert judged("bitnet", "kqv_out", wrong.reshape(T, -1)) == "Vcur: rounded to Q8_0"
