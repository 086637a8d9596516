"""What wrong numbers say by themselves: mistakes with a number in them, each made in one tensor of a recorded forward pass."""

import dataclasses

import numpy as np
import pytest
from dumps import MODEL, TOKENS, family_dump, only, recorded, trace, with_tensor, without_codes
from wrong_tensors import IDS, LAYER, LLAMA, MODELS, POINTS, T, judged, layer_points, read_off

from bitnet_np import BITNET_CPP, EXACT, spec
from bitnet_np.judge import graph, operations
from bitnet_np.judge.edits.blocks import Parts
from bitnet_np.judge.precision import FLOAT32
from bitnet_np.judge.readings.table import cause_of
from bitnet_np.judge.readings.wrong import Wrong
from bitnet_np.judge.roundings import to_digits
from bitnet_np.judge.trace import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model import packing, widen
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key
from scripts import mutations


def with_step(key, compute, ids=TOKENS):
    """A dump of an engine that computes one tensor in another way."""
    return trace(mutations.Engine(MODEL, ids, {key.name: compute}, (key.layer,)).run())


# --- positions ------------------------------------------------------------------------------------------------------------------------


def turned(family, position=None, frequency=None, cos=None):
    """Queries after another RoPE. position: [T]; frequency: [J]; cos: a function of the cosines and of the sines."""
    model = MODELS[family]
    c, x = model.config, layer_points(family)["Qcur"]
    angle = np.multiply.outer(np.arange(T) if position is None else position, model.rope_frequency if frequency is None else frequency)
    cos, sin = ((cos or (lambda x: x))(f(angle)[:, None]) for f in (np.cos, np.sin))
    out = x.reshape(T, -1, c.head_dim).copy()
    j = c.head_dim // 2
    first, second = (slice(0, j), slice(j, None)) if c.rope == "halves" else (slice(0, None, 2), slice(1, None, 2))
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out.reshape(T, -1)


def _based(model, base):
    c, j = model.config, model.rope_frequency.size
    return model.rope_frequency * (c.rope_base / base) ** (np.arange(j) / j)


def _bfloat16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda m: {"position": np.r_[0:8, 0:9]}, "positions restart at position 8"),
        (lambda m: {"position": np.r_[0:8, 9:18]}, "positions from 8 on are too large by 1"),
        (lambda m: {"position": np.full(T, 5)}, "every token is rotated as position 5"),
        (lambda m: {"frequency": _based(m, 123400.0)}, "the frequency base is 123400 instead of"),
        (lambda m: {"frequency": _based(m, m.config.rope_base**0.5)}, "the exponent of the frequencies is halved"),
        (lambda m: {"frequency": _based(m, m.config.rope_base**0.8)}, "the frequency base is"),
        (lambda m: {"frequency": m.rope_frequency * 0.3}, "the angles are 0.3 times what is right"),
        (
            lambda m: {"frequency": m.rope_frequency * (np.arange(m.rope_frequency.size) < 5)},
            "pairs 5 to {} of each head are not rotated",
        ),
        (lambda m: {"cos": _bfloat16}, "sines and cosines are rounded to bfloat16"),
    ],
)
def test_rotations_are_read_off(family, how, says):
    model = MODELS[family]
    if model.rope_factors is not None and "halved" in says:
        pytest.skip("the listed mistake is one of the base alone")
    assert says.format(model.rope_frequency.size - 1) in judged(family, "Qcur_rope", turned(family, **how(model)))


def test_frequencies_of_the_next_pair_are_told():
    c, j = MODEL.config, MODEL.rope_frequency.size
    shifted = c.rope_base ** (-(np.arange(j) + 1) / j)
    assert judged("bitnet", "Qcur_rope", turned("bitnet", frequency=shifted)) == (
        "the frequencies are those behind in the place of each but the last"
    )


@pytest.mark.parametrize("family", MODELS)
def test_pairs_turned_in_place_are_recognised(family):
    model, x = MODELS[family], layer_points(family)["Qcur"]
    right = turned(family).reshape(T, -1, model.config.head_dim)
    j = model.rope_frequency.size
    first, second = (slice(0, j), slice(j, None)) if model.config.rope == "halves" else (slice(0, None, 2), slice(1, None, 2))
    angle = np.multiply.outer(np.arange(T), model.rope_frequency)[:, None]
    before = x.reshape(right.shape)
    right[..., second] = right[..., first] * np.sin(angle) + before[..., second] * np.cos(angle)
    assert "with the first one's new value" in judged(family, "Qcur_rope", right.reshape(T, -1))


# --- matrices -------------------------------------------------------------------------------------------------------------------------


def product(family, name, x=None, change=lambda matrix: matrix, quantize=spec.quantize):
    """The product of a layer's matrix after `change`, with input x if it is given, quantised by `quantize` in a BitNet."""
    model, field, source = MODELS[family], *{"Qcur": ("attn_q", "attn_norm"), "ffn_down": ("ffn_down", DOWN[family])}[name]
    linear = getattr(model.layers[LAYER], field)
    x = layer_points(family)[source] if x is None else x
    bias = 0.0 if linear.bias is None else linear.bias
    if family == "bitnet":
        q, scale = quantize(x)
        return spec.ternary_matmul(q, scale, change(packing.unpack(linear.weights).astype(np.float64)), float(linear.weights.scale))
    return x @ change(widen.float32(linear.weights).astype(np.float64)).T + bias


DOWN = {"bitnet": "ffn_sub_norm", "llama": "ffn_out"}


def test_a_base_far_from_the_models_is_read_off():
    model = MODELS["bitnet"]
    said = judged("bitnet", "Qcur_rope", turned("bitnet", frequency=_based(model, model.config.rope_base**0.2)))
    assert "or the exponent is 0.2 times what it should be" in said


def _without(columns):
    def change(matrix):
        changed = matrix.copy()
        changed[:, columns] = 0
        return changed

    return change


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("ffn_down", lambda w: _without(slice(-32, None))(w), "the last 32 inputs are not summed"),
        ("ffn_down", lambda w: _without(slice(-1, None))(w), "the last input is not summed"),
        ("Qcur", lambda w: _without(slice(0, 8))(w), "the first 8 inputs are not summed"),
        ("ffn_down", lambda w: w.reshape(w.shape[::-1]).T, "read column by column, not row by row"),
    ],
)
def test_matrices_read_in_part_are_told(family, name, change, says):
    config = MODELS[family].config
    m = config.ffn if name == "ffn_down" else config.width
    assert says.format(m=m, m1=m - 1, m32=m - 32) in judged(family, name, product(family, name, change=change))


@pytest.mark.parametrize("family", MODELS)
def test_outputs_that_are_not_written_are_told(family):
    wrong = layer_points(family)["ffn_down"]
    wrong[:, -8:] = 0
    width = wrong.shape[1]
    assert judged(family, "ffn_down", wrong) == f"elements {width - 8} to {width - 1} of each position are 0: never written"


def test_weights_of_other_layers_are_recognised_in_every_family():
    before = LLAMA.layers[LAYER - 1].ffn_down
    x = layer_points("llama")["ffn_out"]
    wrong = x @ widen.float32(before.weights).astype(np.float64).T + before.bias
    assert judged("llama", "ffn_down", wrong) == "the weights of layer 0 are used"


def test_weight_scales_of_others_are_named():
    layer = MODEL.layers[LAYER]
    for name, own in (("Qcur", layer.attn_q), ("ffn_down", layer.ffn_down)):
        wrong = product("bitnet", name) * float(layer.attn_v.weights.scale) / float(own.weights.scale)
        assert judged("bitnet", name, wrong).startswith("the weight scale of Vcur is used")


def _chunked(x):
    scale = np.concatenate([np.broadcast_to(127 / np.abs(part).max(), (len(part), 1)) for part in (x[:8], x[8:16], x[16:])])
    return np.rint(x * scale), scale


def _of_128(x):
    scale = 128 / np.abs(x).max(axis=1, keepdims=True)
    return np.where(np.rint(x * scale) == 128, -128, np.rint(x * scale)), scale


def _signed(x):
    scale = 127 / x.max(axis=1, keepdims=True)
    return np.clip(np.rint(x * scale), -128, 127), scale


@pytest.mark.parametrize(
    ("quantize", "says"),
    [
        (
            _chunked,
            "one activation scale serves several tokens, such as all of a chunk, instead of one for each: positions 0 to 7, 8 to 15",
        ),
        (_of_128, "activations are scaled to 128 steps instead of 127, and +128 wraps around to -128"),
        (_signed, "activations are scaled by their largest number, not by their largest magnitude"),
        (lambda x: (spec.quantize(x)[0], spec.quantize(x)[1] * 128 / 127), "codes in steps of 1/127 are taken for 1/128"),
    ],
)
def test_quantisers_are_recognised(quantize, says):
    assert judged("bitnet", "Qcur", product("bitnet", "Qcur", quantize=quantize)).startswith(says)


def test_weights_misread_are_placed_behind_a_scale_and_a_bias():
    """A block of 16 weights of a row is taken from the row after it."""
    model, ids, points = family_dump("bitnet")
    linear = dataclasses.replace(model.layers[1].ffn_up, bias=np.linspace(-1, 1, model.config.ffn, dtype=np.float32))
    model = dataclasses.replace(model, layers=(model.layers[0], dataclasses.replace(model.layers[1], ffn_up=linear)))
    matrix = packing.unpack(linear.weights).astype(np.float64)
    matrix[7, 32:48] = matrix[8, 32:48]
    q, scale = spec.quantize(points[Key("ffn_norm", 1)].astype(np.float64))
    key = Key("ffn_up", 1)
    wrong = spec.ternary_matmul(q, scale, matrix, float(linear.weights.scale) * float(linear.scale)) + linear.bias
    first_wrong = judge_trace(model, with_tensor(points, key, wrong), ids, precision=FLOAT32).first_wrong
    assert (first_wrong.key, first_wrong.hypothesis) == (key, "weights 32 to 47 of row 7 are read from row 8")


def test_a_wrong_row_of_other_weights_is_placed():
    model, ids, points = family_dump("llama")
    key = Key("attn_o_out", 1)
    wrong = points[key].copy()
    wrong[:, 5] += np.sin(np.arange(len(ids)))
    first_wrong = judge_trace(model, with_tensor(points, key, wrong), ids, precision=FLOAT32).first_wrong
    assert "only element 5 of each position: the rest of the tensor is right" in first_wrong.hypothesis


# --- products: rows, inputs, blocks, roundings, scales ----------------------------------------------------------------------------------

SHAPE = {"n_layers": 2, "vocab": 300, "width": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256}
BLOCK_MODELS = {
    kind: random_model(5, family="llama", weights=kind, table=kind, tied=True, **SHAPE)
    for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "Q5_0", "IQ4_XS", "NVFP4")
}
IDS_20 = np.random.default_rng(1).permutation(300)[:20]


def said_of(model, name, theirs_of, layer=1, ids=IDS_20, tokens=20, x=None):
    """What is read off an operation whose output is theirs_of(inputs, value, linear): text and id. Its inputs are x, random, or ids."""
    key = Key(name, None if name in ("inp_embd", "result_output") else layer)
    operation = next(o for o in graph.operations(model, EXACT) if o.key == key)
    matrix = None if name == "inp_embd" else getattr(model.layers[layer], graph.FIELDS[name]) if key.layer is not None else model.head
    width = model.config.ffn if name == "ffn_down" else model.config.width
    drawn = np.random.default_rng(2).standard_normal((tokens, width)) if x is None else x
    x = ids if name == "inp_embd" else drawn
    expected = operation.evaluate(x)
    theirs = np.asarray(theirs_of(x, expected.value, matrix))
    theirs = theirs * (1 + 1e-7 * np.random.default_rng(1).standard_normal(theirs.shape))
    places = np.abs(theirs - expected.value) > 1e-5 * np.abs(expected.value).max()
    known = {graph.TOKENS: ids}
    cause = cause_of(Wrong(model, EXACT, operation.key, [x], expected.value, theirs, places, 0.0, known))
    return ("", "") if cause is None else (cause.text, cause.id)


def dense(linear):
    return widen.float32(getattr(linear, "weights", linear)).astype(np.float64)


def by(change, name="ffn_up"):
    """Products of a changed matrix, which keep the bias."""
    return name, lambda x, value, linear: value + x @ (change(dense(linear)) - dense(linear)).T


def _scaled(columns, factor):
    def change(w):
        w = w.copy()
        w[:, columns] *= factor
        return w

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: np.roll(w, 1, axis=0), "weights of other rows are used: rows are shifted by 1: row 1 has the numbers of row 0"),
        (
            lambda w: np.concatenate([w[:16], w[:16], w[32:]]),
            "weights of other rows are used: rows 16 to 31 have the numbers of rows 0 to 15",
        ),
        (lambda w: np.concatenate([w[:5], w[7:8], w[6:]]), "weights of other rows are used: row 5 has the numbers of row 7"),
        (lambda w: w[[1, 0, *range(2, 120)]], "weights of other rows are used: rows 0, 1 are exchanged"),
        (
            lambda w: w[np.random.default_rng(2).permutation(120)],
            "weights of other rows are used: the right numbers in other places: row 0 has those of ",
        ),
        (_scaled(slice(32, 64), 2), "inputs 32 to 63 of 96 are summed twice"),
        (_scaled(slice(32, 64), 0), "inputs 32 to 63 of 96 are not summed"),
        (_scaled(slice(32, 64), 3), "inputs 32 to 63 of 96 are multiplied by 3"),
        (_scaled(slice(1, None, 2), 0), "every second input from input 1, 48 of 96, are not summed"),
        (_scaled(np.arange(96) % 8 >= 4, 0), "inputs 4 to 7, 12 to 15, 20 to 23, 28 to 31 and 8 runs more, 48 of 96, are not summed"),
        (_scaled(slice(32, 96), np.repeat([2.0, 3.0], 32)), "inputs 32 to 95 of 96 are multiplied by factors of their own: 2, 3"),
    ],
)
def test_products_of_changed_weights_are_read(change, says):
    assert says in said_of(LLAMA, *by(change))[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda value, bias: value - np.where(np.arange(bias.size) < 40, bias, 0), "at elements 0 to 39 of 120: the bias is missing"),
        (lambda value, bias: value + 3 * bias, "the bias is 4 times what is right"),
        (lambda value, bias: value - bias + np.append(bias[1:], 0), "the bias is read 1 element too late"),
        (lambda value, bias: value - bias + bias[::-1], "the elements of the bias are in the opposite order"),
        (lambda value, bias: value - bias * (np.arange(T) > 0)[:, None], "at positions 1 to 16 of 17: the bias is missing"),
        (lambda value, bias: value - bias + LLAMA.layers[0].ffn_up.bias, "that of layer 0 instead of the bias"),
        (
            lambda value, bias: np.where(np.arange(bias.size) % 8 == 3, bias, value),
            "at every 8th element from element 3, 15 of 120: the products are all 0",
        ),
    ],
)
def test_biases_in_part_or_in_other_places_are_named(change, says):
    bias = LLAMA.layers[LAYER].ffn_up.bias.astype(np.float64)
    assert judged("llama", "ffn_up", change(layer_points("llama")["ffn_up"], bias)) == says


def _dot(x, matrix, digits, lanes):
    total = np.zeros((len(x), len(matrix), lanes))
    for i in range(0, x.shape[1], lanes):
        total = to_digits(total + x[:, None, i : i + lanes] * matrix[:, i : i + lanes], digits)
    return to_digits(total.sum(axis=-1), digits)


@pytest.mark.parametrize(
    ("digits", "lanes", "says"), [(8, 1, "sums are kept in bfloat16"), (11, 8, "sums are kept in float16, 8 of them side by side")]
)
def test_narrow_partial_sums_are_named(digits, lanes, says):
    wrong = said_of(LLAMA, "ffn_up", lambda x, value, w: _dot(x, dense(w), digits, lanes) + w.bias)
    assert wrong[0].startswith(says)


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (0, "the weights of attn_q are used in the place of rows 0 to 47"),
        (48, "weights of other rows are used, of attn_q: rows 0 to 47 have the numbers of rows 48 to 95"),
    ],
)
def test_rows_of_another_matrix_of_the_layer_are_named(begin, says):
    other = LLAMA.layers[1].attn_q
    wrong = said_of(LLAMA, "Kcur", lambda x, value, w: (x @ dense(other).T + other.bias)[:, begin : begin + 48])
    assert wrong == (says, "read.other_rows")


def test_a_bias_where_none_belongs_is_named():
    model = random_model(5, family="qwen2", **SHAPE)
    wrong = said_of(model, "attn_o_out", lambda x, value, w: value + model.layers[1].attn_q.bias)
    assert wrong[0] == "attn_q's bias is added to every position"


@pytest.mark.parametrize("kind", BLOCK_MODELS)
def test_blocks_are_taken_apart_as_they_are_widened(kind):
    table = BLOCK_MODELS[kind].token_embd
    rows = np.arange(9)
    parts = Parts.of(table, rows)
    assert np.allclose(parts.matrix(), widen.take(table, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["inp_embd", "ffn_up"])
def test_types_without_kernels_are_judged_as_floats_are(name):
    model = random_model(5, family="llama", weights="IQ3_S", table="IQ3_S", tied=True, **SHAPE)
    assert (
        said_of(model, name, lambda x, value, w: value + np.sin(np.arange(256)))[0]
        == "a constant of its own is added to each element: a bias; 255 of 256 are wrong"
    )


@pytest.mark.parametrize(
    ("sums", "says"),
    [
        (lambda s: np.clip(s, -512, 511), "sums are cut at -512 and 511: a narrow accumulator saturates"),
        (lambda s: (s + 512) % 1024 - 512, "sums wrap around in 10 bits: a narrow accumulator"),
    ],
)
def test_narrow_accumulators_are_recognised(sums, says):
    linear, x = MODELS["bitnet"].layers[LAYER].ffn_up, layer_points("bitnet")["ffn_norm"]
    codes, steps = spec.quantize(x.astype(np.float64))
    wrong = sums(codes @ packing.unpack(linear.weights).astype(float).T) / steps * float(linear.weights.scale)
    assert judged("bitnet", "ffn_up", wrong) == says


def _clipped(scale):
    return lambda x: (np.clip(np.rint(x * scale(x)), -127, 127), scale(x))


def _largest(x):
    return np.abs(x).max(axis=1, keepdims=True)


def _with_the_scale_of_another(x):
    steps = spec.quantize(x)[1].copy()
    steps[5] = steps[9]
    return np.clip(np.rint(x * steps), -128, 127), steps


@pytest.mark.parametrize(
    ("quantize", "says"),
    [
        (
            _clipped(lambda x: 127 / (2.5 * np.abs(x).mean(axis=1, keepdims=True))),
            "2.5 times the mean magnitude instead of the largest magnitude",
        ),
        (
            _clipped(lambda x: 127 / (3 * np.sqrt((x**2).mean(axis=1, keepdims=True)))),
            "3 times the root mean square instead of the largest magnitude",
        ),
        (
            _clipped(lambda x: 127 / np.maximum(_largest(x), np.median(_largest(x)))),
            "the activation scale's floor is wrong: the largest magnitude",
        ),
        (_clipped(lambda x: np.full((len(x), 1), 20.0)), "the activation scale is fixed: the largest magnitude is taken for at least 6.35"),
        (_clipped(lambda x: 100 / _largest(x)), "activations are scaled to 100 steps instead of 127"),
        (_clipped(lambda x: np.linspace(60, 120, len(x))[:, None] / _largest(x)), "activation scales are wrong by factors from 0.47"),
        (_with_the_scale_of_another, "activation scales are another token's: position 5 has that of position 9"),
        (_clipped(lambda x: 2.0 ** np.floor(np.log2(127 / _largest(x)))), "activation scales are rounded to powers of two"),
    ],
)
def test_activation_scales_are_fitted(quantize, says):
    matrix, scale = packing.unpack(MODEL.layers[1].ffn_up.weights).astype(float), float(MODEL.layers[1].ffn_up.weights.scale)

    def theirs(x, value, linear):
        codes, steps = quantize(x)
        return codes @ matrix.T / steps * scale

    assert says in said_of(MODEL, "ffn_up", theirs)[0]


def test_wrong_embeddings_are_read():
    said = said_of(BLOCK_MODELS["Q5_0"], "inp_embd", lambda ids, value, _: rows_of(np.where(np.arange(20) == 5, 299 - ids, ids)))
    assert said[0] == f"position 5 has the row of token {299 - IDS_20[5]} instead of {IDS_20[5]}"


def rows_of(ids):
    return widen.take(BLOCK_MODELS["Q5_0"].token_embd, ids).astype(np.float64)


@pytest.mark.parametrize("order", [(-1, 2), (2, -1)])
def test_rows_in_the_order_of_another_rope_are_named(order):
    x = layer_points("llama")["Qcur"].reshape(T, LLAMA.config.heads, *order).swapaxes(2, 3).reshape(T, -1)
    assert judged("llama", "Qcur", x).startswith("rows of the weights are in the order of ")


@pytest.mark.parametrize("tokens", [1, 3, 6, 20])
def test_nothing_is_fitted_to_few_tokens(tokens):
    """Fewer tokens than unknowns: any rows, blocks' scales or low rank would fit."""
    rng = np.random.default_rng(9)
    for model, name in ((LLAMA, "ffn_up"), (MODEL, "ffn_up"), (BLOCK_MODELS["Q4_K"], "ffn_up"), (LLAMA, "result_output")):
        said = said_of(model, name, lambda x, value, w: value + rng.standard_normal(value.shape), ids=np.arange(20), tokens=tokens)
        assert said[1] in ("", "read.places"), said


# --- attention ------------------------------------------------------------------------------------------------------------------------


def attention(family, weights=None, allowed=None, scale=1.0, heads=None, values=lambda v: v, keys=lambda k: k):
    """kqv_out by another attention.

    weights: a function of the softmax's weights [H, T, T]. allowed(i, j): whether query i sees key j. scale: a factor of the scores.
    heads: the key-value head that each query head reads. values, keys: functions of values and keys.
    """
    c, p = MODELS[family].config, layer_points(family)
    q = p["Qcur_rope"].reshape(T, c.heads, -1)
    read = np.arange(c.heads) // (c.heads // c.kv_heads) if heads is None else np.array(heads)
    k, v = (x.reshape(T, c.kv_heads, -1)[:, read] for x in (keys(p["Kcur_rope"]), values(p["Vcur"])))
    i, j = np.arange(T)[:, None], np.arange(T)
    s = np.where((allowed or (lambda i, j: j <= i))(i, j), np.einsum("thk,shk->hts", q, k) * scale / c.head_dim**0.5, -np.inf)
    s = np.exp(s - s.max(axis=-1, keepdims=True))
    s /= s.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shk->thk", s if weights is None else weights(s), v).reshape(T, -1)


def _rotated_values(v):
    return operations.rope(MODEL, EXACT, v).value


def _sharpened(p):
    p = p ** np.array([1, 2, 1, 3])[:, None, None]
    return p / p.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"scale": 1.5}, "the score scale is "),
        ({"weights": lambda p: p / 2}, "everything is 0.5 times"),
        ({"weights": lambda p: p * np.linspace(0.5, 0.9, T)[:, None]}, "each position is wrong by a factor of its own"),
        ({"weights": lambda p: p / (1 + np.random.default_rng(0).random(p.shape[:2]))[..., None]}, "instead of 1: empty slots or a sink"),
        ({"weights": lambda p: p * (1 + np.random.default_rng(0).random(p.shape[:2]))[..., None]}, "instead of 1: they are not divided"),
        ({"weights": _sharpened}, "sums of the right values with wrong weights: scores or softmax are wrong"),
        ({"weights": _bfloat16}, "the probabilities: rounded to bfloat16"),
        (
            {"allowed": lambda i, j: (j <= i) & ((i < 8) | (j >= 8))},
            "tokens from position 8 on do not see those before: the cache is lost at the border of a chunk",
        ),
        ({"heads": [0, 1, 1, 1]}, "query head 1 reads key-value head 1 instead of 0"),
        ({"values": _bfloat16, "keys": _bfloat16}, "keys and values are rounded, as a cache of bfloat16 does"),
    ],
)
def test_attention_is_read_off(family, how, says):
    assert says in judged(family, "kqv_out", attention(family, **how))


def test_the_future_is_named_where_all_tokens_can_be_told():
    wrong = attention("bitnet", allowed=lambda i, j: (j <= i) | ((i == 3) & (j == 9)))
    assert judged("bitnet", "kqv_out", wrong) == "position 9 is read by position 3, which must not see it: the mask"


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


def test_rotated_values_are_recognised():
    assert judged("bitnet", "kqv_out", attention("bitnet", values=_rotated_values)) == "values are rotated too, as if they were keys"


def test_rounded_values_are_not_taken_for_another_sequences():
    coarse = attention("bitnet", values=lambda v: np.rint(v * 150) / 150)
    assert "are rounded: a part of" in judged("bitnet", "kqv_out", coarse)


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


def test_tensors_dumped_too_late_are_recognised():
    hypothesis = judged("llama", "Qcur", POINTS["llama"][Key("Qcur_rope", LAYER)])
    assert hypothesis == "it is after RoPE: dumped from a buffer that was rotated in place"
    gate = layer_points("llama")["ffn_gate"]
    assert judged("llama", "ffn_gate", gate / (1 + np.exp(-gate))).startswith("it is after the activation function")
    dump = trace(POINTS["llama"] | {Key("l_out", 0): POINTS["llama"][Key("l_out", 2)]})
    hypothesis = judge_trace(LLAMA, dump, IDS["llama"], precision=FLOAT32).first_wrong.hypothesis
    assert hypothesis == "it has the numbers of layer 2 l_out: its buffer was written to again before it was dumped"


@pytest.mark.parametrize(("kind", "digits"), [("bfloat16", 8), ("float16", 11)])
def test_narrow_numbers_are_recognised(kind, digits):
    x = layer_points("bitnet")["ffn_inp"]
    fraction, exponent = np.frexp(x)
    narrow = np.ldexp(np.rint(np.ldexp(fraction, digits)), exponent - digits)
    first_wrong = judge_trace(MODEL, with_tensor(POINTS["bitnet"], Key("ffn_inp", LAYER), narrow), TOKENS, precision=FLOAT32).first_wrong
    assert (first_wrong.key.name, first_wrong.hypothesis) == ("ffn_inp", f"the result: rounded to {kind}")


def test_a_known_mistake_is_not_given_up_for_a_fitted_factor():
    """The roundings of a norm's root are a factor of each position, so a fitted factor leaves even less than the mistake does."""
    x = POINTS["bitnet"][Key("l_out", LAYER - 1)].astype(np.float64)
    wrong = spec.rms_norm(x, MODEL.layers[LAYER].attn_norm, 1e-3) * (1 + 2e-7 * np.random.default_rng(0).standard_normal((T, 1)))
    assert judged("bitnet", "attn_norm", wrong) == f"epsilon is 0.001 instead of {MODEL.config.eps:.3g}"


def test_norms_of_the_next_layer_are_recognised():
    x = POINTS["llama"][Key("l_out", LAYER - 1)].astype(np.float64)
    wrong = spec.rms_norm(x, LLAMA.layers[LAYER + 1].attn_norm, LLAMA.config.eps)
    assert judged("llama", "attn_norm", wrong) == "the weight of layer 2 is used"


def test_an_exact_engine_declared_as_bitnet_cpp_is_told_so():
    report = judge_trace(MODEL, trace(POINTS["bitnet"]), TOKENS, BITNET_CPP, precision=FLOAT32)
    assert report.first_wrong.hypothesis == "float16 roundings are not there: declare the dialect exact"


def test_a_narrow_cache_is_no_mistake_across_operations():
    """Roundings explain what a float16 KV cache changes, so an engine that has one is right."""

    class Cached(mutations.Engine):
        def attend(self, n, **options):
            for name in ("Kcur_rope", "Vcur"):
                self.t[Key(name, n)] = self.t[Key(name, n)].astype(np.float16).astype(np.float32)
            return super().attend(n, **options)

    ids = TOKENS[:7]
    dump = only(Cached(MODEL, ids).run(), "l_out", "result_output")
    assert judge_trace(MODEL, dump, ids, precision=FLOAT32).verdict == Verdict.FLIPS


def test_nothing_is_said_of_what_nothing_explains():
    rng = np.random.default_rng(3)
    for operation in graph.operations(LLAMA, EXACT):
        if operation.key.layer != LAYER and operation.key.name != "result_output":
            continue
        inputs = [POINTS["llama"][key].astype(np.float64) for key in operation.inputs]
        expected = operation.evaluate(*inputs)
        theirs = expected.value + rng.standard_normal(expected.value.shape)
        cause = cause_of(
            Wrong(LLAMA, EXACT, operation.key, inputs, expected.value, theirs, np.ones(theirs.shape, bool), 0.0, POINTS["llama"])
        )
        assert cause is None or "no sums of the values that tokens see" in cause.text, operation.key


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
