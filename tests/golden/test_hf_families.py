"""Against transformers' recordings of families that are not BitNet, as scripts/recorders/crossval_hf.py --record makes them."""

from dataclasses import replace
from pathlib import Path

import hf_models
import numpy as np
import pytest
from models import assert_same_bits

from bitnet_np import spec
from bitnet_np.engine.forward_pass import forward_full, forward_incremental
from bitnet_np.files.load import load
from bitnet_np.model.dense import dense_view
from bitnet_np.model.rope import llama3_factors, rope_frequencies

DATA = Path(__file__).parents[1] / "data" / "hf_families"
NAMES = ("llama_llama3_biases", "qwen2_linear", "qwen3_wide_heads", "qwen3_yarn", "gptneox_parallel", "gptneox_sequential", "gpt2")
NAMES += ("granite", "smollm3", "olmo2", "gemma", "gemma2", "phi", "stablelm", "phi3_longrope", "mixtral", "qwen2_moe", "qwen3_moe")
WINDOWS = {"gemma3": (6, (0,)), "mistral_window": (5, None), "qwen2_window": (6, (1,)), "qwen3_window": (7, (0,)), "phi3": (7, None)}
WINDOWS |= {"olmo3": (6, (0, 1, 2)), "starcoder2": (6, None)}
NAMES += tuple(WINDOWS)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def recorded(name):
    return np.load(DATA / f"{name}.npz")


@pytest.fixture(scope="module")
def model(name):
    """transformers' gptneox has the exact GELU, which GGUF files cannot ask for."""
    found = load(DATA / f"{name}.gguf", overrides={"context": 64})  # LongRoPE's must be declared
    return replace(found, config=replace(found.config, activation="gelu")) if found.config.architecture == "gptneox" else found


@pytest.fixture(scope="module")
def of_folder(name, tmp_path_factory):
    """The same from transformers' folder: rows of q and k in halves, heads fused one by one, matrices transposed."""
    return load(hf_models.write_folder(tmp_path_factory.mktemp(name), *hf_models.recorded_folder(name)), overrides={"context": 64})


def test_the_definition_agrees_to_float64(model, of_folder, recorded):
    definition_agrees(model, recorded, 1e-11)
    definition_agrees(of_folder, recorded, 1e-10)  # their layer_norm_eps was the nearest float32 of 1e-5


def definition_agrees(model, recorded, limit):
    """Llama 3's factors are float32 in a GGUF file, and YaRN's in a model: the definition gets them as config.json implies them."""
    dense, c = dense_view(model), model.config
    if model.rope_factors is not None and c.longrope is None:
        llama3 = llama3_factors(rope_frequencies(10000.0, 12), 8.0, 1.0, 4.0, 64)
        factors = llama3 if c.yarn is None else spec.yarn_factors(c.rope_base, c.rope_pairs, c.yarn)
        assert 1 == factors[0] < factors[1] <= factors[-1] == (8 if c.yarn is None else 4)
        np.testing.assert_array_equal(model.rope_factors, factors.astype(np.float32))
        dense = replace(dense, rope_factors=factors)
    if c.yarn is not None:  # the file's factor gives it to float32
        assert np.float32(c.rope_magnitude) == np.float32(1.25)
        dense = replace(dense, config=replace(c, rope_magnitude=1.25))
    for tokens, theirs in zip(recorded["tokens"], recorded["logits_f64"], strict=True):
        np.testing.assert_allclose(spec.forward(dense, tokens), theirs, rtol=0, atol=limit * np.abs(theirs).max())


def test_the_kernels_agree_to_float32(model, of_folder, recorded):
    ours = forward_full(model, recorded["tokens"])
    scale = np.abs(recorded["logits_f64"]).max()
    for theirs in (recorded["logits_f32"], recorded["logits_f64"]):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * scale)
    np.testing.assert_allclose(forward_full(of_folder, recorded["tokens"]), recorded["logits_f64"], rtol=0, atol=1e-6 * scale)
    assert_same_bits(forward_incremental(model, recorded["tokens"], chunk=7), ours)


@pytest.mark.parametrize("name", WINDOWS, indirect=True)
def test_the_windows_show(name, model, recorded):
    """In which layer it is, and where it ends, to the token."""
    c = model.config
    assert (c.window, c.window_layers) == WINDOWS[name]
    for change in (
        {"window": None},
        {"window": c.window + 1},
        {"window": c.window - 1},
        {"window_layers": () if c.window_layers is None else None},
    ):
        other = forward_full(replace(model, config=replace(c, **change)), recorded["tokens"])
        assert np.abs(other - recorded["logits_f64"]).max() > 1e-2


@pytest.mark.parametrize("name", ["gemma3", "olmo3"], indirect=True)
def test_both_kinds_of_rope_show(model, recorded):
    """In which layers each is, and where positions are scaled."""
    everywhere, swapped = (replace(model, config=replace(model.config, local_layers=layers)) for layers in ((), (1,)))
    yarn = model.config.yarn is not None
    scaled = replace(model, local_rope_frequency=model.rope_frequency if yarn else model.local_rope_frequency / model.config.rope_scaling)
    for other in (everywhere, swapped, scaled):
        assert np.abs(forward_full(other, recorded["tokens"]) - recorded["logits_f64"]).max() > 1e-2


@pytest.mark.parametrize("name", ["gptneox_parallel"], indirect=True)
def test_the_two_gelus_are_told_apart(model, recorded):
    tanh = replace(model, config=replace(model.config, activation="gelu_tanh"))
    assert np.abs(forward_full(tanh, recorded["tokens"]) - recorded["logits_f64"]).max() > 1e-4
