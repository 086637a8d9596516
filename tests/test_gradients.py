"""Training's gradients: spec_grad.py against finite differences, the kernels against spec_grad.py, and what may not change a bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, seeds, threads

from bitnet_np import spec_grad
from bitnet_np.families import FAMILIES, layer_shapes
from bitnet_np.gradients import loss_and_gradients, parameter_shapes
from bitnet_np.model import Config

SHAPE = {"vocab": 11, "width": 12, "n_layers": 2, "ffn": 10, "heads": 4, "kv_heads": 2, "head_dim": 4, "context": 300}
FAMILY = st.sampled_from(["bitnet-b1.58", "bitnet", "llama", "qwen2"])


def config_of(family, **shape):
    told = {"eps": 1e-5, "rope_base": 100.0, **SHAPE, **FAMILIES[family].config}
    return Config(family, **{**told, **shape})


def random_parameters(rng, config, tied, dtype=np.float32):
    """Norms around 1 and rows of about unit length, so that every part matters."""

    def draw(shape):
        return rng.normal(1, 0.3, shape) if len(shape) == 1 else rng.normal(size=shape) / shape[1] ** 0.5

    found = {name: draw(shape).astype(dtype) for name, shape in parameter_shapes(config, tied).items()}
    told = FAMILIES[config.architecture]
    for n in range(config.n_layers):
        for field in told.biases + told.optional_biases:
            found[f"blk.{n}.{field}.bias"] = rng.normal(0, 0.3, layer_shapes(config)[field][0]).astype(dtype)
    found["token_embd.weight"] *= 3
    return found


def wide(parameters):
    return {name: value.astype(np.float64) for name, value in parameters.items()}


def summed(config, parameters, sequences, **how):
    """spec_grad's loss and gradients of a batch."""
    divisor = sum(len(sequence) - 1 for sequence in sequences)
    parts = [spec_grad.loss_and_gradients(config, wide(parameters), sequence, divisor=divisor, **how) for sequence in sequences]
    return sum(loss for loss, _ in parts), {name: sum(gradients[name] for _, gradients in parts) for name in parameters}


def distance(ours, theirs):
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


@settings(max_examples=10)
@given(seed=seeds, family=FAMILY, tied=st.booleans(), kv_heads=st.sampled_from([1, 2, 4]), length=st.integers(2, 9))
def test_the_definition_agrees_with_finite_differences(seed, family, tied, kv_heads, length):
    """In a random direction of each parameter, by the difference formula of order four."""
    rng = np.random.default_rng(seed)
    config = config_of(family, kv_heads=kv_heads)
    parameters = random_parameters(rng, config, tied, np.float64)
    tokens = rng.integers(0, config.vocab, length)

    def run(parameters):
        return spec_grad.loss_and_gradients(config, parameters, tokens, activations=spec_grad.smooth, weights=spec_grad.smooth)

    _, gradients = run(parameters)
    for name, value in parameters.items():
        direction = rng.normal(size=value.shape)
        step = 3e-4 / np.linalg.norm(direction)
        far_below, below, above, far_above = (run({**parameters, name: value + n * step * direction})[0] for n in (-2, -1, 1, 2))
        slope = (far_below - far_above + 8 * (above - below)) / (12 * step)
        size = np.linalg.norm(gradients[name]) * np.linalg.norm(direction)
        assert abs(slope - np.sum(gradients[name] * direction)) <= 1e-7 * size + 1e-9, name


@settings(max_examples=12)
@given(seed=seeds, family=FAMILY, tied=st.booleans(), length=st.sampled_from([3, 9, 64, 65, 66, 130]), width=st.sampled_from([12, 33, 80]))
def test_float_gradients_are_the_definitions(seed, family, tied, length, width):
    rng = np.random.default_rng(seed)
    config = config_of(family, width=width, head_dim=int(rng.choice([2, 20, 64])), ffn=int(rng.choice([10, 70])))
    parameters = random_parameters(rng, config, tied)
    tokens = rng.integers(0, config.vocab, (2, length))
    loss, gradients = loss_and_gradients(config, parameters, tokens, weights="none")
    expected, theirs = summed(config, parameters, tokens, activations=spec_grad.smooth, weights=spec_grad.smooth)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert list(gradients) == list(parameters)
    for name in gradients:
        assert distance(gradients[name], theirs[name]) < 2e-5, name


@pytest.mark.parametrize("family", ["bitnet-b1.58", "bitnet", "llama"])
def test_nothing_changes_a_bit(family):
    """Threads, recomputation; and a ragged batch of an untied model is the sum of its sequences in order."""
    rng = np.random.default_rng(1)
    config = config_of(family, width=80, ffn=150, head_dim=20, vocab=70)
    parameters = random_parameters(rng, config, False)
    lengths = np.array([9, 2, 130, 64])
    tokens = rng.integers(0, config.vocab, (4, 130))
    divisor = float(lengths.sum() - 4)
    loss, gradients = loss_and_gradients(config, parameters, tokens, lengths)
    with threads(4):
        again, parallel = loss_and_gradients(config, parameters, tokens, lengths)
    other, recomputed = loss_and_gradients(config, parameters, tokens, lengths, recompute=True)
    assert loss == again == other
    total = {}
    for row, length in zip(tokens, lengths, strict=True):
        _, alone = loss_and_gradients(config, parameters, row[None, :length], divisor=divisor)
        total = {name: total[name] + alone[name] if total else alone[name] for name in alone}
    for name in gradients:
        assert_same_bits(gradients[name], parallel[name])
        assert_same_bits(gradients[name], recomputed[name])
        np.testing.assert_array_equal(gradients[name], total[name])
