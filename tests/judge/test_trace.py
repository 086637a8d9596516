"""The judge of traces: it finds every fault of scripts/mutations.py at the right place, and leaves honest engines alone."""

import dataclasses
import tracemalloc

import numpy as np
import pages
import pytest
from dumps import FAULTS, LOGITS, MODEL, TOKENS, family_dump, only, recorded, trace
from engine_runs import DEEP, DEEP_TOKENS, deep_model

from bitnet_np import BITNET_CPP, EXACT
from bitnet_np.judge import graph, operations, products
from bitnet_np.judge import trace as judging
from bitnet_np.judge.mistakes.mistake import Cause
from bitnet_np.judge.precision import FLOAT32
from bitnet_np.judge.report import closer_rows, closer_summary
from bitnet_np.judge.trace import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import TOP_EXPERTS, Key
from scripts import mutations


@pytest.fixture
def unexplained(monkeypatch):
    """What is wrong is blamed and not explained, which would take seconds."""
    monkeypatch.setattr(judging._Judge, "_explain", lambda self, *arguments, **options: Cause("known", "known"))


DOCUMENTED = {row[0]: row for row in pages.table(pages.ROOT / "docs" / "validation.md", "fault")}


# --- faults ---------------------------------------------------------------------------------------------------------------------------


EVERY = {fault.name: (model, ids, fault) for model, ids, fault in mutations.every_fault()}


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


@pytest.mark.parametrize(
    ("layer", "change", "says"),
    [
        (1, {"window": None}, "the window is missing: all tokens before are seen"),
        (1, {"window": 6}, "the window is too long by one"),
        (1, {"window": 4}, "the window is too short by one"),
        (0, {"window_layers": None}, "only the last 4 tokens are seen"),
    ],
)
def test_windows_are_judged_layer_by_layer(layer, change, says):
    """Of two layers the first sees all tokens, the second the last four or five. In one layer their engine sees others."""
    size = 4 if "window_layers" in change else 5
    model = random_model(0, n_layers=2, window=size, window_layers=(1,))
    ids = np.random.default_rng(0).integers(0, model.config.vocab, 17)
    assert judge_trace(model, trace(recorded(model, ids)), ids).verdict is Verdict.SAME_BITS
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, **change))
    report = judge_trace(model, trace(recorded(other, ids)), ids)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("kqv_out", layer))
    assert says in report.first_wrong.hypothesis


WITH_INNER_NORMS = ("bitnet", "bitnet-25", "bitnet-b1.58", "gptneox", "llama")


@pytest.mark.parametrize(
    ("family", "inner_norms"),
    [(family, False) for family in ARCHITECTURES if family not in ("bitnet", "bitnet-25")]
    + [(family, True) for family in WITH_INNER_NORMS],
)
@pytest.mark.usefixtures("unexplained")
def test_every_operation_of_every_family_is_blamed(family, inner_norms):
    """All tensors of a layer are made wrong, each by itself: every one is, for the inputs that the dump has."""
    model, ids, points = family_dump(family, inner_norms=inner_norms)
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
def test_small_errors_everywhere_are_seen(size):
    """Errors within each element's bound: the variance shows that there are too many, and the slope shows a common factor."""
    rng = np.random.default_rng(0)
    points = recorded()
    key = Key("ffn_down", 1)
    points[key] = (points[key] * (1 + size * rng.standard_normal(points[key].shape))).astype(np.float32)
    assert judge_trace(MODEL, trace(points), TOKENS).first_wrong.key == key
    points = recorded()
    points[key] = (points[key] * np.float32(1 + size)).astype(np.float32)
    assert judge_trace(MODEL, trace(points), TOKENS).first_wrong.key == key


def test_codes_are_exact_but_for_ambiguous_ones():
    points = recorded()
    key = Key("ffn_norm_codes", 1)
    points[key] = points[key].copy()
    points[key][3, 5] += 1
    report = judge_trace(MODEL, trace(points), TOKENS)
    assert report.first_wrong.key == key
    expected = products.codes(np.array([[127.0, 0.5, -1.5, 0.4]]))
    assert expected.reach.tolist() == [[0, 1, 1, 0]]


# --- honest engines -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_honest_engines_are_left_alone(seed):
    model = random_model(seed, table=("float32", "float16", "bfloat16")[seed % 3], tied=seed % 2 == 0)
    ids = np.random.default_rng(seed).integers(0, model.config.vocab, 5 + 20 * seed)
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
        (lambda x: np.where(np.arange(x.size).reshape(x.shape) == 77, np.inf, x).astype(np.float32), "inf at position 0"),
        (lambda x: x[:0], "shape"),
        (lambda x: x[:, :-1], "shape"),
        (lambda x: np.full_like(x, 3), "are 3.0"),
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


def test_numbers_beyond_float32_are_invalid():
    """Their squares leave float64's range, too, so nothing that is computed from them could be judged."""
    wide = {key: value.astype(np.float64) for key, value in recorded().items() if value.dtype == np.float32}
    wide[Key("ffn_inp", 1)][3, 5] = 1e300
    report = judge_trace(MODEL, trace(wide), TOKENS)
    assert (report.verdict, report.reason) == (Verdict.INVALID, "layer 1 ffn_inp: its largest number is 1e+300, beyond float32")


# --- several operations at once -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((name, f"at {FAULTS[name].blamed}: ") for name in ("residual missing", "I2_S read as 64/16", "mask off by one, sees the next")),
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
    assert "dump attn_norm" in report.reason
    assert says.startswith("at") or report.first_wrong.nmse < 1e-2


def test_logits_alone_show_a_mistake_of_every_layer():
    model = random_model(5)
    dump, ids = FAULTS["SiLU for relu squared, every layer"].make(model, TOKENS[:5] % model.config.vocab)
    report = judge_trace(model, trace({LOGITS: dump[LOGITS]}), ids)
    assert "ffn_out of every layer: SiLU(gate) * up" in report.reason


@pytest.mark.parametrize(
    ("model", "names"),
    [(DEEP, ("inp_embd", "result_output")), (deep_model(4), ("l_out", "result_norm")), (deep_model(2), ("Qcur", "Kcur", "ffn_out"))],
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
    points[better] = operations.attend(MODEL, EXACT, better.layer, *inputs).value.astype(np.float32)
    report = judge_trace(MODEL, trace(points), TOKENS)
    verdicts = {o.key: o for o in report.operations}
    assert (verdicts[worse].closer, verdicts[better].closer) == ("ours", "theirs")
    assert verdicts[worse].ours_rms < verdicts[worse].theirs_rms < 3
    assert verdicts[Key("Qcur", 0)].closer is None  # the same bits: nothing to ask
    plain = report.as_dict()
    assert {o["tensor"]: o["closer_to_float64"] for o in plain["operations"] if o["layer"] == 1}["ffn_down"] == "ours"
    assert plain["closer_to_float64"]["theirs"] >= 1
    rows = {row[0]: row[1:] for row in closer_rows(report)}
    assert (rows["ffn_down"][0], rows["ffn_down"][3]) == (1, "ours")
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
