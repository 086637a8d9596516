"""ggml's attention over a narrow KV cache is recognised, and nothing else is taken for it."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from dumps import only, recorded, trace

from bitnet_np import check
from bitnet_np.engine.backend import Wrapped
from bitnet_np.engine.dialects import LLAMA_CPP
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.law.precision import FLASH, FLOAT32
from bitnet_np.judge.law.roundings import to_bfloat16
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu
from bitnet_np.model.records import MATRICES
from bitnet_np.model.rope import rope_frequencies
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

MODEL = random_model(4, family="llama", heads=4, kv_heads=2, head_dim=32, n_layers=2)
IDS = np.arange(14) * 5 % MODEL.config.vocab


def flash(q, keys, values, slot, position, window, scale, cap, scaled=False):
    """ggml's flash attention over a float16 cache: one key after another, sums of values in float16. scaled: queries are scaled first."""
    f32, f16 = np.float32, np.float16
    scale = f32(q.shape[2] ** -0.5) if scale is None else scale
    q, scale = (q * scale, f32(1)) if scaled else (q, scale)
    out = np.empty_like(q)
    q, keys, values = q.astype(f16).astype(f32), keys[0].astype(f16), values[0].astype(f16)
    group = q.shape[1] // keys.shape[1]
    for t, h in np.ndindex(q.shape[:2]):
        largest, total, summed = f32(-np.inf), f32(0), np.zeros(q.shape[2], f16)
        for s in range(position[t] + 1):
            score = f32(np.dot(q[t, h], keys[s, h // group].astype(f32))) * scale
            before, largest = largest, max(largest, score)
            shrink, weight = np.exp(before - largest), np.exp(score - largest)
            summed = ((summed * f16(shrink)).astype(f16) + (values[s, h // group] * f16(weight)).astype(f16)).astype(f16)
            total = total * shrink + weight
        out[t, h] = summed.astype(f32) / total
    return out


def rounding(kind, queries):
    """Attention over a cache of a type, with queries of a type."""

    def attend(q, keys, values, *more):
        k, v = (cpu.round_as(x, kind) for x in (keys, values))
        return cpu.attend(cpu.round_as(q, queries), k, v, *more)

    return attend


def scaled_queries(q, keys, values, slot, position, window, scale, cap):
    """Attention over a float16 cache, in a graph that scales queries first."""
    q, k, v = (cpu.round_as(x, "float16") for x in (q * np.float32(q.shape[2] ** -0.5), keys, values))
    return cpu.attend_float16(q, k, v, slot, position, window, np.float32(1), cap)


def dump(attend, model=MODEL):
    """The tensors of an engine with this attention."""
    return recorded(model, IDS, ops=Wrapped(cpu, attend=attend))


ENGINES = {
    "flash": (flash, "read.ggml_flash"),
    "flash of scaled queries": (partial(flash, scaled=True), "read.ggml_flash"),
    "q8_0": (rounding("q8_0", "q8_0"), "cache.ggml"),
    "q4_0": (rounding("q4_0", "q8_0"), "cache.ggml"),
    "bfloat16": (rounding("bfloat16", "bfloat16"), "cache.ggml"),
    "scaled queries": (scaled_queries, "cache.float16_scaled"),
}
DECLARED = dict.fromkeys(("flash", "flash of scaled queries"), "--as llama.cpp-flash") | {"scaled queries": "--as llama.cpp-f16kv"}


@pytest.mark.parametrize("name", ENGINES)
def test_an_undeclared_cache_is_no_fault_and_assumed_from_there_on(name):
    attend, cause = ENGINES[name]
    points = dump(attend)
    report = judge_trace(MODEL, trace(points), IDS)
    assert report.verdict == Verdict.NARROW, report.reason
    narrow = [o for o in report.operations if o.verdict == Verdict.NARROW]
    assert [(o.key, o.mistake) for o in narrow] == [(Key("kqv_out", 0), cause)]
    assert DECLARED.get(name, f"--precision kv={name}") in report.reason
    assert check(MODEL, IDS, trace(points), precision=FLOAT32, budget=0).verdict == Verdict.WRONG
    assert report.precision == (FLASH if "flash" in name else report.precision)


@pytest.mark.parametrize("names", [("l_out", "result_output"), ("result_output",)], ids=["across operations", "logits alone"])
def test_a_cache_is_recognised_behind_other_operations(names):
    attend, cause = ENGINES["q8_0"]
    part = only(dump(attend), *names)
    report = check(MODEL, IDS, part)
    assert report.verdict == Verdict.NARROW, report.reason
    assert "--precision kv=q8_0" in report.reason
    assert [o.mistake for o in report.operations if o.verdict == Verdict.NARROW] == ([cause] if len(names) > 1 else [])
    assert check(MODEL, IDS, part, precision=FLOAT32).verdict == Verdict.WRONG


def test_a_cache_is_recognised_by_the_logits_of_another_dialect():
    """llama.cpp reads GELU off a table, which moves some keys to other codes."""
    model = random_model(4, family="gemma2", heads=4, kv_heads=2, head_dim=32, n_layers=4, width=64, ffn=96, window=None)
    ops = Wrapped(cpu, attend=rounding("q8_0", "q8_0"))
    logits = forward_full(model, IDS[None], dialect=LLAMA_CPP, ops=ops)[0]
    report = check(model, IDS, logits)
    assert report.verdict == Verdict.NARROW, report.reason
    assert "declare it (--precision kv=q8_0); in the dialect llama.cpp" in report.reason


def test_a_bug_behind_a_cache_is_named():
    """RoPE without its factors and a cache of Q8_0 together, seen in the first layer's output alone."""
    wrong = replace(MODEL, rope_frequency=rope_frequencies(MODEL.config.rope_base, MODEL.config.head_dim))
    report = check(MODEL, IDS, trace({(first := Key("l_out", 0)): dump(ENGINES["q8_0"][0], wrong)[first]}))
    assert report.verdict == Verdict.WRONG
    assert "the factors of the frequencies are not divided out" in report.first_wrong.hypothesis
    assert "rounded to q8_0, as in a KV cache of ggml" in report.first_wrong.hypothesis


def test_rounded_weights_are_not_taken_for_a_cache():
    def narrow(layer):
        linears = {name: getattr(layer, name) for name in MATRICES}
        rounded = {name: to_bfloat16(linear.weights).astype(np.float32) for name, linear in linears.items()}
        return replace(layer, **{name: replace(linear, weights=rounded[name]) for name, linear in linears.items()})

    model = replace(MODEL, layers=tuple(map(narrow, MODEL.layers)))
    report = check(MODEL, IDS, only(recorded(model, IDS), "l_out"))
    assert report.verdict == Verdict.NARROW, report.reason
    assert {o.mistake for o in report.operations} == {"weights.narrow_matrices"}


def test_right_numbers_with_a_bug_are_not_taken_for_a_cache():
    """Other values in flash attention, whose sums are on the grid all the same; and errors that its bounds allow, off the grid."""
    noise = np.random.default_rng(0).uniform(-3e-4, 3e-4, (len(IDS), 4, 32))
    wrong = {
        "flash, values of the next head": lambda q, k, v, *more: flash(q, k, v[:, :, ::-1], *more),
        "values times 1.001": lambda q, k, v, *more: cpu.attend(q, k, v * np.float32(1.001), *more),
        "noise": lambda *inputs: (cpu.attend(*inputs) * (1 + noise)).astype(np.float32),
    }
    for name, attend in wrong.items():
        report = check(MODEL, IDS, trace(dump(attend)), precision=FLOAT32 if name == "noise" else None, budget=0)
        assert report.verdict == Verdict.WRONG, name
        assert report.first_wrong.key == Key("kqv_out", 0), name
