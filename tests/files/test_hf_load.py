"""Hugging Face folders: every model type is the model that transformers has, and what is not supported or damaged is refused by name."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import hf_models
import numpy as np
import pytest
from hf_models import FAMILIES, recorded_folder
from models import assert_same_bits
from record_hf_families import LLAMA3

from bitnet_np import packing, spec
from bitnet_np.dense import dense_view
from bitnet_np.errors import Error, FileFormatError, NonFiniteError, ShapeError, UnsupportedError
from bitnet_np.files.hf_folder import open_folder
from bitnet_np.files.hf_source import packed_matrix
from bitnet_np.files.load import load
from bitnet_np.files.tensors import CheckedTensors
from bitnet_np.forward_pass import forward_full
from bitnet_np.model import Ternary
from bitnet_np.rope import llama3_factors, rope_frequencies

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("name", FAMILIES)
def test_model_types_give_their_recorded_logits(tmp_path, name):
    """Rows of q and k in halves, heads fused one by one, matrices transposed: all as transformers has them."""
    recorded = np.load(DATA / "hf_families" / f"{name}.npz")
    model = load(hf_models.write_folder(tmp_path, *recorded_folder(name)))
    dense = dense_view(model)
    if model.rope_factors is not None:  # float32, as a GGUF file has them
        factors = llama3_factors(rope_frequencies(10000.0, 12), 8.0, 1.0, 4.0, 64)
        np.testing.assert_array_equal(model.rope_factors, factors.astype(np.float32))
        dense = replace(dense, rope_factors=factors)
    scale = np.abs(recorded["logits_f64"]).max()
    for tokens, logits in zip(recorded["tokens"], recorded["logits_f64"], strict=True):
        # their layer_norm_eps was the nearest float32 of 1e-5
        np.testing.assert_allclose(spec.forward(dense, tokens), logits, rtol=0, atol=1e-10 * scale)
    np.testing.assert_allclose(forward_full(model, recorded["tokens"]), recorded["logits_f64"], rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("mistral_window", {}, (5, None)),
        ("mistral_window", {"sliding_window": None}, (None, None)),
        ("qwen2_window", {}, (6, (1,))),
        ("qwen2_window", {"max_window_layers": 0}, (6, None)),
        ("qwen2_window", {"max_window_layers": 2}, (None, None)),
        ("qwen2_window", {"use_sliding_window": False}, (None, None)),
        ("qwen2_window", {"sliding_window": None}, (None, None)),
        ("qwen2_window", {"layer_types": ["full_attention"] * 2}, (None, None)),
        ("qwen3_window", {}, (7, (0,))),
        ("qwen3_window", {"layer_types": ["sliding_attention"] * 2}, (7, None)),
        ("qwen3_window", {"layer_types": None, "max_window_layers": 1}, (7, (1,))),
    ],
)
def test_which_layers_see_a_window(tmp_path, name, keys, expected):
    """As transformers' configuration classes say."""
    config, tensors = recorded_folder(name)
    found = load(hf_models.write_folder(tmp_path, config | keys, tensors)).config
    assert (found.window, found.window_layers) == expected


@pytest.mark.parametrize(("name", "expected"), [("mistral_window", (4096, None)), ("qwen2_window", (4096, (1,)))])
def test_the_window_where_config_json_has_none(tmp_path, name, expected):
    config, tensors = recorded_folder(name)
    found = load(hf_models.write_folder(tmp_path, {key: config[key] for key in config if key != "sliding_window"}, tensors)).config
    assert (found.window, found.window_layers) == expected


@pytest.mark.parametrize(
    ("name", "keys", "error", "message"),
    [
        ("mistral_window", {"sliding_window": 0}, ShapeError, "window is 0, expected 1 to 1048576"),
        ("mistral_window", {"layer_types": ["full_attention"] * 2}, UnsupportedError, "'layer_types' = "),
        ("mistral_window", {"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        (
            "qwen3_window",
            {"use_sliding_window": False},
            FileFormatError,
            "layer_types has sliding_attention, but no sliding_window is in use",
        ),
        ("qwen3_window", {"layer_types": ["chunked_attention"] * 2}, UnsupportedError, "layer_types is ['chunked_attention', "),
        ("qwen3_window", {"layer_types": ["sliding_attention"]}, UnsupportedError, "layer_types is ['sliding_attention'], supported is"),
        ("qwen2_window", {"num_hidden_layers": 2**31 - 1}, UnsupportedError, "n_layers is 2147483647, expected at most 4096"),
    ],
)
def test_windows_that_cannot_be(tmp_path, name, keys, error, message):
    config, tensors = recorded_folder(name)
    assert_refused(hf_models.write_folder(tmp_path, config | keys, tensors), error, message)


def test_names_without_the_models_prefix_and_buffers_of_old_files(tmp_path):
    """gpt2 was published so."""
    config, tensors = recorded_folder("gpt2")
    bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    bare |= {f"h.{n}.attn.bias": np.ones((1, 1, 64, 64), np.float32) for n in range(2)}
    one, other = load(hf_models.write_folder(tmp_path / "a", config, tensors)), load(hf_models.write_folder(tmp_path / "b", config, bare))
    assert_same_bits(forward_full(one, [[1, 2, 3]]), forward_full(other, [[1, 2, 3]]))


def test_a_model_in_several_files_is_the_same(tmp_path):
    source = open_folder(DATA / "hf" / "bitnet_autooff_gqa_tied")
    tensors = {name: tensor.data.view(hf_models_dtype(tensor)).reshape(tensor.shape) for name, tensor in source.tensors.items()}
    split = load(hf_models.write_folder(tmp_path, dict(source.config_json), tensors, shards=3))
    assert_same_bits(forward_full(split, [[1, 2, 3]]), forward_full(load(source.path), [[1, 2, 3]]))


def hf_models_dtype(tensor):
    return {name: dtype for dtype, name in hf_models.DTYPES.items()}[tensor.type.name]


@pytest.mark.parametrize(("n", "m"), [(7, 5), (8, 130), (1, 1), (33, 128)])
def test_the_published_packing(tmp_path, n, m):
    """Row i * ceil(N / 4) + r sits in bits 2i and 2i + 1 of packed row r; rows beyond N are padding, whatever is in it."""
    rng = np.random.default_rng(n)
    matrix = rng.integers(-1, 2, (n, m))
    height = -(-n // 4)
    packed = np.full((height, m), 0, np.uint8)
    rows = np.full((4 * height, m), 3)
    rows[:n] = matrix + 1
    for i in range(4):
        packed |= (rows[i * height : (i + 1) * height] << 2 * i).astype(np.uint8)
    hf_models.write_folder(tmp_path, {}, {"w.weight": packed, "w.weight_scale": np.array([4.0], np.float32)})
    for divides, scale in ((True, 0.25), (False, 4.0)):
        tensors = CheckedTensors(tmp_path, open_folder(tmp_path).tensors, allow_nan=False)
        found = packed_matrix(tensors, "w", n, m, divides)
        np.testing.assert_array_equal(packing.unpack(found), matrix)
        assert found.scale == scale


# --- config.json ----------------------------------------------------------------------------------------------------------------------


def changed(tmp_path, name, **keys):
    """A recording's folder with other keys in config.json; None takes one out, a dict changes keys of an object."""
    folder = tmp_path / name
    if not folder.exists():
        folder.mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copy(DATA / "hf" / name / file, folder / file)
    config = json.loads((folder / "config.json").read_text())
    for key, value in keys.items():
        if value is None:
            config.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = {k: v for k, v in (config[key] | value).items() if v is not None}
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_refused(folder, error, *parts):
    with pytest.raises(Error) as caught:
        load(folder)
    assert type(caught.value) is error
    for part in (str(folder), *parts):
        assert part in str(caught.value)


OFFLINE, LLAMA = "bitnet_autooff_gqa_tied", "llama_plain_gqa_untied"


@pytest.mark.parametrize(
    ("name", "keys", "error", "message"),
    [
        (
            OFFLINE,
            {"quantization_config": {"linear_class": None}},
            UnsupportedError,
            "linear_class is 'missing', expected 'bitlinear' (divides",
        ),
        (OFFLINE, {"quantization_config": {"linear_class": "linear"}}, UnsupportedError, "linear_class is 'linear'"),
        (OFFLINE, {"quantization_config": {"quantization_mode": "lazy"}}, UnsupportedError, "quantization_mode of autobitlinear is 'lazy'"),
        (
            OFFLINE,
            {"quantization_config": {"linear_class": "bitlinear", "quantization_mode": "online"}},
            UnsupportedError,
            "quantization_mode of bitlinear is 'online', expected offline",
        ),
        (
            "bitnet_online_mha_tied",
            {"quantization_config": {"linear_class": None, "quantization_mode": None}},
            FileFormatError,
            "q_proj.weight has shape",
        ),
        (
            OFFLINE,
            {"quantization_config": {"quantization_mode": "online"}},
            FileFormatError,
            "q_proj.weight has shape [16, 64], expected [64, 64]",
        ),
        (OFFLINE, {"quantization_config": {"quant_method": "gptq"}}, UnsupportedError, "quant_method is 'gptq'"),
        (OFFLINE, {"quantization_config": {"bits": 2}}, UnsupportedError, "quantization_config: 'bits' = 2 is a setting"),
        (OFFLINE, {"quantization_config": {"use_rms_norm": True}}, FileFormatError, "q_proj.rms_norm.weight is missing"),
        (OFFLINE, {"quantization_config": {"modules_to_not_convert": []}}, UnsupportedError, "the head, too, would be quantised"),
        (OFFLINE, {"quantization_config": {"modules_to_not_convert": ["(a+)+"]}}, UnsupportedError, "expected plain names"),
        (OFFLINE, {"quantization_config": None}, FileFormatError, "q_proj.weight has shape [16, 64], expected [64, 64]"),
        ("bitnet_online_mha_tied", {"quantization_config": {"quantization_mode": "offline"}}, FileFormatError, "q_proj.weight has shape"),
        (OFFLINE, {"model_type": "mixtral"}, UnsupportedError, "model_type is 'mixtral'"),
        (OFFLINE, {"model_type": None}, FileFormatError, "model_type is missing"),
        (OFFLINE, {"architectures": ["BitNetForSequenceClassification"]}, UnsupportedError, "architectures is"),
        (OFFLINE, {"hidden_act": "gelu"}, UnsupportedError, "hidden_act is 'gelu'"),
        (OFFLINE, {"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        (OFFLINE, {"hidden_size": 128}, FileFormatError, "model.embed_tokens.weight has shape [131, 64], expected [131, 128]"),
        (OFFLINE, {"hidden_size": "64"}, FileFormatError, "hidden_size is '64', expected int"),
        (OFFLINE, {"hidden_size": True}, FileFormatError, "hidden_size is True, expected int"),
        (OFFLINE, {"hidden_size": 2**40}, FileFormatError, "hidden_size is 1099511627776"),
        (OFFLINE, {"head_dim": 2**31 - 1}, UnsupportedError, "head_dim is 2147483647, expected at most 4096"),
        (OFFLINE, {"max_position_embeddings": 2**31 - 1}, UnsupportedError, "context is 2147483647, expected at most"),
        (OFFLINE, {"head_dim": 18}, FileFormatError, "attn_sub_norm.weight has shape"),
        (OFFLINE, {"num_hidden_layers": 0}, ShapeError, "n_layers is 0"),
        (OFFLINE, {"num_hidden_layers": 2}, UnsupportedError, "tensor model.layers.2.input_layernorm.weight has no place"),
        (OFFLINE, {"num_hidden_layers": 4096}, FileFormatError, "tensor model.layers.3.input_layernorm.weight is missing"),
        (OFFLINE, {"num_hidden_layers": 2**31 - 1}, UnsupportedError, "n_layers is 2147483647, expected at most 4096"),
        (OFFLINE, {"num_attention_heads": 3}, FileFormatError, "hidden_size 64 is no multiple of num_attention_heads 3"),
        (OFFLINE, {"num_attention_heads": 0}, FileFormatError, "num_attention_heads 0"),
        (OFFLINE, {"num_key_value_heads": 3}, ShapeError, "4 query heads cannot share 3"),
        (OFFLINE, {"vocab_size": 130}, FileFormatError, "model.embed_tokens.weight has shape [131, 64]"),
        (OFFLINE, {"rms_norm_eps": float("nan")}, UnsupportedError, "eps is nan"),
        (OFFLINE, {"rms_norm_eps": 10**400}, FileFormatError, "rms_norm_eps is 1000"),
        (OFFLINE, {"tie_word_embeddings": False}, FileFormatError, "lm_head.weight is missing"),
        (OFFLINE, {"rope_parameters": {"rope_type": "yarn"}}, UnsupportedError, "rope_type is 'yarn'"),
        (OFFLINE, {"rope_parameters": {"rope_theta": None}}, FileFormatError, "rope_theta is missing"),
        (OFFLINE, {"rope_parameters": {"beta": 1}}, UnsupportedError, "RoPE: 'beta' = 1 is a setting"),
        (OFFLINE, {"rope_theta": 1.0}, FileFormatError, "RoPE's 'rope_theta' is 1.0 and 500000.0"),
        (OFFLINE, {"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor is 0.5"),
        (OFFLINE, {"logit_scale": 0.5}, UnsupportedError, "'logit_scale' = 0.5 is a setting"),
        (LLAMA, {"pretraining_tp": 2}, UnsupportedError, "pretraining_tp is 2"),
        (LLAMA, {"sliding_window": 4096}, UnsupportedError, "sliding_window is 4096"),
        (LLAMA, {"layer_types": ["sliding_attention"]}, UnsupportedError, "layer_types is"),
        (LLAMA, {"mlp_bias": True}, FileFormatError, "gate_proj.bias is missing"),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "bitnet", "linear_class": "bitlinear"}},
            FileFormatError,
            "q_proj.weight has shape",
        ),
        (LLAMA, {"tie_word_embeddings": True}, FileFormatError, "lm_head.weight is not model.embed_tokens.weight"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0}}, FileFormatError, "low less than high"),
    ],
)
def test_what_config_json_may_not_say(tmp_path, name, keys, error, message):
    if keys.get("quantization_config", 0) is None:
        assert "quantization_config" in json.loads((DATA / "hf" / name / "config.json").read_text())
    assert_refused(changed(tmp_path, name, **keys), error, message)


def test_what_config_json_need_not_say(tmp_path):
    """Files from before there were classes and modes of linears have what was the only one: bitlinear, offline."""
    both = "linear_class", "quantization_mode"
    for name, keys in (("llama_bitlinear_rms_untied", both), ("bitnet_bitlinear_gqa_untied", both), (OFFLINE, both[1:])):
        silent = load(changed(tmp_path, name, quantization_config=dict.fromkeys(keys)))
        assert_same_bits(forward_full(silent, [[1, 2, 3]]), forward_full(load(DATA / "hf" / name), [[1, 2, 3]]))


def test_modules_that_are_not_converted(tmp_path):
    """By the start of a name up to a dot, and by its end."""
    skipped = ["lm_head", "model.layers.1", "layers.2.mlp.up_proj"]
    model = load(changed(tmp_path, "bitnet_online_mha_tied", quantization_config={"modules_to_not_convert": skipped}))
    found = [[isinstance(getattr(layer, name).weights, Ternary) for name in ("attn_q", "ffn_up", "ffn_down")] for layer in model.layers]
    assert found == [[True, True, True], [False, False, False], [True, False, True]]
    assert np.isfinite(forward_full(model, [[1, 2, 3]])).all()


# --- damaged folders ------------------------------------------------------------------------------------------------------------------


def rewritten(tmp_path, edit, name=OFFLINE):
    folder = changed(tmp_path, name)
    source = open_folder(folder)
    tensors = {key: tensor.data.view(hf_models_dtype(tensor)).reshape(tensor.shape).copy() for key, tensor in source.tensors.items()}
    edit(tensors)
    hf_models.write_safetensors(folder / "model.safetensors", tensors)
    return folder


Q = "model.layers.0.self_attn.q_proj.weight"


def put(name, value):
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda tensors: tensors.pop(Q), FileFormatError, f"tensor {Q} is missing"),
        (put("model.layers.0.extra", np.zeros(3, np.float32)), UnsupportedError, "tensor model.layers.0.extra has no place"),
        (put(Q, np.zeros((16, 64), np.float32)), UnsupportedError, f"{Q} has type F32, supported here: U8"),
        (put(Q, np.zeros((64, 64), np.uint8)), FileFormatError, f"{Q} has shape [64, 64], expected [16, 64]"),
        (put(Q, np.full((16, 64), 0b01_01_11_01, np.uint8)), FileFormatError, f"{Q} has the ternary code 3"),
        (put(Q + "_scale", np.array([np.nan], np.float32)), NonFiniteError, f"{Q}_scale has NaN"),
        (put(Q + "_scale", np.array([0], np.float32)), NonFiniteError, f"{Q}_scale is 0.0, expected a positive"),
        (put(Q + "_scale", np.array([-1], np.float32)), NonFiniteError, f"{Q}_scale is -1.0"),
        (put(Q + "_scale", np.ones(2, np.float32)), FileFormatError, f"{Q}_scale has shape [2]"),
        (put("model.norm.weight", np.full(64, 0x7FC0, np.uint16)), NonFiniteError, "model.norm.weight has NaN"),
        (put("model.norm.weight", np.full(64, 0.1)), UnsupportedError, "model.norm.weight of type F64 has the number 0.1"),
        (put("model.embed_tokens.weight", np.full((131, 64), np.inf, np.float16)), NonFiniteError, "model.embed_tokens.weight has NaN"),
    ],
)
def test_damaged_tensors(tmp_path, edit, error, message):
    assert_refused(rewritten(tmp_path, edit), error, message)


def test_a_scale_that_divides_may_not_be_too_small(tmp_path):
    folder = rewritten(tmp_path, put(Q + "_scale", np.array([1e-39], np.float32)), "bitnet_bitlinear_gqa_untied")
    assert_refused(folder, NonFiniteError, f"{Q}_scale is 1.0000")


def test_a_scale_may_have_no_axes(tmp_path):
    model = load(rewritten(tmp_path, put(Q + "_scale", np.array(2, np.float32))))
    assert model.layers[0].attn_q.weights.scale == 2


def test_master_weights_with_nan(tmp_path):
    folder = rewritten(tmp_path, put(Q, np.full((64, 64), np.nan, np.float32)), "bitnet_online_mha_tied")
    assert_refused(folder, NonFiniteError, f"{Q} has NaN")
    with pytest.raises(NonFiniteError, match="which no ternary code stands for"):
        load(folder, allow_nan=True)


def test_nan_may_be_allowed_in_tables(tmp_path):
    folder = rewritten(tmp_path, put("model.norm.weight", np.full(64, np.nan, np.float32)))
    assert np.isnan(load(folder, allow_nan=True).output_norm).all()


def test_angles_that_cannot_be_computed(tmp_path):
    rope = {"rope_type": "linear", "factor": 1e-9}
    assert_refused(changed(tmp_path, OFFLINE, rope_parameters=rope), UnsupportedError, "RoPE's angles reach")


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "x.bin",
        "a\\b.safetensors",
        "x\n.safetensors",
        "\ud800.safetensors",
        "9" * 244 + ".safetensors",  # 256 bytes
        "\u00e9" * 130 + ".safetensors",
        7,
    ],
)
def test_an_index_names_files_of_the_folder_only(tmp_path, file):
    folder = changed(tmp_path, OFFLINE)
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    assert_refused(folder, FileFormatError, "tensor 'w' is in", "expected the name of a safetensors file of the folder")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"a": "1.safetensors", "b": "2.safetensors"}, "2.safetensors: tensor 'b' is missing"),
        ({"a": "2.safetensors"}, "tensor 'b' is in None by"),
        (
            {"a": "1.safetensors", "b": "3.safetensors"},
            "3.safetensors: the file is missing, model.safetensors.index.json has tensors in it",
        ),
    ],
)
def test_an_index_and_its_files_agree(tmp_path, where, message):
    (tmp_path / "config.json").write_text("{}")
    hf_models.write_safetensors(tmp_path / "1.safetensors", {"a": np.zeros(1, np.float32)})
    names = {"a": np.zeros(1, np.float32)} if "b" not in where else {}
    hf_models.write_safetensors(tmp_path / "2.safetensors", names | ({"b": np.zeros(1, np.float32)} if "b" not in where else {}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_refused(tmp_path, FileFormatError, message)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "\xff", "[" * 100000])
def test_config_json_must_be_an_object(tmp_path, text):
    folder = changed(tmp_path, OFFLINE)
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert_refused(folder, FileFormatError, "config.json")


def test_a_folder_without_config_or_tensors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    assert_refused(tmp_path, FileFormatError, "model.safetensors: expected a file")


@pytest.mark.parametrize("seed", range(60))
def test_random_damage_ends_in_an_error_or_a_model(tmp_path, seed):
    """Bytes of the header and of config.json overwritten, cut or repeated."""
    rng = np.random.default_rng(seed)
    folder = changed(tmp_path, str(rng.choice([OFFLINE, "llama_bitlinear_rms_untied"])))
    path = folder / rng.choice(["config.json", "model.safetensors"])
    raw = bytearray(path.read_bytes())
    size = min(len(raw), 3000)
    for at in rng.integers(0, size, rng.integers(1, 4)):
        raw[at : at + rng.integers(0, 3)] = rng.choice([b"0", b"9", b"null", b"-1", b"]", b'"', bytes(rng.integers(0, 256, 2, np.uint8))])
    path.write_bytes(raw)
    with suppress(Error):
        assert np.isfinite(forward_full(load(folder), [[1]])).all()
