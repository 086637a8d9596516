"""Experts under the judge: honest engines, and choices between equals, which are discrete as codes are."""

from dataclasses import replace

import numpy as np
import pytest
from dumps import recorded, trace, without_codes
from judging.experts import NORMALIZED, SHARED, TOKENS_OF_EXPERTS, MixtureEngine
from judging.pooling import EMBEDDING, PooledEngine
from judging.rotations import STRETCHED, TWO_BASES, RotationEngine
from models import random_model

from bitnet_np import EXACT, check
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.honest_engines import other_choices
from bitnet_np.judge.law.precision import FLOAT32, Precision
from bitnet_np.judge.variant import Variant, variant_logits
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu
from bitnet_np.traces.points import Key

TOKENS = np.arange(12) * 5 % 50
MODELS = {
    "mixtral": random_model(4, family="llama", experts=5, experts_used=2, ffn=48),
    "qwen2moe": random_model(4, family="qwen2moe", ffn=48),
}


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        (MixtureEngine, NORMALIZED),
        (MixtureEngine, SHARED),
        (RotationEngine, TWO_BASES),
        (RotationEngine, STRETCHED),
        (PooledEngine, EMBEDDING),
    ],
    ids=["normalized", "shared", "two bases", "stretched", "embedding"],
)
def test_an_honest_engine_is_left_alone(engine, model):
    dump = engine(model, TOKENS_OF_EXPERTS).run()
    assert judge_trace(model, trace(dump), TOKENS_OF_EXPERTS, precision=FLOAT32).verdict <= Verdict.FLIPS


SWAP = np.array([0, 3, 2, 1, 4], np.int32)
"""Experts 1 and 3 in each other's place."""


def dump_of(variant):
    return without_codes(recorded(variant.model, TOKENS, ops=variant.ops, edit=variant.edit))


def tied(model):
    """The model with experts 1 and 3 of layer 0 whose logits are equal."""
    layer = model.layers[0]
    table = layer.ffn_gate_inp.weights.copy()
    table[3] = table[1]
    table.flags.writeable = False
    first = replace(layer, ffn_gate_inp=replace(layer.ffn_gate_inp, weights=table))
    return replace(model, layers=(first, *model.layers[1:]))


@pytest.mark.parametrize("names", [None, ("ffn_norm", "ffn_moe_logits", "ffn_moe_out")])
def test_a_choice_between_equal_experts_is_a_flip_and_no_fault(names):
    """Where exactly one of both is taken, an engine may take the other. Everything behind is judged by its own choice, which a dump of the
    logits and the sum alone does not show."""
    model, key = tied(MODELS["mixtral"]), Key("ffn_moe_topk", 0)
    variant = Variant("", model, EXACT).with_operations(top_experts=lambda logits, k: SWAP[cpu.top_experts(logits, k)])
    points, ours = dump_of(variant), recorded(model, TOKENS)
    assert (points[key] != ours[key]).any()
    assert np.abs(points[Key("ffn_moe_out", 0)] - ours[Key("ffn_moe_out", 0)]).max() > 0.1
    points = {k: x for k, x in points.items() if k.layer == 0 and (names is None or k.name in names)}
    report = judge_trace(model, trace(points, TOKENS), TOKENS)
    assert report.verdict <= Verdict.FLIPS, report.reason
    if names is None:
        assert [o.key for o in report.operations if o.verdict is Verdict.FLIPS] == [key]


@pytest.mark.parametrize("precision", [FLOAT32, Precision(act="bfloat16")])
def test_logits_of_other_choices_between_nearly_equal_experts_are_flips(precision):
    model, tokens = MODELS["qwen2moe"], np.arange(40) * 7 % 50
    variant = other_choices(Variant("", model, EXACT), precision)
    logits = variant_logits(variant, tokens[None])[0]
    assert np.abs(logits - forward_full(model, tokens[None])[0]).max() > 0.1
    assert check(model, tokens, logits, precision=precision).verdict is Verdict.FLIPS
    assert other_choices(Variant("", random_model(4, family="llama", experts=2, experts_used=2), EXACT)) is None
    assert other_choices(Variant("", random_model(4), EXACT)) is None


def test_a_choice_of_an_expert_that_is_not_as_good_is_a_fault():
    model = MODELS["mixtral"]
    points = without_codes(recorded(model, TOKENS))
    key = Key("ffn_moe_topk", 1)
    points[key] = points[key].copy()
    points[key][7, 1] = next(e for e in range(5) if e not in points[key][7])
    report = judge_trace(model, trace(points, TOKENS), TOKENS)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, key)


def test_the_order_of_a_tokens_experts_is_looked_through():
    """Of those that sort them by number, say."""
    model = MODELS["mixtral"]
    points = without_codes(recorded(model, TOKENS))
    for n in range(2):
        order = np.argsort(points[Key("ffn_moe_topk", n)], axis=1)
        assert (order[:, 0] == 1).any()
        for name in ("topk", "weights", "gate", "up", "swiglu", "down"):
            key = Key(f"ffn_moe_{name}", n)
            points[key] = np.take_along_axis(points[key].reshape(12, 2, -1), order[:, :, None], axis=1).reshape(12, -1)
    report = judge_trace(model, trace(points, TOKENS), TOKENS)
    assert report.verdict is Verdict.ROUNDING
    assert any("not in the order of their logits" in note for note in report.notes)
    points[Key("ffn_moe_gate", 1)] = points[Key("ffn_moe_gate", 1)].reshape(12, 2, -1)[:, ::-1].reshape(12, -1)
    report = judge_trace(model, trace(points, TOKENS), TOKENS)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("ffn_moe_gate", 1))


@pytest.mark.parametrize("bad", [[5, 0, 1], [-1, 0, 1], [2, 2, 1], [0.5, 1, 2]])
def test_numbers_that_are_no_experts_are_invalid(bad):
    model = replace(MODELS["mixtral"], config=replace(MODELS["mixtral"].config, experts_used=3))
    points = without_codes(recorded(model, TOKENS))
    key = Key("ffn_moe_topk", 0)
    points[key] = points[key].astype(np.float32)
    points[key][3] = bad
    report = judge_trace(model, trace(points, TOKENS), TOKENS)
    assert report.verdict is Verdict.INVALID
    assert "expected different ones of 0 to 4" in report.reason
