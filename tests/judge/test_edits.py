"""Edits of the definition: the expressions are the definition, and what an edit makes of one is named, in all of it or in a part."""

from dataclasses import replace

import numpy as np
import pytest
from dumps import only, recorded, trace
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import random_model

from bitnet_np import check, spec
from bitnet_np.base.block_formats import FORMATS
from bitnet_np.contract.blocks import weights_as
from bitnet_np.engine.dialects import DIALECTS, EXACT
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.edits.edited import edits_of
from bitnet_np.judge.edits.kinds import KINDS
from bitnet_np.judge.law import products
from bitnet_np.judge.law.expression import tensors, value_of
from bitnet_np.judge.law.formats import NARROW
from bitnet_np.judge.law.functions import pairs
from bitnet_np.judge.law.graph import TOKENS, operations
from bitnet_np.judge.law.precision import FLOAT32
from bitnet_np.judge.law.products import linear_of
from bitnet_np.judge.law.roundings import to_bfloat16
from bitnet_np.judge.mistakes.search import Search
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.traces.points import FIELDS, Key

T = 14
SMALL = {"width": 48, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "n_layers": 2, "vocab": 80}
MODELS = {
    "bitnet": random_model(1, **SMALL),
    "gemma3": random_model(2, family="gemma3", window=5, window_layers=(0,), **SMALL),
    "granite": random_model(3, family="granite", **SMALL),
}
IDS = np.random.default_rng(4).permutation(80)[:T]
QUERY, KEY = np.arange(T)[:, None], np.arange(T)


@pytest.mark.usual(21)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_expressions_are_the_operations(family, dialect):
    """Also those of steps that a dialect computes by a function of its own."""
    model = random_model(5, family=family, inner_norms=True, window=5, window_layers=(1,), tied=False)
    values = {TOKENS: np.random.default_rng(0).integers(0, model.config.vocab, 9)}
    for operation in operations(model, DIALECTS[dialect]):
        values[operation.key] = operation.evaluate(*(values[key] for key in operation.inputs)).value
        own = value_of(operation.tree, values.__getitem__, 9)
        assert np.abs(own - values[operation.key]).max() <= 1e-12 * np.abs(values[operation.key]).max(), operation.key


def test_edits_keep_a_dialects_own_functions():
    """Of other positions the angles are stepped in float32, too; another activation than the one that ggml has a table of is itself."""
    model, dialect = random_model(2, family="gemma", **SMALL), DIALECTS["llama.cpp"]
    sites = {o.key: o for o in operations(model, dialect)}
    rotation, activation = sites[Key("Kcur_rope", 0)], sites[Key("ffn_out", 0)]
    x = {key: np.random.default_rng(0).normal(size=(T, 32)) for key in (*activation.inputs, *rotation.inputs)}
    (later,) = (edit.tree for edit in edits_of(replace(rotation, length=T), "positions") if edit.words == "positions are too large by 1")
    heads = x[rotation.inputs[0]].reshape(T, -1, 16)
    expected = spec.rotate(heads, dialect.angles(np.arange(T) + 1, model).astype(np.float64), model.config.rope)
    np.testing.assert_allclose(value_of(later, x.__getitem__, T), expected.reshape(T, -1), rtol=0, atol=1e-14)
    (relu,) = (edit.tree for edit in edits_of(activation, "other_function") if edit.words.startswith("relu(gate) * up"))
    gate, up = (x[key] for key in activation.inputs)
    np.testing.assert_array_equal(value_of(relu, x.__getitem__, T), np.maximum(gate, 0) * up)


def planted(model, name, change):
    """What is said of a dump in which change(inputs) is the output of an operation of layer 1."""
    points = recorded(model, IDS)
    key = Key(name, 1)
    operation = next(o for o in operations(model, EXACT) if o.key == key)
    inputs = [points[k].reshape(T, -1).astype(np.float64) for k in operation.inputs]
    wrong = change(*inputs).astype(np.float32)
    before = {k: x for k, x in points.items() if k.layer == 0 or k.name.startswith("inp")}
    report = judge_trace(model, trace(before | {k: points[k] for k in operation.inputs} | {key: wrong}), IDS, precision=FLOAT32)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, key)
    return report.first_wrong.hypothesis


def of_regrouped_heads(x):
    heads = x.reshape(T, 2, 2, -1).swapaxes(1, 2).reshape(T, -1)
    linear = MODELS["granite"].layers[1].attn_output
    return heads @ linear.weights.T.astype(np.float64) + linear.bias


def run_over(x):
    """Products in tiles of 64 of rows of 48, whose last tile is not bounded."""
    linear = MODELS["granite"].layers[1].ffn_gate
    matrix = products.rows_of(linear.weights, np.arange(linear.shape[0]))
    tokens, rows = (np.append(a, np.append(a[1:], 0 * a[:1], axis=0)[:, :16], axis=1) for a in (x, matrix))
    rows[-1, 48:] = matrix[-1, :16]  # whatever is behind the matrix
    return tokens @ rows.T + (0 if linear.bias is None else linear.bias)


def of_a_scale_for_each_element(x):
    w = MODELS["bitnet"].layers[1].attn_v
    steps = 127 / np.maximum(np.abs(x).max(axis=0), 1e-5)
    return np.rint(x * steps) / steps @ products.rows_of(w.weights, np.arange(w.shape[0])).T * float(w.weights.scale)


def unturned(x, first):
    """Rotated heads: the first of each pair without its cosine, or the second with the first's new value."""
    model = MODELS["granite"]
    angle = spec.angles(np.arange(T), model.config.rope_base, model.config.rope_pairs, model.rope_factors)[:, None]
    heads = x.reshape(T, -1, model.config.head_dim)
    places = pairs(model.config.rope, model.config.rope_pairs, model.config.head_dim)
    a, b = (heads[..., part] for part in places)
    new = (a if first else a * np.cos(angle)) - b * np.sin(angle)
    out = heads.copy()
    out[..., places[0]] = new
    out[..., places[1]] = (a if first else new) * np.sin(angle) + b * np.cos(angle)
    return out.reshape(T, -1)


def of_codes(quantise):
    """Values of codes by another rule: quantise(the largest magnitudes in steps of 1 / 127, the numbers in them) gives codes and steps."""

    def change(x):
        largest, w = np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-5), MODELS["bitnet"].layers[1].attn_v
        codes, steps = quantise(127 / largest, x * (127 / largest))
        return codes / steps @ products.rows_of(w.weights, np.arange(w.shape[0])).T * float(w.weights.scale)

    return change


@pytest.mark.parametrize(
    ("family", "name", "change", "says"),
    [
        ("granite", "ffn_gate", run_over, "sums run 16 inputs over the end of rows, into the next ones"),
        ("granite", "attn_o_out", of_regrouped_heads, "heads of kqv_out are in another order: 2 in turn, not one after another"),
        (
            "bitnet",
            "Vcur",
            of_a_scale_for_each_element,
            "the largest magnitude of each element over all tokens instead of the largest magnitude",
        ),
        ("bitnet", "Vcur", of_codes(lambda s, x: (np.rint(x / 127 * 255), s / 127 * 255)), "the largest code is 255 instead of 127"),
        ("bitnet", "Vcur", of_codes(lambda s, x: (np.clip(np.rint(x), -100, 100), s)), "the codes are clipped beyond 100"),
        ("bitnet", "Vcur", of_codes(lambda s, x: (np.rint(x) + 3, s)), "3 is added to the codes"),
        ("bitnet", "Vcur", of_codes(lambda s, x: (np.ceil(x), s)), "rounding up instead of rounding to the nearest"),
        ("granite", "ffn_out", lambda gate, up: gate * gate / (1 + np.exp(-gate)), "{gate} is read instead of {up}"),
        ("granite", "Qcur_rope", lambda x: unturned(x, first=True), "the cosines are missing, in the first times the cosines"),
        ("granite", "Qcur_rope", lambda x: unturned(x, first=False), "the new first of each pair instead of the first of each pair"),
    ],
)
def test_mistakes_inside_an_operation_are_named(family, name, change, says):
    said = planted(MODELS[family], name, change)
    assert said == says.format(gate="ffn_gate", up="ffn_up")


@settings(max_examples=10)
@given(name=st.sampled_from(sorted(MODELS)), number=st.integers(0, 999), factor=st.floats(1.5, 20))
def test_a_number_that_is_another_is_found_at_any_operation(name, number, factor):
    """The number of any step of any operation, times any factor that changes the output, is blamed there, and something is said of it.

    The largest code stands in front of a rounding, so that only likely ones are tried.
    """
    model = MODELS[name]
    points = recorded(model, IDS)
    values = {key: x.reshape(T, -1).astype(np.float64) for key, x in points.items()} | {TOKENS: IDS}
    places = [o for o in operations(model, EXACT) if o.key.layer == 1 and not o.key.name.endswith("_codes")]
    families = [
        (place, family)
        for place in places
        for family in edits_of(place, "numbers")
        if " is {number} instead of " in family.words and "code" not in family.words
    ]
    place, family = families[number % len(families)]
    right = float(family.words.rsplit(" ", 1)[1])
    other = float(f"{right * factor:.4g}")
    wrong = value_of(family.tree(other), values.__getitem__, T)
    if np.abs(wrong - values[place.key]).max() < 1e-3 * np.abs(values[place.key]).max():
        return
    kept = {key: points[key] for key in place.inputs if key in points}
    report = judge_trace(model, trace(kept | {place.key: wrong.astype(np.float32)}), IDS, precision=FLOAT32)
    assert report.verdict is Verdict.WRONG
    assert report.first_wrong.key == place.key
    assert report.first_wrong.hypothesis


def float_engine(model, operands, faults=(), cache=None):
    """All tensors of an engine in float64 that rounds the operands of the matrices in its layers. faults: other models, by the tensors that
    they compute in its place. cache: what becomes of keys and values."""
    values = {TOKENS: IDS}
    for operation in operations(model, EXACT):
        other = dict(faults).get(operation.key, model)
        inputs = [values[key] for key in operation.inputs]
        if cache is not None and operation.key.name == "kqv_out":
            inputs = [inputs[0], *map(cache, inputs[1:])]
        y = next(o for o in operations(other, EXACT) if o.key == operation.key).evaluate(*inputs).value
        if operation.key.name in FIELDS:
            linear = linear_of(other, operation.key)
            y = operands(inputs[0]) @ operands(linear.weights.astype(np.float64)).T + (0 if linear.bias is None else linear.bias)
        values[operation.key] = y.astype(np.float32).astype(np.float64)
    return {key: x.astype(np.float32) for key, x in values.items() if key != TOKENS}


def cut(x):
    """The first 11 bits of numbers, as units that read TF32 take them of float32."""
    return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def in_rows(x):
    scale = 127 / np.abs(x).max(axis=1, keepdims=True)
    return np.rint(x * scale) / scale


@pytest.mark.parametrize(
    ("operands", "says"),
    [
        (to_bfloat16, "operands of products are rounded to bfloat16"),
        (cut, "operands of products are rounded to TF32, by truncation"),
        (lambda x: in_rows(x) if len(x) == T else x, "the input is rounded to int8 with a scale for each row"),
    ],
)
def test_engines_of_fewer_bits_inside_operations_are_narrow(operands, says):
    """In every tensor, with nothing declared. Declared as float32 they are wrong."""
    model = random_model(3, family="llama", weights="float32", **SMALL)
    points = float_engine(model, operands)
    report = judge_trace(model, trace(points), IDS)
    assert report.verdict is Verdict.NARROW, report.reason
    assert says in report.reason
    assert judge_trace(model, trace(points), IDS, precision=FLOAT32).verdict is Verdict.WRONG


FEWER_BITS_MODEL = random_model(3, family="qwen2", weights="float32", tied=False, **SMALL)


def with_layer_1(**changes):
    first, second = FEWER_BITS_MODEL.layers
    changed = replace(second, **{name: change(getattr(second, name)) for name, change in changes.items()})
    return replace(FEWER_BITS_MODEL, layers=(first, changed))


WITHOUT_BIAS = with_layer_1(attn_k=lambda linear: replace(linear, bias=None))
UNSCALED = replace(FEWER_BITS_MODEL, config=replace(FEWER_BITS_MODEL.config, attention_scale=1.0))


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("dumped", "operands", "bits", "key", "other", "says"),
    [
        ("all", to_bfloat16, "bfloat16", "Kcur", WITHOUT_BIAS, "the bias is missing"),
        ("l_out", to_bfloat16, "bfloat16", "kqv_out", UNSCALED, "the score scale is missing"),
        ("result_output", cut, "TF32, by truncation", "ffn_norm", with_layer_1(ffn_norm=np.ones_like), "the norm's weight is missing"),
    ],
)
def test_a_mistake_is_named_in_an_engine_of_fewer_bits(monkeypatch, dumped, operands, bits, key, other, says):
    """Hidden mistakes, none of which explains it, are tried in vain between layers: over all layers that takes half a minute."""
    if dumped == "result_output":
        monkeypatch.setattr(Search, "hidden", lambda *_, **__: None)
    points = float_engine(FEWER_BITS_MODEL, operands, {Key(key, 1): other})
    report = check(FEWER_BITS_MODEL, IDS, trace({k: x for k, x in points.items() if dumped in ("all", k.name)}), budget=np.inf)
    assert report.verdict is Verdict.WRONG
    rounded = f"operands of products are rounded to {bits}"
    if dumped == "all":  # where right operations show the rounding by themselves
        assert report.reason.endswith(f": {says}")
        assert {o.key.name for o in report.operations if rounded in (o.hypothesis or "")} >= {"Qcur", "Kcur", "ffn_gate"}
    else:
        assert f"{says}; and {rounded}" in report.reason


def test_a_mistake_is_named_beside_roundings_of_no_known_type():
    linear = FEWER_BITS_MODEL.layers[1].attn_k
    noise = 1 + 3e-3 * np.random.default_rng(0).standard_normal((T, linear.shape[0]))
    said = planted(FEWER_BITS_MODEL, "Kcur", lambda x: noise * (x @ linear.weights.T.astype(np.float64)))
    assert said.startswith("the bias is missing; what is left of the error, NMSE ")


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("operands", "dumped", "in_cache"),
    [(cut, "l_out", None), (to_bfloat16, "result_output", None), *((to_bfloat16, "l_out result_output", x) for x in ("float16", "q8_0"))],
)
def test_operands_and_a_cache_of_fewer_bits_are_narrow_across_operations(operands, dumped, in_cache):
    points = float_engine(FEWER_BITS_MODEL, operands, cache=NARROW.get(in_cache))
    report = check(FEWER_BITS_MODEL, IDS, only(points, *dumped.split()), budget=np.inf)
    assert report.verdict is Verdict.NARROW, report.reason
    assert "operands of products are rounded to" in report.reason
    assert ("cache of q8_0" in report.reason) == (in_cache == "q8_0")


# --- abilities of any layer, heads and tensor -------------------------------------------------------------------------------------------


def attended(model, q, k, v, weights_of):
    """Attention's outputs [T, H * K] by weights_of(scores, visible), both [H, T, T]."""
    c = model.config
    q, k, v = (x.reshape(T, -1, c.head_dim) for x in (q, k, v))
    scores = np.einsum("thk,shk->hts", q, spec.by_query_head(k, c.heads)) * c.head_dim**-0.5
    return np.einsum("hts,shk->thk", weights_of(scores, np.tri(T, dtype=bool)), spec.by_query_head(v, c.heads)).reshape(T, -1)


def test_cells_of_a_window_that_are_lost_from_some_token_on_are_told_together():
    """As where a ring of slots is copied when it grows, and what has wrapped is left behind."""
    model = random_model(4, family="llama", window=7, **SMALL)
    lost = (KEY >= 3) & (KEY < 7) & (QUERY >= 8)
    seen = (QUERY - KEY < 7) & ~lost
    said = planted(model, "kqv_out", lambda *x: attended(model, *x, lambda s, visible: spec.softmax(np.where(visible & seen, s, -np.inf))))
    assert said == "positions 3 to 6 are read by no token from position 8 on: they were lost, or written over"


@settings(max_examples=3)
@given(st.integers(0, 99), st.floats(0.5, 4), st.sampled_from([(2, 1), (4, 2), (3, 3)]))
def test_a_mask_that_comes_before_the_cap_of_scores_is_named(seed, cap, heads):
    """What is not seen has then a score of minus the cap, and some weight."""
    shape = SMALL | {"heads": heads[0], "kv_heads": heads[1], "head_dim": 16}
    model = random_model(seed, family="gemma2", attention_scale=0.25, **shape)
    model = replace(model, config=replace(model.config, score_cap=cap, window=None, window_layers=None))

    def capped_behind_the_mask(scores, visible):
        return spec.softmax(np.where(visible, cap * np.tanh(scores / cap), -cap))

    said = planted(model, "kqv_out", lambda q, k, v: attended(model, q, k, v, capped_behind_the_mask))
    assert said == "the mask comes before the scores' capping"


@settings(max_examples=2)  # each has two searches behind it
@given(st.integers(0, 99), st.sampled_from([(2, 1), (4, 2), (3, 3)]), st.floats(-3, -0.5))
def test_numbers_of_the_softmax_are_named(seed, heads, masked):
    """Scores of what is not seen, and the scale where probabilities have it instead of scores."""
    model = random_model(seed, family="llama", **SMALL | {"heads": heads[0], "kv_heads": heads[1], "head_dim": 16})

    for says, weights in {
        f"masked scores are {masked:.3g}": lambda scores, visible: spec.softmax(np.where(visible, scores, masked)),
        f"the mask adds {masked:.3g}": lambda scores, visible: spec.softmax(np.where(visible, scores, scores + masked)),
        "the score scale is applied to the heads": lambda scores, visible: spec.softmax(np.where(visible, 4 * scores, -np.inf)) / 4,
    }.items():
        said = planted(model, "kqv_out", lambda q, k, v, weights=weights: attended(model, q, k, v, weights))
        assert said.startswith(says[:-1])


@settings(max_examples=3)
@given(st.integers(0, 99))
def test_queries_and_keys_rotated_in_a_layer_without_rotation_are_named(seed):
    model = random_model(seed, family="smollm3", **SMALL | {"n_layers": 4})
    model = replace(model, config=replace(model.config, rope_layers=(0, 2, 3)))
    angles = spec.angles(np.arange(T), model.config.rope_base, model.config.rope_pairs)

    def turned(x):
        return spec.rotate(x.reshape(T, -1, model.config.head_dim), angles, model.config.rope).reshape(T, -1)

    def weights(scores, visible):
        return spec.softmax(np.where(visible, scores, -np.inf))

    said = planted(model, "kqv_out", lambda q, k, v: attended(model, turned(q), turned(k), v, weights))
    assert said == "queries and keys are rotated, as in other layers"


@settings(max_examples=3)
@given(st.integers(0, 99), st.sampled_from(["ffn_gate", "ffn_up", "ffn_down"]), st.floats(1.5, 9), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_step_inside_the_products_of_experts_is_named(seed, field, scale, tile):
    """In the product of every expert: its scale that is missing, a last tile that runs into the next token and row, inputs not summed."""
    model = random_model(seed, family="qwen3moe", **SMALL | {"ffn": 32, "experts": 5, "experts_used": 2})
    layers = [
        replace(layer, experts=tuple(replace(e, **{field: replace(getattr(e, field), scale=np.float32(scale))}) for e in layer.experts))
        for layer in model.layers
    ]
    model, name = replace(model, layers=tuple(layers)), f"ffn_moe_{field[4:]}"
    right = recorded(model, IDS)[Key(name, 1)].astype(np.float64)
    assert planted(model, name, lambda x, chosen: right.reshape(T, -1) / scale) == "the weight scale is missing"

    def run_over(x, chosen):
        flat = chosen.astype(int).ravel()
        rows, out = x.reshape(-1, x.size // T // (len(flat) // T if field == "ffn_down" else 1)), right.reshape(len(flat), -1).copy()
        for e, expert in enumerate(model.layers[1].experts):
            linear, slots = getattr(expert, field), np.flatnonzero(flat == e)
            following = np.append(rows[slots // (len(flat) // len(rows))][1:], 0 * rows[:1], axis=0)  # the next token of this expert
            matrix = products.rows_of(linear.weights, np.minimum(np.arange(linear.shape[0]) + 1, linear.shape[0] - 1))
            out[slots] += scale * following[: len(slots), :tile] @ matrix[:, :tile].T
        return out.reshape(T, -1)

    assert planted(model, name, run_over) == f"sums run {tile} inputs over the end of rows, into the next ones"

    def without_first(x, chosen):
        flat = chosen.astype(int).ravel()
        rows, out = x.reshape(-1, x.size // T // (len(flat) // T if field == "ffn_down" else 1)), right.reshape(len(flat), -1).copy()
        for e, expert in enumerate(model.layers[1].experts):
            linear, slots = getattr(expert, field), np.flatnonzero(flat == e)
            matrix = products.rows_of(linear.weights, np.arange(linear.shape[0]))
            out[slots] -= scale * rows[slots // (len(flat) // len(rows))][:, :8] @ matrix[:, :8].T
        return out.reshape(T, -1)

    assert planted(model, name, without_first) == "the first 8 inputs are not summed"


@settings(max_examples=8)
@given(st.sampled_from(["Kcur_rope", "Vcur"]), st.sampled_from([1, -2, 4, -8]), st.sampled_from(["stride", "place", "aligned"]))
def test_tensors_that_are_read_from_other_places_are_told(name, by, how):
    row, model = np.arange(T)[:, None], random_model(4, family="llama", **SMALL)
    starts = {"stride": row * (32 + by), "place": row * 32 + by, "aligned": row * 32 // 64 * 64}[how]
    source = (starts + np.arange(32)).clip(0, 32 * T - 1)

    def change(q, k, v):
        k, v = (x.ravel()[source] if name == own else x for own, x in (("Kcur_rope", k), ("Vcur", v)))
        return attended(model, q, k, v, lambda scores, visible: spec.softmax(np.where(visible, scores, -np.inf)))

    said = planted(model, "kqv_out", change)
    words = {
        "stride": f"rows are read by a stride that is {abs(by)} too {'large' if by > 0 else 'small'}",
        "place": f"numbers are read {abs(by)} {'behind' if by > 0 else 'before'} their place",
        "aligned": "rows are read from the last multiple of 64 before their start",
    }
    assert said == f"{name}: {words[how]}"


@settings(max_examples=6)
@given(st.sampled_from(["Qcur", "Kcur"]), st.sampled_from([1, 2, 8]))
def test_heads_that_are_read_as_if_padded_are_told(name, more):
    model = random_model(4, family="llama", **SMALL)
    c, angle = model.config, np.arange(T)[:, None] * model.rope_frequency.astype(np.float64)

    def rotated(x):
        heads = x.shape[1] // c.head_dim
        at = (np.arange(heads)[:, None] * (c.head_dim + more) + np.arange(c.head_dim)).ravel()
        read = np.append(x, np.zeros((T, heads * more)), axis=1)[:, at]
        return spec.rotate(read.reshape(T, heads, -1), angle, c.rope).reshape(T, -1)

    said = planted(model, f"{name}_rope", rotated)
    assert said == f"{name}: heads are read as if {more} numbers lay behind each, and zeros behind the row"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_codes_in_twos_complement_are_told(kind):
    model = random_model(3, family="llama", weights=kind, width=64, ffn=96, heads=4, kv_heads=2, head_dim=16, n_layers=2, vocab=80)
    right = FORMATS[kind]
    signed = tuple(replace(codes, table=(*range(8), *range(-8, 0)), bias=0) for codes in right.codes)
    linear = model.layers[1].attn_q
    matrix = weights_as(linear.weights.data.view(np.uint8), replace(right, codes=signed)).astype(np.float64)
    assert planted(model, "Qcur", lambda x: x @ matrix.T + linear.bias) == f"{kind}: codes are read with a sign, in two's complement"


@settings(max_examples=6)
@given(st.integers(0, 99), st.sampled_from(["attn_norm", "ffn_norm"]), st.sampled_from(["attn_norm", "ffn_norm", "layer 0", "result_norm"]))
def test_a_norm_with_all_weights_of_another_is_told(seed, name, other):
    model = random_model(seed, family="starcoder2", **SMALL)
    source = {"layer 0": model.layers[0], "result_norm": model}.get(other, model.layers[1])
    field = {"layer 0": name, "result_norm": "output_norm"}.get(other, other)
    assume(other != name)

    def normed(x):
        away = x - x.mean(axis=1, keepdims=True)
        root = np.sqrt(np.square(away).mean(axis=1, keepdims=True) + model.config.eps)
        return away / root * getattr(source, field) + getattr(source, f"{field}_bias")

    assert planted(model, name, normed) == f"the weight and the bias of {other} are used"


@pytest.mark.parametrize("name", ["Qcur", "ffn_down"])
@pytest.mark.parametrize(("scales", "minimums", "says"), [(15, 63, "scales"), (63, 15, "minimums"), (15, 15, "scales and minimums")])
def test_upper_bits_of_scales_and_minimums_that_are_lost_are_told(name, scales, minimums, says):
    model = random_model(3, family="llama", weights="Q4_K", width=256, ffn=256, heads=4, kv_heads=2, head_dim=64, n_layers=2, vocab=80)
    linear = getattr(model.layers[1], FIELDS[name])
    b = linear.weights.data.view(np.uint8).reshape(-1, 144)
    low, high, rest = b[:, 4:8].astype(int), b[:, 8:12].astype(int), b[:, 12:16].astype(int)
    scale = np.append(low & 63, (rest & 15 | low >> 6 << 4) & scales, axis=1)
    minimum = np.append(high & 63, (rest >> 4 | high >> 6 << 4) & minimums, axis=1)
    d, least = (np.ascontiguousarray(b[:, i : i + 2]).view(np.float16).astype(np.float64) for i in (0, 2))
    qs = b[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([qs & 15, qs >> 4], axis=2).reshape(-1, 8, 32)
    matrix = ((d * scale)[..., None] * codes - (least * minimum)[..., None]).reshape(256, 256)
    bias = 0 if linear.bias is None else linear.bias
    said = planted(model, name, lambda x: x @ matrix.T * (linear.scale or 1) + bias)
    assert said == f"Q4_K: upper bits of {says} are lost, where they lie apart"


MISREAD = {
    "Q6_K: scales inside a block are read without their sign": lambda scale: {"integers": replace(scale.integers, signed=False)},
    "MXFP4: the bytes of scales count as numbers themselves": lambda scale: {"table": tuple(np.arange(256) / 2)},
}


@pytest.mark.parametrize("says", MISREAD)
def test_scales_that_are_taken_for_other_integers_are_told(says):
    kind, shape = says.partition(":")[0], {"width": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "n_layers": 2, "vocab": 80}
    model, form = random_model(3, family="llama", weights=kind, **shape), FORMATS[kind]
    other, linear = replace(form, scale=replace(form.scale, **MISREAD[says](form.scale))), model.layers[1].ffn_up
    matrix, bias = weights_as(linear.weights.data.view(np.uint8), other).astype(np.float64), 0 if linear.bias is None else linear.bias
    assert planted(model, "ffn_up", lambda x: x @ matrix.T * (linear.scale or 1) + bias) == says


@pytest.mark.parametrize("family", ["gemma3", "qwen3moe"])
def test_edits_read_tensors_that_the_model_has(family):
    """Also where layers differ: not every layer rotates its queries and keys, or has a window."""
    model = random_model(3, **SMALL | {"n_layers": 3}, family=family, window=5, window_layers=(0,))
    model = replace(model, config=replace(model.config, rope_layers=(0, 2))) if model.config.rope != "none" else model
    sites = [replace(o, length=T) for o in operations(model, EXACT)]
    keys = {TOKENS, *(site.key for site in sites)}
    for site in sites:
        for edit in (edit for kind in KINDS for edit in edits_of(site, kind)):
            tree = edit.tree(edit.grid[0]) if edit.grid else edit.tree
            assert {leaf.what for leaf in tensors(tree)} <= keys, (site.key, edit.words)
