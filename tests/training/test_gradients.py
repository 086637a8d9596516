"""Gradients of a whole model: torch's and the definition's, the same bits from every path, and mistakes of callers named."""

import numpy as np
import pytest
from gradient_models import FAMILIES, SMOOTH, WIDTHS, config_of, normal, random_parameters, summed, wide
from hypothesis import given
from models import assert_same_bits, random_model, seeds, threads

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
from bitnet_np.files.embedded import model_path
from bitnet_np.files.load import load
from bitnet_np.generation.nll import token_nll
from bitnet_np.model import packing, ternarize
from bitnet_np.model.records import Yarn
from bitnet_np.training import spec as spec_grad
from bitnet_np.training.gradients import loss_and_gradients, parameters_of, quantize

# --- against torch and the definition -------------------------------------------------------------------------------------------------


def assert_near(ours, theirs):
    """Each gradient's error is a small part of its own size, as on the few models that are fixed here.

    It is not so of every model: where a sub-norm divides by nearly nothing, roundings reach a hundred times as far. The gradients of
    single kernels are within derived bounds of any (test_backward.py).
    """
    assert list(ours) == list(theirs)
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) <= 2e-5 * np.linalg.norm(gradient), name


YARN = Yarn(4.0, 16, fast=4.0)
SHAPES = {
    "small": (0, True, 9, {}),
    "two chunks": (1, False, 65, {"width": 33, "ffn": 70, "head_dim": 20}),
    "a long window": (2, True, 130, {"width": 80, "head_dim": 64, "window": 70}),
    "a short window and YaRN": (3, False, 30, {"head_dim": 20, "window": 3, "yarn": YARN, "rope_magnitude": 1.25}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("seed", "tied", "length", "shape"), SHAPES.values(), ids=SHAPES)
def test_float_gradients_are_the_definitions(family, seed, tied, length, shape):
    rng, how = np.random.default_rng(seed), dict(SMOOTH)
    config = config_of(family, **shape)
    if config.yarn:
        how["factors"] = spec.yarn_factors(config.rope_base, config.rope_pairs, YARN)
    parameters = random_parameters(rng, config, tied)
    tokens = rng.integers(0, config.vocab, (2, length))
    loss, gradients = loss_and_gradients(config, parameters, tokens, weights="none")
    expected, theirs = summed(config, parameters, tokens, **how)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_near(gradients, theirs)


@pytest.mark.parametrize("family", ["bitnet-b1.58", "bitnet", "llama"])
@pytest.mark.parametrize(("seed", "tied"), [(1, False), (4, True), (5, False)])
def test_ternary_gradients_are_the_definitions_where_no_code_flips(family, seed, tied):
    """Float32 and float64 agree on the code of an activation that is 3e-4 steps or more from where the code changes."""
    rng, margins = np.random.default_rng(seed), []
    config = config_of(family)
    parameters = random_parameters(rng, config, tied)
    tokens = rng.integers(0, config.vocab, (2, 4))

    def watched(x):
        q, scale = spec.quantize(x)
        margins.append(0.5 - np.abs(x * scale - q).max())
        return spec_grad.int8(x)

    expected, theirs = summed(config, parameters, tokens, activations=watched)
    assert min(margins) > 3e-4
    loss, gradients = loss_and_gradients(config, parameters, tokens)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_near(gradients, theirs)


@given(seed=seeds, n=WIDTHS, m=WIDTHS)
def test_quantize_is_what_loading_a_folder_does(seed, n, m):
    w = normal(np.random.default_rng(seed), n, m)
    packed, mean = quantize(w), max(ternarize.mean_magnitude(w), 1e-5)
    assert packed.scale == np.float32(1 / (1 / mean))  # what divides is the inverse, as in transformers
    np.testing.assert_array_equal(packing.unpack(packed), np.clip(np.rint(w * (1 / mean)), -1, 1))
    np.testing.assert_allclose(packing.unpack(packed) * float(packed.scale), spec_grad.ternary(w.astype(np.float64))[0], rtol=1e-7)


def test_the_loss_is_that_of_inference():
    """It is the mean of token_nll of a model with these quantised weights."""
    with model_path() as path:
        model = load(path)
    tokens = np.random.default_rng(3).integers(0, model.config.vocab, 40)
    loss, _ = loss_and_gradients(model.config, parameters_of(model), tokens[None], weights="none")
    assert loss == pytest.approx(token_nll(model, tokens).mean(), rel=1e-6)


def test_ropes_factors_are_no_parameters():
    model = random_model(4, family="llama", tied=False, table="float16")
    tokens = np.random.default_rng(4).integers(0, model.config.vocab, 20)
    parameters = parameters_of(model)
    loss, gradients = loss_and_gradients(model.config, parameters, tokens[None], weights="none")
    assert set(parameters) - set(gradients) == {"rope_freqs.weight"}
    assert loss == pytest.approx(token_nll(model, tokens).mean(), rel=1e-6)
    trained = wide({name: parameters[name] for name in gradients})
    _, theirs = spec_grad.loss_and_gradients(model.config, trained, tokens, factors=model.rope_factors, **SMOOTH)
    assert_near(gradients, {name: theirs[name] for name in gradients})


# --- the same bits --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bitnet-b1.58", "bitnet", "llama"])
def test_nothing_changes_a_bit(family, monkeypatch):
    """Threads, recomputation, quantising beforehand, padding, and the rows that the head takes at a time change nothing.

    A ragged batch is the sum of its sequences in order.
    """
    rng = np.random.default_rng(1)
    config = config_of(family, width=80, ffn=150, head_dim=20, vocab=70)
    parameters = random_parameters(rng, config, False)
    lengths = np.array([9, 2, 130, 64])
    tokens = rng.integers(0, config.vocab, (4, 131))
    loss, gradients = loss_and_gradients(config, parameters, tokens, lengths)
    tokens[np.arange(131) >= lengths[:, None]] = -1
    with threads(4):
        again = loss_and_gradients(config, parameters, tokens, lengths)
    recomputed = loss_and_gradients(config, parameters, tokens, lengths, recompute=True)
    ternary = {name: quantize(value) if value.ndim == 2 and name.startswith("blk.") else value for name, value in parameters.items()}
    quantised = loss_and_gradients(config, ternary, tokens, lengths, weights="none")
    in_parts = []
    for rows in (1, 10, 150):
        monkeypatch.setattr("bitnet_np.training.gradients._LOGITS", rows * config.vocab)
        in_parts.append(loss_and_gradients(config, parameters, tokens, lengths))
    for other_loss, other in (again, recomputed, quantised, *in_parts):
        assert other_loss == loss
        for name in gradients:
            assert_same_bits(other[name], gradients[name])
    total, total_loss = {}, 0.0
    for row, length in zip(tokens, lengths, strict=True):
        alone_loss, alone = loss_and_gradients(config, parameters, row[None, :length], divisor=float(lengths.sum() - 4))
        total = {name: total[name] + alone[name] if total else alone[name] for name in alone}
        total_loss += alone_loss
    assert total_loss == pytest.approx(loss, rel=1e-14)
    for name in gradients:
        np.testing.assert_array_equal(gradients[name], total[name])


# --- the border -----------------------------------------------------------------------------------------------------------------------


def gradients_of(config=None, drop=None, lengths=None, tokens=((1, 2, 3), (4, 5, 6)), change=(), **how):
    """Loss and gradients of a small model. drop: a parameter that is missing; change: parameters that are other ones."""
    config = config or config_of("bitnet-b1.58")
    parameters = random_parameters(np.random.default_rng(5), config, True)
    parameters.pop(drop, None)
    return loss_and_gradients(config, {**parameters, **dict(change)}, tokens, lengths, **how)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"weights": "int4"}, OptionError, "weights is 'int4', expected one of ternary, none"),
        ({"divisor": 0.0}, OptionError, "divisor is 0.0"),
        ({"divisor": float("nan")}, OptionError, "divisor is nan"),
        ({"drop": "blk.1.attn_q.weight"}, ShapeError, r"blk.1.attn_q.weight is missing, expected float32 \[16, 12\]"),
        ({"change": {"blk.2.attn_q.weight": np.zeros((16, 12), np.float32)}}, ShapeError, "'blk.2.attn_q.weight' has no place"),
        ({"change": {"blk.1.attn_q.bias": np.zeros(16, np.float32)}}, ShapeError, "'blk.1.attn_q.bias' has no place"),
        ({"change": {"output_norm.weight": np.zeros(12)}}, ShapeError, r"output_norm.weight is float64 \[12\], expected float32 \[12\]"),
        ({"change": {"output_norm.weight": np.zeros(13, np.float32)}}, ShapeError, r"float32 \[13\], expected float32 \[12\]"),
        ({"change": {"token_embd.weight": packing.pack(np.ones((11, 12)), 1.0)}}, ShapeError, "token_embd.weight is Ternary"),
        ({"change": {"blk.0.attn_q.weight": packing.pack(np.ones((16, 12)), 1.0)}, "weights": "none"}, UnsupportedError, "ternary and not"),
        ({"lengths": [3, 1]}, ShapeError, "sequence 1 has 1 token, expected at least 2"),
        ({"lengths": [3, 0]}, EmptyInputError, "sequence 1"),
        ({"lengths": [3, 4]}, ShapeError, r"lengths\[1\] is 4"),
        ({"tokens": [[1, 11]]}, TokenRangeError, "token 11"),
        ({"tokens": np.zeros((1, 301), np.int64)}, ContextLimitError, "sequence 0 has 301 tokens, the model's context is 300"),
        ({"config": config_of("qwen2"), "drop": "blk.0.attn_k.bias"}, ShapeError, "blk.0.attn_k.bias is missing"),
        ({"change": {"blk.0.attn_q.weight": np.full((16, 12), np.nan, np.float32)}}, NonFiniteError, "blk.0.attn_q.weight has NaN"),
        ({"change": {"output_norm.weight": np.full(12, 3e38, np.float32)}}, NonFiniteError, "leaves float32's range"),
        *(({"config": config_of(x)}, UnsupportedError, f"architecture is '{x}', gradients are") for x in ("qwen3", "gptneox", "gpt2")),
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
        (random_model(1, family="llama", weights="TQ2_0", width=256, ffn=256, head_dim=64, heads=4, kv_heads=2), "TQ2_0 of several scales"),
    ],
)
def test_parameters_that_have_no_gradient_are_refused(model, message):
    with pytest.raises(UnsupportedError, match=message):
        parameters_of(model)
