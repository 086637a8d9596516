"""Kernels of kernels/cpu.py at their edges. That each has the contract's bits, near the definition's numbers: tests/test_contract.py."""

import numpy as np
import pytest
from gguf import quants
from hypothesis import given
from hypothesis import strategies as st
from models import as_table, assert_same_bits, normal, threads
from numba import njit

from bitnet_np import contract, spec
from bitnet_np.base.tensor_types import Q8_0
from bitnet_np.contract import numbers
from bitnet_np.contract.numbers import f32
from bitnet_np.kernels import cpu, launching, scalar, tiles
from bitnet_np.kernels.fast import simd
from bitnet_np.model import packing, widen

TABLES = ["float32", "float16", "bfloat16"]


# --- the judge itself -----------------------------------------------------------------------------------------------------------------


@njit
def fma(a, b, c, out):
    for i in range(a.size):
        out[i] = simd.fma(a[i], b[i], c[i])


def test_the_contracts_fma_rounds_once():
    """As the processor's, also where a product's low half decides a tie, and where the result is subnormal or a zero of either sign."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2**32, (2, 400_000), np.uint32).view(np.float32)
    a, b = (np.where(np.isfinite(x), x, f32(1)) for x in (a, b))
    with np.errstate(over="ignore", invalid="ignore"):
        product = a * b
    nearby = [product, -product, np.nextafter(-product, f32(0)), product * f32(2**-23), product * f32(2**-24), rng.permutation(b)]
    c = np.choose(rng.integers(0, len(nearby), a.size), nearby).astype(np.float32)
    ours = np.empty_like(a)
    fma(a, b, c, ours)
    theirs = numbers.fma(a, b, c)
    number = ~np.isnan(theirs)
    assert number.mean() > 0.9
    np.testing.assert_array_equal(np.isnan(ours), ~number)
    assert_same_bits(ours[number], theirs[number])
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: the exact tie that the last bit of c breaks
    tie = numbers.fma(f32(1 + 2**-12), f32(1 + 2**-12), f32([0, 2**-60, -(2**-60)]))
    assert tie.tolist() == [1 + 2**-11, 1 + 2**-11 + 2**-23, 1 + 2**-11]


# --- embedding and widening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_is_widened_exactly(dtype):
    """All 65536 patterns, where they fill a register and where they do not. NaN stays NaN; embed and matmul give +0 for -0."""
    bits = np.arange(2**16, dtype=np.uint16)
    table = bits if dtype == "bfloat16" else bits.view(np.float16)
    table.flags.writeable = False
    expected = widen.float32(table)
    expected = np.where(expected == 0, f32(0), expected)
    number = ~np.isnan(expected)
    assert np.isinf(expected).sum() == 2

    for width in (1, 2, 16, 64):
        out = cpu.embed(table.reshape(-1, width), np.arange(2**16 // width)).reshape(-1)
        np.testing.assert_array_equal(np.isnan(out), ~number)
        assert_same_bits(out[number], expected[number])
    for width in (1, 2, 16, 17):
        weights = np.zeros((2**16, width), table.dtype)
        weights[:, -1] = table
        weights.flags.writeable = False
        x = np.zeros((3, width), np.float32)
        x[:, -1] = 1, 2, -0.5
        out = cpu.matmul(x, weights)
        for row, factor in zip(out, x[:, -1], strict=True):
            np.testing.assert_array_equal(np.isnan(row), ~number)
            with np.errstate(over="ignore"):
                assert_same_bits(row[number], expected[number] * factor + f32(0))


# --- quantiser ------------------------------------------------------------------------------------------------------------------------


def test_a_norm_and_a_quantiser_in_one_kernel_have_the_bits_of_two():
    """Also of rows with NaN, infinity, or squares beyond float32."""
    x, gain = np.random.default_rng(0).standard_normal((2, 4, 2571), np.float32)
    x[1, 3], x[2, 5], x[3] = np.nan, np.inf, x[3] * f32(1e30)
    for one, two in zip(cpu.quantize_normed(x, gain[0], 1e-5), cpu.quantize(cpu.rms_norm(x, gain[0], 1e-5)), strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_quantiser_rounds_ties_to_even():
    x = f32([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 125.5, 126.5, -126.5], [1, 0.5 / 127, 0, 0, 0, 0, 0, 0, 0, -1]])
    codes, scale = cpu.quantize(x)
    assert codes[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126, 126, -126]
    assert codes[1, [0, -1]].tolist() == [127, -127]
    assert scale.tolist() == [1, 127]
    np.testing.assert_array_equal(codes[0], spec.quantize(x[:1].astype(np.float64))[0][0])


# --- ternary matmul -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 100, 128, 130, 300])
def test_ternary_matmul_ignores_what_pads_a_row(width):
    """Weights past a row's end meet activations of zero."""
    rng = np.random.default_rng(width)
    q, one = rng.integers(-127, 128, (5, width)).astype(np.int8), np.ones(5, np.float32)
    matrix = rng.integers(-1, 2, (7, width))
    expected = cpu.ternary_matmul(q, one, packing.pack(matrix, 1.0).codes, f32(1), 7)
    for filler in (-1, 1):
        whole = np.full((7, -(-width // 16) * 16), filler)
        whole[:, :width] = matrix
        codes = packing.pack(whole, 1.0).codes
        for rows in (1, 5):
            assert_same_bits(cpu.ternary_matmul(q[:rows], one[:rows], codes, f32(1), 7), expected[:rows])


# --- float matmul ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TABLES)
@pytest.mark.parametrize("width", [1, 40, tiles.DEPTH, tiles.DEPTH + 16, 2 * tiles.DEPTH + 5])
def test_matmul_of_many_tokens(width, dtype):
    """Weights are multiplied a strip at a time: of so many columns, for so many tokens."""
    rng = np.random.default_rng(width)
    x, weights = normal(rng, tiles.PART + 3, width), as_table(normal(rng, tiles.ROW_BLOCK + 2, width), dtype)
    some, wide = [0, 63, tiles.PART - 1, tiles.PART, tiles.PART + 2], widen.float32(weights)
    out = cpu.matmul(x, weights)
    assert_same_bits(out[some], contract.matmul(x[some], wide))
    assert_same_bits(out, np.concatenate([cpu.matmul(row[None], weights) for row in x]))
    with threads(3):
        assert_same_bits(cpu.matmul(x, weights), out)


def steps(*numbers):
    return st.lists(st.sampled_from(numbers), min_size=12, max_size=12).map(lambda drawn: np.repeat(f32(drawn).reshape(3, 4), 32, axis=1))


@pytest.mark.parametrize("kind", [*TABLES, "Q8_0"])
@given(x=steps(0.0, -0.0, 1e-45, -1e-45, 1e-39), w=steps(0.0, -0.0, 0.25, -0.25, 6e-8), workers=st.sampled_from([1, 2]))
def test_no_product_is_minus_zero(kind, x, w, workers):
    """All lanes of a sum may underflow to -0, before products that are 0 or -0; for any number of tokens."""
    name, args = ("matmul", (as_table(w, kind),)) if kind in TABLES else ("matmul_blocks", (quants.quantize(w, Q8_0.number), Q8_0))
    expected = getattr(contract, name)(x, *args)
    assert not np.signbit(expected[expected == 0]).any()
    with threads(workers):
        for rows in (1, 3, 64, 65, 130):
            assert_same_bits(getattr(cpu, name)(np.resize(x, (rows, 128)), *args), np.resize(expected, (rows, 3)))


# --- positions ------------------------------------------------------------------------------------------------------------------------


def test_cos_sin():
    rng = np.random.default_rng(0)
    angles = np.concatenate(
        [
            [0.0, 1.0, 1e-9, 1.6e6],
            rng.uniform(0, 10, 60),
            np.exp(rng.uniform(0, np.log(1.6e6), 60)),
            rng.integers(1, 2**20, 60) * (np.pi / 2),  # where one of the two is nearly zero
            rng.integers(1, 2**20, 30) * (np.pi / 4),  # where the quadrant changes
            [0.5 * np.pi, np.pi, 1.5 * np.pi, 2 * np.pi],
        ]
    )
    for angle in angles:
        np.testing.assert_allclose(scalar.cos_sin(angle), (np.cos(angle), np.sin(angle)), rtol=0, atol=1e-15)
    assert scalar.cos_sin(0.0) == (1, 0)


# --- exponential ----------------------------------------------------------------------------------------------------------------------


def sweep(points):
    """Float32 numbers evenly spread over every binade from 2^-30 on, of both signs, to where the result is 0 or nearly infinity."""
    bits = np.unique(np.linspace(f32(2.0**-30).view(np.uint32), f32(104).view(np.uint32), points).astype(np.uint32))
    x = bits.view(np.float32)
    return np.concatenate([-x[::-1], f32([0]), x[x < 88.72]])


def test_exp_is_good_to_0_92_units_in_the_last_place():
    """The bound of its docstring. (Over all float32 numbers the largest error is 0.9091.) And the bits of the contract."""
    x = sweep(1_000_000)
    exact = np.exp(x.astype(np.float64))
    out = cpu.exponential(x)
    error = np.abs(out - exact) / np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert error.max() <= 0.92  # so it rises wherever true values are 2 units apart
    assert (out[x <= 0] <= 1).all()  # no probability is above 1
    assert (out[x >= 0] >= 1).all()
    assert_same_bits(out, numbers.exp(x))


def test_exp_at_its_ends():
    assert cpu.exponential(f32([0, -0.0, 1e-45, -1e-45])).tolist() == [1, 1, 1, 1]
    assert cpu.exponential(f32([-103.97, -103.98, -1e9, -3e38, -np.inf])).tolist() == [2.0**-149, 0, 0, 0, 0]
    below, *above = cpu.exponential(f32([88.72, 88.73, 3e38, np.inf]))
    assert np.isfinite(below)
    assert np.isposinf(above).all()
    assert np.isnan(cpu.exponential(f32([np.nan, -np.nan]))).all()


@njit
def rounded_to_half(x, out):
    for i in range(x.size):
        out[i] = scalar.round_to_half(x[i])


def test_round_to_half():
    """At every float16, at every boundary between two, and beside those; and at numbers in between."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    rng = np.random.default_rng(0)
    random = rng.integers(0, f32(65504).view(np.uint32), 200_000, np.uint32).view(np.float32)
    x = np.concatenate([halves, middles, np.nextafter(middles, f32(0)), np.nextafter(middles, f32(1e9)), random])
    out = np.empty_like(x)
    rounded_to_half(x, out)
    assert_same_bits(out, x.astype(np.float16).astype(np.float32))


# --- checks of weights ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 8, 9, 65, 1541])
def test_a_code_three_is_found_wherever_it_is(size):
    codes = np.random.default_rng(size).choice([0, 1, 2], (size, 4)) @ np.array([64, 16, 4, 1])
    assert not cpu.has_code_three(codes.astype(np.uint8))
    for i in range(size):
        for shift in (0, 2, 4, 6):
            damaged = codes.copy()
            damaged[i] |= 3 << shift
            assert cpu.has_code_three(damaged.astype(np.uint8))


@pytest.mark.parametrize("dtype", TABLES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 13), (7, 131)])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(shape, dtype):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    values[0, 0] = 0
    largest = {"float32": np.finfo(np.float32).max, "float16": 65504, "bfloat16": f32(2) ** 127 * f32(1.9921875)}[dtype]
    values[-1, -1] = largest
    assert not cpu.has_non_finite(as_table(values, dtype))
    for where in np.ndindex(shape):
        for bad in (np.nan, np.inf, -np.inf):
            damaged = values.copy()
            damaged[where] = bad
            assert cpu.has_non_finite(as_table(damaged, dtype))


# --- threads --------------------------------------------------------------------------------------------------------------------------


def test_little_work_stays_on_the_calling_thread():
    seen = []
    kernel = launching.Kernel(body=None, run=seen.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "SMALL", 100)
        for work in (101, 100):
            launching.launch(kernel, work)
    assert seen == [(launching._TEAM, 0), (launching._ALONE, 0)]
