"""What wrong rotations and attention say by themselves, head by head and layer by layer."""

import numpy as np
import pytest
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

from bitnet_np import spec
from bitnet_np.judge.equivalence import pair_slices
from bitnet_np.judge.roundings import to_bfloat16
from bitnet_np.traces.points import Key


@pytest.mark.parametrize(
    ("position", "says"),
    [
        (QUERY * (np.arange(C.heads) == 0), "at heads 1 to 3 of 4: the rotation is missing"),
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
        (lambda: by_frequencies(FREQUENCY * (PAIRS != 4)), "pair 4 of each head is not rotated"),
        (
            lambda: by_frequencies(FREQUENCY * np.where(PAIRS == 3, 1.3, 1)),
            "frequencies are wrong: that of pair 3 is 1.3 times what it should be, for the first of them",
        ),
        (lambda: partly(HALF), "pairs 6 to 11 of each head are not rotated"),
        (lambda: by_frequencies(FREQUENCY, np.r_[0:8, 0:9]), "positions restart at position 8"),
        (lambda: by_frequencies(FREQUENCY, np.r_[0:8, 9:18]), "positions from 8 on are too large by 1"),
        (lambda: by_frequencies(FREQUENCY, narrow=to_bfloat16), "sines and cosines: rounded to bfloat16"),
    ],
)
def test_rotations_by_another_rule_are_named(wrong, says):
    assert judged("llama", "Qcur_rope", wrong()).startswith(says)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ((0, 0), "keys and values of layer 0 are read: the cache of another layer"),
        ((LAYER, 0), "values of layer 0 are read: the cache of another layer"),
    ],
)
def test_caches_of_other_layers_are_named(layers, says):
    keys, values = layers
    assert judged("llama", "kqv_out", by_weights(softmax(scores_of(k=heads("Kcur_rope", keys))), heads("Vcur", values))) == says


# --- rules ----------------------------------------------------------------------------------------------------------------------------

BEGIN = 10  # of a second chunk
PAST = (QUERY >= BEGIN) & (KEY < BEGIN)


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
        (lambda: by_weights(softmax(scores_of()), np.rint(heads("Vcur") * 150) / 150), "are rounded: a part of"),
        (
            lambda: by_weights(softmax(np.where(PAST, scores_of(k=later_by(3)), scores_of()))),
            f"keys before position {BEGIN} are rotated by 3 positions more than they should be, for tokens behind it",
        ),
        (
            lambda: by_weights(softmax(scores_of(q=heads("Qcur_rope")[:, [0, 2, 1, 3]]))),
            "heads of the queries, before they are shared, are interleaved",
        ),
    ],
)
def test_attention_by_another_rule_is_named(wrong, says):
    assert says in judged("llama", "kqv_out", wrong())


def test_coarse_weights_are_named():
    noise = np.random.default_rng(0).standard_normal((C.heads, T, T))
    assert read("llama", "kqv_out", by_weights(softmax(scores_of() + 3e-3 * noise))).startswith("attention's weights are right to 0.00")


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
