"""The judge of traces: it finds every fault of scripts/mutations.py at the right place, and leaves honest engines alone."""

import tracemalloc

import numpy as np
import pages
import pytest
from dumps import FAULTS, LOGITS, MODEL, TOKENS, family_dump, only, recorded, trace
from engine_runs import DEEP, DEEP_TOKENS, deep_model

from bitnet_np import BITNET_CPP, EXACT
from bitnet_np.judge import tensors as judging
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.hypothesis import Hypothesis
from bitnet_np.judge.law import graph
from bitnet_np.judge.law.precision import FLOAT32
from bitnet_np.judge.report.report import closer_rows, closer_summary
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import TOP_EXPERTS, Key
from scripts import mutations


@pytest.fixture
def unexplained(monkeypatch):
    """What is wrong is blamed and not explained, which would take seconds."""
    monkeypatch.setattr(judging.Search, "named", lambda self, case, every: Hypothesis("known", "known"))


DOCUMENTED = {row[0]: row for row in pages.table(pages.ROOT / "docs" / "validation.md", "fault")}


# --- faults ---------------------------------------------------------------------------------------------------------------------------


EVERY = {fault.name: (model, ids, fault) for model, ids, fault in mutations.every_fault()}


@pytest.mark.usual(24)
@pytest.mark.parametrize("name", EVERY)
def test_fault_is_found_and_blamed(name):
    model, ids, fault = EVERY[name]
    dump, ids = fault.make(model, ids)
    report = judge_trace(model, trace(dump), ids, precision=FLOAT32)
    row = mutations.row(fault, report)
    assert row["found"], row
    assert row["right"], row
    assert row["explained"] or name == "one block's codes misread", row  # which is placed
    if name in FAULTS and report.verdict is Verdict.WRONG and report.first_wrong.hypothesis:  # nothing lies between a tensor and its inputs
        assert report.reason == f"WRONG at {report.first_wrong.place}: {report.first_wrong.hypothesis}"
    assert list(map(row.get, ("fault", "verdict", "blamed", "says"))) == DOCUMENTED[name]


@pytest.mark.usual(6)
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.usefixtures("unexplained")
def test_every_operation_of_every_family_is_blamed(family):
    """All tensors of a layer are made wrong, each by itself: every one is, for the inputs that the dump has."""
    model, ids, points = family_dump(family, inner_norms=family in ("bitnet", "bitnet-25", "gptneox"))
    wrong = dict(points)
    for key, value in points.items():
        if key.layer != 0:
            off = np.float32(0.1) * np.abs(value).max() * np.sin(np.arange(value.size, dtype=np.float32)).reshape(value.shape)
            wrong[key] = (value + 1) % model.config.experts if key.name == TOP_EXPERTS else value + off
    report = judge_trace(model, trace(wrong, ids), ids)
    assert all(o.verdict is Verdict.WRONG for o in report.operations if o.key.layer != 0)
    assert {o.key for o in report.operations} == set(points)


@pytest.mark.usefixtures("unexplained")
def test_equal_outputs_of_other_inputs_are_not_the_same_bits():
    """A dump does not pass because its late tensors are copies of ours: the early ones differ."""
    dump, ids = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    points = recorded()
    for key in points:
        if key.layer == 0 or key.name == "ffn_out":
            points[key] = dump.get(key, points[key])
    report = judge_trace(MODEL, trace(points), ids)
    assert report.verdict is Verdict.WRONG


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("size", [3e-5, 1e-3])
@pytest.mark.parametrize("shape", [(17, 256), (1, 1)], ids=["random", "a factor"])
def test_small_errors_everywhere_are_seen(size, shape):
    """Errors within each element's bound: the variance shows that there are too many, and the slope shows a common factor."""
    key = Key("ffn_down", 1)
    points = recorded()
    points[key] = (points[key] * (1 + size * np.random.default_rng(0).standard_normal(shape))).astype(np.float32)
    assert judge_trace(MODEL, trace(points), TOKENS).first_wrong.key == key


def test_codes_are_exact_but_for_ambiguous_ones():
    points = recorded()
    key = Key("ffn_norm_codes", 1)
    points[key] = points[key].copy()
    points[key][3, 5] += 1
    report = judge_trace(MODEL, trace(points), TOKENS)
    assert report.first_wrong.key == key
    expected = next(o for o in graph.operations(MODEL, EXACT) if o.key == key).evaluate(np.array([[127.0, 0.5, -1.5, 0.4]]))
    assert expected.reach.tolist() == [[0, 1, 1, 0]]


# --- honest engines -------------------------------------------------------------------------------------------------------------------


@pytest.mark.usual(2)
@pytest.mark.parametrize("seed", range(4))
def test_honest_engines_are_left_alone(seed):
    model = random_model(seed, table=("float32", "float16", "bfloat16")[seed % 3], tied=seed % 2 == 0)
    ids = np.random.default_rng(seed).integers(0, model.config.vocab, 5 + 10 * seed)
    for name, dump, dialect in mutations.honest(model, ids):
        for shown in (trace(dump), only(dump, "l_out", "result_output")):
            report = judge_trace(model, shown, ids, dialect)
            assert report.verdict <= Verdict.FLIPS, (name, report.reason)


@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP])
def test_our_own_recording_has_the_same_bits(dialect):
    report = judge_trace(MODEL, trace(recorded(dialect=dialect), TOKENS), TOKENS, dialect)
    assert report.verdict is Verdict.SAME_BITS
    assert not report.missing
    assert len(report.operations) == len(list(graph.operations(MODEL, dialect)))


def test_equal_rows_are_fine_where_tokens_are_equal():
    ids = np.full(9, 7)
    assert judge_trace(MODEL, trace(mutations.Engine(MODEL, ids).run()), ids).verdict <= Verdict.FLIPS


# --- dumps that cannot be judged ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: np.where(np.arange(x.size).reshape(x.shape) == 77, np.nan, x).astype(np.float32), "nan at position 0, element 77"),
        (lambda x: x[:0], "shape"),
        (lambda x: x[:, :-1], "shape"),
        (lambda x: np.full_like(x, 3), "are 3.0"),
        (lambda x: x.astype(np.float64) + 1e300 * (x == x[3, 5]), "its largest number is 1e+300, beyond float32"),
    ],
)
@pytest.mark.parametrize("key", [LOGITS, Key("ffn_out", 1), Key("Kcur", 0)])
def test_dumps_that_say_nothing_are_invalid(key, change, says):
    """As the faults of dumps are, at any tensor."""
    points = recorded()
    points[key] = change(points[key].reshape(len(TOKENS), -1))
    report = judge_trace(MODEL, trace(points), TOKENS)
    assert report.verdict is Verdict.INVALID
    assert report.verdict.exit_code == 2
    assert says in report.reason


def test_empty_foreign_and_other_tokens_are_invalid():
    for points in ({}, {Key("ffn_moe_out", 0): np.ones((17, 4), np.float32)}):
        report = judge_trace(MODEL, trace(points), TOKENS)
        assert report.verdict is Verdict.INVALID
        assert "no tensor" in report.reason
    report = judge_trace(MODEL, trace(recorded(), TOKENS + 1), TOKENS)
    assert report.verdict is Verdict.INVALID
    assert "other token ids" in report.reason


# --- several operations at once -------------------------------------------------------------------------------------------------------


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((name, f"at {FAULTS[name].blamed}: ") for name in ("residual missing", "mask off by one, sees the next")),
        # each changes less than FLIPS_LIMIT, which holds where there is no model
        ("codes truncated, not rounded", "codes are truncated"),
        ("one activation scale per tensor", "one activation scale"),
    ],
)
def test_layer_outputs_are_enough_to_recognise_a_mistake(name, says):
    dump, ids = FAULTS[name].make(MODEL, TOKENS)
    report = judge_trace(MODEL, only(dump, "l_out", "result_output"), ids)
    assert report.first_wrong.key == Key("l_out", 1)
    assert says in report.first_wrong.hypothesis
    assert "17 operations lie between it and the tensors of the dump" in report.reason
    assert says.startswith("at") or report.first_wrong.nmse < 1e-2


@pytest.mark.usual(1)
@pytest.mark.parametrize(
    ("model", "names"),
    [(deep_model(3), ("l_out", "result_norm")), (deep_model(2), ("Qcur", "Kcur", "ffn_out")), (DEEP, ("inp_embd", "result_output"))],
)
def test_roundings_across_many_operations_are_no_fault(model, names):
    report = judge_trace(model, only(recorded(model, DEEP_TOKENS, BITNET_CPP), *names), DEEP_TOKENS)
    assert report.verdict is Verdict.FLIPS, report.reason


@pytest.mark.usefixtures("unexplained")
@pytest.mark.parametrize("name", ["inp_embd", "ffn_gate"])
def test_numbers_beyond_float32_on_the_way_are_wrong(name):
    model, ids, points = family_dump("bitnet-b1.58", inner_norms=True)
    dump = {key: value for key, value in points.items() if key.name in (name, "ffn_sub_norm", "l_out") and not key.layer}
    for key in dump:
        if key.name == name:
            dump[key] = dump[key] * np.float32(1e25)
    assert judge_trace(model, trace(dump), ids).verdict is Verdict.WRONG


def test_what_is_too_much_work_to_explain_is_said(monkeypatch):
    monkeypatch.setattr(judging, "_MOST_WORK", 10**5)
    dump, ids = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    report = judge_trace(MODEL, only(dump, "l_out"), ids)
    assert report.verdict is Verdict.WRONG
    assert (report.first_wrong.hypothesis, report.first_wrong.tried) == (None, False)
    (note,) = report.notes
    assert "layer 1 l_out: known mistakes were not tried" in note
    assert "`bitnet-np trace --layers 1 --names attn_norm,Qcur," in note
    assert report.as_dict()["notes"] == [note]
    (note,) = judge_trace(MODEL, only(dump, "result_output"), ids).notes
    assert "--names l_out`" in note.replace(" does", "")
    assert "then all names of the first layer that is wrong" in note
    assert not judge_trace(MODEL, trace(dump), ids).notes


# --- who is closer to float64 ---------------------------------------------------------------------------------------------------------


def test_our_kernels_read_the_dumps_own_inputs():
    """After a fault every tensor is far from ours, but our kernels are near float64 where they are given the dump's inputs."""
    dump, ids = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    report = judge_trace(MODEL, trace(dump), ids)
    assert [o.place for o in report.operations if o.verdict is Verdict.WRONG] == ["layer 1 ffn_out"]
    verdicts = [o for o in report.operations if o.key.layer == 2]
    assert len(verdicts) > 10
    assert all(0 <= o.ours_rms < 3 for o in verdicts)
    assert np.abs(dump[verdicts[-1].key] - recorded()[verdicts[-1].key]).max() > 0.1


@pytest.mark.usefixtures("unexplained")
def test_numbers_beyond_float32_have_no_kernel_to_compare():
    points = recorded()
    del points[LOGITS], points[Key("result_norm", None)]
    for key in points:
        if key.layer == 2:
            points[key] = points[key] * np.float32(1e30)
    assert judge_trace(MODEL, trace(points), TOKENS).verdict is Verdict.WRONG


def test_who_is_closer_to_float64():
    rng = np.random.default_rng(0)
    points = recorded()
    worse, better = Key("ffn_down", 1), Key("kqv_out", 2)
    points[worse] = (points[worse] * (1 + 1e-7 * rng.standard_normal(points[worse].shape))).astype(np.float32)
    inputs = [points[Key(name, 2)].astype(np.float64) for name in ("Qcur_rope", "Kcur_rope", "Vcur")]
    points[better] = next(o for o in graph.operations(MODEL, EXACT) if o.key == better).evaluate(*inputs).value.astype(np.float32)
    report = judge_trace(MODEL, trace(points), TOKENS)
    verdicts = {o.key: o for o in report.operations}
    assert (verdicts[worse].closer, verdicts[better].closer) == ("ours", "theirs")
    assert verdicts[worse].ours_rms < verdicts[worse].theirs_rms < 3
    assert verdicts[Key("Qcur", 0)].closer is None  # the same bits: nothing to ask
    assert report.as_dict()["closer_to_float64"] == report.closer
    assert [(row[0], row[1], row[4]) for row in closer_rows(report) if row[0] == "ffn_down"] == [("ffn_down", 1, "ours")]
    assert "theirs in " in closer_summary(report)
    assert closer_summary(judge_trace(MODEL, trace(recorded()), TOKENS)) == ""


def test_inputs_of_more_bits_than_ours_are_not_held_against_us():
    exact = {key: value.astype(np.float64) for key, value in recorded().items() if key.name in ("ffn_gate", "ffn_up", "ffn_out")}
    verdicts = judge_trace(MODEL, trace(exact), TOKENS).operations
    assert [o.closer for o in verdicts if o.key.name == "ffn_out"] == [None] * 3


# --- memory ---------------------------------------------------------------------------------------------------------------------------


def test_judging_takes_little_more_memory_than_the_dump():
    """The output matrix and the logits of a large vocabulary are not held in float64 several times."""
    shape = {"vocab": 100_000, "width": 64, "ffn": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "n_layers": 1}
    model = random_model(0, table="float16", **shape)
    ids = np.random.default_rng(0).integers(0, 100_000, 48)
    dump = recorded(model, ids)
    dump[LOGITS] = np.nextafter(dump[LOGITS], np.float32(9))
    judge_trace(model, trace(dump), ids)  # compiles the kernels, and fills what is cached
    tracemalloc.start()
    assert judge_trace(model, trace(dump), ids).verdict is Verdict.ROUNDING
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 14 * dump[LOGITS].nbytes
