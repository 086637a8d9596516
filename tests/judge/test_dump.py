"""Whole dumps: their logits and log-probabilities as such, beside every operation."""

import numpy as np
import pytest
from dumps import FAULTS, LOGITS, MODEL, TOKENS, only, recorded, trace
from engine_runs import known_mistakes

from bitnet_np import EXACT, check, forward_full
from bitnet_np.judge.dump import log_softmax
from bitnet_np.judge.law.roundings import to_bfloat16
from bitnet_np.judge.variant import Variant, variant_logits
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.formats import FORMATS, read_any
from bitnet_np.traces.points import Key


def test_nan_is_blamed_where_it_begins():
    """NaN in the logits does not show where it came from. The tensors before them do."""
    points = recorded()
    for key in points:
        late = key == LOGITS or key.layer == 2 or (key.layer == 1 and key.name in ("kqv_out", "attn_o_out", "ffn_inp"))
        if late and points[key].dtype == np.float32:  # codes have no NaN
            points[key] = np.full_like(points[key], np.nan)
    report = check(MODEL, TOKENS, trace(points))
    assert (report.verdict, report.first_wrong.key, report.logits.verdict) == (Verdict.INVALID, Key("kqv_out", 1), Verdict.INVALID)
    assert report.reason.startswith("layer 1 kqv_out: it has nan at position 0, element 0")


def test_log_probabilities_and_some_positions_are_judged():
    logits = recorded()[LOGITS]
    for key, values in ((LOGITS, logits), (Key("log_probs", None), log_softmax(logits))):
        report = check(MODEL, TOKENS, trace({key: values[8:]}, positions=np.arange(8, 17)), EXACT)
        assert report.verdict <= Verdict.ROUNDING
        assert report.logits.positions == 9
        report = check(MODEL, TOKENS, trace({key: values[7:16]}, positions=np.arange(8, 17)), EXACT, budget=0)
        assert report.verdict == report.logits.verdict == Verdict.WRONG


def test_log_probabilities_are_judged_as_far_as_their_file_tells_them(tmp_path):
    """llama.cpp's file has steps, and nothing below the largest logit minus 16. A right engine is not blamed for that."""
    logits = recorded()[LOGITS]
    verdicts = []
    for theirs in (logits, logits * np.float32(1 + 1e-6), logits * np.float32(1.05)):
        with FORMATS["llama-logits"].writer(tmp_path / "x.kld", TOKENS) as out:
            out.add(LOGITS, theirs)
        report = check(MODEL, TOKENS, read_any(tmp_path / "x.kld"), EXACT, budget=0)  # few mistakes are tried
        verdicts.append((report.verdict, report.logits.verdict))
    assert verdicts == [(verdict, verdict) for verdict in (Verdict.SAME_BITS, Verdict.ROUNDING, Verdict.WRONG)]


def test_log_probabilities_of_a_narrow_engine_are_judged_apart_from_their_sums():
    """The error of a position's sum is one number of all its log-probabilities: now and then it is off by more than noise reaches."""
    shape = {"n_layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256, "vocab": 320}
    model, ids = random_model(1, family="llama", **shape), np.random.default_rng(0).integers(0, 320, 40)
    narrow = Variant("", model, EXACT, edit=lambda name, n, x: to_bfloat16(x).astype(x.dtype) if x.dtype == np.float32 else x)
    theirs = log_softmax(variant_logits(narrow, ids[None])[0])
    report = check(model, ids, {"log_probs": theirs})
    assert (report.verdict, report.reason) == (Verdict.NARROW, "no farther than the precision act=bfloat16 reaches, and in its direction")
    for more in (0.1, 1, -1):
        report = check(model, ids, {"log_probs": theirs + np.float32(more)}, budget=0)
        assert report.verdict is Verdict.WRONG
        assert f"their exponentials add up to {np.exp(more):.4g}" in report.reason
    for wrong in (log_softmax(1.05 * theirs), log_softmax(np.roll(theirs, 1, axis=1))):
        assert check(model, ids, {"log_probs": wrong}, budget=0).verdict is Verdict.WRONG
    theirs[3, 5] = -np.inf
    assert "their logit at 3, 5 is -inf" in check(model, ids, {"log_probs": theirs}).reason


def test_one_row_of_logits_is_taken_for_the_last():
    logits = recorded()[LOGITS]
    report = check(MODEL, TOKENS, trace({LOGITS: logits[-1:]}), EXACT)
    assert (report.logits.compared, report.logits.positions) == ((16,), 1)
    for key, values in ((LOGITS, logits), (Key("log_probs", None), log_softmax(logits))):
        report = check(MODEL, TOKENS, trace({key: values[5:6]}), EXACT)
        assert report.verdict is Verdict.WRONG
        assert report.reason == "it is the row of position 5, not of the last one, 16"
        assert report.logits.explanation == "the row of position 5"
    declared, single = trace({LOGITS: logits[-1:]}, positions=np.array([16])), trace({LOGITS: logits[:1]})
    for tokens, dump in ((TOKENS, declared), (TOKENS[:1], single)):
        report = check(MODEL, tokens, dump, EXACT)
        assert (report.verdict, report.notes, report.logits.compared) == (Verdict.SAME_BITS, (), None)
    for bad in (logits[-1:, :-1], np.full_like(logits[-1:], np.nan), logits[-1:].astype(np.float64) * 1e300):
        assert check(MODEL, TOKENS, trace({LOGITS: bad}), EXACT).verdict is Verdict.INVALID


@pytest.mark.parametrize("key", [LOGITS, Key("log_probs", None)])
def test_one_row_of_logits_does_not_keep_the_other_tensors_from_being_judged(key):
    """Aprender's stage files hold the logits of the last token only, and the other tensors of all."""
    row = recorded()[LOGITS][-1:] if key == LOGITS else log_softmax(recorded()[LOGITS][-1:])
    others = {k: v for k, v in recorded().items() if k != LOGITS}
    report = check(MODEL, TOKENS, trace(others | {key: row}), EXACT)
    assert report.logits.verdict is Verdict.SAME_BITS
    assert (report.verdict, len(report.operations)) == (Verdict.SAME_BITS, len(others))
    assert report.notes == (f"one row of {key.name} for 17 tokens: taken for the last position, 16",)
    bad, _ = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    wrong = {k: v for k, v in bad.items() if k != LOGITS}
    report = check(MODEL, TOKENS, trace(wrong | {key: row}), EXACT)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("ffn_out", 1))


@pytest.mark.usual(2)
@pytest.mark.parametrize("positions", [None, [16], [0, 1, 70, 90], [90, 3]])
def test_mistakes_are_tried_on_the_positions_a_dump_has(positions):
    """At most 64 tokens are run again: those whose logits come first."""
    model = random_model(5)
    ids = np.random.default_rng(2).integers(0, 50, 91)
    faulty = next(m for m in known_mistakes(Variant("", model, EXACT)) if "truncated" in m.text)
    theirs = forward_full(model, ids[None], ops=faulty.ops)[0]
    some = trace({LOGITS: theirs}) if positions is None else trace({LOGITS: theirs[positions]}, positions=np.array(positions))
    report = check(model, ids, some, EXACT)
    assert report.verdict is Verdict.WRONG
    assert report.logits.explanation == faulty.text


def test_sequences_of_a_batch_that_are_mixed_are_named():
    small = random_model(5)
    ids = np.random.default_rng(2).integers(0, 50, (3, 9))
    right = forward_full(small, ids)
    for theirs in (right[[1, 0, 2]], right[[1, 0, 2], -1]):
        report = check(small, ids, theirs)
        assert report.reason.startswith("sequence 0: it has the logits of sequence 1; ")
        assert [one.logits.explanation for one in report.sequences] == [f"it has the logits of sequence {n}" for n in (1, 0)] + [None]


def test_more_tensors_never_hide_a_cause():
    model = random_model(3, family="llama", n_layers=3, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, tied=False)
    ids = np.random.default_rng(0).integers(0, model.config.vocab, 12)
    faulty = next(m for m in known_mistakes(Variant("", model, EXACT)) if "the mean is subtracted" in m.text)
    points = recorded(faulty.model, ids, ops=faulty.ops, edit=faulty.edit)
    for names in ((), ("l_out",), ("l_out", "result_norm")):
        report = check(model, ids, only(points, "result_output", *names), EXACT)
        assert report.verdict is Verdict.WRONG, names
        assert "the mean is subtracted" in report.reason, names
