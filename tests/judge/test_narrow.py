"""The bounds of narrow types: honest engines stay within them, and a bound is not much wider than needed."""

from dataclasses import replace

import numpy as np
import pytest
from dumps import recorded, trace
from engine_runs import float16_scales

from bitnet_np.engine.backend import Wrapped
from bitnet_np.engine.dialects import EXACT
from bitnet_np.engine.network import Runtime
from bitnet_np.engine.tokens import Tokens
from bitnet_np.judge.bounds import bound_of, within
from bitnet_np.judge.dump import judge_operations, judge_trace
from bitnet_np.judge.law import graph
from bitnet_np.judge.law.expected import Storage
from bitnet_np.judge.law.formats import NARROW, half_steps, rounded
from bitnet_np.judge.law.precision import Precision
from bitnet_np.judge.law.roundings import to_bfloat16
from bitnet_np.judge.options import Options
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key, Trace
from scripts.judging.engine import KINDS, Engine, accumulate, bfloat16, precise
from scripts.judging.faults import silu


def judged(model, ids, dump, **how):
    return judge_trace(model, trace(dump), ids, **how)


# --- types ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "least"), [("float16", 0.9), ("bfloat16", 0.9), ("q8_0", 0.5)])
def test_half_a_step_is_the_largest_error_of_a_type(kind, least):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 64)) * (1 if kind == "q8_0" else np.exp(rng.uniform(-20, 3, (50, 64))))
    share = np.abs(NARROW[kind](x) - x) / half_steps(x, kind)
    assert least < share.max() <= 1


# --- operations -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "name"), [("granite", "l_out"), ("gemma2", "inp_scaled")])
def test_a_rounded_factor_is_shared_by_all_elements(family, name):
    """mlx-lm keeps the factors of Granite and Gemma in the type of the activations."""
    model = random_model(1, family=family, n_layers=1, width=64, heads=4, kv_heads=4, head_dim=16, ffn=96)
    c = replace(model.config, residual_scale=0.4, embedding_scale=64.7)
    (operation,) = (o for o in graph.operations(replace(model, config=c), EXACT) if o.key.name == name)
    inputs = to_bfloat16(np.random.default_rng(0).standard_normal((len(operation.inputs), 2000, 64)))
    factor = float(to_bfloat16(np.array(c.residual_scale if name == "l_out" else c.embedding_scale)))
    computed = inputs[0] + to_bfloat16(factor * inputs[1]) if name == "l_out" else factor * inputs[0]
    storage = Storage(("bfloat16",) * len(inputs), "bfloat16")
    verdict, reason, _ = within(operation.expected(storage, *inputs), to_bfloat16(computed))
    assert verdict <= Verdict.FLIPS, reason


def test_rounded_weights_are_shared_by_tokens_whose_inputs_are_alike():
    """The rows of attention's output often are: the roundings of a few weights then are a factor of everything."""
    model = random_model(1, family="llama", n_layers=1, width=64, heads=4, kv_heads=4, head_dim=16, ffn=96)
    (operation,) = (o for o in graph.operations(model, EXACT) if o.key.name == "attn_o_out")
    matrix, bias = (x.astype(np.float64) for x in (model.layers[0].attn_output.weights, model.layers[0].attn_output.bias))
    storage = Storage(("bfloat16",), "bfloat16")
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x = to_bfloat16(np.where(np.arange(64) == 5, 30.0, 1.0) * rng.standard_normal(64) + 0.05 * rng.standard_normal((48, 64)))
        verdict, reason, _ = within(operation.expected(storage, x), to_bfloat16(x @ to_bfloat16(matrix).T + to_bfloat16(bias)))
        assert verdict <= Verdict.FLIPS, (seed, reason)


@pytest.mark.usual(4)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["bitnet-b1.58", "llama", "gpt2", "qwen2", "gptneox"])
def test_every_operation_of_every_family_has_room_for_its_roundings(family, kind):
    """Inputs and result rounded once each, the least that an honest engine does; and the bound is at most 20 times the mean error."""
    model = random_model(1, family=family, n_layers=1, width=64, heads=4, kv_heads=4, head_dim=16, ffn=96)
    ids = np.arange(12) * 7 % model.config.vocab
    values = {graph.TOKENS: ids}
    for operation in graph.operations(model, EXACT, scores=[0]):
        inputs = [values[key] for key in operation.inputs]
        values[operation.key] = NARROW[kind](operation.evaluate(*inputs).value)
        if operation.key.name.endswith(("_codes", "_scale")):
            continue
        storage = Storage(tuple("float32" if key == graph.TOKENS else kind for key in operation.inputs), kind)
        expected = operation.expected(storage, *inputs)
        verdict, reason, ratio = within(expected, values[operation.key])
        assert verdict <= Verdict.FLIPS, (operation.key, reason)
        assert 1e-3 < ratio <= 1, operation.key


def test_float32_adds_nothing():
    model = random_model(1, family="llama", n_layers=1)
    ids = np.arange(5)
    values = {graph.TOKENS: ids}
    for operation in graph.operations(model, EXACT):
        inputs = [values[key] for key in operation.inputs]
        expected = operation.evaluate(*inputs)
        values[operation.key] = expected.value
        wide = operation.expected(Storage(("float32",) * len(inputs), "float32"), *inputs)
        np.testing.assert_array_equal(wide.worst, expected.worst)
        cached = operation.expected(Storage(("float32",) * len(inputs), "float32", Precision(kv="float16")), *inputs)
        grows = bound_of(cached, expected.value.shape)[1].sum() > bound_of(wide, expected.value.shape)[1].sum()
        assert grows == (operation.key.name == "kqv_out"), operation.key


def test_a_head_of_few_bits_is_within_its_type_and_no_other():
    model = random_model(2, family="llama", n_layers=1, tied=False)
    x = np.random.default_rng(0).standard_normal((9, model.config.width))
    operation = list(graph.operations(model, EXACT))[-1]
    head = rounded(model.head.astype(np.float64), "int4")
    theirs = (x @ head.T).astype(np.float32).astype(np.float64)
    verdicts = {}
    for kind in ("float32", "int8", "q6_K", "int4"):
        expected = operation.expected(Storage(("float32",), "float32", Precision(head=kind)), x)
        verdicts[kind] = within(expected, theirs)[0]
    assert verdicts["int4"] == Verdict.ROUNDING
    assert verdicts["float32"] == verdicts["int8"] == verdicts["q6_K"] == Verdict.WRONG


def test_scales_in_float16_are_within_their_type_alone():
    """The scales, the codes that they flip, and the products."""
    model = random_model(3, n_layers=1)
    dump = recorded(model, np.arange(20), ops=Wrapped(cpu, quantize=float16_scales))
    assert judged(model, np.arange(20), dump, precision=Precision(scale="float16")).verdict <= Verdict.FLIPS
    strict = judged(model, np.arange(20), dump, precision=Precision())
    assert {o.key.name for o in strict.operations if o.verdict == Verdict.WRONG} > {"attn_norm_scale", "Qcur", "ffn_down"}


# --- whole dumps ----------------------------------------------------------------------------------------------------------------------


def dump_of(kind, seed, faults=None, layers=None, **shape):
    """A model, token ids, and the dump of an engine of this kind, with faults in some layers."""
    model = random_model(seed, head_dim=32, **shape)
    ids = np.random.default_rng(seed).integers(0, model.config.vocab, 11)
    return model, ids, Engine(model, ids, faults or {}, layers, **KINDS[kind]).run()


@pytest.mark.usual(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_honest_engines_are_left_alone(kind, seed):
    model = random_model(seed, head_dim=32)
    ids = np.random.default_rng(seed).integers(0, model.config.vocab, 9 + seed)
    for dot in (precise, accumulate(8)):
        report = judged(model, ids, Engine(model, ids, dot=dot, **KINDS[kind]).run())
        assert report.verdict <= Verdict.NARROW, report.reason
        assert (report.verdict == Verdict.NARROW) == ("cache" in kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_is_the_headline_and_never_a_rounding(kind):
    wrong = {"ffn_out": lambda e, n: silu(e.at("ffn_gate", n)) * e.at("ffn_up", n)}
    report = judged(*dump_of(kind, 4, wrong, (1,)))
    assert report.reason == "WRONG at layer 1 ffn_out: SiLU(gate) * up instead of relu(gate)^2 * up"


def test_a_mistake_in_attention_is_seen_through_a_narrow_cache():
    """In the first layer, where nothing has shown yet that the cache is narrow."""
    wrong = {"kqv_out": lambda e, n: e.attend(n, scale=1.0)}
    report = judged(*dump_of("q8_0 KV cache", 4, wrong, (0,), heads=4, kv_heads=2))
    assert report.first_wrong.key.layer == 0
    assert report.first_wrong.mistake == "attention.unscaled"
    assert report.first_wrong.hypothesis.endswith("; and keys and values are rounded, as a cache of q8_0 does")


@pytest.mark.parametrize(("kind", "field", "right"), [("bfloat16", "act", "bfloat16"), ("q8_0 KV cache", "kv", "q8_0")])
def test_what_is_declared_is_a_floor_and_all_there_is_if_strict(kind, field, right):
    model, ids, dump = dump_of(kind, 3)
    dump = {key: dump[key] for key in (Key("inp_embd", None), Key("attn_norm", 0))} if field == "act" else dump
    declared = judged(model, ids, dump, precision=Precision(**{field: right}))
    assert declared.verdict <= Verdict.FLIPS
    assert f"judged in the declared precision: {field}={right}" in declared.notes
    for other in ("float32", "float16"):
        how = Options(Precision(**{field: other}), strict=True)
        assert judge_operations(Runtime(model, EXACT).checked(), Tokens.whole(ids[None]), trace(dump), how).verdict == Verdict.WRONG
    assert judged(model, ids, dump, precision=Precision(**{field: "float16"})).verdict <= Verdict.NARROW
    note = judged(model, ids, dump).notes[0]
    assert note.startswith("judged as bfloat16, read off the dump: " if field == "act" else "a KV cache of q8_0")


@pytest.mark.parametrize(("offset", "is_right"), [(1.0, True), (0.0, False)])
def test_a_norm_rounds_its_weight_as_the_file_has_it(offset, is_right):
    """Gemma's weights are stored without the 1 that is added to them: near -1 their rounding is large beside the sum."""
    model = random_model(1, family="gemma", n_layers=1)
    rng, c = np.random.default_rng(2), model.config
    weight = (-1 + 0.05 * rng.standard_normal(c.width)).astype(np.float32)
    x = bfloat16(rng.standard_normal((6, c.width)).astype(np.float32))
    y = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + np.float32(c.eps)) * (1 + bfloat16(weight))
    model = replace(model, output_norm=1 + weight, norm_offset=offset)
    trace = Trace({Key("l_out", 0): x, Key("result_norm", None): bfloat16(y)}, None, "dump")
    report = judge_operations(Runtime(model).checked(), Tokens.whole(rng.integers(0, c.vocab, (1, 6))), trace, Options(budget=0))
    assert (report.operations[-1].verdict <= Verdict.FLIPS) == is_right
