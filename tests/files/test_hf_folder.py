"""The tensors of a Hugging Face folder: every model type is the model that transformers has, and damaged tensors are refused by name."""

import json

import hf_models
import numpy as np
import pytest
from family_models import assert_refused
from hf_models import DATA, OFFLINE, array_of, changed, put, recorded_folder, rewritten
from models import assert_same_bits

from bitnet_np.base.errors import FileFormatError, NonFiniteError, UnsupportedError
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.hf_folder import open_folder
from bitnet_np.files.load import load
from bitnet_np.model.records import Ternary


def test_tables_may_be_transposed(tmp_path):
    config, tensors = recorded_folder("llama_llama3_biases")
    turned = {name: np.ascontiguousarray(tensors[name].T) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    models = [load(hf_models.write_folder(tmp_path / f"{i}", config, tensors | more)) for i, more in enumerate(({}, turned))]
    np.testing.assert_array_equal(models[1].output, models[0].output)
    assert_same_bits(*(forward_full(model, [[1, 2, 3]]) for model in models))


def test_minicpm_is_granite_by_other_names(tmp_path):
    """Its branches are scaled by scale_depth over the root of the layers, its logits by dim_model_base over the width."""
    config, tensors = recorded_folder("granite")
    tensors = {name: array for name, array in tensors.items() if not name.endswith(".bias")}
    config = config | {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    granite = load(hf_models.write_folder(tmp_path / "a", config | {"attention_multiplier": 12**-0.5, "logits_scaling": 2.0}, tensors))
    factors = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
    config = {key: value for key, value in config.items() if key not in factors} | {"model_type": "minicpm"}
    config |= {"scale_emb": 3, "scale_depth": 0.375 * 2**0.5, "dim_model_base": 24}
    minicpm = load(hf_models.write_folder(tmp_path / "b", config, tensors))
    np.testing.assert_allclose(forward_full(minicpm, [[1, 2, 3]]), forward_full(granite, [[1, 2, 3]]), rtol=0, atol=1e-5)
    message = "dim_model_base is 0, expected at least 1"
    assert_refused(hf_models.write_folder(tmp_path / "c", config | {"dim_model_base": 0}, tensors), FileFormatError, message)


@pytest.mark.parametrize("prefix", [("language_model.model.", "vision_tower."), ("model.language_model.", "model.vision_tower.")])
def test_the_text_model_in_a_larger_one(tmp_path, prefix):
    """Under the names that are published, and those that transformers has in memory. What is not the text model's is not read."""
    config, tensors = recorded_folder("gemma3")
    plain = load(hf_models.write_folder(tmp_path / "text", config, tensors))
    whole = {name.replace("model.", prefix[0], 1): array for name, array in tensors.items()} | {prefix[1] + "w": np.ones(3, np.float32)}
    keys = {"model_type": "gemma3", "text_config": config, "vision_config": {"hidden_size": 3}, "eos_token_id": [1, 106]}
    assert_same_bits(
        forward_full(load(hf_models.write_folder(tmp_path / "all", keys, whole)), [[1, 2, 3]]), forward_full(plain, [[1, 2, 3]])
    )
    whole["other.w"] = np.ones(3, np.float32)
    assert_refused(hf_models.write_folder(tmp_path / "other", keys, whole), UnsupportedError, "tensor other.w has no place")


def test_names_without_the_models_prefix_and_buffers_of_old_files(tmp_path):
    """gpt2 was published so."""
    config, tensors = recorded_folder("gpt2")
    bare = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    bare |= {f"h.{n}.attn.bias": np.ones((1, 1, 64, 64), np.float32) for n in range(2)}
    one, other = load(hf_models.write_folder(tmp_path / "a", config, tensors)), load(hf_models.write_folder(tmp_path / "b", config, bare))
    assert_same_bits(forward_full(one, [[1, 2, 3]]), forward_full(other, [[1, 2, 3]]))


def test_a_model_in_several_files_is_the_same(tmp_path):
    source = open_folder(DATA / "hf" / "bitnet_autooff_gqa_tied")
    tensors = {name: array_of(tensor) for name, tensor in source.tensors.items()}
    split = load(hf_models.write_folder(tmp_path, dict(source.keys), tensors, shards=3))
    assert_same_bits(forward_full(split, [[1, 2, 3]]), forward_full(load(source.path), [[1, 2, 3]]))


def test_modules_that_are_not_converted(tmp_path):
    """By the start of a name up to a dot, and by its end."""
    skipped = ["lm_head", "model.layers.1", "layers.2.mlp.up_proj"]
    model = load(changed(tmp_path, "bitnet_online_mha_tied", quantization_config={"modules_to_not_convert": skipped}))
    found = [[isinstance(getattr(layer, name).weights, Ternary) for name in ("attn_q", "ffn_up", "ffn_down")] for layer in model.layers]
    assert found == [[True, True, True], [False, False, False], [True, False, True]]
    assert np.isfinite(forward_full(model, [[1, 2, 3]])).all()


Q = "model.layers.0.self_attn.q_proj.weight"


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


# --- the files of a folder -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
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
        ({"a": "1.safetensors", "b": "3.safetensors"}, "3.safetensors: the file is missing, model.safetensors.index.json has"),
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
