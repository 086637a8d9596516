"""Gradients of a whole model against finite differences and torch, the loss against inference's, and mistakes of callers named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import padded, random_model, random_tokens, seeds

from bitnet_np import spec
from bitnet_np.base.errors import (
    ContextLimitError,
    EmptyInputError,
    NonFiniteError,
    OptionError,
    ShapeError,
    TokenRangeError,
    UnsupportedError,
)
from bitnet_np.generation.nll import token_nll
from bitnet_np.model import packing, ternarize
from bitnet_np.model.families import FAMILIES, layer_shapes
from bitnet_np.model.records import Config, Ternary, Yarn
from bitnet_np.training.gradients import FACTORS, loss_and_gradients, parameter_shapes, parameters_of

RECORDINGS = Path(__file__).parents[1] / "data" / "hf_gradients"


def config_of(family, **shape):
    """A small config of a family."""
    sizes = {"vocab": 11, "width": 12, "n_layers": 2, "ffn": 10, "heads": 4, "kv_heads": 2, "head_dim": 4, "context": 300}
    return Config(family, **{"eps": 1e-5, "rope_base": 100.0, **sizes, **FAMILIES[family].config, **shape})


def random_parameters(rng, config, tied=True):
    """Norms around 1 and rows of about unit length, so that every part matters; biases where the family may have them."""
    shapes, family = parameter_shapes(config, tied), FAMILIES[config.architecture]
    parameters = {n: rng.normal(1, 0.3, s) if len(s) == 1 else rng.normal(size=s) / s[1] ** 0.5 for n, s in shapes.items()}
    for n in range(config.n_layers):
        for field in family.biases + family.optional_biases:
            parameters[f"blk.{n}.{field}.bias"] = rng.normal(0, 0.3, layer_shapes(config)[field][0])
    parameters["token_embd.weight"] *= 3
    return parameters


def assert_near(ours, theirs, tolerance):
    """Each gradient's error is a small part of its own size."""
    assert list(ours) == list(theirs)
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) <= tolerance * np.linalg.norm(gradient), name


# --- the definition -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    seed=seeds,
    family=st.sampled_from(["bitnet-b1.58", "bitnet", "llama", "qwen2"]),
    tied=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
    length=st.integers(2, 9),
    window=st.sampled_from([None, 1, 3]),
    pairs=st.sampled_from(["halves", "adjacent"]),
)
def test_without_quantisers_it_agrees_with_finite_differences(seed, family, tied, kv_heads, length, window, pairs):
    """Derivatives along a random direction of each parameter. A loss of 10 is rounded by 2e-15, which a step of 1e-4 makes 1e-10.

    Where the square of ReLU begins, its curvature jumps: that adds a small part of the step.
    """
    rng, step = np.random.default_rng(seed), 1e-4
    config = config_of(family, kv_heads=kv_heads, window=window, rope=pairs)
    parameters, tokens = random_parameters(rng, config, tied), rng.integers(0, config.vocab, (1, length))
    _, gradients = loss_and_gradients(config, parameters, tokens, weights="none")
    assert gradients.keys() == parameters.keys()
    for name, value in parameters.items():
        direction = rng.normal(size=value.shape)
        direction /= np.linalg.norm(direction)
        moved = ({**parameters, name: value + n * step * direction} for n in (-2, -1, 1, 2))
        a, b, c, d = (loss_and_gradients(config, other, tokens, weights="none")[0] for other in moved)
        derivative = (a - d + 8 * (c - b)) / (12 * step)  # the central difference of order four
        assert abs(derivative - np.sum(gradients[name] * direction)) <= 1e-5 * np.linalg.norm(gradients[name]) + 1e-8, name


@pytest.mark.parametrize("name", ["relu2_tied", "silu_untied"])
def test_master_weights_get_torchs_gradients(name):
    """The convention of quantisers is transformers'. No code flips between two programs in float64, so every gradient agrees."""
    arrays = np.load(RECORDINGS / f"{name}.npz")
    parameters, expected = (
        {key.removeprefix(kind): arrays[key] for key in arrays if key.startswith(kind)} for kind in ("parameters/", "gradients/")
    )
    loss, gradients = loss_and_gradients(Config(**json.loads(str(arrays["config"]))), parameters, arrays["tokens"][None])
    assert loss == pytest.approx(float(arrays["loss"]), rel=1e-13)
    assert_near(gradients, {parameter: expected[parameter] for parameter in parameters}, 1e-10)


@pytest.mark.parametrize("family", ["bitnet-b1.58", "bitnet", "llama"])
def test_ternary_matrices_get_the_gradients_of_their_masters(family):
    """An exported matrix has the same codes, and its scale is the same but for rounding."""
    rng, config = np.random.default_rng(1), config_of(family)
    parameters, tokens = random_parameters(rng, config, False), rng.integers(0, config.vocab, (2, 9))
    loss, gradients = loss_and_gradients(config, parameters, tokens)
    exported = {
        name: ternarize.from_masters(value.astype(np.float32)) if name.startswith("blk.") and value.ndim == 2 else value
        for name, value in parameters.items()
    }
    assert sum(isinstance(value, Ternary) for value in exported.values()) == 14
    other_loss, others = loss_and_gradients(config, exported, tokens, weights="none")
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert_near(others, gradients, 1e-5)


MODELS = {
    "ternary": random_model(4, window=3),
    "SiLU": replace(random_model(3, family="qwen2", window=3, table="bfloat16"), output_bias=None),
    "factors of RoPE": random_model(4, family="llama", tied=False, table="float16"),
    "YaRN": random_model(5, family="llama", weights="float32", yarn=Yarn(4.0, 16, fast=4.0), rope_magnitude=1.2),
    "positions": random_model(6, family="llama", weights="float16", rope_scaling=4.0),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_loss_is_that_of_inference(model):
    """It is the mean of token_nll, from float32 logits."""
    tokens = random_tokens(np.random.default_rng(4), model, 40)
    parameters = parameters_of(model)
    loss, gradients = loss_and_gradients(model.config, parameters, tokens[None], weights="none")
    assert loss == pytest.approx(token_nll(model, tokens).mean(), rel=1e-6)
    assert list(gradients) == [name for name in parameters if name != FACTORS]


def test_a_batch_is_the_sum_of_its_sequences():
    """Whatever stands behind their ends."""
    rng, config = np.random.default_rng(1), config_of("bitnet-b1.58")
    parameters, sequences = random_parameters(rng, config), [rng.integers(0, 11, length) for length in (9, 2, 30)]
    loss, gradients = loss_and_gradients(config, parameters, *padded(rng, sequences, 2))
    alone = [loss_and_gradients(config, parameters, sequence[None], divisor=38.0) for sequence in sequences]
    assert loss == pytest.approx(sum(part for part, _ in alone), rel=1e-14)
    assert_near(gradients, {name: sum(part[name] for _, part in alone) for name in gradients}, 1e-14)
    assert {gradient.dtype for gradient in gradients.values()} == {np.dtype(np.float64)}


def test_a_matrix_is_multiplied_once_for_all_sequences(monkeypatch):
    rng, config, rows = np.random.default_rng(1), config_of("bitnet-b1.58"), []
    monkeypatch.setattr(spec, "matmul", lambda x, matrix: rows.append(len(x)) or x @ matrix.T)
    loss_and_gradients(config, random_parameters(rng, config), rng.integers(0, 11, (3, 5)), [5, 2, 4])
    assert rows == [4 + 1 + 3] * (7 * config.n_layers + 1)


# --- the border -----------------------------------------------------------------------------------------------------------------------


def gradients_of(config=None, drop=None, lengths=None, tokens=((1, 2, 3), (4, 5, 6)), change=(), **how):
    """Loss and gradients of a small model. drop: a parameter that is missing; change: parameters that are other ones."""
    config = config or config_of("bitnet-b1.58")
    parameters = random_parameters(np.random.default_rng(5), config)
    parameters.pop(drop, None)
    return loss_and_gradients(config, {**parameters, **dict(change)}, tokens, lengths, **how)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"weights": "int4"}, OptionError, "weights is 'int4', expected one of ternary, none"),
        ({"divisor": 0.0}, OptionError, "divisor is 0.0"),
        ({"divisor": float("nan")}, OptionError, "divisor is nan"),
        ({"drop": "blk.1.attn_q.weight"}, ShapeError, r"blk.1.attn_q.weight is missing, expected floats \[16, 12\]"),
        ({"change": {"blk.2.attn_q.weight": np.zeros((16, 12))}}, ShapeError, "'blk.2.attn_q.weight' has no place"),
        ({"change": {"blk.1.attn_q.bias": np.zeros(16)}}, ShapeError, "'blk.1.attn_q.bias' has no place"),
        ({"change": {"output_norm.weight": np.zeros(12, int)}}, ShapeError, r"output_norm.weight is int64 \[12\], expected floats \[12\]"),
        ({"change": {"output_norm.weight": np.zeros(13)}}, ShapeError, r"float64 \[13\], expected floats \[12\]"),
        ({"change": {"output_norm.weight": [1.0] * 12}}, ShapeError, "is list, expected floats"),
        ({"change": {"token_embd.weight": packing.pack(np.ones((11, 12)), 1.0)}}, ShapeError, "token_embd.weight is Ternary"),
        ({"lengths": [3, 1]}, ShapeError, "sequence 1 has 1 token, expected at least 2"),
        ({"lengths": [3, 0]}, EmptyInputError, "sequence 1"),
        ({"lengths": [3, 4]}, ShapeError, r"lengths\[1\] is 4"),
        ({"tokens": [[1, 11]]}, TokenRangeError, "token 11"),
        ({"tokens": np.zeros((1, 301), np.int64)}, ContextLimitError, "sequence 0 would have 301 positions, the model's context is 300"),
        ({"config": config_of("qwen2"), "drop": "blk.0.attn_k.bias"}, ShapeError, "blk.0.attn_k.bias is missing"),
        ({"change": {"blk.0.attn_q.weight": np.full((16, 12), np.nan)}}, NonFiniteError, "blk.0.attn_q.weight has NaN"),
        ({"change": {"output_norm.weight": np.full(12, 1e308)}}, NonFiniteError, "beyond float64's range"),
        *(({"config": config_of(x)}, UnsupportedError, f"architecture is '{x}', gradients are") for x in ("qwen3", "olmo2")),
        ({"config": config_of("llama", logit_scale=2.0)}, UnsupportedError, "logit_scale is 2.0, which has no gradient here"),
        ({"config": config_of("smollm3", rope_layers=(0,))}, UnsupportedError, r"rope_layers is \(0,\)"),
        ({"config": config_of("gemma")}, UnsupportedError, "activation is 'gelu_gate'"),
    ],
)
def test_mistakes_are_named(how, error, message):
    with pytest.raises(error, match=message):
        gradients_of(**how)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (random_model(1, family="bitnet"), "blk.0.attn_q has a factor"),
        (random_model(1, inner_norms=True), "blk.0.attn_q has a norm inside"),
        (random_model(1, family="qwen2"), "output.bias"),
        (random_model(1, family="llama", experts=5, experts_used=2), "experts is 5, which has no gradient here"),
        (random_model(1, family="llama", weights="TQ2_0", width=256, ffn=256, head_dim=64, heads=4, kv_heads=2), "TQ2_0 of several scales"),
    ],
)
def test_parameters_that_have_no_gradient_are_refused(model, message):
    with pytest.raises(UnsupportedError, match=message):
        parameters_of(model)
