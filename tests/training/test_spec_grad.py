"""The definition of training against finite differences and against torch."""

import numpy as np
import pytest
from gradient_models import FAMILIES, RECORDINGS, SMOOTH, WINDOW, config_of, random_parameters, recording, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from models import seeds

from bitnet_np.training import spec as spec_grad


def slope(run, parameters, name, direction, step):
    """The derivative of the loss along a direction of one parameter, by the central difference of order four."""
    values = [run({**parameters, name: parameters[name] + n * step * direction}) for n in (-2, -1, 1, 2)]
    return (values[0] - values[3] + 8 * (values[2] - values[1])) / (12 * step)


@settings(max_examples=20)
@given(
    seed=seeds,
    family=st.sampled_from(FAMILIES),
    tied=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
    length=st.integers(2, 9),
    window=WINDOW,
    pairs=st.sampled_from(["halves", "adjacent"]),
)
def test_the_definition_agrees_with_finite_differences(seed, family, tied, kv_heads, length, window, pairs):
    """Derivatives along a random direction of each parameter. A loss of 10 is rounded by 2e-15, which a step of 3e-4 makes 1e-11."""
    rng = np.random.default_rng(seed)
    config = config_of(family, kv_heads=kv_heads, window=window, rope=pairs)
    parameters = random_parameters(rng, config, tied, np.float64)
    tokens = rng.integers(0, config.vocab, length)
    _, gradients = spec_grad.loss_and_gradients(config, parameters, tokens, **SMOOTH)
    for name, value in parameters.items():
        direction = rng.normal(size=value.shape)
        direction /= np.linalg.norm(direction)
        derivative = slope(lambda p: spec_grad.loss_and_gradients(config, p, tokens, **SMOOTH)[0], parameters, name, direction, 3e-4)
        assert abs(derivative - np.sum(gradients[name] * direction)) <= 1e-7 * np.linalg.norm(gradients[name]) + 1e-9, name


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_definition_agrees_with_torch(name):
    """No code flips between two programs in float64, so every gradient agrees."""
    config, parameters, tokens, expected_loss, expected = recording(name)
    loss, gradients = spec_grad.loss_and_gradients(config, wide(parameters), tokens)
    assert loss == pytest.approx(expected_loss, rel=1e-13)
    assert set(expected) == set(gradients)
    for parameter, gradient in expected.items():
        np.testing.assert_allclose(gradients[parameter], gradient, rtol=0, atol=1e-10 * np.abs(gradient).max())
