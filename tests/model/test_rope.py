"""RoPE's frequencies: correctly rounded powers, and angles whose cosines are exact."""

from fractions import Fraction

import numpy as np
import pytest
from family_models import drawn
from fuzzing.gguf_bytes import UINT32, number
from gguf_models import A

from bitnet_np import spec
from bitnet_np.base.errors import ShapeError, UnsupportedError
from bitnet_np.files.load import load
from bitnet_np.kernels.scalar import cos_sin
from bitnet_np.model.records import Yarn
from bitnet_np.model.rope import LARGEST_ANGLE, longrope_magnitude, rope_frequencies, yarn_factors, yarn_magnitude
from bitnet_np.testing.models import random_model


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6, 1.0, 2.0, 0.5, float(np.float32(123.456))])
@pytest.mark.parametrize("width", [2, 6, 64, 128, 130, 256])
def test_rope_frequencies_are_powers_of_the_base(base, width):
    found = rope_frequencies(base, width)
    powers = base ** (-np.arange(0, width, 2) / width)
    assert found.dtype == np.float64
    assert found.shape == (width // 2,)
    assert found[0] == 1
    assert (np.abs(found - powers) <= np.spacing(powers) * (1 + abs(np.log(base)))).all()  # the exponent is rounded, too
    for i in range(0, width // 2, 7):  # f^K * base^2i is 1, to the roundings of f
        assert abs(Fraction(found[i]) ** width * Fraction(base) ** (2 * i) - 1) <= width * Fraction(1, 2**53) * Fraction(1001, 1000)


def test_factors_of_frequencies():
    model = drawn("llama")
    assert model.rope_factors.size == 32
    np.testing.assert_array_equal(model.rope_frequency, rope_frequencies(10000.0, 64) / model.rope_factors)
    with pytest.raises(ShapeError, match="3 factors"):
        rope_frequencies(10000.0, 64, np.ones(3, np.float32))


def test_the_longest_context_that_is_allowed(write):
    model = load(write({A + "context_length": number(UINT32, 2**20)}))
    assert model.config.context * model.rope_frequency.max() <= LARGEST_ANGLE
    angle = np.array([np.nextafter(LARGEST_ANGLE, 0.0), 2.0**20])
    cos, sin = np.array([cos_sin(a) for a in angle]).T
    np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=2e-15)
    np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=2e-15)


@pytest.mark.parametrize("yarn", [Yarn(4.0, 16384), Yarn(8.0, 64, 4.0, 0.5), Yarn(2.0, 4096, truncate=False), Yarn(4.0, 1), Yarn(1.0, 64)])
def test_yarns_factors_are_the_definitions(yarn):
    c = random_model(0, family="qwen3", head_dim=64, rope_base=1e6, yarn=yarn).config
    theirs = spec.yarn_factors(c.rope_base, c.rope_pairs, yarn)
    np.testing.assert_allclose(yarn_factors(c), theirs, rtol=2.0**-23)
    assert (theirs >= 1 - 2.0**-50).all()
    assert (theirs <= yarn.factor * (1 + 2.0**-50)).all()


@pytest.mark.parametrize(("factor", "magnitude"), [(1.0, 1.0), (0.5, 1.0), (32.0, np.sqrt(1 + 5 / 12)), (4.0, np.sqrt(1 + 1 / 6))])
def test_longropes_magnitude(factor, magnitude):
    assert longrope_magnitude(factor, 4096) == pytest.approx(magnitude, rel=1e-15)


def test_yarns_magnitude():
    assert yarn_magnitude(4.0) == pytest.approx(1 + 0.1 * np.log(4), rel=1e-15)
    assert yarn_magnitude(40.0, 0.7, 1.2) == pytest.approx((1 + 0.07 * np.log(40)) / (1 + 0.12 * np.log(40)), rel=1e-15)
    assert yarn_magnitude(0.5) == 1
    with pytest.raises(UnsupportedError, match="magnitude is"):
        yarn_magnitude(4.0, -10.0)
