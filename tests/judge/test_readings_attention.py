"""What wrong rotations and attention say by themselves, head by head and layer by layer."""

import numpy as np
import pytest
from dumps import MODEL, recorded, with_tensor, without_codes
from wrong_tensors import IDS, LAYER, LLAMA, POINTS, T, judged, layer_points, read, read_off

from bitnet_np import EXACT, spec
from bitnet_np.judge import graph
from bitnet_np.judge.operations import pair_slices
from bitnet_np.judge.precision import FLOAT32
from bitnet_np.judge.roundings import to_digits, to_q8_0
from bitnet_np.judge.trace import judge_trace
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

C = LLAMA.config


def heads(name, layer=LAYER):
    return POINTS["llama"][Key(name, layer)].astype(np.float64).reshape(T, -1, C.head_dim)


def turned(position):
    """Queries of the layer, each head rotated by its positions, [T, H]."""
    x = layer_points("llama")["Qcur"].reshape(T, C.heads, C.head_dim)
    frequency = LLAMA.rope_frequency.astype(np.float64)
    rotated = [spec.rotate(x[:, [h]], np.multiply.outer(position[:, h], frequency), C.rope) for h in range(C.heads)]
    return np.concatenate(rotated, axis=1).reshape(T, -1)


def attended(k="Kcur_rope", v="Vcur", layers=(LAYER, LAYER), cap=None):
    """Attention of the layer with keys and values of these layers."""
    mask = spec.causal_mask(T, T)
    return spec.attend(heads("Qcur_rope"), heads(k, layers[0]), heads(v, layers[1]), mask, None, cap).reshape(T, -1)


POSITION = np.broadcast_to(np.arange(T)[:, None], (T, C.heads))


@pytest.mark.parametrize(
    ("position", "says"),
    [
        (POSITION * (np.arange(C.heads) == 0), "at heads 1 to 3 of 4: the rotation is missing"),
        (POSITION * (np.arange(C.heads) != 2), "at head 2 of 4: the rotation is missing"),
        (np.broadcast_to(np.arange(C.heads), (T, C.heads)), "every token is rotated by the number of the head instead of its position"),
        (POSITION + (np.arange(C.heads) == 3), "at head 3 of 4: positions are too large by one"),
    ],
)
def test_heads_that_are_rotated_otherwise_are_named(position, says):
    assert judged("llama", "Qcur_rope", turned(position)) == says


ANGLE = np.multiply.outer(np.arange(T), LLAMA.rope_frequency.astype(np.float64))[:, None]
HALF = C.head_dim // 2


def rotated(one, other):
    """Queries whose pairs (a, b) are one(a, b, cos, sin) and other(...)."""
    x = layer_points("llama")["Qcur"].reshape(T, C.heads, C.head_dim)
    first, second = pair_slices(C)
    y, arguments = x.copy(), (x[..., first], x[..., second], np.cos(ANGLE), np.sin(ANGLE))
    y[..., first], y[..., second] = one(*arguments), other(*arguments)
    return y.reshape(T, -1)


def right_first(a, b, cos, sin):
    return a * cos - b * sin


def right_second(a, b, cos, sin):
    return a * sin + b * cos


def partly(width):
    x = layer_points("llama")["Qcur"].reshape(T, C.heads, C.head_dim)
    return spec.rope(x, np.arange(T), C.rope_base, C.rope, width).reshape(T, -1)


def by_frequencies(frequency, begin=0):
    """Queries turned by these frequencies from a position on."""
    x = layer_points("llama")["Qcur"].reshape(T, C.heads, C.head_dim)
    right = LLAMA.rope_frequency.astype(np.float64)
    angle = np.where(np.arange(T)[:, None] < begin, np.multiply.outer(np.arange(T), right), np.multiply.outer(np.arange(T), frequency))
    return spec.rotate(x, angle, C.rope).reshape(T, -1)


PAIRS = np.arange(HALF)
FREQUENCY = LLAMA.rope_frequency.astype(np.float64)


def laid_out():
    of_a, of_b = 2 * PAIRS % HALF, (2 * PAIRS + 1) % HALF  # as for halves; the model's pairs are adjacent
    cos_a, sin_a, cos_b, sin_b = (
        f(np.multiply.outer(np.arange(T), FREQUENCY[of])[:, None]) for of in (of_a, of_b) for f in (np.cos, np.sin)
    )
    return rotated(lambda a, b, cos, sin: a * cos_a - b * sin_a, lambda a, b, cos, sin: b * cos_b + a * sin_b)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: by_frequencies(2 * np.pi * FREQUENCY), "the angles are 6.28319 times what is right"),
        (
            lambda: by_frequencies(FREQUENCY[PAIRS // 2 * 2]),
            "pairs 1, 3, 5, 7 and 2 runs more of a head have the frequencies of pairs 0, 2, 4, 6",
        ),
        (
            lambda: by_frequencies(FREQUENCY / np.linspace(1, 8, HALF).clip(1.5) * 1.5),
            "low frequencies are scaled, as Llama 3 or yarn does",
        ),
        (lambda: by_frequencies(to_digits(FREQUENCY, 8)), "the divided frequencies: rounded to bfloat16"),
        (lambda: by_frequencies(FREQUENCY * (PAIRS != 4)), "pair 4 of each head is not rotated"),
        (lambda: by_frequencies(np.pi / 180 * FREQUENCY), "the angles are 0.0174533 times what is right"),
        (lambda: by_frequencies(180 / np.pi * FREQUENCY), "the angles are 57.2958 times what is right"),
        (
            lambda: by_frequencies(FREQUENCY * np.where(PAIRS == 3, 1.3, 1)),
            "frequencies are wrong: that of pair 3 is 1.3 times what it should be, for the first of them",
        ),
        (
            lambda: by_frequencies(FREQUENCY * (1 + 5e-4 * np.cos(3 * PAIRS))),
            "frequencies are nearly, but not quite, what they should be",
        ),
        (laid_out, "cosines and sines are laid out for halves of a head, but pairs are not"),
        (
            lambda: rotated(lambda a, b, cos, sin: a * abs(cos) - b * sin, lambda a, b, cos, sin: a * sin + b * abs(cos)),
            "cosines have lost their sign",
        ),
        (lambda: partly(HALF), "pairs 6 to 11 of each head are not rotated"),
        (lambda: rotated(right_first, lambda a, b, cos, sin: b * cos - a * sin), "the sine has the wrong sign in the second of each pair"),
        (lambda: rotated(lambda a, b, cos, sin: a * cos + b * sin, right_second), "the sine has the wrong sign in the first of each pair"),
        (
            lambda: rotated(lambda a, b, cos, sin: a * sin - b * cos, lambda a, b, cos, sin: a * cos + b * sin),
            "sine and cosine are swapped",
        ),
        (lambda: rotated(lambda a, b, cos, sin: a * cos, lambda a, b, cos, sin: b * cos), "the sine terms are missing"),
        (
            lambda: rotated(right_first, lambda a, b, cos, sin: (a * cos - b * sin) * sin + b * cos),
            "the second number of a pair is turned with the first one's new value",
        ),
    ],
)
def test_rotations_by_another_rule_are_named(wrong, says):
    assert judged("llama", "Qcur_rope", wrong()).startswith(says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": (0, 0)}, "keys and values of layer 0 are read: the cache of another layer"),
        ({"layers": (2, LAYER)}, "keys of layer 2 are read: the cache of another layer"),
        ({"layers": (LAYER, 0)}, "values of layer 0 are read: the cache of another layer"),
        ({"cap": 0.7}, "the scores are soft-capped at 0.7"),
    ],
)
def test_caches_of_other_layers_and_capped_scores_are_named(options, says):
    assert judged("llama", "kqv_out", attended(**options)) == says


def test_outputs_of_heads_in_other_places_are_named():
    right = layer_points("llama")["kqv_out"].reshape(T, C.heads, C.head_dim)
    assert judged("llama", "kqv_out", right[:, [0, 1, 2, 2]].reshape(T, -1)) == "the output of head 3 is that of head 2"
    said = judged("llama", "kqv_out", right[:, [0, 2, 1, 3]].reshape(T, -1))
    assert said == "the outputs of heads 1 and 2 are exchanged"


def test_a_mask_after_the_softmax_is_named():
    scores = np.einsum("thk,shk->hts", heads("Qcur_rope"), spec.by_query_head(heads("Kcur_rope"), C.heads)) / np.sqrt(C.head_dim)
    p = np.tril(np.ones((T, T))) * spec.softmax(scores)
    wrong = np.einsum("hts,shk->thk", p, spec.by_query_head(heads("Vcur"), C.heads)).reshape(T, -1)
    assert judged("llama", "kqv_out", wrong) == "the mask is applied after the softmax: weights no longer add up to 1"


# --- rules ----------------------------------------------------------------------------------------------------------------------------

QUERY, KEY = np.arange(T)[:, None], np.arange(T)
BEGIN = 10  # of a second chunk
PAST = (QUERY >= BEGIN) & (KEY < BEGIN)


def by_weights(weights, v=None):
    """Attention's outputs by weights [H, T, T]."""
    return np.einsum("hts,shk->thk", weights, spec.by_query_head(heads("Vcur") if v is None else v, C.heads)).reshape(T, -1)


def scores_of(q=None, k=None):
    q, k = heads("Qcur_rope") if q is None else q, heads("Kcur_rope") if k is None else k
    return np.einsum("thk,shk->hts", q, spec.by_query_head(k, C.heads)) / np.sqrt(C.head_dim)


def softmax(scores, visible=QUERY >= KEY):
    return spec.softmax(np.where(visible, scores, -np.inf))


def over(axis):
    powers = np.where(QUERY >= KEY, np.exp(scores_of()), 0)
    return powers / np.maximum(powers.sum(axis=axis, keepdims=True), 1e-300)


def late(x, by=1):
    return np.concatenate([x[:by], x[:-by]])


def unmasked(*which):
    visible = (QUERY >= KEY) | np.isin(np.arange(C.heads), which)[:, None, None]
    return by_weights(softmax(scores_of(), visible))


def in_tiles(size):
    """Flash attention that does not rescale its sums when a later tile has a larger maximum."""
    scores = np.where(QUERY >= KEY, scores_of(), -np.inf)
    powers = np.zeros_like(scores)
    for begin in range(0, T, size):
        most = scores[..., : begin + size].max(axis=-1, keepdims=True)
        powers[..., begin : begin + size] = np.exp(scores[..., begin : begin + size] - most)
    return by_weights(powers / powers.sum(axis=-1, keepdims=True))


def powers():
    scores = np.where(QUERY >= KEY, scores_of(), -np.inf)
    return np.exp(scores - scores.max(axis=-1, keepdims=True)), scores.max(axis=-1, keepdims=True)


def with_sink():
    exponentials, most = powers()
    return exponentials / (exponentials.sum(axis=-1, keepdims=True) + np.exp(-most))


def lost_past(*wrong_heads):
    """Zeros for all keys and values before BEGIN, in some heads."""
    weights = np.where(PAST, 0, softmax(np.where(PAST, 0, scores_of())))
    right, wrong = (by_weights(x).reshape(len(x[0]), C.heads, -1) for x in (softmax(scores_of()), weights))
    right[:, wrong_heads] = wrong[:, wrong_heads]
    return right.reshape(len(right), -1)


def stale_sums():
    exponentials, _ = powers()
    sums = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / np.concatenate([sums[:, :1], sums[:, :-1]], axis=1)


def later_by(positions):
    return spec.rotate(heads("Kcur_rope"), positions * LLAMA.rope_frequency[None].astype(np.float64), C.rope)


def slot(name, factor):
    """Keys or values where those of the token BEGIN are times the ones before."""
    x = heads(name).copy()
    x[BEGIN] = factor * x[BEGIN - 1]
    return x


SHORT = np.where(np.arange(C.head_dim) < 20, 1, 0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: by_weights(over(0)), "the softmax is taken over the heads, not over the keys of each query"),
        (lambda: by_weights(over(1)), "the softmax is taken over the queries, not over the keys of each query"),
        (lambda: by_weights(over((0, 1, 2))), "the softmax is taken over everything at once, not over the keys of each query"),
        (lambda: by_weights(softmax(scores_of()), late(heads("Vcur"))), "rows of Vcur are those before in the place of each but the first"),
        (
            lambda: by_weights(softmax(scores_of(k=late(heads("Kcur_rope"))))),
            "rows of Kcur_rope are those before in the place of each but the first",
        ),
        (lambda: by_weights(softmax(scores_of(k=heads("Kcur")))), "keys are not rotated"),
        (
            lambda: by_weights(softmax(scores_of(), QUERY <= KEY)),
            "the mask is transposed: a token sees those behind it, not those before",
        ),
        (lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) | (KEY < 5))), "the first 5 tokens are seen by all, as a prefix is"),
        (lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) & (KEY > QUERY - 7))), "only the last 7 tokens are seen, as in a window"),
        (
            lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) | (QUERY >= BEGIN))),
            f"tokens from position {BEGIN} on see each other's future: a later chunk is not masked inside",
        ),
        (
            lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) & ((QUERY < BEGIN) | (KEY <= QUERY - BEGIN)))),
            f"the mask of a later chunk, from position {BEGIN} on, is that of a chunk that begins at 0",
        ),
        (
            lambda: by_weights(softmax(np.where(PAST, scores_of(k=heads("Kcur")), scores_of()))),
            f"keys before position {BEGIN} are not rotated for tokens behind it: they are cached before RoPE",
        ),
        (
            lambda: by_weights(softmax(scores_of(k=slot("Kcur_rope", 0))), slot("Vcur", 0)),
            f"keys and values of position {BEGIN} are 0: a slot of the cache that was not written",
        ),
        (
            lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) & ~(PAST & (KEY == 9)))),
            "position 9 is not seen by later tokens, as padding is",
        ),
        (
            lambda: by_weights(np.where(PAST & (KEY < 2), 0, softmax(np.where(PAST & (KEY < 2), 0, scores_of())))),
            "at positions 10 to 16 of 17: keys and values before position 2 are 0 for tokens behind it: the cache of a later chunk",
        ),
        (
            lambda: by_weights(softmax(scores_of() + np.log(2) * (PAST & (KEY == 9)))),
            "position 9 is read 2 times by positions 10 to 16",
        ),
        (
            lambda: unmasked(1, 3),
            "at heads 1, 3 of 4: the mask is missing: tokens see the future",
        ),
        (lambda: by_weights(softmax(scores_of(q=heads("Qcur_rope") * SHORT))), "of each head the last 4 elements are not summed in q . k"),
        (
            lambda: by_weights(softmax(scores_of(q=heads("Qcur_rope")[:, [0, 1, 1, 3]]))),
            "query head 2 has the queries of head 1",
        ),
        (lambda: in_tiles(8), "flash attention: the running maximum is not corrected between tiles of 8 keys"),
        (lambda: by_weights(np.where(QUERY >= KEY, np.exp(scores_of()), 0)), "the softmax does not divide by its sum"),
        (lambda: by_weights(softmax(np.log(2) * scores_of())), "exp2 instead of exp"),
        (
            lambda: by_weights(softmax(scores_of() * C.head_dim**0.5) / C.head_dim**0.5),
            "the score scale is applied to Vcur first",
        ),
        (lambda: lost_past(2, 3), f"at heads 2 to 3 of 4: keys and values before position {BEGIN} are 0 for tokens behind it"),
        (lambda: by_weights(with_sink()), "a score of 0 stands beside the keys: an attention sink"),
        (lambda: by_weights(stale_sums()), "exponentials are divided by the sum of the position before"),
        (lambda: by_weights(to_digits(softmax(scores_of()), 4)), "the probabilities: rounded to e4m3"),
        (lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) & (KEY // 8 == QUERY // 8))), "tokens see their own chunk of 8 alone"),
        (lambda: by_weights(softmax(scores_of(), KEY // 4 <= QUERY // 4)), "tokens see the future within their chunk of 4"),
        (
            lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) | (KEY >= 16))),
            "position 16 is read by positions 0 to 15, which must not see it: the mask",
        ),
        (
            lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) & ((KEY > QUERY - 8) | (KEY < 4)))),
            "only the last 8 tokens and the first 4 are seen: a window with sinks",
        ),
        (lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) & (KEY != QUERY - 1))), "no token sees the one before it"),
        (
            lambda: by_weights(softmax(np.where(PAST, scores_of(k=later_by(3)), scores_of()))),
            f"keys before position {BEGIN} are rotated by 3 positions more than they should be, for tokens behind it",
        ),
        (
            lambda: by_weights(softmax(scores_of(q=heads("Qcur_rope")[:, [0, 2, 1, 3]]))),
            "heads of the queries, before they are shared, are interleaved",
        ),
        (lambda: by_weights(powers()[0]), "the softmax's sum is not divided out"),
        (
            lambda: by_weights(softmax(scores_of()), np.roll(heads("Vcur"), 1, axis=0)),
            "rows of Vcur are shifted by one, the one before in the place of each",
        ),
        (
            lambda: np.einsum("hts,shk->thk", softmax(scores_of(k=heads("Kcur_rope")[:, ::-1])), heads("Vcur")[:, [1, 1, 0, 0]]).reshape(
                T, -1
            ),
            "key-value heads are in the opposite order",
        ),
        (
            lambda: by_weights(softmax(scores_of(), (QUERY >= KEY) & ~((QUERY == 9) & (KEY == 3)))),
            "at position 9 of 17: position 3 is not seen by later tokens, as padding is",
        ),
    ],
)
def test_attention_by_another_rule_is_named(wrong, says):
    assert says in judged("llama", "kqv_out", wrong())


def test_coarse_weights_are_named():
    noise = np.random.default_rng(0).standard_normal((C.heads, T, T))
    assert read("llama", "kqv_out", by_weights(softmax(scores_of() + 3e-3 * noise))).startswith("attention's weights are right to 0.00")


SCALED = random_model(3, family="llama", rope_scaling=4.0, n_layers=2, vocab=90, width=96, heads=4, kv_heads=2, head_dim=24, ffn=120)
SCALED_POINTS = without_codes(recorded(SCALED, IDS["llama"]))


def test_a_base_that_changes_at_a_position_is_read_off():
    wrong = by_frequencies(FREQUENCY * (C.rope_base / 40000) ** (PAIRS / HALF), begin=10)
    assert judged("llama", "Qcur_rope", wrong).startswith("at positions 10 to 16 of 17: the frequency base is 40000 instead of")


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        (lambda f: 1 / f, "the factors of the frequencies are multiplied instead of divided by"),
        (lambda f: f[::-1], "the elements of the factors of the frequencies are in the opposite order"),
    ],
)
def test_factors_of_frequencies_are_named(factors, says):
    c = SCALED.config
    x = SCALED_POINTS[Key("Qcur", LAYER)].astype(np.float64).reshape(T, -1, c.head_dim)
    wrong = spec.rope(x, np.arange(T) / c.rope_scaling, c.rope_base, c.rope, None, factors(SCALED.rope_factors.astype(np.float64)))
    report = judge_trace(SCALED, with_tensor(SCALED_POINTS, Key("Qcur_rope", LAYER), wrong.reshape(T, -1)), IDS["llama"], precision=FLOAT32)
    assert report.first_wrong.hypothesis == says


@pytest.mark.parametrize(
    ("rope", "keys", "says"),
    [
        ("halves", "Kcur_normed", "keys are not rotated: Kcur_normed is read"),
        ("halves", "Kcur", "keys are not rotated: Kcur is read"),
        ("none", "Kcur", "Kcur is read instead of Kcur_normed"),
    ],
)
def test_keys_before_their_norm_are_named(rope, keys, says):
    model = random_model(8, family="qwen3", rope=rope, n_layers=2, vocab=90, width=96, heads=4, kv_heads=2, head_dim=24, ffn=120)
    points = without_codes(recorded(model, IDS["llama"]))
    own = graph.operations(model, EXACT)
    operation = next(o for o in own if o.key == Key("kqv_out", LAYER))
    q, k, v = (points[Key(name, LAYER)].astype(np.float64) for name in (operation.inputs[0].name, keys, "Vcur"))
    wrong = operation.evaluate(q, k, v).value
    report = judge_trace(model, with_tensor(points, operation.key, wrong), IDS["llama"], precision=FLOAT32)
    assert (report.first_wrong.key, report.first_wrong.hypothesis) == (operation.key, says)


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


def test_positions_without_a_rule_are_listed():
    positions = np.random.default_rng(0).permutation(T)
    x = layer_points("llama")["Qcur"].reshape(T, C.heads, C.head_dim)
    angles = np.multiply.outer(positions, LLAMA.rope_frequency.astype(np.float64))
    said = judged("llama", "Qcur_rope", spec.rotate(x, angles, C.rope).reshape(T, -1))
    assert said.startswith(f"positions are {positions[0]}, {positions[1]}, ")
    assert said.endswith(f", ... instead of 0 to {T - 1}")


def test_right_positions_are_not_said_to_be_others():
    """Angles that are a little off, as of tables in bfloat16."""
    said = judged("llama", "Qcur_rope", by_frequencies(FREQUENCY * (1 + 2e-5 * np.cos(3 * PAIRS))))
    assert "positions are" not in said, said


def test_cosines_laid_out_for_adjacent_pairs_are_named():
    """In a model whose pairs are halves of a head."""
    c, frequency = MODEL.config, MODEL.rope_frequency.astype(np.float64)
    x = layer_points("bitnet")["Qcur"].reshape(T, -1, c.head_dim)
    angle = np.repeat(np.multiply.outer(np.arange(T), frequency), 2, axis=1)[:, None]  # of each element
    halves = np.concatenate([-x[..., frequency.size :], x[..., : frequency.size]], axis=-1)
    wrong = (x * np.cos(angle) + halves * np.sin(angle)).reshape(T, -1)
    assert judged("bitnet", "Qcur_rope", wrong) == "cosines and sines are laid out for adjacent pairs, but pairs are not"


def test_values_of_a_cache_in_blocks_are_named():
    c, values = MODEL.config, layer_points("bitnet")["Vcur"]
    q, k = (layer_points("bitnet")[name].reshape(T, -1, c.head_dim) for name in ("Qcur_rope", "Kcur_rope"))
    wrong = spec.attend(q, k, to_q8_0(values).reshape(T, -1, c.head_dim), spec.causal_mask(T, T))
    assert judged("bitnet", "kqv_out", wrong.reshape(T, -1)) == "Vcur: rounded to Q8_0"


@pytest.mark.parametrize("what", ["keys and values", "keys", "values"])
def test_a_dropped_write_is_named_though_fewer_tokens_see_it_than_a_head_is_wide(what):
    """Position 25 of 40, which 14 tokens see, and heads 20 wide."""
    model = random_model(7, family="llama", n_layers=2, vocab=90, width=80, heads=4, kv_heads=2, head_dim=20, ffn=120)
    ids = np.random.default_rng(0).permutation(90)[:40]
    points = {key: x for key, x in recorded(model, ids).items() if key.layer == 1 and key.name in ("Qcur_rope", "Kcur_rope", "Vcur")}
    q, k, v = (points[Key(name, 1)].astype(np.float64).reshape(40, -1, 20) for name in ("Qcur_rope", "Kcur_rope", "Vcur"))
    for name, x in (("keys", k), ("values", v)):
        x[25] *= name not in what
    wrong = spec.attend(q, k, v, spec.causal_mask(40, 40)).reshape(40, -1)
    report = judge_trace(model, with_tensor(points, Key("kqv_out", 1), wrong), ids, precision=FLOAT32)
    assert report.first_wrong.key == Key("kqv_out", 1)
    assert report.first_wrong.hypothesis == f"{what} of position 25 are 0: a slot of the cache that was not written"
