"""Layers with experts: what files, folders and records say of them. One answer in any groups of rows: properties/, test_network.py."""

import json
import re
from dataclasses import replace

import hf_models
import numpy as np
import pytest
from family_models import assert_refused, drawn, rewrite
from fuzzing.gguf_bytes import Document
from models import assert_same_bits

from bitnet_np.base.errors import FileFormatError, ShapeError, UnsupportedError
from bitnet_np.cli import main as cli
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.load import load
from bitnet_np.gpu.device import place
from bitnet_np.model.checks import check_model
from bitnet_np.model.records import Linear
from bitnet_np.testing.models import write_gguf

TOKENS = [[0, 22, 3, 3, 7, 1]]
FAMILIES = {"llama": {"experts": 5, "experts_used": 2}, "qwen2moe": {}, "qwen3moe": {}}
TYPES = ("ternary", "float32", "float16", "bfloat16", "Q8_0", "Q4_K", "TQ2_0")


def mixture(family="qwen3moe", weights="", **shape):
    return drawn(family, weights, **{**FAMILIES[family], **shape})


# --- files ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", TYPES)
def test_a_mixtral_file_is_the_model_that_was_written(written, weights):
    """Qwen's are among all families in test_families.py. Ternary matrices with a scale each are written one by one."""
    model = mixture("llama", weights)
    path = written(model)
    found = load(path)
    assert found.config == model.config
    assert_same_bits(forward_full(found, TOKENS), forward_full(model, TOKENS))
    assert ("blk.0.ffn_up_exps.weight" in open_gguf(path).tensors) == (weights != "ternary")


@pytest.mark.parametrize("weights", ["float32", "Q8_0"])
def test_older_files_have_a_tensor_for_each_expert(tmp_path, written, weights):
    model = mixture("llama", weights)
    path, old = written(model), tmp_path / "old.gguf"
    document, entries = Document.read(path), []
    for entry in document.entries:
        match = re.fullmatch(r"(blk\.\d\.ffn_\w+)_exps\.weight", entry.name)
        size = len(entry.data) // entry.dims[-1]
        own = {f"{match[1]}.{n}.weight": entry.data[n * size :][:size] for n in range(5)} if match else {}
        entries += [replace(entry, name=name, dims=entry.dims[:2], data=data) for name, data in own.items()] or [entry]
    old.write_bytes(Document(document.keys, entries).bytes())
    assert_same_bits(forward_full(load(old), TOKENS), forward_full(model, TOKENS))


@pytest.mark.parametrize(
    ("family", "keys", "error", "message"),
    [
        ("qwen3moe", {"expert_used_count": 6}, ShapeError, "experts_used is 6 and shared_ffn 0 in a model of 5 experts"),
        ("qwen3moe", {"expert_used_count": 0}, ShapeError, "experts_used is 0, expected at least 1"),
        ("qwen3moe", {"expert_count": 0}, ShapeError, "experts_used is 2 and shared_ffn 0 in a model of 0 experts"),
        ("qwen3moe", {"expert_count": 2**31}, UnsupportedError, "experts is 2147483648, expected at most 4096"),
        ("qwen3moe", {"expert_count": 4}, FileFormatError, "blk.0.ffn_gate_inp.weight has shape [5, 256], expected [4, 256]"),
        ("qwen3moe", {"expert_feed_forward_length": 128}, FileFormatError, "has shape [5, 256, 256], expected [5, 128, 256]"),
        ("qwen3moe", {"expert_feed_forward_length": None}, FileFormatError, "expert_feed_forward_length"),
        ("qwen3moe", {"expert_shared_feed_forward_length": 256}, UnsupportedError, "expert_shared_feed_forward_length = 256 is a setting"),
        ("qwen3moe", {"expert_weights_norm": False}, UnsupportedError, "expert_weights_norm = False is a setting"),
        ("qwen2moe", {"expert_shared_feed_forward_length": 128}, FileFormatError, "blk.0.ffn_gate_shexp.weight has shape"),
        ("llama", {"expert_count": 0}, ShapeError, "experts_used is 2"),
        ("llama", {"expert_count": 0, "expert_used_count": 0}, FileFormatError, "blk.0.ffn_gate.weight is missing"),
    ],
)  # fmt: skip
def test_what_a_file_may_not_say(written, family, keys, error, message):
    path = written(mixture(family))
    rewrite(path, family, keys)
    assert_refused(path, error, message)


def test_a_stack_of_i2s_is_refused(tmp_path):
    """It has one scale for all experts, and no writer says what that means."""
    path = tmp_path / "stack.gguf"
    write_gguf(path, mixture("qwen3moe", "float32"))
    raw = path.read_bytes()
    at = raw.index(b"blk.0.ffn_gate_exps.weight") + len("blk.0.ffn_gate_exps.weight")
    kind = at + 4 + 3 * 8
    assert raw[kind : kind + 4] == b"\0\0\0\0"
    path.write_bytes(raw[:kind] + (36).to_bytes(4, "little") + raw[kind + 4 :])
    assert_refused(path, UnsupportedError, "blk.0.ffn_gate_exps.weight has type I2_S")


# --- folders --------------------------------------------------------------------------------------------------------------------------


def in_memory(tensors):
    """The tensors as transformers 5 has them in memory: all experts of a layer in two, gates before ups."""
    tensors = {name.replace("block_sparse_moe", "mlp"): array for name, array in tensors.items()}
    for path in ("model.layers.0.mlp.experts.", "model.layers.1.mlp.experts."):
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(path)}
        gates, ups, downs = ([x for name, x in own.items() if name.split(".")[-2] in names] for names in EXPERT_MODULES)
        tensors[path + "gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gates, ups, strict=True)])
        tensors[path + "down_proj"] = np.stack(downs)
    return tensors


EXPERT_MODULES = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_in_memory_layout_of_transformers_load_too(tmp_path, name):
    config, tensors = hf_models.recorded_folder(name)
    fused = in_memory(tensors)
    assert "model.layers.1.mlp.experts.gate_up_proj" in fused
    assert not any("experts.0" in key for key in fused)
    one, other = (load(hf_models.write_folder(tmp_path / sub, config, each)) for sub, each in (("a", tensors), ("b", fused)))
    assert_same_bits(forward_full(one, TOKENS), forward_full(other, TOKENS))


@pytest.mark.parametrize(
    ("name", "keys", "error", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, ShapeError, "experts_used is 5"),
        ("mixtral", {"num_local_experts": 5}, FileFormatError, "block_sparse_moe.gate.weight has shape [4, 48], expected [5, 48]"),
        ("mixtral", {"num_local_experts": 0}, UnsupportedError, "num_local_experts is 0"),
        ("mixtral", {"num_experts": 8}, FileFormatError, "num_local_experts and num_experts are"),
        ("mixtral", {"num_local_experts": None}, FileFormatError, "num_experts is missing"),
        ("mixtral", {"sliding_window": 4096}, UnsupportedError, "sliding_window is 4096"),
        ("mixtral", {"norm_topk_prob": False}, UnsupportedError, "'norm_topk_prob'"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, UnsupportedError, "decoder_sparse_step is 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, UnsupportedError, "mlp_only_layers is [0]"),
        ("qwen3_moe", {"moe_intermediate_size": 41}, FileFormatError, "experts.0.gate_proj.weight has shape [40, 48], expected [41, 48]"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 24}, UnsupportedError, "'shared_expert_intermediate_size'"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, UnsupportedError, "shared_expert_intermediate_size is 0"),
        ("qwen2_moe", {"qkv_bias": False}, UnsupportedError, "qkv_bias is False"),
        ("qwen2_moe", {"quantization_config": {"quant_method": "bitnet"}}, UnsupportedError, "not for Qwen2MoeForCausalLM"),
    ],
)  # fmt: skip
def test_what_config_json_may_not_say(tmp_path, name, keys, error, message):
    config, tensors = hf_models.recorded_folder(name)
    changed = {key: value for key, value in (config | keys).items() if value is not None or key in ("sliding_window",)}
    assert_refused(hf_models.write_folder(tmp_path, changed, tensors), error, message)


def test_weights_that_are_not_normalised_are_no_file(tmp_path, capsys):
    """GGUF's qwen3moe always normalises."""
    config, tensors = hf_models.recorded_folder("qwen3_moe")
    folder = hf_models.write_folder(tmp_path / "in", config | {"norm_topk_prob": False}, tensors)
    assert not load(folder).config.normalized_experts
    assert cli.main(["convert", str(folder), str(tmp_path / "out.gguf")]) == 2
    assert "normalized_experts" in capsys.readouterr().err
    assert json.loads((folder / "config.json").read_text())["norm_topk_prob"] is False


# --- records --------------------------------------------------------------------------------------------------------------------------


MIXED = mixture("qwen2moe", "float32", n_layers=2)
LAYER, EXPERT = MIXED.layers[1], MIXED.layers[1].experts[2]


def with_expert(**changes):
    """Experts of which one is changed."""
    return {"experts": (*LAYER.experts[:2], replace(EXPERT, **changes), *LAYER.experts[3:])}


@pytest.mark.parametrize(
    ("changes", "flaw"),
    [
        ({"experts": LAYER.experts[:4]}, "experts are tuple of 4, expected a tuple of 5 Experts"),
        ({"experts": [*LAYER.experts]}, "experts are list of 5"),
        ({"experts": (*LAYER.experts[:4], LAYER)}, "experts are tuple of 5"),
        (with_expert(ffn_up=None), "expert 2: ffn_up is NoneType"),
        (with_expert(ffn_down=EXPERT.ffn_up, ffn_up=Linear(np.ones((5, 256), np.float32))), "expert 2: ffn_up is"),
        (with_expert(ffn_up=replace(EXPERT.ffn_up, norm=np.ones(256, np.float32))), "expert 2: ffn_up has a separate norm"),
        ({"ffn_gate_inp": None}, "ffn_gate_inp is NoneType"),
        ({"ffn_gate_inp_shexp": None}, "ffn_gate_inp_shexp is NoneType"),
        ({"ffn_up": None}, "ffn_up is NoneType"),
    ],
)
def test_what_a_model_of_experts_must_have(changes, flaw):
    check_model(MIXED)
    with pytest.raises(ShapeError, match=f"^the model's layer 1: {flaw}"):
        check_model(replace(MIXED, layers=(MIXED.layers[0], replace(LAYER, **changes))))


def test_a_matrix_for_all_tokens_beside_experts_has_no_place():
    plain = mixture("qwen3moe", "float32")
    wrong = replace(plain, layers=(plain.layers[0], replace(plain.layers[1], ffn_up=LAYER.ffn_up)))
    with pytest.raises(ShapeError, match="ffn_up is Linear, but the model has 5 experts and a shared one of width 0"):
        check_model(wrong)


def test_what_has_no_kernels_for_experts_says_so():
    class Device:
        widest_head = 256

    with pytest.raises(UnsupportedError, match="the model has experts, which the device has no kernels for"):
        place(mixture(), Device())
