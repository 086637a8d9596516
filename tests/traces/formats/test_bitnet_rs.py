"""BitNet-rs's trace records: its fields and its hashes, and records that are not believed."""

import json
import sys

import numpy as np
import pytest
from trace_files import LOGITS, T, write_trace

from bitnet_np.base.errors import FileFormatError, UnsupportedError
from bitnet_np.traces.formats import bitnet_rs, read_any
from bitnet_np.traces.points import Key

RECORD = {"name": "blk0/attn_norm", "shape": [1, 2560], "dtype": "BF16", "blake3": "0" * 64, "rms": 0.9982, "num_elements": 2560}


@pytest.fixture
def blake3():
    """The hash of BitNet-rs's records; without the package a test is skipped."""
    return pytest.importorskip("blake3").blake3


def test_records_are_those_of_bitnet_rs(tmp_path, blake3):
    written = write_trace(tmp_path / "t.jsonl", "bitnet-rs-lines")
    lines = {record["name"]: record for record in map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines())}
    assert {"t0/embeddings", "t4/logits", "t2/all_layers_out", "t1/blk1/q_proj", "t0/blk0/ffn_down"} < lines.keys()
    assert len(lines) == T * len(written)
    q = written[Key("Qcur", 1)]
    told = {"name": "t1/blk1/q_proj", "shape": [1, 1, 9], "dtype": "F32", "num_elements": 9, "seq": 1, "layer": 1, "stage": "q_proj"}
    rms = pytest.approx(np.sqrt(np.mean(q[1].astype(np.float64) ** 2)), rel=1e-15)
    assert lines["t1/blk1/q_proj"] == told | {"blake3": blake3(q[1].tobytes()).hexdigest(), "rms": rms}
    records = {(record.seq, record.layer, record.stage): record for record in bitnet_rs.read(tmp_path / "t.jsonl")}
    assert len(records) == len(lines)
    assert records[4, -1, "logits"].key == LOGITS
    assert records[4, -2, "all_layers_out"].key == Key("result_norm", None)
    assert records[3, 0, "attn_norm_codes"].blake3 == blake3(written[Key("attn_norm_codes", 0)][3].astype("<f4").tobytes()).hexdigest()
    probabilities = records[2, 0, "attn_scores_softmax"]
    assert (probabilities.key, probabilities.shape) == (Key("kq_soft_max", 0), (1, 2, 1, 3))
    assert probabilities.blake3 == blake3(written[Key("kq_soft_max", 0)][:, 2, :3].tobytes()).hexdigest()
    assert np.isnan(records[1, 0, "l_out"].rms)
    assert lines["t1/blk0/l_out"]["rms"] is None


@pytest.mark.usefixtures("blake3")
def test_a_folder_holds_the_same_records(tmp_path):
    write_trace(tmp_path / "t.jsonl", "bitnet-rs-lines")
    (tmp_path / "t").mkdir()
    for line in (tmp_path / "t.jsonl").read_text().splitlines():
        record = json.loads(line)
        (tmp_path / "t" / f"{record['name'].replace('/', '_')}.trace").write_text(json.dumps(record, indent=2))
    lines, files = ({repr(record) for record in bitnet_rs.read(tmp_path / name)} for name in ("t.jsonl", "t"))
    assert lines == files
    for name in ("t", "t.jsonl"):
        with pytest.raises(UnsupportedError, match="hashes and no values"):
            read_any(tmp_path / name)


def test_without_blake3_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'bitnet_np\[interop\]'"):
        write_trace(tmp_path / "t.jsonl", "bitnet-rs-lines")
    assert not list(tmp_path.iterdir())


def test_records_may_be_short_and_may_say_more(tmp_path):
    (tmp_path / "a.trace").write_text(json.dumps(RECORD | {"first_values": [0.1, None]}))
    (record,) = bitnet_rs.read(tmp_path)
    assert (record.seq, record.layer, record.stage, record.key) == (None, None, None, None)
    assert json.loads(bitnet_rs.as_json(record)) == RECORD


WRONG = [{"shape": [1, 2561]}, {"shape": [2560.0]}, {"num_elements": True, "shape": [1]}, {"layer": 2**40}, {"stage": 3}]
WRONG += [{"blake3": "0" * 63}, {"blake3": "G" * 64}, {"rms": 10**400}]


@pytest.mark.parametrize("wrong", WRONG)
def test_records_that_break_a_rule_are_refused(tmp_path, wrong):
    (tmp_path / "a.trace").write_text(json.dumps(RECORD | wrong))
    with pytest.raises(FileFormatError, match=r"a\.trace: .*expected"):
        bitnet_rs.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"name": 1, "name": 2}', "1" * 10_000, "\ufeff{}", "{}\n{}"])
def test_files_that_are_no_records_are_refused(tmp_path, text):
    (tmp_path / "a.trace").write_text(text, "utf-8")
    with pytest.raises(FileFormatError):
        bitnet_rs.read(tmp_path)


def test_a_folder_without_records_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(FileFormatError, match="no records in it"):
        bitnet_rs.read(tmp_path)
