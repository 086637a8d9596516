"""Types as grids, scales and blocks: their numbers, their largest errors, and their names."""

import numpy as np
import pytest

from bitnet_np.base.errors import OptionError
from bitnet_np.judge.law.formats import GRIDS, TYPES, Rounding, format_of, half_steps, rounded

RNG = np.random.default_rng(0)
X = RNG.standard_normal((20, 64)) * np.exp(RNG.uniform(-8, 3, (20, 64)))
NAMES = (
    "bf16",
    "tf32:cut",
    "e5m2",
    "int8",
    "int8:tensor",
    "int4:32",
    "e4m3:row",
    "e3m2:16:pow2",
    "q8_0",
    "mxfp4",
    "nvfp4",
    "int5:16:float16",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_half_step_is_the_largest_error(name):
    share = np.abs(format_of(name)(X) - X) / half_steps(X, name)
    assert 0.7 < share.max() <= 1 + 1e-9


@pytest.mark.parametrize("grid", ["e5m2", "e4m3", "e3m2", "e2m3", "e2m1"])
def test_elements_are_those_of_the_format(grid):
    """All positive elements, from their bits."""
    mantissa, (_, least, most) = int(grid[3]), GRIDS[grid]
    steps = np.arange(2**mantissa) / 2**mantissa
    every = np.concatenate([least * steps, *(2.0**e * (1 + steps) for e in range(int(np.log2(least)), int(np.log2(most)) + 1))])
    every = every[every <= most]
    to_grid = Rounding(grid)
    assert (to_grid(every) == every).all()
    between = (every[1:] + every[:-1]) / 2
    assert np.isin(to_grid(between * (1 + 1e-9)), every).all()
    assert to_grid(np.array([3 * most])) == most


def test_scales_are_of_blocks():
    x = np.array([[127.0, 1.4, *[0] * 30, 1.27, 0.014, *[0] * 30]])
    np.testing.assert_allclose(format_of("q8_0")(x)[0, [0, 1, 32, 33]], [127, 1, 1.27, 0.01], rtol=1e-3)
    assert format_of("int8:row")(x)[0, [1, 32, 33]].tolist() == [1.0, 1.0, 0.0]
    assert np.isnan(format_of("q8_0")(x[:, :33])).all()
    assert np.isfinite(rounded(x[:, :33], "q8_0")).all()  # about, in one block


def test_names_are_read_as_they_are_written():
    for one in (*TYPES.values(), *map(format_of, NAMES)):
        assert format_of(str(one)) == one
    assert format_of("int8").noun == "int8 with a scale for each row"
    assert format_of("MXFP4").noun == "MXFP4"


@pytest.mark.parametrize("name", ["", "fp8", "int8:0", "int8:1", "int8:row:f16", "q8_0:32", "e4m3:row:pow2:cut:cut", "int8:-1"])
def test_what_is_no_type_is_refused(name):
    with pytest.raises(OptionError, match="expected one of float16"):
        format_of(name)
