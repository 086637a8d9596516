"""The catalogue of mistakes: every entry can happen, names itself, and is called the same at one operation and in a whole engine."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from dumps import family_dump, recorded, with_tensor
from engine_runs import TOKENS_OF_300, judge_by, logits_of
from models import random_model

from bitnet_np import spec
from bitnet_np.engine.dialects import EXACT
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.law.formats import NARROW
from bitnet_np.judge.measures import judge
from bitnet_np.judge.mistakes.catalogue import CATALOGUE, HIDDEN
from bitnet_np.judge.mistakes.hypotheses import hypotheses, in_engine, sites
from bitnet_np.judge.variant import Variant
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.model.records import Yarn
from bitnet_np.traces.points import Key

SHAPE = {"width": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "n_layers": 3, "tied": False, "window": 4}


@cache
def models():
    """Models of every family, and some with traits that a family may have or lack."""
    scaled = {"gemma3": {"rope_scaling": 4.0}}
    drawn = [random_model(0, family=family, **SHAPE | scaled.get(family, {})) for family in ARCHITECTURES]
    drawn += [random_model(1, family="gptneox", rope_width=8, parallel_residual=True, **SHAPE | {"kv_heads": 4})]
    drawn += [random_model(2, family="gpt2", activation="gelu", **SHAPE | {"window": None})]
    drawn += [random_model(2, family="llama", weights="ternary", inner_norms=True, rope_scaling=2.0, **SHAPE | {"ffn": 128})]
    drawn += [random_model(2, family="qwen3", yarn=Yarn(4.0, 16), rope_magnitude=1.2, pooling="mean", **SHAPE | {"head_dim": 12})]
    return drawn


# --- the catalogue --------------------------------------------------------------------------------------------------------------------


def test_ids_are_told_apart():
    ids = [mistake.id for mistake in (*CATALOGUE, *HIDDEN)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z_]+\.[a-z0-9_]+", id) for id in ids)


def test_every_entry_is_tried_somewhere_with_its_numbers():
    """In whole engines; test_planted.py plants each in a tensor."""
    engines = [trial for model in models() for trial in in_engine(Variant("ours", model, EXACT))]
    of_engines = {mistake.id for mistake in CATALOGUE if mistake.fault and (mistake.engine is not None or mistake.likely)}
    assert of_engines == {trial.id for trial in engines}
    assert all(mistake.at or mistake.id in of_engines for mistake in CATALOGUE)
    assert not any("{" in trial.text for trial in engines)


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def assert_mistakes_name_themselves(model, texts=None):
    """No other mistake is blamed for those that one made, unless it makes the same logits. texts: of some; None: of every third."""
    base, ids = Variant("ours", model, EXACT), TOKENS_OF_300
    mine, judge_theirs = logits_of(base, ids), judge_by(base, ids)
    every = list(in_engine(base))
    mistakes = {trial.text: trial.variant(base) for trial in every}
    assert len(mistakes) == len(every)
    changed = 0
    for text in texts or [*mistakes][::3]:
        theirs = logits_of(mistakes[text], ids)
        if judge(mine, theirs).verdict <= Verdict.ROUNDING:
            continue
        changed += 1
        judgement = judge_theirs(theirs)
        assert judgement.verdict in (Verdict.WRONG, Verdict.FLIPS), (text, judgement)
        if judgement.verdict is Verdict.FLIPS:
            continue
        if judgement.explanation.split(", in the dialect")[0] == text.split(", in the dialect")[0]:
            continue  # a large mistake outweighs the differences between dialects
        same = logits_of(mistakes[judgement.explanation], ids)
        assert judge(same, theirs).verdict <= Verdict.ROUNDING, (text, judgement.explanation)
    assert changed >= (15 if texts is None else len(texts))


SMALL = {"vocab": 300, "n_layers": 2, "width": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "tied": False, "context": 64}


def test_known_mistakes_name_themselves():
    assert_mistakes_name_themselves(random_model(3, **SMALL))


FAMILY = {  # what a family adds to the shape
    "bitnet": {},
    "llama": {"rope_scaling": 4.0},
    "qwen2": {},
    "qwen3": {"yarn": Yarn(4.0, 16), "rope_magnitude": 1.2},
    "gemma3": {"rope_scaling": 4.0, "window": 3},
    "gptneox": {"rope_width": 8, "parallel_residual": True},
    "gpt2": {},
    "qwen2moe": {"ffn": 48},
}
WITHIN_ROUNDING = {("qwen3", "norm.epsilon_outside"), ("gemma3", "norm.epsilon_outside")}
"""What changes logits no more than roundings do: in the norms of heads, and in those behind both branches."""


@cache
def own_mistakes():
    """By family, the mistakes that no family before it can make, one of each id."""
    known, own = {trial.text for trial in in_engine(Variant("", random_model(3, **SMALL), EXACT))}, {}
    for family, more in FAMILY.items():
        every = list(in_engine(Variant("", random_model(3, family=family, **SMALL, **more), EXACT)))
        new = [cause for cause in every if cause.text not in known and (family, cause.id) not in WITHIN_ROUNDING]
        own[family] = {cause.id: cause.text for cause in new}
        known.update(cause.text for cause in every)
    return own


@pytest.mark.usual("gptneox", "gemma3", "qwen2moe")
@pytest.mark.parametrize("family", FAMILY)
def test_known_mistakes_of_a_family_name_themselves(family):
    assert_mistakes_name_themselves(random_model(3, family=family, **SMALL, **FAMILY[family]), [*own_mistakes()[family].values()])


def test_known_mistakes_of_norms_inside_matrices_name_themselves():
    texts = ["at ffn_down_in of every layer: the norm is missing: its input comes out unchanged"]
    assert_mistakes_name_themselves(random_model(3, family="gptneox", inner_norms=True, **SMALL, **FAMILY["gptneox"]), texts)


# --- single operations of other families ----------------------------------------------------------------------------------------------


def _narrow(linear):
    return replace(linear, weights=NARROW["float16"](linear.weights.astype(np.float64)).astype(np.float32))


@pytest.mark.parametrize("name", ["ffn_moe_logits", "ffn_moe_up"])
def test_weights_of_routers_and_experts_in_16_bits_are_no_fault(name):
    model, ids, points = family_dump("qwen3moe")
    first, *others = model.layers
    changed = [replace(expert, ffn_up=_narrow(expert.ffn_up)) for expert in first.experts]
    first = replace(first, ffn_gate_inp=_narrow(first.ffn_gate_inp), experts=tuple(changed))
    wrong = recorded(replace(model, layers=(first, *others)), ids)
    report = judge_trace(model, with_tensor(points, Key(name, 0), wrong[Key(name, 0)]), ids)
    assert [(o.verdict, o.hypothesis) for o in report.operations if o.key == Key(name, 0)] == [
        (Verdict.NARROW, "weights are rounded to float16")
    ]


@pytest.mark.parametrize(("family", "kind"), [("gemma2", "float16"), ("llama", "bfloat16")])
def test_an_activation_in_16_bits_is_no_fault(family, kind):
    """ggml reads GELU off a table of float16: its input and its value are rounded."""
    model, ids, points = family_dump(family)
    narrow, right = NARROW[kind], spec.ACTIVATIONS[model.config.activation]
    gate, up = (points[Key(name, 1)].astype(np.float64) for name in ("ffn_gate", "ffn_up"))
    wrong = narrow(right(narrow(gate), np.ones_like(gate))) * up
    report = judge_trace(model, with_tensor(points, Key("ffn_out", 1), wrong), ids)
    assert [(o.verdict, o.hypothesis) for o in report.operations if o.key == Key("ffn_out", 1)] == [
        (Verdict.NARROW, f"the activation's input and value are rounded to {kind}, as in a table of it")
    ]


def test_a_mistake_may_be_in_the_norms_of_all_heads():
    """Queries' and keys' heads share a function. What is in these norms alone is not called one of every norm."""
    model = random_model(1, family="qwen3", **SHAPE)
    some = [mistake for mistake in CATALOGUE if mistake.id in ("norm.missing", "norm.after_rope")]
    tried = {trial.text: {key.name for key in trial.computes} for trial in hypotheses(sites(model, EXACT), False, some)}
    missing = "the norm is missing: its input comes out unchanged"
    of_heads, rotations = {"Qcur_normed", "Kcur_normed"}, {"Qcur_rope", "Kcur_rope"}
    assert tried[f"at Qcur_normed, Kcur_normed of every layer: {missing}"] == of_heads
    assert tried[f"in every norm of the layers: {missing}"] == of_heads | {"attn_norm", "ffn_norm"}
    assert of_heads | rotations in [names for text, names in tried.items() if "the rotation comes before the norm of heads" in text]
