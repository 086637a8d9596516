"""The judge of traces: every fault of scripts/mutations.py is found at the right place, honest engines are left alone, nothing passes
for want of something to compare."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pages
import pytest

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP, embedded, forward_full, packing, spec
from bitnet_np.families import ARCHITECTURES
from bitnet_np.forward_pass import run_whole
from bitnet_np.judge import graph, operations
from bitnet_np.judge import trace as judging
from bitnet_np.judge.bounds import within
from bitnet_np.judge.dump import check_trace, log_softmax
from bitnet_np.judge.mistakes.catalogue import in_engine as known_mistakes
from bitnet_np.judge.report import closer_rows, closer_summary, heat_map, plot
from bitnet_np.judge.trace import judge_trace
from bitnet_np.judge.two_dumps import compare_traces
from bitnet_np.judge.variant import Variant
from bitnet_np.judge.verdict import Verdict
from bitnet_np.network import Runtime
from bitnet_np.testing import random_model
from bitnet_np.tokens import check_tokens
from bitnet_np.traces.formats import llama_logits, read_any
from bitnet_np.traces.points import Key, Trace, key_of
from scripts import mutations

MODEL = mutations.embedded_model()
TOKENS = embedded.recording()["tokens_T17"].astype(np.int64)
LOGITS = Key("result_output", None)
FAULTS = {fault.name: fault for fault in mutations.faults()}
DOCUMENTED = {row[0]: row for row in pages.table(pages.ROOT / "docs" / "judging.md", "fault")}


def trace(points, tokens=None, **more):
    return Trace(points=points, tokens=tokens, origin="dump", **more)


def recorded(model=MODEL, tokens=TOKENS, dialect=EXACT):
    points = {}
    forward_full(model, tokens[None], dialect=dialect, record=lambda name, layer, array: points.update({Key(name, layer): array.copy()}))
    return {key: array.reshape(len(array), -1) if array.ndim > 1 else array for key, array in points.items()}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_blamed(name):
    fault = FAULTS[name]
    dump, ids = fault.make(MODEL, TOKENS)
    row = mutations.row(fault, judge_trace(MODEL, trace(dump), ids))
    assert row["found"], row
    assert row["right"], row
    assert list(map(row.get, ("fault", "verdict", "blamed", "says"))) == DOCUMENTED[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("SiLU for relu squared", "SiLU(gate) * up instead of relu(gate)^2 * up"),
        ("RoPE pairs interleaved (queries)", "interleaved"),
        ("RoPE restarts on a filled cache", "positions restart every 9 tokens"),
        ("KV heads dealt in turn", "dealt out in turn"),
        ("last prompt token fed twice", "fed twice"),
        ("weight scale inverted", "weight scale divides"),
        ("float16 roundings not declared", "declare the dialect bitnet.cpp"),
        ("scale off by 1e-4", "1.0001 times"),
        ("epsilon 1e-6 in attn_norm", "epsilon is 1e-06"),
    ],
)
def test_mistake_is_recognised(name, says):
    dump, ids = FAULTS[name].make(MODEL, TOKENS)
    report = judge_trace(MODEL, trace(dump), ids)
    assert says in report.first_wrong.hypothesis
    assert report.reason == f"WRONG at {report.first_wrong.place}: {report.first_wrong.hypothesis}"


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
    """The second layer of two sees five tokens; the first one all. Theirs sees something else."""
    size = 4 if "window_layers" in change else 5
    model = random_model(0, n_layers=2, window=size, window_layers=(1,))
    ids = np.random.default_rng(0).integers(0, model.config.vocab, 17)
    assert judge_trace(model, trace(recorded(model, ids)), ids).verdict is Verdict.SAME_BITS
    other = dataclasses.replace(model, config=dataclasses.replace(model.config, **change))
    report = judge_trace(model, trace(recorded(other, ids)), ids)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("kqv_out", layer))
    assert says in report.first_wrong.hypothesis


@pytest.mark.parametrize("seed", range(4))
def test_honest_engines_are_left_alone(seed):
    model = random_model(seed, table=("float32", "float16", "bfloat16")[seed % 3], tied=seed % 2 == 0)
    ids = np.random.default_rng(seed).integers(0, model.config.vocab, 5 + 20 * seed)
    for name, dump, dialect in mutations.honest(model, ids):
        report = judge_trace(model, trace(dump), ids, dialect)
        assert report.verdict <= Verdict.FLIPS, (name, report.reason)


@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP])
def test_our_own_recording_has_the_same_bits(dialect):
    report = judge_trace(MODEL, trace(recorded(dialect=dialect), TOKENS), TOKENS, dialect)
    assert report.verdict is Verdict.SAME_BITS
    assert not report.missing
    assert len(report.operations) == len(list(graph.operations(MODEL, dialect)))


@pytest.mark.parametrize(("base", "width"), [(5e5, 64), (7e4, 20), (1e4, 12)])
def test_float32_angles_are_honest(base, width):
    """As in transformers: frequencies and angles in float32, an error that all heads of a position share and that grows with it."""
    t = 400
    x = np.random.default_rng(0).standard_normal((t, 2 * width)).astype(np.float32)
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    angle = np.arange(t, dtype=np.float32)[:, None] * (np.float32(1) / np.float32(base) ** exponent)
    assert angle.dtype == np.float32
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = np.split(x.reshape(t, 2, width), 2, axis=-1)
    rotated = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(t, -1)
    model = random_model(0, rope_base=base, head_dim=width, heads=2, kv_heads=1, n_layers=1)
    operation = next(o for o in graph.operations(model, EXACT) if o.key == Key("Qcur_rope", 0))
    verdict, reason, _ = within(operation.evaluate(x.astype(np.float64)), rotated.astype(np.float64))
    assert verdict is Verdict.ROUNDING, reason


def test_errors_do_not_spread_to_later_operations():
    dump, ids = FAULTS["attn_sub_norm missing"].make(MODEL, TOKENS)
    wrong = [o.place for o in judge_trace(MODEL, trace(dump), ids).operations if o.verdict is Verdict.WRONG]
    assert wrong == ["layer 1 attn_sub_norm"]


@pytest.mark.parametrize("name", ["SiLU for relu squared", "residual missing", "I2_S read as 64/16", "mask off by one, sees the next"])
def test_layer_outputs_are_enough_to_recognise_a_mistake(name):
    dump, ids = FAULTS[name].make(MODEL, TOKENS)
    report = judge_trace(MODEL, trace({key: value for key, value in dump.items() if key.name in ("l_out", "result_output")}), ids)
    assert report.first_wrong.key == Key("l_out", 1)
    assert report.first_wrong.hypothesis.startswith(f"at {FAULTS[name].blamed}: ")
    assert "dump attn_norm" in report.reason


def test_logits_alone_show_a_mistake_of_every_layer():
    dump, ids = FAULTS["SiLU for relu squared, every layer"].make(MODEL, TOKENS)
    report = judge_trace(MODEL, trace({LOGITS: dump[LOGITS]}), ids)
    assert "ffn_out of every layer: SiLU(gate) * up" in report.reason


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: np.where(np.arange(x.size).reshape(x.shape) == 77, np.nan, x).astype(np.float32), "nan at position 0, element 77"),
        (lambda x: np.where(np.arange(x.size).reshape(x.shape) == 77, np.inf, x).astype(np.float32), "inf at position 0"),
        (lambda x: x[:0], "shape"),
        (lambda x: x[:, :-1], "shape"),
        (lambda x: x[:-1], "shape"),
        (lambda x: x.astype(np.int32), "dtype"),
        (np.zeros_like, "are 0.0"),
        (lambda x: np.full_like(x, 3), "are 3.0"),
        (lambda x: np.repeat(x[:1], len(x), axis=0), "rows are all the same"),
    ],
)
@pytest.mark.parametrize("key", [LOGITS, Key("ffn_out", 1), Key("Kcur", 0)])
def test_dumps_that_say_nothing_are_invalid(key, change, says):
    points = recorded()
    points[key] = change(points[key].reshape(len(TOKENS), -1))
    report = judge_trace(MODEL, trace(points), TOKENS)
    assert report.verdict is Verdict.INVALID
    assert report.verdict.exit_code == 2
    assert says in report.reason


def test_empty_foreign_and_other_tokens_are_invalid():
    for points in ({}, {Key("kq", 0): np.ones((4, 17, 17), np.float32)}):
        report = judge_trace(MODEL, trace(points), TOKENS)
        assert report.verdict is Verdict.INVALID
        assert "no tensor" in report.reason
    report = judge_trace(MODEL, trace(recorded(), TOKENS + 1), TOKENS)
    assert report.verdict is Verdict.INVALID
    assert "other token ids" in report.reason


def test_nan_is_blamed_where_it_begins():
    """Logits that are NaN say nothing of where it came from; the tensors before them do."""
    points = recorded()
    for key in points:
        late = key == LOGITS or key.layer == 2 or (key.layer == 1 and key.name in ("kqv_out", "attn_o_out", "ffn_inp"))
        if late and points[key].dtype == np.float32:  # codes have no NaN
            points[key] = np.full_like(points[key], np.nan)
    report = check_trace(MODEL, TOKENS, trace(points))
    assert (report.verdict, report.first_wrong.key, report.logits.verdict) == (Verdict.INVALID, Key("kqv_out", 1), Verdict.INVALID)
    assert report.reason.startswith("layer 1 kqv_out: it has nan at position 0, element 0")
    report = check_trace(MODEL, TOKENS, trace(recorded() | {LOGITS: points[LOGITS]}))
    assert report.reason.startswith("logits: their logit at 0, 0 is nan")


def test_codes_are_exact_but_for_ambiguous_ones():
    points = recorded()
    key = Key("ffn_norm_codes", 1)
    points[key] = points[key].copy()
    points[key][3, 5] += 1
    report = judge_trace(MODEL, trace(points), TOKENS)
    assert report.first_wrong.key == key
    expected = operations.codes(np.array([[127.0, 0.5, -1.5, 0.4]]))
    assert expected.reach.tolist() == [[0, 1, 1, 0]]


def test_equal_outputs_of_other_inputs_are_not_the_same_bits():
    """A dump whose late tensors are copied from ours, over early ones that differ, does not pass for their sake."""
    dump, ids = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    points = recorded()
    for key in points:
        if key.layer == 0 or key.name == "ffn_out":
            points[key] = dump.get(key, points[key])
    report = judge_trace(MODEL, trace(points), ids)
    assert report.verdict is Verdict.WRONG


@pytest.mark.parametrize("size", [3e-5, 1e-3])
def test_small_errors_everywhere_are_seen(size):
    """Within each element's bound, but too many: the variance test; and a common factor: the slope."""
    rng = np.random.default_rng(0)
    points = recorded()
    key = Key("ffn_down", 1)
    points[key] = (points[key] * (1 + size * rng.standard_normal(points[key].shape))).astype(np.float32)
    assert judge_trace(MODEL, trace(points), TOKENS).first_wrong.key == key
    points = recorded()
    points[key] = (points[key] * np.float32(1 + size)).astype(np.float32)
    assert judge_trace(MODEL, trace(points), TOKENS).first_wrong.key == key


# --- across operations ----------------------------------------------------------------------------------------------------------------

DEEP, LESS_DEEP = (random_model(52, n_layers=n, width=128, ffn=256, vocab=256, heads=4, kv_heads=2, head_dim=32) for n in (30, 8))


def only(dump, *names):
    return trace({key: value for key, value in dump.items() if key.name in names})


@pytest.mark.parametrize(
    ("model", "names"), [(DEEP, ("inp_embd", "result_output")), (DEEP, ("l_out", "result_norm")), (LESS_DEEP, ("Qcur", "Kcur", "ffn_out"))]
)
def test_roundings_across_many_operations_are_no_fault(model, names):
    ids = np.random.default_rng(0).integers(0, 256, 12)
    report = judge_trace(model, only(recorded(model, ids, BITNET_CPP), *names), ids)
    assert report.verdict is Verdict.FLIPS, report.reason


@pytest.mark.parametrize(
    ("name", "says"), [("codes truncated, not rounded", "codes are truncated"), ("one activation scale per tensor", "one activation scale")]
)
def test_small_mistakes_across_operations_are_found(name, says):
    """Each changes less than the limit for logits without a model."""
    dump, ids = FAULTS[name].make(MODEL, TOKENS)
    report = judge_trace(MODEL, only(dump, "l_out"), ids)
    assert report.first_wrong.key == Key("l_out", 1)
    assert report.first_wrong.nmse < 1e-2
    assert says in report.first_wrong.hypothesis


@pytest.mark.parametrize("seed", range(6))
def test_epsilon_across_operations_is_not_blamed_for_roundings(seed):
    model = random_model(seed, table="float16", tied=seed % 2 == 0)
    ids = np.random.default_rng(seed).integers(0, model.config.vocab, 5 + 2 * seed)
    for name, dump, dialect in mutations.honest(model, ids):
        report = judge_trace(model, only(dump, "l_out", "result_output"), ids, dialect)
        assert report.verdict <= Verdict.FLIPS, (name, report.reason)


@pytest.mark.parametrize("name", ["inp_embd", "ffn_gate"])
def test_numbers_beyond_float32_on_the_way_are_wrong(name):
    dump = {key: value for key, value in recorded().items() if key.name in (name, "ffn_sub_norm", "l_out")}
    for key in dump:
        if key.name == name:
            dump[key] = dump[key] * np.float32(1e25)
    assert judge_trace(MODEL, trace(dump), TOKENS).verdict is Verdict.WRONG


def test_one_wrong_logit_is_seen_across_operations():
    dump, ids = FAULTS["one logit wrong"].make(MODEL, TOKENS)
    report = judge_trace(MODEL, only(dump, "l_out", "result_output"), ids)
    assert "logit 5 of position 8 is off by 0.01" in report.reason


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


# --- where the places say what happened -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("one logit wrong", "one number alone is wrong: position 8, element 5"),
        ("one block's codes misread", "weights 0 to 127 of row 3 are read from row 4"),
        ("cache slot leaks another sequence", "values are summed that a token must not see"),
        ("codes truncated, not rounded", "codes are truncated instead of rounded"),
    ],
)
def test_local_mistakes_are_explained(name, says):
    dump, ids = FAULTS[name].make(MODEL, TOKENS)
    assert says in judge_trace(MODEL, trace(dump), ids).first_wrong.hypothesis


def with_step(key, compute, model=MODEL, ids=TOKENS):
    return mutations.Engine(model, ids, {key.name: compute}, (key.layer,)).run()


def test_values_of_another_sequence_are_counted():
    other = mutations.Engine(MODEL, np.arange(100, 105)).run()
    key = Key("kqv_out", 1)
    dump = with_step(key, lambda e, n: e.attend(n, extra=(other[Key("Kcur_rope", n)], other[Key("Vcur", n)])))
    found = judge_trace(MODEL, trace(dump), TOKENS).first_wrong
    assert (found.key, found.hypothesis.split(",")[1]) == (key, " 5 of them: a cache slot that was not cleared")


def test_a_factor_of_all_scores_is_measured():
    found = judge_trace(MODEL, trace(with_step(Key("kqv_out", 1), lambda e, n: e.attend(n, scale=0.1))), TOKENS).first_wrong
    assert found.hypothesis == "scores are 0.8 times what they should be"


def test_equal_rows_are_fine_where_tokens_are_equal():
    ids = np.full(9, 7)
    assert judge_trace(MODEL, trace(mutations.Engine(MODEL, ids).run()), ids).verdict <= Verdict.FLIPS


def test_repeated_tokens_have_no_values_of_others():
    ids = np.full(9, 7)
    found = judge_trace(MODEL, trace(with_step(Key("kqv_out", 0), lambda e, n: e.attend(n) * np.float32(1.5), ids=ids)), ids).first_wrong
    assert "1.5 times" in found.hypothesis


@pytest.mark.parametrize(
    ("rows", "columns", "says"),
    [
        (slice(None), [3, 70], "only elements 3, 70 of each position: rows of the weights are misread"),
        ([4], slice(None, None, 3), "only position 4: the other 16 are right"),
        ([4, 5, 6, 7, 8, 9], slice(None, None, 3), None),
    ],
)
def test_places_of_wrong_numbers(rows, columns, says):
    points = recorded()
    key = Key("ffn_up", 1)
    noise = np.random.default_rng(0).normal(0, 1, points[key].shape).astype(np.float32)
    mask = np.zeros(noise.shape, bool)
    mask[rows, columns] = True
    points[key] = points[key] + noise * mask
    found = judge_trace(MODEL, trace(points), TOKENS).first_wrong
    assert found.key == key
    assert found.hypothesis is None if says is None else says in found.hypothesis


# --- who is closer to float64 ---------------------------------------------------------------------------------------------------------


def test_our_kernels_read_the_dumps_own_inputs():
    """After a fault everything is far from ours, but each operation by our kernel is near what it should be there."""
    dump, ids = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    found = [o for o in judge_trace(MODEL, trace(dump), ids).operations if o.key.layer == 2]
    assert len(found) > 10
    assert all(0 <= o.ours_rms < 3 for o in found)
    assert np.abs(dump[found[-1].key] - recorded()[found[-1].key]).max() > 0.1


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
    found = {o.key: o for o in report.operations}
    assert (found[worse].closer, found[better].closer) == ("ours", "theirs")
    assert found[worse].ours_rms < found[worse].theirs_rms < 3
    assert found[Key("Qcur", 0)].closer is None  # the same bits: nothing to ask
    plain = report.as_dict()
    assert {o["tensor"]: o["closer_to_float64"] for o in plain["operations"] if o["layer"] == 1}["ffn_down"] == "ours"
    assert plain["closer_to_float64"]["theirs"] >= 1
    rows = {row[0]: row[1:] for row in closer_rows(report)}
    assert (rows["ffn_down"][0], rows["ffn_down"][3]) == (1, "ours")
    assert "theirs in " in closer_summary(report)
    assert closer_summary(judge_trace(MODEL, trace(recorded()), TOKENS)) == ""


def test_inputs_of_more_bits_than_ours_are_not_held_against_us():
    exact = {key: value.astype(np.float64) for key, value in recorded().items() if key.name in ("ffn_gate", "ffn_up", "ffn_out")}
    found = judge_trace(MODEL, trace(exact), TOKENS).operations
    assert [o.closer for o in found if o.key.name == "ffn_out"] == [None] * 3


# --- logits and dumps without a model -------------------------------------------------------------------------------------------------


def test_log_probabilities_and_some_positions_are_judged():
    logits = recorded()[LOGITS]
    for key, values in ((LOGITS, logits), (Key("log_probs", None), log_softmax(logits))):
        report = check_trace(MODEL, TOKENS, trace({key: values[8:]}, positions=np.arange(8, 17)), EXACT)
        assert report.verdict <= Verdict.ROUNDING
        assert report.logits.positions == 9
        report = check_trace(MODEL, TOKENS, trace({key: values[7:16]}, positions=np.arange(8, 17)), EXACT)
        assert report.verdict >= Verdict.WRONG


def test_log_probabilities_are_judged_as_far_as_their_file_tells_them(tmp_path):
    """llama.cpp's has nothing below the largest minus 16, and steps: a right engine is not to blame for that."""
    logits = recorded()[LOGITS]
    verdicts = []
    for theirs in (logits, logits * np.float32(1 + 1e-6), logits * np.float32(1.05)):
        with llama_logits.LlamaLogitsWriter(tmp_path / "x.kld", TOKENS) as out:
            out.add(LOGITS, theirs)
        report = check_trace(MODEL, TOKENS, read_any(tmp_path / "x.kld"), EXACT)
        verdicts.append((report.verdict, report.logits.verdict))
    assert verdicts == [(verdict, verdict) for verdict in (Verdict.SAME_BITS, Verdict.ROUNDING, Verdict.WRONG)]


def test_one_row_of_logits_is_taken_for_the_last():
    logits = recorded()[LOGITS]
    report = check_trace(MODEL, TOKENS, trace({LOGITS: logits[-1:]}), EXACT)
    assert (report.verdict, report.logits.compared, report.logits.positions) == (Verdict.SAME_BITS, (16,), 1)
    assert report.notes == ("one row of result_output for 17 tokens: taken as that of the last position, 16",)
    for key, values in ((LOGITS, logits), (Key("log_probs", None), log_softmax(logits))):
        report = check_trace(MODEL, TOKENS, trace({key: values[5:6]}), EXACT)
        assert report.verdict is Verdict.WRONG
        assert report.reason == "it is the row of position 5, not of the last one, 16"
        assert report.logits.explanation == "the row of position 5"
    report = check_trace(MODEL, TOKENS, trace({LOGITS: logits[-1:]}, positions=np.array([16])), EXACT)
    assert (report.verdict, report.notes, report.logits.compared) == (Verdict.SAME_BITS, (), None)
    report = check_trace(MODEL, TOKENS[:1], trace({LOGITS: logits[:1]}), EXACT)
    assert (report.verdict, report.notes, report.logits.compared) == (Verdict.SAME_BITS, (), None)


@pytest.mark.parametrize("key", [LOGITS, Key("log_probs", None)])
def test_one_row_of_logits_does_not_keep_the_other_tensors_from_being_judged(key):
    """Aprender's stage files hold the last token's logits, and all of each layer."""
    row = recorded()[LOGITS][-1:] if key == LOGITS else log_softmax(recorded()[LOGITS][-1:])
    others = {k: v for k, v in recorded().items() if k != LOGITS}
    report = check_trace(MODEL, TOKENS, trace(others | {key: row}), EXACT)
    assert report.logits.verdict is Verdict.SAME_BITS
    assert (report.verdict, len(report.operations)) == (Verdict.SAME_BITS, len(others))
    assert report.notes == (f"one row of {key.name} for 17 tokens: taken as that of the last position, 16",)
    bad, _ = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    wrong = {k: v for k, v in bad.items() if k != LOGITS}
    report = check_trace(MODEL, TOKENS, trace(wrong | {key: row}), EXACT)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("ffn_out", 1))


def test_wrong_log_probabilities_alone_are_wrong():
    """Not a dump that cannot be compared, for want of an operation that gives them."""
    report = check_trace(MODEL, TOKENS, trace({Key("log_probs", None): log_softmax(3 * recorded()[LOGITS])}), EXACT)
    assert (report.verdict, report.logits.verdict) == (Verdict.WRONG, Verdict.WRONG)


@pytest.mark.parametrize("positions", [[16], [3, 9], [0, 1, 70, 90], [90, 3]])
def test_mistakes_are_tried_on_the_positions_a_dump_has(positions):
    model = random_model(5)
    ids = np.random.default_rng(2).integers(0, 50, 91)
    faulty = next(m for m in known_mistakes(Variant("", model, EXACT)) if "truncated" in m.text)
    theirs = forward_full(model, ids[None], ops=faulty.ops)[0]
    report = check_trace(model, ids, trace({LOGITS: theirs[positions]}, positions=np.array(positions)), EXACT)
    assert report.verdict is Verdict.WRONG
    assert report.logits.explanation == faulty.text


def test_judging_takes_little_more_memory_than_the_dump():
    """Heads and vocabularies are large: neither the one nor the logits may be held in float64 many times."""
    shape = {"vocab": 100_000, "width": 64, "ffn": 64, "heads": 2, "kv_heads": 1, "head_dim": 16, "n_layers": 1}
    model, rng = random_model(0, table="float16", **shape), np.random.default_rng(0)
    ids = rng.integers(0, 100_000, 48)
    dump = recorded(model, ids)
    dump[LOGITS] = np.nextafter(dump[LOGITS], np.float32(9))
    judge_trace(model, trace(dump), ids[:48])  # compiled, and kept what is kept
    tracemalloc.start()
    assert judge_trace(model, trace(dump), ids).verdict is Verdict.ROUNDING
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 14 * dump[LOGITS].nbytes


def test_numbers_beyond_float32_are_invalid():
    """Their squares leave float64, too, and what comes of them is neither right nor wrong."""
    wide = {key: value.astype(np.float64) for key, value in recorded().items() if value.dtype == np.float32}
    wide[Key("ffn_inp", 1)][3, 5] = 1e300
    report = judge_trace(MODEL, trace(wide), TOKENS)
    assert (report.verdict, report.reason) == (Verdict.INVALID, "layer 1 ffn_inp: its largest number is 1e+300, beyond float32")


def test_compare_two_dumps():
    ours, dialect = trace(recorded(), TOKENS), trace(recorded(dialect=BITNET_CPP), TOKENS)
    assert compare_traces(ours, ours).verdict is Verdict.SAME_BITS
    assert compare_traces(ours, dialect).verdict is Verdict.FLIPS
    bad, _ = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    report = compare_traces(ours, trace(bad), partial=True)
    assert report.verdict is Verdict.WRONG
    assert report.first_wrong.key.layer == 1


def test_compare_refuses_what_cannot_be_compared():
    ours = trace(recorded(), TOKENS)
    part = trace({LOGITS: ours.points[LOGITS]}, TOKENS)
    assert compare_traces(ours, part).verdict is Verdict.INVALID
    assert compare_traces(ours, part, partial=True).verdict is Verdict.SAME_BITS
    assert compare_traces(ours, trace({}, TOKENS), partial=True).verdict is Verdict.INVALID
    assert compare_traces(ours, dataclasses.replace(ours, tokens=TOKENS[::-1])).verdict is Verdict.INVALID
    nan = {**ours.points, LOGITS: np.full_like(ours.points[LOGITS], np.nan)}
    assert compare_traces(ours, trace(nan)).verdict is Verdict.INVALID
    assert compare_traces(trace(nan), trace(nan)).verdict is Verdict.INVALID


# --- reports --------------------------------------------------------------------------------------------------------------------------


def test_report_for_people_and_machines(tmp_path):
    dump, ids = FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)
    report = judge_trace(MODEL, trace(dump), ids)
    picture = heat_map(report)
    rows = {line.split()[1]: line for line in picture.splitlines() if line.startswith("layer")}
    assert "X" in rows["1"]
    assert "X" not in rows["0"] + rows["2"]
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert plain["first_wrong"]["tensor"] == "ffn_out"
    assert plain["first_wrong"]["layer"] == 1
    assert "key" not in plain["first_wrong"]
    assert all(key_of(label) for o in plain["operations"] for label in o["across"])
    assert plain["verdict"] == "WRONG"
    pytest.importorskip("matplotlib")
    plot(report, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


# --- other families -------------------------------------------------------------------------------------------------------------------


def family_trace(family, **shape):
    more = {"rope_width": 10, "parallel_residual": True} if family == "gptneox" else {}
    model = random_model(4, family=family, n_layers=2, **more, **shape)
    ids, points = np.arange(9) * 5 % model.config.vocab, {}
    keep = lambda name, n, array: points.update({Key(name, n): array.reshape(len(ids), -1).copy()})  # noqa: E731
    forward_full(model, ids[None], record=keep)
    return model, ids, {key: value for key, value in points.items() if not key.name.endswith(("_codes", "_scale"))}


@pytest.mark.parametrize("inner_norms", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_operation_of_every_family_is_blamed(family, inner_norms):
    """Each tensor of a layer made wrong alone, by what no mistake explains: it is the first that is wrong."""
    model, ids, points = family_trace(family, inner_norms=inner_norms)
    for key, value in points.items():
        if key.layer == 0:
            continue
        wrong = points | {
            key: value + np.float32(0.1) * np.abs(value).max() * np.sin(np.arange(value.size, dtype=np.float32)).reshape(value.shape)
        }
        report = judge_trace(model, Trace(wrong, ids, "dump"), ids)
        assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, key)


@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP, LLAMA_CPP])
@pytest.mark.parametrize("inner_norms", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_pass_goes_on_with_what_the_editor_returns(family, inner_norms, dialect):
    """Every tensor is replaced as it comes, and each operation's own result is still that of its inputs: those that replaced ours."""
    model, ids, points = family_trace(family, inner_norms=inner_norms)
    rng, made = np.random.default_rng(0), {}
    given = {key: (value * rng.uniform(0.5, 2, value.shape)).astype(np.float32) for key, value in points.items()}

    def note(name, n, array):
        made.setdefault(Key(name, n), array.reshape(len(ids), -1).copy())

    def feed(name, n, array):
        note(name, n, array)
        return given[Key(name, n)].reshape(array.shape)

    run_whole(Runtime(model, dialect, edit=feed), check_tokens(model.config, ids[None]), note)
    inputs = {key: value.astype(np.float64) for key, value in given.items()} | {graph.TOKENS: ids}
    for operation in graph.operations(model, dialect):
        expected = operation.evaluate(*(inputs[key] for key in operation.inputs))
        verdict, reason, _ = within(expected, made[operation.key].astype(np.float64))
        assert verdict <= Verdict.FLIPS, (operation.key, reason)


def test_weights_misread_are_placed_behind_a_scale_and_a_bias():
    """A block of 16 weights of a row is taken from the row after it."""
    model, ids, points = family_trace("bitnet")
    linear = dataclasses.replace(model.layers[1].ffn_up, bias=np.linspace(-1, 1, model.config.ffn, dtype=np.float32))
    model = dataclasses.replace(model, layers=(model.layers[0], dataclasses.replace(model.layers[1], ffn_up=linear)))
    matrix = packing.unpack(linear.weights).astype(np.float64)
    matrix[7, 32:48] = matrix[8, 32:48]
    q, scale = spec.quantize(points[Key("ffn_norm", 1)].astype(np.float64))
    key = Key("ffn_up", 1)
    wrong = spec.ternary_matmul(q, scale, matrix, float(linear.weights.scale) * float(linear.scale)) + linear.bias
    found = judge_trace(model, _recomputed(model, points, key, wrong), ids).first_wrong
    assert (found.key, found.hypothesis) == (key, "weights 32 to 47 of row 7 are read from row 8")


def test_a_wrong_row_of_other_weights_is_placed():
    model, ids, points = family_trace("llama")
    key = Key("attn_o_out", 1)
    wrong = points[key].copy()
    wrong[:, 5] += np.sin(np.arange(len(ids)))
    found = judge_trace(model, _recomputed(model, points, key, wrong), ids).first_wrong
    assert "only element 5 of each position: rows of the weights are misread" in found.hypothesis


def _recomputed(model, points, key, value):
    return Trace(points | {key: np.asarray(value, np.float32)}, None, "dump")


MISTAKES = {  # family, point, what it is made of in its place, what the judge must say
    "silu as relu squared": (
        "llama",
        "ffn_out",
        lambda m, p: np.maximum(p["ffn_gate"], 0) ** 2 * p["ffn_up"],
        "relu(gate)^2 * up instead of SiLU(gate) * up",
    ),
    "exact gelu": ("gptneox", "ffn_out", lambda m, p: spec.gelu(p["ffn_up"].astype(np.float64)), "the exact GELU instead of"),
    "halves": (
        "llama",
        "Kcur_rope",
        lambda m, p: _turned(m, p["Kcur"], pairs="halves"),
        "pairs are halves (i, i + K/2) instead of adjacent",
    ),
    "factors forgotten": ("llama", "Qcur_rope", lambda m, p: _turned(m, p["Qcur"], factors=1.0), "the factors of the frequencies"),
    "all of the head rotated": ("gptneox", "Qcur_rope", lambda m, p: _turned(m, p["Qcur"], width=None), "all of each head is rotated"),
    "rms norm": (
        "gpt2",
        "ffn_norm",
        lambda m, p: spec.rms_norm(p["ffn_inp"].astype(np.float64), m.layers[1].ffn_norm, m.config.eps),
        "the mean is not subtracted, as in RMSNorm",
    ),
    "norm without bias": ("gpt2", "attn_norm", lambda m, p: p["attn_norm"] - m.layers[1].attn_norm_bias, "the norm's bias is missing"),
    "no bias": ("qwen2", "Vcur", lambda m, p: p["Vcur"] - m.layers[1].attn_v.bias, "the bias is missing"),
    "attention's branch": ("gptneox", "l_out", lambda m, p: p["l_out"] - p["attn_o_out"], "attention's branch is missing"),
}


def _turned(model, x, **changes):
    c = model.config
    factors = 1.0 if model.rope_factors is None else model.rope_factors.astype(np.float64)
    told = {"pairs": c.rope, "width": c.rope_width, "factors": factors} | changes
    heads = x.reshape(len(x), -1, c.head_dim).astype(np.float64)
    return spec.rope(heads, np.arange(len(x)), c.rope_base, **told).reshape(x.shape)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_other_families_are_recognised(name):
    family, point, make, expected = MISTAKES[name]
    model, ids, points = family_trace(family)
    layer = {key.name: value for key, value in points.items() if key.layer == 1}
    trace = _recomputed(model, points, Key(point, 1), make(model, layer))
    report = judge_trace(model, trace, ids)
    assert report.first_wrong.key == Key(point, 1)
    assert report.first_wrong.hypothesis.startswith(expected)
