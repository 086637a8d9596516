"""Logits alone: mistakes of a whole engine are found and named, also those that change less than roundings do."""

import re
from dataclasses import replace

import numpy as np
import pytest
from engine_runs import BASE, DEEP, DEEP_TOKENS, TOKENS_OF_300, judge_by, judged, known_mistakes, llama_of, logits_of
from spec_faults import SMALL_FAULTS, definition, model, ours, tokens

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP, check, forward_full
from bitnet_np.base.errors import NonFiniteError
from bitnet_np.judge import logits_alone
from bitnet_np.judge.honest_engines import in_precision
from bitnet_np.judge.law.graph import LOGITS, TOKENS
from bitnet_np.judge.law.precision import Precision
from bitnet_np.judge.logits_alone import _explains, _FirstLook, judge_logits
from bitnet_np.judge.measures import judge, position_nmse
from bitnet_np.judge.mistakes.hypotheses import hypotheses, sites
from bitnet_np.judge.mistakes.search import Search
from bitnet_np.judge.options import Options
from bitnet_np.judge.variant import Variant, scaled, variant_logits
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.testing.space import Case, model_of, tokens_of
from bitnet_np.traces.points import Key
from scripts.judging.engine import KINDS, Engine

FLIPS, NARROW, WRONG = Verdict.FLIPS, Verdict.NARROW, Verdict.WRONG
SMALL = {"n_layers": 4, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96}
LLAMA = random_model(1, family="llama", tied=False, **SMALL)
FLOATS = random_model(7, family="llama", vocab=128, n_layers=2, tied=False)
IDS = np.random.default_rng(1).integers(0, LLAMA.config.vocab, 20)


def test_the_dialect_that_was_not_declared_is_named():
    judgement = judged(forward_full(model(), tokens(17)[None], dialect=BITNET_CPP)[0])
    assert judgement.verdict is FLIPS
    assert judgement.explanation == "closest to the dialect bitnet.cpp (--as bitnet.cpp)"
    assert 1e-4 < judgement.mean_nmse <= judgement.reach < 3e-3


def test_nothing_is_run_for_what_needs_no_limit():
    def never(variant):
        raise AssertionError(variant.text)

    for theirs, verdict in (
        (ours(17), Verdict.SAME_BITS),
        (ours(17) * np.nan, Verdict.INVALID),
        (definition(tokens(17)), Verdict.ROUNDING),
    ):
        assert judge_logits(ours(17), theirs, BASE, never).verdict is verdict


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda x: np.hstack([x[:, :40], x[:, 41:], 0 * x[:, :1]]),
            "elements 40 to 126 have the numbers of elements 41 to 127, and element 127 is 0",
        ),
        (lambda x: x[[*range(9), 10, 9, *range(11, 17)]], "positions 9 and 10 are exchanged"),
        (lambda x: np.where(np.arange(128) < 96, x, 0), "elements 96 to 127 of each position are 0: never written"),
    ],
)
def test_logits_in_other_places_are_named(change, says):
    report = check(FLOATS, tokens(17) % 128, change(forward_full(FLOATS, tokens(17)[None] % 128)[0]))
    assert report.verdict is WRONG
    assert report.logits.explanation == says


def test_wrong_logits_behind_those_that_are_looked_at_are_not_excused():
    """Mistakes and dialects are tried on the first 64 positions alone."""
    ids = np.arange(72) % 128
    theirs = forward_full(FLOATS, ids[None])[0]
    theirs[66:] += np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
    report = check(FLOATS, ids, theirs)
    assert report.verdict is WRONG
    assert "the first 64 of these positions are right" in report.reason


EQUAL = Case(family="bitnet-b1.58", weights="ternary", table="float16", layers=2, width=128, ffn=128, vocab=64, length=144, tokens="alike")
LIKE = random_model(1, n_layers=2, table="float16", width=128, ffn=128, heads=4, kv_heads=2, head_dim=32, vocab=64)


def equal_tokens(seed):
    """A model, ids that are all alike, and the logits of a right engine in float16."""
    case = replace(EQUAL, seed=seed)
    model, (ids,) = model_of(case, LIKE), tokens_of(case)
    return model, ids, Engine(model, ids, **KINDS["float16"]).run()[LOGITS]


@pytest.mark.usual(1)
@pytest.mark.parametrize("seed", [0, 11, 27])
def test_a_prompt_of_equal_tokens_is_one_position_many_times(seed):
    """So a scale that is off fits its errors by chance (27), and what reaches farther behind the first positions does so at all (0, 11)."""
    model, ids, theirs = equal_tokens(seed)
    assert check(model, ids, theirs, budget=2.0).verdict <= NARROW


@pytest.mark.usual(3)
@pytest.mark.parametrize("at", [35, 50, 66, 90, 110])
@pytest.mark.parametrize("seed", [0, 6])
def test_noise_that_begins_at_a_position_is_none_of_all_operations(seed, at):
    """Also where the positions that are looked at, the first 64, have a little noise, or a little more than float16 has."""
    model, ids, theirs = equal_tokens(seed)
    theirs[at:] += 0.2 * theirs.std() * np.random.default_rng(0).standard_normal(theirs[at:].shape).astype(np.float32)
    assert check(model, ids, theirs, budget=0 if seed else 0.5).verdict is WRONG  # searched for causes in one model


FAR = {
    "bfloat16": {"kv_heads": 2, "group": 4, "head_dim": 16, "vocab": 100, "length": 200, "seed": 8},
    "float16": {"kv_heads": 3, "head_dim": 256, "eps": 0.001, "length": 200, "tokens": "last", "seed": 232},
}
"""By the type of an engine, a model: its errors at the positions of the second sequence are unlike."""


@pytest.mark.parametrize("kind", FAR)
def test_a_position_may_be_as_far_off_as_one_of_many_is(kind):
    case = replace(EQUAL, **{"tied": True, "tokens": "inner", "batch": 2} | FAR[kind])
    model, (_, ids) = model_of(case, LIKE), tokens_of(case)
    ours, theirs = forward_full(model, ids[None])[0], Engine(model, ids, **KINDS[kind]).run()[LOGITS]
    away = position_nmse(ours, theirs)
    far = away.argmax()  # as far as the engine's own sums, which differ between processors, now and then are
    theirs[far] = ours[far] + (theirs[far] - ours[far]) * np.sqrt(8 * away.mean() / away[far])
    assert check(model, ids, theirs, budget=0).verdict <= NARROW
    theirs[150] += 0.2 * theirs.std() * np.random.default_rng(0).standard_normal(theirs.shape[1]).astype(np.float32)
    assert check(model, ids, theirs, budget=0).verdict is WRONG


SAYS = {
    "activations of 7 bits": "63 steps",
    "absmax to 126": "126 steps",
    "truncated, not rounded": "truncated",
    "not quantised": "not quantised",
    "one scale for all tokens": "one activation scale for the whole tensor",
    "ffn_down's scale 5 % too large": "the scale of ffn_down is off, by a factor of about 1.05",
    "attn_q with the scale of attn_k": "at Qcur of every layer: the weight scale of Kcur is used",
}


@pytest.mark.usual(3)
@pytest.mark.parametrize("name", SAYS)
def test_mistakes_smaller_than_roundings_are_found_and_named(name):
    theirs = definition(tokens(17), *SMALL_FAULTS[name])
    assert judge(ours(17), theirs).verdict is FLIPS
    judgement = judged(theirs)
    assert judgement.verdict is WRONG, judgement
    assert SAYS[name] in judgement.explanation
    assert judged(theirs, search=False).explanation is None


def test_what_changes_less_than_float16_is_no_more_than_close():
    """It may flip the codes that roundings flip, so nothing tells it from them. Where it changes more than they reach, it is named."""
    assert judged(definition(tokens(17), *SMALL_FAULTS["epsilon outside the root"])).verdict is FLIPS
    large = random_model(4, eps=0.05)
    ids = np.arange(9)
    base = Variant("ours", large, EXACT)
    text = "in every norm: epsilon is 1e-06 instead of 0.05"
    judgement = judge_by(base, ids)(logits_of(next(m for m in known_mistakes(base) if m.text == text), ids))
    assert (judgement.verdict, judgement.explanation[:25]) == (WRONG, "in every norm: epsilon is")


@pytest.mark.parametrize(
    ("model", "ids", "dialect", "name", "factor"),
    [
        (DEEP, DEEP_TOKENS, BITNET_CPP, "ffn_down", 1.03),  # float16 changes the logits as much, or more
        (llama_of("Q4_K"), TOKENS_OF_300, LLAMA_CPP, "ffn_up", 1.05),
    ],
)
def test_a_wrong_scale_is_seen_through_roundings_and_in_any_weights(model, ids, dialect, name, factor):
    judgement = judge_by(Variant("ours", model, EXACT), ids)(logits_of(scaled(Variant("", model, dialect), name, factor), ids))
    assert judgement.verdict is WRONG, judgement


def test_a_mistake_that_leaves_float32s_range_is_passed_over():
    def overflowing(variant):
        if "scale" in variant.text:
            raise NonFiniteError("out of range")
        return logits_of(variant, tokens(17))

    theirs = definition(tokens(17), *SMALL_FAULTS["truncated, not rounded"])
    judgement = judge_logits(ours(17), theirs, BASE, overflowing)
    assert "truncated" in judgement.explanation


def test_progress_is_told_to_the_end():
    steps = []
    judged(
        definition(tokens(17), *SMALL_FAULTS["absmax to 126"]),
        options=Options(bars=lambda label: lambda done, total: steps.append((done, total))),
    )
    assert steps[-1][0] == steps[-1][1] > 40
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_scales_that_do_the_same_are_said_together():
    """Without biases the scales of ffn_up and ffn_down are one factor."""
    base, ids = Variant("ours", random_model(1, family="qwen3", **SMALL), EXACT), IDS
    explanation = judge_by(base, ids)(logits_of(scaled(base, "ffn_down", 1.2), ids)).explanation
    said = r"the scale of ffn_(up|down) is off, by a factor of about 1\.\d+ \(that of ffn_(down|up) would look the same\)"
    assert re.fullmatch(said, explanation)


def test_a_scale_that_is_far_off_is_named_and_another_large_error_is_none():
    """The logits are WRONG by their distance. The engine with the scale that is read off them is run, and comes near."""
    base, ids = Variant("ours", LLAMA, EXACT), IDS
    judgement = judge_by(base, ids)(logits_of(scaled(base, "attn_v", 1.3), ids))
    says = "the scale of attn_v is off, by a factor of about "
    assert judgement.verdict is WRONG
    assert judgement.explanation.startswith(says)
    assert float(judgement.explanation.removeprefix(says)) == pytest.approx(1.3, rel=0.1)
    right = logits_of(base, ids)
    noise = np.random.default_rng(2).standard_normal(right.shape).astype(np.float32) * right.std() / 2
    judgement = judge_by(base, ids)(right + noise)
    assert (judgement.verdict, judgement.explanation) == (WRONG, None)


def test_a_precision_is_named_only_where_logits_err_in_its_direction():
    """The error of a cache of 4 bits is large, so its reach alone would excuse most bugs."""
    model, ids = random_model(3, family="llama", n_layers=2, width=96, heads=3, kv_heads=3, head_dim=32, vocab=300), TOKENS_OF_300
    base = Variant("ours", model, EXACT)
    own, cached = logits_of(base, ids), logits_of(in_precision(base, Precision(kv="q4_0")), ids)
    judged_by = judge_by(base, ids)
    assert "the precision kv=q4_0 would explain it" in judged_by(cached).reason
    as_large = judged_by(own + (cached - own)[:, ::-1])
    assert as_large.verdict == Verdict.WRONG
    assert "would explain it" not in as_large.reason


def test_what_takes_too_much_time_is_said(monkeypatch):
    model = random_model(0, family="llama", n_layers=2, width=32, ffn=32, heads=2, kv_heads=1, head_dim=16, vocab=40)
    ids = np.arange(6)
    other = replace(model.layers[1], ffn_norm=np.ones_like(model.layers[1].ffn_norm))
    theirs = forward_full(replace(model, layers=(model.layers[0], other)), ids[None])[0]
    little = check(model, ids, theirs, budget=0)
    assert little.logits.explanation is None
    assert "the search for causes ended after its 0 s: --budget 20 tries more" in little.reason
    monkeypatch.setattr(logits_alone, "_MOST_WORK", 10**6)
    monkeypatch.setattr(Search, "unnamed", lambda *_: None)  # what is no known mistake would be tried for half a minute
    little = check(model, ids, theirs)
    assert "known mistakes in one layer alone were tried on logits: --budget 150 tries more" in little.reason


def test_of_a_common_factor_only_the_last_operations_are_asked(monkeypatch):
    """Each mistake of a layer takes a run, and the norm behind the layers forgets their factors."""
    asked = set()
    every = logits_alone.hypotheses
    monkeypatch.setattr(logits_alone, "hypotheses", lambda span, **more: asked.update(o.key.name for o in span) or every(span, **more))
    model, ids = random_model(0, family="llama", **SMALL), [1, 5, 2, 7, 3]
    right = forward_full(model, [ids])[0]
    assert check(model, ids, {"logits": 1.05 * right}).reason.startswith("everything is 1.05 times what it should be")
    assert asked - {"kqv_out"} == {"result_norm", "result_output"}  # attention is asked for the caches of other dialects
    right[2] *= np.float32(1.05)
    check(model, ids, {"logits": right}, budget=0.1)
    assert "ffn_down" in asked


def test_an_interrupt_ends_the_search_and_keeps_the_verdict_where_that_is_asked_for(monkeypatch):
    theirs = forward_full(LLAMA, IDS[None])[0][:, ::-1]
    runs = []

    def named(self, case, every):
        runs.append(case)
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "named", named)
    base = Variant("ours", LLAMA, EXACT)

    def judgement(options):
        return judge_logits(forward_full(LLAMA, IDS[None])[0], theirs, base, lambda v: variant_logits(v, IDS[None])[0], options, ids=IDS)

    found = judgement(Options(keeps_known=True))
    assert (found.verdict, found.reason.endswith("the search for causes was interrupted"), len(runs)) == (WRONG, True, 1)
    with pytest.raises(KeyboardInterrupt):
        judgement(Options())


def test_a_first_look_refuses_most_mistakes_and_not_the_one_that_was_made():
    """Many at once at the first wrong positions; but those that depend on later tokens, or have a number, are tried at all."""
    base, ids = Variant("ours", LLAMA, EXACT), IDS
    every = [trial for trial in hypotheses(sites(LLAMA, EXACT, len(ids)), single=True) if trial.fault]
    right = {TOKENS: ids}
    own = base.run(ids[None], lambda name, n, x: right.update({Key(name, n): x.reshape(len(x), -1).copy()}))[0]

    def run(variant, count, length):
        return variant.run(np.tile(ids[:length], (count, 1)))

    for said in ("the norm's weight is missing", "the score scale is missing", "the mask is missing: tokens see the future"):
        made = next(trial for trial in every if said in trial.text)
        theirs = made.variant(base, ids).run(ids[None])[0]
        away = position_nmse(own, theirs)
        look = _FirstLook(base, run, right, own, theirs, away, np.flatnonzero(away >= away.mean() / 2)[:3])
        left = look.promising(every)
        assert made in left
        assert len(left) < len(every) / 4
    assert look.looks_ahead(made, 4)


def test_positions_that_are_right_do_not_count_against_a_mistake():
    """A window one too long changes nothing in front of its end, so that few positions may be nearer."""
    wrong = np.arange(17) >= 9
    assert _explains(0.01 * wrong, 1.0 * wrong)
    assert not _explains(np.where(wrong, 0.01, 0.4), 1.0 * wrong)
    assert not _explains(np.where(np.arange(17) >= 13, 0.5, 0.0), 1.0 * wrong)
