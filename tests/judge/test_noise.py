"""The law of noise: engines that round inside operations pass in any format, and a mistake stands out of their errors.

Searches are cut off (budget=0): verdicts and places do not hang on them.
"""

import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitnet_np import EXACT, check
from bitnet_np.base.errors import OptionError
from bitnet_np.engine.network import Runtime
from bitnet_np.engine.tokens import Tokens
from bitnet_np.judge.dump import judge_dump
from bitnet_np.judge.law import noise
from bitnet_np.judge.law.noise import Noise, Residual, doubt, left_out, residual
from bitnet_np.judge.mistakes.search import Search
from bitnet_np.judge.options import Options
from bitnet_np.judge.tensors import TensorJudge
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key, Trace
from scripts.judging.engine import Engine, bfloat16
from scripts.judging.policies import TUNED, UNSEEN, Dense, cut, scaled

SHAPE = {"family": "qwen2", "n_layers": 3, "width": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 96, "vocab": 96}
MODEL = random_model(1, **SHAPE)
IDS = np.random.default_rng(0).integers(0, MODEL.config.vocab, 20)
LOGITS = Key("result_output", None)
BASES = ("TF32 by truncation", "bfloat16 operands", "int8 rows", "MXFP8")


def judged(points, names=None, **how):
    some = {key: x for key, x in points.items() if names is None or key.name in names}
    return check(MODEL, IDS, Trace(some, None, "dump"), budget=0.0, **how)


def judged_unnamed(points):
    """The format of noise that is believed is not sought, which takes most of the time. Right engines below have it named."""
    believed = lambda self, judged, case_of: self._caused(judged, self._cause_of_noise(self.sites[judged.key]))  # noqa: E731
    with mock.patch.object(TensorJudge, "_noisy", believed):
        return judged(points)


# --- engines --------------------------------------------------------------------------------------------------------------------------


COARSE_BETWEEN_LAYERS = {"int4 weights, bfloat16 inputs", "int4 cache", "MXFP6 e3m2"}
"""Engines whose noise is believed between layers only if it is declared."""

BETWEEN_LAYERS = {
    *(*COARSE_BETWEEN_LAYERS, "int4 weights, int8 inputs", "KIVI", "e5m2 by tensor", "e4m3 in blocks of 128 and e4m3 cache"),
    *(*BASES, "bfloat16 results of products", "float16 sums", "mantissas cut to 7 bits", "TF32 in matrices alone"),
    *("NVFP4", "MXFP4", "int4 weights in groups", "int8 by tensor", "int8 affine inputs", "LLM.int8"),
    *("flash attention in bfloat16", "SageAttention", "e5m2 cache", "Q8_0 cache"),
    *("SiLU by a table", "exp of phones", "rsqrt of 12 bits", "subnormals flushed"),
}
"""Engines of every kind, and the noisiest of each."""

SOUGHT = {*BASES, "int4 weights, int8 inputs", "MXFP4", "NVFP4", "e5m2 cache", "int4 weights in groups"}
"""Those whose format between layers is sought, which takes seconds for each. The noise of the others is believed without its name, or not
believed, of which one is sought in vain."""


def assert_right(policy, names, is_coarse):
    """An engine passes; where its noise is too coarse to be believed, if the level that the report states is declared. What is coarser than
    8-bit floats the report does not offer to declare."""
    points = Dense(MODEL, IDS, **{**TUNED, **UNSEEN}[policy]).run()
    report = judged(points, names)
    if is_coarse:
        assert report.verdict == Verdict.WRONG
        level = re.search(r"errors are alike everywhere.*(2\^-\d)", report.reason)[1]
        assert ("--precision" in report.reason) != ("at a level of" in report.reason)
        report = judged(points, names, precision=f"noise={level}")
    assert report.verdict <= Verdict.NARROW, report.reason


def test_a_cache_may_keep_its_first_token_whole_and_weights_may_not_be_wrong_behind_it():
    int4 = scaled("int4")

    def keys(x):  # [H, T, K]
        return np.concatenate([x[:, :1], int4(x[:, 1:])], axis=1)

    def values(x):  # [H, K, T]
        return keys(x.swapaxes(1, 2)).swapaxes(1, 2)

    def exp(x):  # Schraudolph's: a straight line for each power of two
        powers = np.maximum(x, -80) / np.log(2)  # masked scores are minus infinity
        return np.where(x < -80, 0, np.ldexp(1 + powers % 1, np.floor(powers).astype(int))).astype(np.float32)

    report = judged(Dense(MODEL, IDS, k=keys, v=values).run())
    assert report.verdict == Verdict.NARROW, report.reason
    report = judged(Dense(MODEL, IDS, exp=exp).run())
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("kqv_out", 0))


@pytest.mark.usual(12)
@pytest.mark.parametrize("policy", [*TUNED, *UNSEEN])
def test_right_engines_pass_whatever_their_format(policy):
    assert_right(policy, None, is_coarse=False)


@pytest.mark.usual(6)
@pytest.mark.parametrize("policy", sorted(BETWEEN_LAYERS))
def test_right_engines_pass_by_the_outputs_of_layers(policy, monkeypatch):
    if policy not in SOUGHT:
        monkeypatch.setattr(Search, "has_ended", lambda self: True)
    assert_right(policy, ("l_out", "result_output"), policy in COARSE_BETWEEN_LAYERS)


def between_layers(engines, ids, model=MODEL, **policy):
    """The report on the outputs of layers of an engine that has another model, or rounds so."""
    points = Dense(engines, ids, **policy).run()
    some = {key: points[key] for key in points if key.name in ("l_out", "result_output")}
    return check(model, ids, Trace(some, None, "dump"), budget=0.0)


class Rounded(Dense):
    """An engine that rounds some of its tensors after they are computed: `after` is a function of the name, the layer and the tensor."""

    after = staticmethod(lambda name, n, x: x)

    def step(self, name, n, compute):
        super().step(name, n, lambda: self.after(name, n, np.asarray(compute(), np.float32)))


def report_of(after):
    engine = Rounded(MODEL, IDS)
    engine.after = after
    return judged_unnamed(engine.run())


def test_what_layers_add_to_may_be_handed_on_in_8_bits():
    """Levels that lie closer together near 0 are in no list of formats."""
    t = np.linspace(-1, 1, 255, dtype=np.float32)
    levels = t * np.abs(t)

    def handed_on(x):
        largest = np.abs(x).max(axis=1, keepdims=True)
        return (levels[np.abs((x / largest)[..., None] - levels).argmin(axis=-1)] * largest).astype(np.float32)

    report = report_of(lambda name, n, x: handed_on(x) if name == "l_out" else x)
    assert report.verdict == Verdict.NARROW
    assert "sums of layers are computed with about 2^-7" in report.reason


@pytest.mark.parametrize("limit", [None, 0.0])
def test_reciprocals_of_the_softmax_may_be_inexact(limit, monkeypatch):
    """An 8-bit estimate and one step of Newton's: most where the sum is 1, as where a token sees one key."""
    if limit is not None:
        monkeypatch.setattr(noise, "_OF_SUM", limit)
    factor = 1 - 4e-6 * np.append(1, np.random.default_rng(0).random(len(IDS) - 1) ** 8)[:, None].astype(np.float32)
    report = report_of(lambda name, n, x: x * factor if name == "kqv_out" else x)
    assert (report.verdict == Verdict.NARROW) == (limit is None), report.reason


@pytest.mark.parametrize("name", ["ffn_inp", "l_out"])
def test_a_factor_of_one_term_of_a_sum_is_no_noise(name):
    """1 % of a branch is smaller than the noise of 8 bits."""
    engine = Rounded(MODEL, IDS)
    term = {"ffn_inp": "attn_o_out", "l_out": "ffn_down"}[name]
    engine.after = lambda step, n, x: x + np.float32(0.01) * engine.at(term, n) if step == name else x
    report = judged_unnamed(engine.run())
    assert report.verdict == Verdict.WRONG
    assert f"at layer 0 {name}" in report.reason


def test_sums_of_layers_may_be_cut():
    """A common factor makes most of the error then, and the larger term has most of that in common."""
    assert report_of(lambda name, n, x: cut(10)(x) if name in ("ffn_inp", "l_out") else x).verdict == Verdict.NARROW


def test_factors_of_elements_are_no_noise():
    """As where rows of a matrix have the scales of others: some 10 % are less than the noise of 4-bit weights."""
    factors = np.exp(0.1 * np.random.default_rng(0).standard_normal(SHAPE["ffn"])).astype(np.float32)
    report = report_of(lambda name, n, x: x * factors if name in ("ffn_gate", "ffn_up") else x)
    assert report.verdict == Verdict.WRONG
    assert "at layer 0 ffn_gate" in report.reason


PRODUCTS_OF_A_LAYER = ("Qcur", "Kcur", "Vcur", "attn_o_out", "ffn_gate", "ffn_up", "ffn_down")


@pytest.mark.parametrize("names", [PRODUCTS_OF_A_LAYER, PRODUCTS_OF_A_LAYER[:-1]])
def test_a_layer_may_have_a_format_that_the_others_have_not(names):
    """Then all of its products have: what many of them have alone may be a mistake."""
    rng = np.random.default_rng(0)
    after = lambda name, n, x: x * (1 + 2.0**-6 * rng.standard_normal(x.shape)).astype(np.float32) if n == 1 and name in names else x  # noqa: E731
    report = report_of(after)
    assert report.verdict == (Verdict.NARROW if names == PRODUCTS_OF_A_LAYER else Verdict.WRONG)
    assert "alike in all products of layer 1" in report.reason or names != PRODUCTS_OF_A_LAYER


def test_the_format_of_one_span_is_sought():
    """No other tensor has the noise of the embedding."""
    report = between_layers(replace(MODEL, token_embd=scaled("int8")(MODEL.token_embd)), IDS)
    assert report.verdict == Verdict.NARROW
    assert "at inp_embd: the embedding's table: rounded to int8 with a scale for each row" in report.reason


def test_attention_alone_may_be_noisy(monkeypatch):
    """The first positions average the fewest values, and are off by more than noise of all operations makes them."""
    monkeypatch.setattr(Search, "has_ended", lambda self: True)  # no search for formats, which takes most of the time

    def passes(seed):
        rng = np.random.default_rng(seed)
        model, ids = random_model(seed, **SHAPE), rng.integers(0, SHAPE["vocab"], 60)
        level = lambda x: 2.0**-9 * np.sqrt((x**2).mean())  # noqa: E731
        noisy = lambda x: (x + level(x) * rng.standard_normal(x.shape)).astype(np.float32)  # noqa: E731
        return between_layers(model, ids, model, v=noisy).verdict == Verdict.NARROW

    assert sum(map(passes, range(8))) >= 7  # in the other one, attention to few values makes one position stand out


def test_noise_is_wrong_where_only_what_is_declared_is_right():
    points = Dense(MODEL, IDS, **TUNED["MXFP8"]).run()
    assert judged(points, precision="kv=f16").verdict == Verdict.NARROW
    assert judged(points, precision="kv=f16", strict=True).verdict == judged(points, precision="exact").verdict == Verdict.WRONG


@pytest.mark.usual(2)
@pytest.mark.parametrize(
    ("policy", "flag"), [("int8 rows", "mul=int8:row"), ("e4m3 cache", "kv=e4m3"), ("SiLU by a table", "exp=0.001"), ("KIVI", "noise=2^-")]
)
def test_the_option_that_is_printed_declares_what_was_found(policy, flag):
    dump = Trace(Dense(MODEL, IDS, **TUNED[policy]).run(), None, "dump")
    option = next(note for note in check(MODEL, IDS, dump).notes if note.startswith("to declare it: --precision "))
    assert flag in option
    assert check(MODEL, IDS, dump, precision=option.split()[-1]).verdict <= Verdict.FLIPS


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"act": TUNED["SiLU by a table"]["act"]}, "SiLU is approximated to 0.0001, everywhere alike"),
        ({"rsqrt": TUNED["rsqrt of 12 bits"]["rsqrt"]}, "the root mean square is approximated to 7e-05, everywhere alike"),
        ({"p": bfloat16, "flash": True}, "the exponentials, where they are not summed: rounded to bfloat16"),
        (
            {**dict.fromkeys("qkpv", bfloat16), "flash": True},
            "operands of products, exponentials instead of probabilities, are rounded to bf",
        ),
        ({"head_w": TUNED["NVFP4 weights"]["w"]}, "result_output: matrices are rounded to NVFP4"),
    ],
)
def test_what_is_approximated_is_said(policy, says):
    report = check(MODEL, IDS, Trace(Dense(MODEL, IDS, **policy).run(), None, "dump"))
    assert report.verdict == Verdict.NARROW
    assert says in report.reason


FAULTS = {
    "Vcur": lambda e, n: e.at("Kcur", n) + 0 * e.at("Vcur", n) if Key("Vcur", n) in e.t else e.at("Kcur", n),
    "ffn_down": lambda e, n: Dense.product(e, "ffn_out", n, e.model.layers[n - 1].ffn_down),
    "kqv_out": lambda e, n: e.attend(n, allowed=lambda i, j: (j < i) | (i + j == 0)),
    "ffn_norm": lambda e, n: e.norm(e.at("ffn_inp", n), np.ones(1, np.float32)),
    "Qcur_rope": lambda e, n: e.rope(e.at("Qcur", n), np.arange(len(e.tokens)) + 1),
    "ffn_out": lambda e, n: np.maximum(e.at("ffn_gate", n), 0) * e.at("ffn_up", n),
    "l_out": lambda e, n: e.at("ffn_down", n),
}
"""A tensor -> a mistake in it."""


@pytest.mark.usual(7)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("base", BASES)
def test_a_mistake_stands_out_of_noise(base, name):
    report = judged_unnamed(Dense(MODEL, IDS, {name: FAULTS[name]}, (1,), **TUNED[base]).run())
    assert report.verdict == Verdict.WRONG
    assert report.first_wrong.key == Key(name, 1)


def test_an_epsilon_is_of_all_positions():
    """A cause of whole rows is no cause of some: it would fit any rows that are a little too large."""

    def norm(e, n):
        x = e.at("ffn_inp", n)
        late = np.arange(len(x))[:, None] >= 10
        return np.where(late, e.norm(x, e.model.layers[n].ffn_norm, 0.1), e.norm(x, e.model.layers[n].ffn_norm))

    report = check(MODEL, IDS, Trace(Dense(MODEL, IDS, {"ffn_norm": norm}, (1,)).run(), None, "dump"))
    assert report.first_wrong.key == Key("ffn_norm", 1)
    assert "epsilon is" not in (report.first_wrong.hypothesis or "")


@pytest.mark.parametrize("base", BASES)
def test_inputs_that_are_not_summed_stand_out(base):
    def without_last(e, n):
        x = e.at("ffn_norm", n).copy()
        x[:, -8:] = 0
        return e.times(x, e.model.layers[n].ffn_up)

    report = judged_unnamed(Dense(MODEL, IDS, {"ffn_up": without_last}, (1,), **TUNED[base]).run())
    assert report.first_wrong.key == Key("ffn_up", 1)


# --- the law --------------------------------------------------------------------------------------------------------------------------

KEY = Key("ffn_up", 1)


def errors(change=lambda r: r, level=1e-3):
    rng = np.random.default_rng(1)
    value, r = rng.standard_normal((24, 64)), level * rng.standard_normal((24, 64))
    return residual(KEY, value, np.ones_like(value), value + change(r))


def test_what_is_like_noise_has_no_odd_part():
    assert errors().odd == ""
    assert errors().level == pytest.approx(1e-3, rel=0.1)


def test_an_error_with_a_direction_is_no_noise_of_several_operations():
    random = np.random.default_rng(0)
    error, effect = random.standard_normal((20, 64)), random.standard_normal((noise.PARTS, 20, 64))
    assert [noise.is_spread(error, tried) for tried in ([effect], [])] == [True, None]
    at_each = (random.standard_normal((noise.PARTS, 20, 1)) * effect).sum(axis=0)  # another factor of each part at each position
    for more in (effect[3], effect.sum(axis=0), 8 * random.standard_normal(64), 8 * at_each):
        assert noise.is_spread(error + more, [effect]) is False


def test_inputs_that_make_most_of_an_error_are_none_of_its_noise():
    rng = np.random.default_rng(2)
    x, weights = rng.standard_normal((20, 64)), rng.standard_normal((96, 64)).astype(np.float32)
    noisy = 0.1 * rng.standard_normal((20, 96))
    assert left_out(x, weights, noisy) == ""
    for factor in (-1, 1):
        assert left_out(x, weights, noisy + factor * x[:, 56:] @ weights[:, 56:].T) == "8 inputs from 56 to 63 make most of the error"


def times(part, factor):
    def change(r):
        r = r.copy()
        r[part] *= factor
        return r

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (times(np.s_[5], 100), "position 5 is off by"),
        (times(np.s_[:, 7], 100), "element 7 is off by"),
        (times((5, 7), 1000), "is off by"),
        (lambda r: np.broadcast_to(r[:1], r.shape), "every position has the same error"),
        (lambda r: 1e-3 * np.random.default_rng(1).standard_normal(r.shape), "everything is 1.001 times"),
    ],
)
def test_rows_columns_numbers_and_factors_are_odd(change, says):
    assert says in errors(change).odd


def test_few_wrong_numbers_are_no_noise():
    assert errors(lambda r: np.where(np.arange(64) < 8, r, 1e-9)).odd == "most numbers are right"


def noise_of(*levels, odd=""):
    """Residuals of one operation in some layers; the first is asked for."""
    return Noise({Key("ffn_up", n): Residual(noise.PRODUCTS, level, odd if n == 0 else "") for n, level in enumerate(levels)})


@pytest.mark.parametrize(
    ("levels", "explained"),
    [
        ((1e-3, 1e-3, 1e-3), True),
        ((1e-3, 3e-3, 1e-3), True),
        ((1e-3, 1e-7, 1e-3, 1e-7), True),  # some layers are spared
        ((1e-3, 1e-7, 1e-7), False),
        ((1e-1, 1e-3, 1e-3), False),
        ((0.5, 0.5, 0.5), False),  # coarser than any format
        ((1e-3, *[1e-7] * 8, 1e-3), False),
    ],
)
def test_noise_is_what_many_layers_have(levels, explained):
    every = noise_of(*levels)
    assert every.explains(Key("ffn_up", 0)) == explained
    assert not noise_of(*levels, odd="a row").explains(Key("ffn_up", 0))


def test_a_factor_or_a_mean_that_others_have_not_is_none_of_their_noise():
    own = Residual(noise.PRODUCTS, 2e-3)
    for more in ({"along": 1.5e-3}, {"mean": -1.5e-3}):
        other = Residual(noise.PRODUCTS, 1e-3, **more)
        assert other.is_like(other)
        assert not own.is_like(other)
        assert not other.is_like(own)


def test_the_level_of_others_is_that_of_noise_alone():
    assert noise_of(0.1, 1e-3, 2e-3).level(Key("ffn_up", 0)) == 1e-3
    assert noise_of(0.1, 0.5, 0.5).level(Key("ffn_up", 0)) == 0


# --- logits ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.usual(3)
@pytest.mark.parametrize(
    "policy", ["int8 rows", "LLM.int8", "TF32 by truncation", "MXFP8", "KIVI", "e5m2 by tensor", "mantissas cut to 7 bits"]
)
def test_logits_alone_pass_by_noise(policy):
    assert_right(policy, ("result_output",), is_coarse=False)


@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("name", ["kqv_out", "ffn_out", "ffn_norm"])
def test_a_factor_that_logits_follow_is_no_noise(name, is_asked, monkeypatch):
    """A quarter of a tensor of one layer is 1.2 times what it should be. Logits alone have an error like noise of 2^-5 to 2^-6 then, but
    that it has a direction: where none is asked for, it passes."""
    for limit in () if is_asked else ("_OF_ONE_IN_LOGITS", "_OF_POSITIONS"):
        monkeypatch.setattr(noise, limit, 1.0)
    engine, quarter = Rounded(MODEL, IDS), lambda x: np.arange(x.shape[1]) < x.shape[1] // 4
    engine.after = lambda step, n, x: x * np.where(quarter(x), np.float32(1.2), np.float32(1)) if (step, n) == (name, 1) else x
    assert (judged(engine.run(), ("result_output",)).verdict == Verdict.WRONG) == is_asked


def test_coarser_noise_of_logits_has_to_be_declared():
    points = Dense(MODEL, IDS, **TUNED["int4 cache"]).run()
    report = judged(points, ("result_output",))
    assert report.verdict == Verdict.WRONG
    declared = re.search(r"--precision (noise=2\^-\d)\)", report.reason)[1]
    assert judged(points, ("result_output",), precision=declared).verdict <= Verdict.NARROW


@given(st.floats(-8, -2))
def test_no_mistake_in_all_numbers_is_offered_as_noise(power):
    """What is coarser than 8-bit floats is not offered for several operations."""
    said = doubt(2.0**power)
    assert ("--precision" in said) == (power <= -4)
    assert re.search(r"2\^(-[\d.]+)", said)[1] in (f"{np.ceil(power):.0f}", f"{power:.1f}")


def test_noise_that_spares_the_first_positions_is_none():
    late = {"Qcur_rope": lambda e, n: e.rope(e.at("Qcur", n), np.arange(len(e.tokens)) + 1)}
    report = judged(Dense(MODEL, IDS, late).run(), ("result_output",))
    assert report.verdict == Verdict.WRONG


def test_logits_of_operations_that_are_right_are_right():
    """Whatever they reach: operations may amplify roundings."""
    report = judged(Dense(MODEL, IDS, **TUNED["NVFP4"]).run())
    assert report.logits.verdict == Verdict.NARROW
    assert report.logits.reason.startswith("they follow from operations that are right")


def test_the_type_of_the_weights_is_the_engines_own_word():
    """Logits of an engine that computes in bfloat16, whose dump is float32, as of a server."""
    model = random_model(2, n_layers=3, table="bfloat16", head_dim=32)
    ids = np.random.default_rng(3).integers(0, model.config.vocab, 16)
    logits = Engine(model, ids, kept=bfloat16).run()[LOGITS]
    logits = (logits + 1e-4 * np.random.default_rng(1).standard_normal(logits.shape)).astype(np.float32)  # not on bfloat16's grid
    report = check(model, ids, logits, budget=0.0)
    assert report.verdict <= Verdict.NARROW, report.reason
    assert report.verdict == Verdict.FLIPS or "in bfloat16, the type of the model's weights" in report.reason


# --- the search -----------------------------------------------------------------------------------------------------------------------


def test_a_search_without_time_leaves_the_verdict():
    points = Dense(MODEL, IDS, {"ffn_out": FAULTS["ffn_out"]}, (1,)).run()
    report = judged(points)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("ffn_out", 1))
    assert "the search for causes ended after its 0 s: --budget 20 tries more" in report.notes
    assert "relu(gate) * up" in check(MODEL, IDS, Trace(points, None, "dump"), EXACT).reason


@pytest.mark.parametrize("budget", [-1.0, float("nan")])
def test_a_budget_is_no_negative_time(budget):
    with pytest.raises(OptionError, match="budget is"):
        check(MODEL, IDS, np.zeros((20, 96), np.float32), budget=budget)


def test_an_interrupted_search_says_what_is_known(monkeypatch):
    def interrupted(self, case, every):
        if not self.has_ended():
            raise KeyboardInterrupt

    monkeypatch.setattr(Search, "named", interrupted)
    dump = Trace(Dense(MODEL, IDS, {"ffn_out": FAULTS["ffn_out"]}, (1,)).run(), None, "dump")
    report = judge_dump(Runtime(MODEL, EXACT), Tokens.whole(IDS[None]), dump, Options(keeps_known=True))
    assert "the search for causes was interrupted" in report.notes
    with pytest.raises(KeyboardInterrupt):
        check(MODEL, IDS, dump)
    assert report.first_wrong.key == Key("ffn_out", 1)
