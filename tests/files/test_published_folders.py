"""Folders as they are published load as they are: keys that change nothing are known by name, and by the value with which they do not."""

import json
from dataclasses import replace
from unittest import mock

import hf_models
import numpy as np
import pages
import pytest
from family_models import assert_refused, drawn
from hf_models import LLAMA, changed, recorded_folder
from models import assert_same_bits, random_model
from published_configs import PUBLISHED, PUBLISHED_GGUF, REFUSED, REFUSED_CONFIGS, REFUSED_GGUF, of_text, small

from bitnet_np import forward_full, load
from bitnet_np.base.errors import OptionError, UnsupportedError
from bitnet_np.cli import main as cli
from bitnet_np.files.gguf_writer import write_model
from bitnet_np.files.hf_config import read_recipe
from bitnet_np.model.families import FAMILIES
from bitnet_np.model.matrix_facts import kinds_of_matrices
from bitnet_np.testing.hf_files import write_hf
from bitnet_np.testing.models import write_gguf

INERT = {"activation", "input_bits", "is_bitnet_config", "parallel_attn", "rope_interleaved", "weight_bits"}
ARCHITECTURES = {"1bitLLM": "bitnet", "microsoft": "bitnet-b1.58", "Qwen/Qwen3-30B-A3B": "qwen3moe", "Qwen/Qwen1.5-MoE-A2.7B": "qwen2moe"}
ARCHITECTURES |= {"google": "gemma3", "openbmb": "minicpm"}
TOKENS = [[1, 2, 3, 4]]


@pytest.mark.parametrize("repository", PUBLISHED)
def test_a_published_folder_loads_and_its_inert_keys_change_nothing(tmp_path, repository):
    config = small(PUBLISHED[repository])
    write_hf(tmp_path, config)
    model = load(tmp_path)
    architecture = ARCHITECTURES.get(repository, ARCHITECTURES.get(repository.partition("/")[0], "llama"))
    assert model.config.architecture == ("phi3" if config["model_type"] == "phi3" else architecture)
    logits = forward_full(model, TOKENS)
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in INERT}))
    assert_same_bits(forward_full(load(tmp_path), TOKENS), logits)


@pytest.mark.parametrize("repository", PUBLISHED)
def test_the_published_sizes_are_read(tmp_path, repository):
    recipe = read_recipe(PUBLISHED[repository], tmp_path / "config.json")
    config = of_text(PUBLISHED[repository])
    c, quantization = recipe.config, recipe.quantization
    ffn = config.get("moe_intermediate_size", config["intermediate_size"])
    assert (c.width, c.ffn, c.n_layers, c.vocab) == (config["hidden_size"], ffn, config["num_hidden_layers"], config["vocab_size"])
    assert c.experts == config.get("num_experts", config.get("num_local_experts", 0))
    assert (quantization is None) == ("TriLM" in repository or c.experts > 0 or c.architecture in ("phi3", "gemma3", "minicpm"))
    assert recipe.tied == config.get("tie_word_embeddings", c.architecture in ("gemma3", "minicpm"))
    if c.architecture == "minicpm":
        assert (c.embedding_scale, c.residual_scale, c.logit_scale) == (12, 1.4 / c.n_layers**0.5, c.width / 256)
        assert c.rope_magnitude == 1
    if c.architecture == "gemma3":  # every sixth layer is global
        assert (c.rope_base, c.local_rope_base, c.rope_scaling) == (1e6, 1e4, 8.0 if c.n_layers == 34 else 1.0)
        assert c.local_layers == c.window_layers == tuple(n for n in range(c.n_layers) if n % 6 != 5)
    if quantization is not None:
        assert quantization.packed == (repository != "microsoft/bitnet-b1.58-2B-4T-bf16" and "1bitLLM" not in repository)
        assert quantization.divides == ("tiiuae" in repository or "HF1BitLLM" in repository)
        assert quantization.skipped == ("lm_head",)


@pytest.mark.parametrize("repository", PUBLISHED_GGUF)
def test_a_published_file_loads(written, repository):
    """Of random weights of that type; the embedding is of it, too, where the weights are not BitNet's."""
    architecture, weights, keys, options = PUBLISHED_GGUF[repository]
    model = drawn(architecture, weights, table="float16" if weights == "ternary" else weights, **options)
    assert np.isfinite(forward_full(load(written(model, **keys)), TOKENS)).all()


@pytest.mark.parametrize("repository", REFUSED)
def test_a_published_folder_is_refused_for_what_the_table_says(tmp_path, repository):
    write_hf(tmp_path, small(REFUSED_CONFIGS[repository]))
    assert_refused(tmp_path, UnsupportedError, REFUSED[repository], "here --override context=N says it, up to 64")
    for context, factor in ((32, 1.0), (64, 2.0)):
        model = load(tmp_path, overrides={"context": context})
        assert (model.config.context, set(model.rope_factors)) == (context, {factor})


def test_norms_inside_linears_are_refused_in_gemma3(tmp_path):
    """As the file of REFUSED_GGUF has them."""
    with mock.patch.dict(FAMILIES, gemma3=replace(FAMILIES["gemma3"], inner_norms=True)):
        write_gguf(tmp_path / "m.gguf", drawn("gemma3", inner_norms=True, eps=1e-6))
    assert_refused(tmp_path / "m.gguf", UnsupportedError, "tensor blk.0.ffn_down_norm_in.weight has no place in architecture gemma3")


def test_the_table_of_published_repositories(tmp_path):
    """Those that load and what their matrices are, and those that do not and why."""
    rows = {name.strip("`"): (loads, what) for name, loads, what in pages.table(pages.ROOT / "docs" / "models.md", "repository")}
    expected = dict.fromkeys((*PUBLISHED, *PUBLISHED_GGUF), "yes") | dict.fromkeys((*REFUSED, *REFUSED_GGUF), "no")
    assert {name: loads for name, (loads, _) in rows.items()} == expected
    for name, config in PUBLISHED.items():
        write_hf(tmp_path / name.replace("/", "_"), small(config))
        model, source = load(tmp_path / name.replace("/", "_")), hf_models.open_folder(tmp_path / name.replace("/", "_"))
        (kind,) = kinds_of_matrices(model, {tensor.type.name for tensor in source.tensors.values()})
        assert rows[name][1] == kind.partition(" (")[0]
    for name, reason in REFUSED.items():
        assert f"`{reason}`" in rows[name][1]
    for name, tensor in REFUSED_GGUF.items():
        assert f"`{tensor}`" in rows[name][1]


def test_bitnet_b1_58_is_bitnet_by_other_names(tmp_path):
    """Master weights, quantised in each pass; sub-norms and SiLU."""
    config = small(PUBLISHED["1bitLLM/bitnet_b1_58-large"])
    write_hf(tmp_path / "published", config, floats="F16")
    source = hf_models.open_folder(tmp_path / "published")
    names = {"self_attn.inner_attn_ln": "self_attn.attn_sub_norm", "mlp.ffn_layernorm": "mlp.ffn_sub_norm"}
    tensors = {}
    for name, tensor in source.tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name] = hf_models.array_of(tensor)
    online = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    config = {key: value for key, value in config.items() if key not in INERT} | {"model_type": "bitnet", "quantization_config": online}
    config["architectures"] = ["BitNetForCausalLM"]
    same = hf_models.write_folder(tmp_path / "same", config, tensors)
    assert_same_bits(forward_full(load(tmp_path / "published"), TOKENS), forward_full(load(same), TOKENS))


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"quantization_config": {"quant_method": "bitnet", "bits": 2}}, "quantization_config.bits"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "beta": 1}}, "rope_parameters.beta"),
    ],
)
def test_the_option_that_an_error_names_ignores_the_key(tmp_path, capsys, keys, path):
    folder = changed(tmp_path, "llama_bitlinear_rms_untied", **keys)
    before = forward_full(load(hf_models.DATA / "hf" / "llama_bitlinear_rms_untied"), TOKENS)
    assert_refused(folder, UnsupportedError, f"--override {path}=none loads the model as if it were not there")
    if "rope" not in path:  # the recording has other RoPE settings
        assert_same_bits(forward_full(load(folder, overrides={path: None}), TOKENS), before)
    assert cli.main(["logits", str(folder), "--tokens", "1,2", "--override", f"{path}=none"]) == 0
    assert f"bitnet-np: {path} is ignored\n" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["none_such", "rope_parameters.none_such", "model_type.none_such", "quantization_config.quant_method"])
def test_a_key_that_is_not_there_cannot_be_ignored(tmp_path, key):
    with pytest.raises(OptionError, match="has no key"):
        load(changed(tmp_path, LLAMA), overrides={key: None})


def test_a_key_of_a_gguf_file_is_ignored(tmp_path):
    path, model = tmp_path / "model.gguf", random_model(0, family="llama")
    write_model(path, model, {"tokenizer.ggml.model": "none", "llama.attention.clamp_kqv": 3.0})
    assert_refused(path, UnsupportedError, "--override llama.attention.clamp_kqv=none loads the model as if it were not there")
    logits = forward_full(load(path, overrides={"llama.attention.clamp_kqv": None}), TOKENS)
    write_gguf(path, model)
    assert_same_bits(logits, forward_full(load(path), TOKENS))
    with pytest.raises(OptionError, match=r"has no key 'llama\.attention\.clamp_kqv'"):
        load(path, overrides={"llama.attention.clamp_kqv": None})


def test_gpt_neox_has_its_head_under_the_name_that_files_have(tmp_path):
    """transformers saves it as embed_out, whatever the module's name is."""
    config, tensors = recorded_folder("gptneox_parallel")
    assert "lm_head.weight" in tensors
    renamed = {name.replace("lm_head", "embed_out"): array for name, array in tensors.items()}
    logits = [forward_full(load(hf_models.write_folder(tmp_path / str(n), config, t)), TOKENS) for n, t in enumerate((tensors, renamed))]
    assert_same_bits(*logits)
    both = tensors | {"embed_out.weight": np.zeros_like(tensors["lm_head.weight"])}
    assert_refused(hf_models.write_folder(tmp_path / "both", config, both), UnsupportedError, "tensor embed_out.weight has no place")
