"""Logits alone, and layer outputs alone: mistakes of one operation, of one layer, and of the prompt are tried in our engine and named."""

from dataclasses import replace

import numpy as np
import pytest
from dumps import LOGITS, only, recorded, trace

from bitnet_np import EXACT, check, forward_full
from bitnet_np.judge.mistakes.catalogue import at_operation
from bitnet_np.judge.mistakes.hypotheses import sites
from bitnet_np.judge.variant import Variant, variant_logits, with_computed
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

MODEL = random_model(5, family="llama", n_layers=2, vocab=64)
IDS = np.random.default_rng(2).permutation(64)[:10]
GRAPH = {site.key: site for site in sites(MODEL, EXACT)}
BASE = Variant("ours", MODEL, EXACT)
ROTATED = [Key(name, n) for name in ("Qcur_rope", "Kcur_rope") for n in range(2)]


def engine_with(mistake, *keys):
    """Our engine with a known mistake, by its id, in some operations."""
    computes = {key: next(trial.computes[key] for trial in at_operation(GRAPH[key]) if trial.id == mistake) for key in keys}
    return with_computed(BASE, mistake, computes, IDS)


def judged(variant, *names):
    """The report on an engine's logits, and on its tensors with these names."""
    return check(MODEL, IDS, only(recorded(MODEL, IDS, edit=variant.edit), "result_output", *names))


def test_an_engine_without_a_change_has_our_bits():
    for variant in (BASE, with_computed(BASE, "", {}, IDS)):
        np.testing.assert_array_equal(variant_logits(variant, IDS[None]), forward_full(MODEL, IDS[None]))


@pytest.mark.usual(2)
@pytest.mark.parametrize(
    ("mistake", "keys", "says"),
    [
        ("norm.weight_missing", [Key("ffn_norm", 1)], "at ffn_norm of layer 1: the norm's weight is missing"),
        (
            "attention.last_only",
            [Key("kqv_out", 1)],
            "at kqv_out of layer 1: only the last 2 tokens are seen, as in a window, or in a ring of so many slots",
        ),
        ("rope.positions", ROTATED[:2], "at Qcur_rope of every layer: positions are too large by 1"),
        ("rope.pairs", ROTATED, "in RoPE: pairs are "),
        ("residual.twice", [Key("l_out", 0)], "at l_out of layer 0: the residual, ffn_inp, is applied twice"),
    ],
)
def test_a_mistake_of_single_operations_is_named_by_logits_alone(mistake, keys, says):
    report = judged(engine_with(mistake, *keys))
    assert report.verdict == Verdict.WRONG
    assert report.logits.explanation.startswith(says)


def test_a_head_of_int8_is_a_rounding_unless_nothing_is_rounded():
    changed, says = engine_with("head.int8", LOGITS), "result_norm: rounded to int8 with a scale for each row"
    report = judged(changed)
    assert report.verdict == Verdict.NARROW
    assert report.reason.startswith(says)
    exact = check(MODEL, IDS, only(recorded(MODEL, IDS, edit=changed.edit), "result_output"), precision="exact")
    assert exact.verdict == Verdict.WRONG


def test_a_mistake_in_queries_and_keys_is_named_by_the_outputs_of_layers():
    report = judged(engine_with("rope.pairs", *ROTATED), "l_out")
    assert report.first_wrong.key == Key("l_out", 0)
    assert report.first_wrong.hypothesis.startswith("in RoPE: pairs are ")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (np.r_[IDS[:1], IDS], "the first token is fed twice"),
        (np.r_[IDS, IDS], "the cache holds the same prompt already"),
        ((IDS + 1) % 64, "token ids are off by 1"),
    ],
)
def test_another_prompt_is_named_by_logits_alone(prompt, says):
    logits = forward_full(MODEL, prompt[None])[0, -len(IDS) :]
    assert check(MODEL, IDS, trace({LOGITS: logits})).logits.explanation.startswith(says)


def test_weights_of_fewer_bits_are_no_fault_by_logits_alone():
    text = "weights are rounded to bfloat16"
    computes = {key: trial.computes[key] for key, o in GRAPH.items() for trial in at_operation(o) if trial.text == text}
    report = judged(with_computed(BASE, text, computes, IDS))
    assert report.verdict == Verdict.NARROW
    assert text in report.reason


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (("attn_output", "ffn_down"), "at attn_o_out, ffn_down of every layer: the bias is applied twice"),
        (("attn_q", "attn_k", "attn_v"), "at Qcur, Kcur, Vcur of every layer: the bias is applied twice"),
    ],
)
def test_a_mistake_of_all_products_of_a_role_is_named(fields, says):
    model = random_model(15, family="starcoder2", n_layers=2, heads=4, kv_heads=2, head_dim=16, width=64, ffn=96)
    ids = np.random.default_rng(6).integers(0, 50, 16)
    twice = [{name: replace(getattr(layer, name), bias=2 * getattr(layer, name).bias) for name in fields} for layer in model.layers]
    wrong = replace(model, layers=tuple(replace(layer, **other) for layer, other in zip(model.layers, twice, strict=True)))
    report = check(model, ids, only(recorded(wrong, ids), "result_output"))
    assert report.logits.explanation.startswith(says)
