"""config.json: what transformers makes of it, and a refusal of every setting that is not supported."""

import hf_models
import pytest
from family_models import assert_refused
from hf_models import DATA, FAMILIES, LLAMA, OFFLINE, changed, recorded_folder
from models import assert_same_bits

from bitnet_np.base.errors import FileFormatError, ShapeError, UnsupportedError
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.load import load
from bitnet_np.model.rope import longrope_magnitude

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

LISTS = {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}
MLX = ("quantization", "quantization_config")  # mlx-lm writes both


def quantized(linear="autobitlinear", mode="offline", **keys):
    return {"quantization_config": {"linear_class": linear, "quantization_mode": mode, **keys}}


LLAMA3 = FAMILIES["llama_llama3_biases"]["rope_parameters"]


FALCON, MASTERS = "tiiuae/Falcon3-1B-Instruct-1.58bit", "1bitLLM/bitnet_b1_58-3B"
FULL, LOCAL = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, {"rope_type": "default", "rope_theta": 100.0}
BY_LAYER = {"rope_theta": None, "rope_scaling": None, "rope_local_base_freq": None}
BY_LAYER |= {"rope_parameters": {"full_attention": FULL, "sliding_attention": LOCAL}}


def local(keys):
    return {"rope_local_base_freq": None, "rope_parameters": {"sliding_attention": keys}}


BASES = "rope_local_base_freq is 5.0, and rope_theta of local layers 100.0"
LAYERS = "layer_types has sliding_attention, but no sliding_window is in use"


@pytest.mark.parametrize(
    ("name", "keys", "error", "message"),
    [
        (OFFLINE, quantized(None), UnsupportedError, "linear_class is 'missing', expected 'bitlinear' (divides"),
        (OFFLINE, quantized(mode="lazy"), UnsupportedError, "quantization_mode of autobitlinear is 'lazy'"),
        (OFFLINE, quantized("bitlinear", "online"), UnsupportedError, "quantization_mode of bitlinear is 'online', expected offline"),
        (OFFLINE, quantized(mode="online"), FileFormatError, "q_proj.weight has shape [16, 64], expected [64, 64]"),
        (OFFLINE, quantized(quant_method="gptq"), UnsupportedError, "quant_method is 'gptq'"),
        (OFFLINE, quantized(bits=2), UnsupportedError, "quantization_config: 'bits' = 2 is a setting"),
        *((LLAMA, {key: {"group_size": 64, "bits": 7}}, FileFormatError, f"{key} is ") for key in MLX),
        (OFFLINE, quantized(use_rms_norm=True), FileFormatError, "q_proj.rms_norm.weight is missing"),
        (OFFLINE, quantized(modules_to_not_convert=[]), UnsupportedError, "the head would also be quantised"),
        (OFFLINE, quantized(modules_to_not_convert=["(a+)+"]), UnsupportedError, "expected plain names"),
        (OFFLINE, {"quantization_config": None}, FileFormatError, "q_proj.weight has shape [16, 64], expected [64, 64]"),
        (OFFLINE, {"model_type": "phimoe"}, UnsupportedError, "model_type is 'phimoe'"),
        (OFFLINE, {"model_type": None}, FileFormatError, "model_type is missing"),
        (OFFLINE, {"architectures": ["BitNetForSequenceClassification"]}, UnsupportedError, "architectures is"),
        (OFFLINE, {"hidden_act": "gelu"}, UnsupportedError, "hidden_act is 'gelu'"),
        (OFFLINE, {"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        (OFFLINE, {"hidden_size": "64"}, FileFormatError, "hidden_size is '64', expected int"),
        (OFFLINE, {"hidden_size": True}, FileFormatError, "hidden_size is True, expected int"),
        (OFFLINE, {"hidden_size": 2**40}, FileFormatError, "hidden_size is 1099511627776"),
        (OFFLINE, {"num_attention_heads": 3}, FileFormatError, "hidden_size 64 is no multiple of num_attention_heads 3"),
        (OFFLINE, {"num_attention_heads": 0}, FileFormatError, "num_attention_heads 0"),
        (OFFLINE, {"rms_norm_eps": 10**400}, FileFormatError, "rms_norm_eps is 1000"),
        (OFFLINE, {"rope_parameters": {"rope_type": "dynamic"}}, UnsupportedError, "rope_type is 'dynamic'"),
        (OFFLINE, {"rope_parameters": {"rope_type": "yarn"}}, FileFormatError, "RoPE: original_max_position_embeddings is missing"),
        (OFFLINE, {"rope_parameters": YARN | {"beta_slow": 64.0}}, UnsupportedError, "YaRN's fast and slow are 32.0 and 64.0"),
        (OFFLINE, {"rope_parameters": YARN | {"factor": -1.0}}, UnsupportedError, "YaRN's factor is -1.0"),
        (OFFLINE, {"rope_parameters": YARN | {"factor": 1e-320}}, UnsupportedError, "YaRN's factor is 1e-320"),
        (OFFLINE, {"rope_parameters": YARN} | {"original_max_position_embeddings": 8}, FileFormatError, "is 16, that outside it 8"),
        (OFFLINE, {"rope_parameters": LISTS | {"long_factor": [1.0] * 7}}, ShapeError, "LongRoPE's long list has 7 factors, expected 8"),
        (OFFLINE, {"rope_parameters": LISTS | {"long_factor": [0.0, 1e300] * 4}}, UnsupportedError, "LongRoPE's long list is [0.0, "),
        (OFFLINE, {"rope_parameters": LISTS | {"short_factor": [True] * 8}}, FileFormatError, "expected lists of numbers"),
        (OFFLINE, {"rope_parameters": LISTS | {"short_factor": [10**400] * 8}}, FileFormatError, "expected lists of numbers"),
        (OFFLINE, {"rope_parameters": LISTS | {"attention_factor": 0.0}}, UnsupportedError, "rope_magnitude is 0.0"),
        (OFFLINE, {"rope_parameters": LISTS | {"original_max_position_embeddings": 1}}, UnsupportedError, "original context is 1"),
        (OFFLINE, {"rope_parameters": LISTS}, UnsupportedError, "RoPE is scaled by longrope"),
        (OFFLINE, {"rope_parameters": {"rope_theta": None}}, FileFormatError, "rope_theta is missing"),
        (OFFLINE, {"rope_parameters": {"rope_type": "linear", "factor": 1e-9}}, UnsupportedError, "RoPE's angles reach"),
        (OFFLINE, {"rope_parameters": {"beta": 1}}, UnsupportedError, "RoPE: 'beta' = 1 is a setting"),
        (OFFLINE, {"rope_theta": 1.0}, FileFormatError, "RoPE's 'rope_theta' is 1.0 and 500000.0"),
        (OFFLINE, {"partial_rotary_factor": 0.5}, UnsupportedError, "partial_rotary_factor is 0.5"),
        (OFFLINE, {"logit_scale": 0.5}, UnsupportedError, "'logit_scale' = 0.5 is a setting"),
        (LLAMA, {"pretraining_tp": 2}, UnsupportedError, "pretraining_tp is 2"),
        (LLAMA, {"layer_types": ["sliding_attention"]}, UnsupportedError, "layer_types is"),
        (LLAMA, {"mlp_bias": True}, FileFormatError, "gate_proj.bias is missing"),
        (LLAMA, {"tie_word_embeddings": True}, FileFormatError, "lm_head.weight is not model.embed_tokens.weight"),
        (LLAMA, {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, FileFormatError, "low less than high"),
        ("gemma3", {"rope_local_base_freq": 0.0}, UnsupportedError, "local_rope_base is 0.0, expected a positive number"),
        ("gemma3", {"sliding_window_pattern": 0}, FileFormatError, "sliding_window_pattern is 0, expected at least 1"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, UnsupportedError, "attn_logit_softcapping is 50.0, supported are None"),
        ("gemma3", {"rope_scaling": YARN}, UnsupportedError, "local_rope_base is 100.0 in a model with YaRN"),
        ("gemma3", BY_LAYER | {"rope_local_base_freq": 5.0}, FileFormatError, BASES),
        ("gemma3", local(FULL), UnsupportedError, "rope_type is 'linear', supported are 'default'"),
        ("gemma3", local(LOCAL | {"beta": 1}), UnsupportedError, "rope_parameters.sliding_attention.beta=none"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, UnsupportedError, "rope_parameters: 'rope_theta' = 10000.0 is a setting"),
        ("gemma3", {"model_type": "gemma3"}, FileFormatError, "text_config is missing"),
        ("gemma3", {"model_type": "gemma3", "text_config": {}}, UnsupportedError, "config.json: 'vocab_size' = 31 is a setting"),
        ("olmo3", {"rope_theta": 10000.0, "rope_parameters": None}, UnsupportedError, "base is 10000.0 in global and 500000.0 in local"),
        ("olmo3", {"sliding_window_pattern": 2}, UnsupportedError, "'sliding_window_pattern' = 2 is a setting"),
        ("stablelm", {"use_parallel_residual": True}, UnsupportedError, "use_parallel_residual is True, supported are False"),
        ("stablelm", {"use_qkv_bias": False}, UnsupportedError, "self_attn.q_proj.bias"),
        ("phi", {"partial_rotary_factor": None}, FileFormatError, "partial_rotary_factor is missing"),
        ("mistral_window", {"sliding_window": 0}, ShapeError, "window is 0, expected 1 to 1048576"),
        ("mistral_window", {"layer_types": ["full_attention"] * 2}, UnsupportedError, "'layer_types' = "),
        ("qwen3_window", {"use_sliding_window": False}, FileFormatError, LAYERS),
        ("qwen3_window", {"layer_types": ["chunked_attention"] * 2}, UnsupportedError, "layer_types is ['chunked_attention', "),
        ("qwen2_window", {"num_hidden_layers": 2**31 - 1}, UnsupportedError, "n_layers is 2147483647, expected at most 4096"),
        (FALCON, {"is_bitnet_config": 1}, UnsupportedError, "is_bitnet_config is 1, supported are False, True"),
        (FALCON, {"weight_bits": 1}, UnsupportedError, "'weight_bits' = 1 is a setting"),
        (MASTERS, {"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        (MASTERS, {"architectures": ["BitForCausalLM"]}, UnsupportedError, "for llama is LlamaForCausalLM or BitnetForCausalLM"),
        (MASTERS, {"quantization_config": {"quant_method": "bitnet"}}, UnsupportedError, "not for BitnetForCausalLM"),
        ("HF1BitLLM/Llama3-8B-1.58-100B-tokens", {"quantization_config": None}, UnsupportedError, "and no quantization_config"),
    ],
)
def test_what_config_json_may_not_say(tmp_path, name, keys, error, message):
    assert_refused(changed(tmp_path, name, **keys), error, message)


def test_what_config_json_need_not_say(tmp_path):
    """Files from before there were classes and modes of linears have what was the only one: bitlinear, offline."""
    both = "linear_class", "quantization_mode"
    for name, keys in (("llama_bitlinear_rms_untied", both), ("bitnet_bitlinear_gqa_untied", both), (OFFLINE, both[1:])):
        silent = load(changed(tmp_path, name, quantization_config=dict.fromkeys(keys)))
        assert_same_bits(forward_full(silent, [[1, 2, 3]]), forward_full(load(DATA / "hf" / name), [[1, 2, 3]]))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (10000.0, 100.0, 4.0, (0,))),
        (BY_LAYER, (10000.0, 100.0, 4.0, (0,))),
        ({"rope_theta": None, "rope_local_base_freq": None, "rope_scaling": None}, (1e6, 1e4, 1.0, (0,))),
        ({"sliding_window_pattern": None}, (10000.0, 100.0, 4.0, (0, 1))),
        ({"sliding_window_pattern": 1}, (10000.0, 100.0, 4.0, ())),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (10000.0, 100.0, 4.0, (1,))),
    ],
)
def test_which_layers_have_which_base(tmp_path, keys, expected):
    """As transformers' configuration class says."""
    config, tensors = recorded_folder("gemma3")
    keys = {key: value for key, value in (config | keys).items() if value is not None}
    c = load(hf_models.write_folder(tmp_path, keys, tensors)).config
    assert (c.rope_base, c.local_rope_base, c.rope_scaling, c.local_layers) == expected


@pytest.mark.parametrize(
    ("keys", "magnitude"),
    [({}, longrope_magnitude(4.0, 16)), ({"factor": 32.0}, longrope_magnitude(32.0, 16)), ({"attention_factor": 1.5, "factor": 32.0}, 1.5)],
)
def test_longropes_magnitude(tmp_path, keys, magnitude):
    """As it is stated, or as the factor or the model's context says."""
    config, tensors = recorded_folder("phi3_longrope")
    rope = {key: value for key, value in config["rope_scaling"].items() if key != "attention_factor"}
    folder = hf_models.write_folder(tmp_path, config | {"rope_scaling": rope | keys}, tensors)
    assert load(folder, overrides={"context": 64}).config.rope_magnitude == magnitude


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("mistral_window", {}, (5, None)),
        ("mistral_window", {"sliding_window": None}, (None, None)),
        ("mistral_window", {"sliding_window": "missing"}, (4096, None)),
        ("qwen2_window", {"sliding_window": "missing"}, (4096, (1,))),
        ("qwen2_window", {}, (6, (1,))),
        ("qwen2_window", {"max_window_layers": 0}, (6, None)),
        ("qwen2_window", {"max_window_layers": 2}, (None, None)),
        ("qwen2_window", {"use_sliding_window": False}, (None, None)),
        ("qwen2_window", {"sliding_window": None}, (None, None)),
        ("qwen2_window", {"layer_types": ["full_attention"] * 2}, (None, None)),
        ("qwen3_window", {}, (7, (0,))),
        ("qwen3_window", {"layer_types": ["sliding_attention"] * 2}, (7, None)),
        ("qwen3_window", {"layer_types": None, "max_window_layers": 1}, (7, (1,))),
        ("olmo3", {"sliding_window": "missing"}, (4096, (0, 1, 2))),
        ("olmo3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (6, (3,))),
        ("starcoder2", {}, (6, None)),
        ("starcoder2", {"sliding_window": "missing"}, (None, None)),
    ],
)
def test_which_layers_see_a_window(tmp_path, name, keys, expected):
    """As transformers' configuration classes say."""
    config, tensors = recorded_folder(name)
    config = {key: value for key, value in (config | keys).items() if value != "missing"}
    found = load(hf_models.write_folder(tmp_path, config, tensors)).config
    assert (found.window, found.window_layers) == expected
    assert found.local_layers == (found.window_layers if name == "olmo3" else ())
