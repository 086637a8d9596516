"""`bitnet-np inspect`: what a model file holds, and whether it is supported."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from command_line import TINY, TOKENS, write_file
from fuzzing.gguf_bytes import FLOAT32, UINT32, Entry, number, text
from fuzzing.gguf_bytes import gguf as build

from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.load import load
from bitnet_np.model import packing
from bitnet_np.testing.models import random_model, write_gguf

DATA = Path(__file__).parents[1] / "data"
SMALL = {"width": 128, "ffn": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "eps": float(np.float32(1e-5))}


def test_inspect_lists_what_a_dump_may_hold(run, model):
    """It lists the names, layers, shapes and dtypes that a forward pass records."""
    recorded = {}

    def record(name, layer, array):
        axes = ["T", *([array.size // len(array)] if array.ndim > 1 else [])]
        recorded.setdefault(name, ([], axes, str(array.dtype)))[0].append(layer)

    forward_full(model, TOKENS[None], record=record)
    points = run("inspect", TINY, "--points", "--json")["points"]
    assert {p["name"]: (p["layers"], p["shape"], p["dtype"]) for p in points} == recorded
    assert all(p["meaning"] for p in points)
    out = run("inspect", TINY, "--points")
    assert re.search(r"\nKcur_rope +0-2 +T x 128 +float32 +keys after RoPE\n", out)
    assert re.search(r"\nattn_norm_scale +0-2 +T +float32 ", out)
    assert "Kcur_rope" not in run("inspect", TINY)


def test_inspect_in_json(run):
    result = run("inspect", TINY, "--json")
    assert (result["file"], result["bytes"], result["kind"], result["version"]) == (TINY, Path(TINY).stat().st_size, "GGUF v3", 3)
    assert (result["supported"], result["problem"]) == (True, None)
    assert result["config"] == json.loads(json.dumps(vars(load(TINY).config)))  # a tuple becomes a list
    assert result["kv_cache_bytes_per_token"] == 2 * 4 * 3 * 2 * 64
    assert (result["matrices"], result["warnings"]) == ({"ternary, packed in the file": 21}, [])
    assert result["keys"]["general.architecture"] == "bitnet-b1.58"
    assert result["keys"]["bitnet-b1.58.block_count"] == 3
    assert result["keys"]["tokenizer.ggml.add_bos_token"] is True
    assert result["keys"]["tokenizer.ggml.tokens"] == "[512 values]"
    tensors = run("inspect", TINY, "--json", "--tensors")["tensors"]
    assert len(tensors) == 35
    assert tensors[0] == {"name": "token_embd.weight", "type": "F16", "shape": "512 x 256", "bytes": 262144}


def test_sizes_come_first_then_what_differs_from_the_usual_and_never_a_none(run, tmp_path):
    """What a family implies is usual in it."""
    out = run("inspect", TINY)
    assert re.search(r"yes\n\nsize\narchitecture +bitnet-b1.58\nvocab +512\n", out)
    assert re.search(r"\nKV cache, bytes per token +3,072\n\nas usual\nactivation +relu2\n", out)
    path = tmp_path / "m.gguf"
    write_gguf(path, random_model(1, family="qwen2", window=None, rope_scaling=2.0, weights="float32"))
    out = run("inspect", path)
    assert re.search(r"\n\ndiffers from the usual\nrope_scaling +2.0\n\nas usual\nactivation +silu\n", out)
    assert out.index("\nsize\n") < out.index("\ndiffers") < out.index("\nas usual\n") < out.index("\ntype ")
    for said in (out, run("inspect", TINY)):
        assert re.search(r"None|\(\)|\n(yarn|score_cap|local_layers|shared_norm) ", said) is None


def test_inspect_shows_what_cannot_be_run_and_says_why(run, tmp_path):
    keys = [("general.architecture", text("falcon")), ("odd", number(FLOAT32, float("nan"))), ("falcon.block_count", number(UINT32, 1))]
    path = write_file(tmp_path / "other.gguf", build(keys, [Entry("output.weight", (256, 2), 14)]))
    out = run("inspect", path, "--tensors")
    assert f"supported: no: {path}: general.architecture is 'falcon', supported are bitnet-b1.58, bitnet-25, bitnet, llama, " in out
    assert "\nsize\n" not in out
    assert re.search(r"\nfalcon\.block_count +1\n", out)
    assert re.search(r"\noutput\.weight +Q6_K +2 x 256 +420\n", out)
    result = run("inspect", path, "--json")
    assert (result["supported"], result["config"], result["kv_cache_bytes_per_token"]) == (False, None, None)
    assert "general.architecture is 'falcon'" in result["problem"]
    assert result["keys"]["odd"] == "nan"


def test_inspect_shows_the_numbers_of_a_model_with_damaged_weights(run, tmp_path):
    raw = bytearray(Path(TINY).read_bytes())
    at = open_gguf(TINY).tensors["blk.1.ffn_norm.weight"].offset
    raw[at : at + 4] = struct.pack("<f", float("nan"))
    result = run("inspect", write_file(tmp_path / "nan.gguf", bytes(raw)), "--json")
    assert "tensor blk.1.ffn_norm.weight has NaN or infinity in it" in result["problem"]
    assert result["config"]["width"] == 256


def test_nothing_in_a_file_can_garble_the_terminal(run, tmp_path):
    evil = "\x1b[2J\n\r\x07\u202e"
    keys = [("general.architecture", text(evil)), (evil, text(evil))]
    path = write_file(tmp_path / "\x1b.gguf", build(keys, [Entry(evil, (4,))]))
    out = run("inspect", path, "--tensors")
    assert all(character.isprintable() or character == "\n" for character in out)
    assert out.count(r"\x1b[2J\n\r\x07\u202e") == 5  # architecture twice, key, value and tensor
    assert run("inspect", path, "--json", "--tensors")["tensors"][0]["name"] == evil


# --- what matrices hold ---------------------------------------------------------------------------------------------------------------


def test_inspect_says_of_which_kind_the_matrices_are(run):
    assert "\nmatrices of layers           number\nternary, packed in the file      21\n" in run("inspect", TINY)
    masters = "ternary, quantised at load from master weights"
    for name, kind in (("bitnet_online_mha_tied", masters), ("llama_plain_gqa_untied", "float (BF16)")):
        assert run("inspect", str(DATA / "hf" / name), "--json")["matrices"] == {kind: 21}
    assert run("inspect", str(DATA / "llamacpp" / "llama_lq_q4_k_m.gguf"), "--json")["matrices"].keys() == {"float (Q4_K)", "float (Q6_K)"}


def test_commands_warn_of_matrices_that_say_nothing(run, printed, tmp_path):
    model = random_model(0, **SMALL)
    first = model.layers[0]
    zero = replace(first.ffn_up, weights=packing.pack(np.zeros(first.ffn_up.shape, np.int8), 0.5))
    path = tmp_path / "model.gguf"
    write_gguf(path, replace(model, layers=(replace(first, ffn_up=zero), *model.layers[1:])))
    warning = "warning: layer 0 ffn_up: every weight is 0"
    assert f"\n{warning}\n" in run("inspect", str(path))
    assert run("inspect", str(path), "--json")["warnings"] == [warning.removeprefix("warning: ")]
    np.save(tmp_path / "logits.npy", forward_full(load(path), [[1, 2]])[0])
    _, err = printed("check", path, "--tokens", "1,2", "--theirs", tmp_path / "logits.npy")
    assert f"bitnet-np: {warning}\n" in err
