"""APRT, aprender's stage files: the bytes that `apr` reads, and files that break its rules."""

import shutil
import struct

import pytest
from trace_files import LOGITS, TOKENS, T, V, write_trace

from bitnet_np.base.errors import FileFormatError, OptionError
from bitnet_np.traces.formats import aprt
from bitnet_np.traces.points import Key


def test_stage_files_are_those_that_apr_reads(tmp_path):
    written = write_trace(tmp_path / "t", "aprt")
    files = {str(path.relative_to(tmp_path / "t")) for path in (tmp_path / "t").rglob("*.bin")}
    assert {"layer-0/embedding.bin", "layer-1/attn_out.bin", "layer-0/ffn_swigl.bin", "final_norm.bin", "lm_head.bin"} < files
    assert len(files) == len(written) == 3 + 2 * 14
    raw = (tmp_path / "t" / "layer-1" / "post_ffn_residual.bin").read_bytes()
    assert raw == b"APRT" + struct.pack("<II", 1, T * 9) + written[Key("l_out", 1)].tobytes()
    raw = (tmp_path / "t" / "lm_head.bin").read_bytes()
    assert raw == b"APRT" + struct.pack("<II", 0xFFFFFFFF, V) + written[LOGITS][-1].tobytes()


def test_stages_that_are_none_of_ours_are_listed(tmp_path):
    write_trace(tmp_path / "t", "aprt")
    shutil.copy(tmp_path / "t" / "layer-0" / "ffn_gate.bin", tmp_path / "t" / "layer-0" / "ffn_silu.bin")
    assert aprt.read(tmp_path / "t", TOKENS).trace(TOKENS).ignored == ("layer-0/ffn_silu.bin",)


@pytest.mark.parametrize(
    ("file", "raw", "message"),
    [
        ("layer-0/ffn_up.bin", b"APRT" + struct.pack("<II", 1, T) + bytes(4 * T), "header says layer 1"),
        ("ffn_up.bin", b"APRT" + struct.pack("<II", 0, T) + bytes(4 * T), "header says layer 0"),
        ("layer-0/ffn_up.bin", b"APRX" + struct.pack("<II", 0, T) + bytes(4 * T), "starts with b'APRX'"),
        ("layer-0/ffn_up.bin", b"APRT" + struct.pack("<II", 0, T + 1) + bytes(4 * T + 4), "expected a multiple of 5"),
        ("layer-0/ffn_up.bin", b"APRT" + struct.pack("<II", 0, 0), "expected a multiple of 5"),
        ("layer-0/attn_scores.bin", b"APRT" + struct.pack("<II", 0, 10) + bytes(40), "expected a multiple of 25"),
        ("layer-0/ffn_up.bin", b"APRT\0", "bytes, expected"),
    ],
)
def test_stage_files_that_break_a_rule_are_refused(tmp_path, file, raw, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(raw)
    with pytest.raises(FileFormatError, match=message):
        aprt.read(tmp_path, TOKENS)
    with pytest.raises(OptionError, match="give the tokens"):
        aprt.read(tmp_path)
