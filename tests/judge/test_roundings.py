"""The judge's own rules of rounding give what the kernels and dialects give, which share nothing with them."""

from dataclasses import replace

import numpy as np
import pytest
from block_samples import ROUNDINGS
from models import random_model

from bitnet_np.base import tensor_types
from bitnet_np.base.block_formats import FORMATS
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.judge.law import roundings
from bitnet_np.judge.law.expression import nodes, value_of
from bitnet_np.judge.law.graph import operations
from bitnet_np.kernels.ggml import activations as kernels
from bitnet_np.model import widen
from bitnet_np.model.records import Yarn
from bitnet_np.testing.models import random_table
from bitnet_np.traces.points import Key

f32 = np.float32


def activations():
    """Rows of very different sizes; zeros, subnormal numbers and numbers beyond float16 among them."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((7, 512)) * np.exp(rng.normal(0, 3, (7, 1)))).astype(f32)
    x[1, :256] = 0
    x[2, :32] = 1e-40
    x[3, 5] = -9e4
    x[4, 64:96] *= 1e-38
    return x


@pytest.mark.parametrize("kind", tensor_types.ALL_BLOCK_TYPES, ids=lambda kind: kind.name)
def test_inputs_of_block_types(kind):
    x, table = activations(), random_table(np.random.default_rng(1), kind.name, 3, 512)
    np.testing.assert_array_equal(roundings.matrix_input(x.astype(np.float64), table), ROUNDINGS[kind](x))


@pytest.mark.parametrize(
    ("dtype", "kind"), [(np.float32, tensor_types.F32), (np.float16, tensor_types.F16), (np.uint16, tensor_types.BF16)]
)
def test_inputs_of_float_tables(dtype, kind):
    x = activations()
    np.testing.assert_array_equal(roundings.matrix_input(x.astype(np.float64), np.zeros((1, 1), dtype)), ROUNDINGS[kind](x))


def test_sums_that_minimums_are_multiplied_by():
    """The judge has what llama.cpp's sums are more than those of the rounded numbers."""
    x = activations()
    codes, scale, of_llama_cpp = kernels.rounded(x, 32)
    sums = codes.reshape(*scale.shape, 32).sum(axis=2) * scale
    expected = (of_llama_cpp - sums.astype(f32)).astype(np.float64)
    np.testing.assert_array_equal(roundings.rounded_sums(x.astype(np.float64)), expected)


@pytest.mark.parametrize("kind", roundings.MINIMUM_TYPES, ids=lambda kind: kind.name)
def test_minimums_are_the_weights_with_codes_of_0(kind):
    table = random_table(np.random.default_rng(1), kind.name, 3, 512)
    without_codes = replace(table, data=table.data.copy())
    records = without_codes.data.view(FORMATS[kind.name].layout)
    for name in set(records.dtype.names) - {"d", "m"}:
        records[name] = 0
    np.testing.assert_array_equal(np.repeat(roundings.minimums(table), 32, axis=1), widen.float32(without_codes))


ROPES = [{"family": "bitnet"}, {"family": "llama", "rope_scaling": 4.0}, {"family": "gptneox", "rope_width": 4}]
ROPES += [{"family": "qwen3", "yarn": Yarn(4.0, 64)}]


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@pytest.mark.parametrize("shape", ROPES)
def test_angles(dialect, shape):
    model = random_model(1, **shape)
    rotation = next(o for o in operations(model, dialect) if o.key == Key("Qcur_rope", 0))
    angles = next(node for node, _ in nodes(rotation.tree) if node.noun == "the angles")
    ours, theirs = value_of(angles, {}.__getitem__, 300), dialect.angles(np.arange(300), model)
    if dialect.stepped_angles:
        np.testing.assert_array_equal(ours, theirs)
    else:  # powers of NumPy's (1 ulp) and correctly rounded ones, with three more roundings on either side
        np.testing.assert_allclose(ours, theirs, rtol=2.0**-50, atol=0)


def test_eleven_bits_are_float16s_with_float32s_range():
    x = np.random.default_rng(0).standard_normal(1000).astype(f32)
    ties = (x.view(np.uint32) & 0x1FFF) == 0x1000
    np.testing.assert_array_equal(roundings.to_eleven_bits(x)[~ties], x.astype(np.float16).astype(f32)[~ties])
    big = f32([1e30, -1e-30])
    assert (np.abs(roundings.to_eleven_bits(big) / big - 1) < 2**-11).all()
    assert (roundings.to_eleven_bits(big) != big).all()


def test_narrow_types():
    x = np.array([[1 + 2**-11, 1 + 2**-8, 65536.0, 1e-8, 3.0, -1 - 3 * 2**-9]])
    assert roundings.to_float16(x).tolist() == [[1.0, 1 + 2**-8, np.inf, 0.0, 3.0, -1 - 3 * 2**-9]]
    assert roundings.to_bfloat16(x).tolist() == [[1.0, 1.0, 65536.0, roundings.to_digits(x, 8)[0, 3], 3.0, -1 - 2**-7]]
