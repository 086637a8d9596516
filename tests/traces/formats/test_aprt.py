"""APRT, aprender's stage files: the bytes that `apr` reads, and files that break its rules."""

import shutil
import struct

import numpy as np
import pytest
from trace_files import LOGITS, TOKENS, T, V, write_trace

from bitnet_np import Verdict, check, forward_full
from bitnet_np.base.errors import FileFormatError, OptionError
from bitnet_np.testing.models import random_model
from bitnet_np.traces.formats import aprt, read_any
from bitnet_np.traces.points import Key, ours_of


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


def stage(folder, layer, name, numbers):
    """Write a stage file as aprender does."""
    path = folder if layer is None else folder / f"layer-{layer}"
    path.mkdir(parents=True, exist_ok=True)
    values = np.asarray(numbers, "<f4")
    (path / f"{name}.bin").write_bytes(b"APRT" + struct.pack("<II", 0xFFFFFFFF if layer is None else layer, values.size) + values.tobytes())


@pytest.mark.parametrize("model", [random_model(3, n_layers=2), random_model(4, family="qwen3moe", n_layers=2)], ids=["dense", "experts"])
def test_a_tree_of_positions_is_one_dump(tmp_path, model):
    """As apr parity --per-op writes one for the CPU and one for the GPU; experts by their numbers, as float32."""
    seen, tokens, gpu = [], np.array([5, 1, 4]), tmp_path / "gpu"
    forward_full(model, tokens[None], record=lambda *point: seen.append((*point[:2], point[2].copy())))
    stages = {ours: theirs for theirs, ours in ours_of("aprt").items()}
    for name, layer, array in seen:
        for position in range(3) if name in stages else ():
            stage(gpu / f"pos-{position:04}", 0 if name == "inp_embd" else layer, stages[name], array[position])
    stage(gpu / "pos-0001", 1, "qkv_matmul", [1.0])
    shutil.copytree(gpu, tmp_path / "cpu")
    trace = read_any(gpu, tokens=tokens)
    assert {key.name for key in trace.points} == {name for name, *_ in seen} & stages.keys()
    assert trace.points[LOGITS].shape == (3, model.config.vocab)
    assert trace.ignored == ("pos-0001/layer-1/qkv_matmul.bin",)
    assert check(model, tokens, gpu).verdict <= Verdict.ROUNDING
    assert read_any(gpu).points.keys() == trace.points.keys()  # positions say how many tokens there are
    with pytest.raises(OptionError, match=r"two dumps of apr parity --per-op, expected one of them: .*cpu or .*gpu"):
        read_any(tmp_path, tokens=tokens)
    shutil.rmtree(gpu / "pos-0001")
    with pytest.raises(FileFormatError, match="has no step 1"):
        read_any(gpu, tokens=tokens)


def test_stages_of_the_last_token_are_no_points_of_several(tmp_path):
    write_trace(tmp_path / "t", "aprt")
    stage(tmp_path / "t", 1, "moe_router", [0.75, 0.25])
    assert aprt.read(tmp_path / "t", TOKENS).ignored == ("layer-1/moe_router.bin",)
    assert Key("ffn_moe_weights", 1) in aprt.read(tmp_path / "t" / "layer-1" / "moe_router.bin", TOKENS[:1]).trace(TOKENS[:1]).points
