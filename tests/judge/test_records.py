"""Engines judged by BitNet-rs's trace records alone: a wrong RMS is evidence, another hash is not."""

from dataclasses import replace

import numpy as np
import pytest
from models import random_model, random_tokens

from bitnet_np.engine.dialects import BITNET_CPP, EXACT
from bitnet_np.judge.partial import check_records
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.formats import bitnet_rs
from bitnet_np.traces.points import Key
from bitnet_np.traces.record import record_trace

pytest.importorskip("blake3")
MODEL = random_model(0, width=64, ffn=96, vocab=50)
TOKENS = random_tokens(np.random.default_rng(0), MODEL, 6)


def records_of(folder, model=MODEL, dialect=EXACT):
    path = folder / "engine.jsonl"
    record_trace(model, TOKENS, path, dialect=dialect)
    return bitnet_rs.read(path)


def changed(records, key, **fields):
    return [replace(record, **fields) if record.key == key else record for record in records]


def judged(records, **how):
    return check_records(MODEL, TOKENS, records, **how)


def test_our_own_records_are_the_same_bits(tmp_path):
    records = records_of(tmp_path)
    report = judged(records)
    assert report.verdict == Verdict.SAME_BITS
    assert {Key("Qcur", 0), Key("l_out", 1), Key("result_output", None), Key("ffn_norm_codes", 1)} <= {o.key for o in report.operations}


def test_another_hash_alone_is_no_evidence(tmp_path):
    report = judged(changed(records_of(tmp_path), Key("l_out", 0), blake3="0" * 64))
    assert report.verdict == Verdict.ROUNDING
    assert {o.key for o in report.operations if o.verdict == Verdict.ROUNDING} == {Key("l_out", 0)}


def test_another_rms_is_named(tmp_path):
    wrong = [replace(r, rms=1.5 * r.rms) if (r.key, r.seq) == (Key("ffn_out", 1), 3) else r for r in records_of(tmp_path)]
    report = judged(wrong)
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("ffn_out", 1))
    assert report.reason.startswith("WRONG at layer 1 ffn_out: RMS ")
    assert "in t3/blk1/" in report.reason


def test_an_engine_with_roundings_is_right_and_one_with_a_mistake_is_not(tmp_path):
    assert judged(records_of(tmp_path, dialect=BITNET_CPP)).verdict <= Verdict.FLIPS
    wrong = replace(MODEL, config=replace(MODEL.config, activation="silu"))
    report = judged(records_of(tmp_path, wrong))
    assert (report.verdict, report.first_wrong.key) == (Verdict.WRONG, Key("ffn_out", 0))


def test_the_last_token_under_number_0_is_found(tmp_path):
    """As BitNet-rs's own dumps have it, in which each token's record replaces the one before."""
    last = [replace(record, seq=0) for record in records_of(tmp_path) if record.seq == len(TOKENS) - 1]
    assert judged(last).verdict == Verdict.SAME_BITS


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_elements": 63, "shape": (1, 1, 63)}, "has shape [1, 1, 63], expected 64 numbers of one of 6 tokens, or all"),
        ({"seq": 6}, "expected 64 numbers of one of 6 tokens"),
        ({"rms": np.nan}, "has no RMS that is finite"),
    ],
)
def test_records_that_cannot_be_compared(tmp_path, fields, reason):
    report = judged(changed(records_of(tmp_path), Key("l_out", 1), **fields))
    assert report.verdict == Verdict.INVALID
    assert reason in report.reason


def test_records_of_nothing_are_no_pass(tmp_path):
    (record, *_) = records_of(tmp_path)
    report = judged([replace(record, stage="moe_router", layer=0)])
    assert (report.verdict, report.operations) == (Verdict.INVALID, ())
