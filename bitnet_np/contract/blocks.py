"""Matrices in ggml's block types: their weights, and their products as llama.cpp's CPU backend defines them.

base/block_formats.py is the table of the types:
where the integers and the floats lie in the bytes of a block.
"""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from ..base.block_formats import FORMATS, RUN, Bits, Digit, Factor, Flags, Format, Integers
from ..base.tensor_types import GRID_TYPES, NVFP4, TensorType
from .numbers import Doubles, Floats, Int8s, dot, f32, fma

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

# --- weights ------------------------------------------------------------------------------------------------


def weights(data: Bytes, kind: TensorType) -> Floats:  # [N, bytes of a row], type -> [N, M]
    """Each weight is code * scale + minimum, where scale and minimum are of RUN weights: a float, times a
    small integer in some types.

    All these products are exact. The codes of some types stand for rows of a grid, whose tables gguf-py has.
    """
    if kind in GRID_TYPES:
        return dequantize(data, GGMLQuantizationType(kind.number))
    return weights_as(data, FORMATS[kind.name])


@np.errstate(all="ignore")
def weights_as(data: Bytes, record: Format) -> Floats:  # [N, bytes of a row] -> [N, M]
    """The weights of blocks that are laid out so."""
    blocks = data.reshape(-1, record.layout.itemsize)
    codes = _codes(blocks, record).astype(f32)
    out = codes * factors_of(blocks, record, record.scale)
    if record.minimum is not None:
        out = out + factors_of(blocks, record, record.minimum)
    return out.reshape(len(data), -1)


def factors_of(blocks: Bytes, record: Format, factor: Factor) -> Floats:  # -> [blocks, weights]
    integers = _small_integers(blocks, record, factor).astype(f32)
    numbers = _floats(blocks, record, factor) * integers
    if factor.negative:
        numbers = -numbers
    return np.repeat(numbers, RUN, axis=1)


# --- products as llama.cpp defines them ---------------------------------------------------------------------


@np.errstate(invalid="ignore")
def product_as_llama_cpp(kind: TensorType, x: Floats, data: Bytes) -> Floats:
    # type, [R, M], [N, bytes of a row] -> [R, N]
    """x, rounded for the type, times the transposed matrix.

    A type whose codes are rows of a grid has no integers here:
    the rounded activations are multiplied as floats.
    """
    q, dx, sx = rounded(x, kind)
    if kind not in GRID_TYPES:
        return product(q, dx, sx, data, kind)
    size = q.shape[1] // dx.shape[1]
    scale = np.repeat(dx, size, axis=1)
    wide = q.astype(f32) * scale
    return dot(wide[:, None], weights(data, kind))


@np.errstate(all="ignore")
def rounded(x: Floats, kind: TensorType) -> tuple[Int8s, Floats, Floats]:
    # [R, M] -> [R, M], [R, U], [R, U]
    """Codes, scales, and sums of codes times scale, U of each:
    ggml's Q8_K for types of 256 weights to a block, else Q8_0 and Q8_1.

    Q8_K: 256 numbers share a scale, of the sign that makes the first of the largest -127. Q8_0: 32 numbers
    share a scale; their codes come from the exact scale, which is then rounded to float16, as are Q8_1's
    sums. A number that is not finite makes its block's scale NaN.
    """
    size = 256 if kind.block == 256 else 32
    groups = x.reshape(len(x), -1, size)
    magnitude = np.abs(groups)
    place = magnitude.argmax(axis=2, keepdims=True)
    largest = np.take_along_axis(groups, place, axis=2)
    finite = np.isfinite(groups).all(axis=2, keepdims=True)
    largest = np.where(finite, largest, f32(np.nan))
    steps: NDArray
    scale: NDArray
    if size == 256:
        steps = f32(-127) / largest
        scale = f32(1) / steps
    else:
        steps = f32(127) / np.abs(largest)
        scale = np.abs(largest) / f32(127)
    usable = np.abs(steps) < np.inf  # not of zeros, nor of numbers too small for float32 to divide by
    scale = np.where(usable | np.isnan(largest), scale, f32(0))
    scale = scale[..., 0]
    codes = np.where(usable, np.rint(groups * steps), f32(0))
    codes = codes.astype(np.int8)
    total = codes.sum(axis=2, dtype=np.int64)
    sums: Floats = total.astype(f32) * scale
    if size == 32:
        scale = scale.astype(np.float16).astype(f32)
        sums = sums.astype(np.float16).astype(f32)
    return np.reshape(codes, x.shape), scale, sums


@np.errstate(all="ignore")
def product(q: Int8s, dx: Floats, sx: Floats | None, data: Bytes, kind: TensorType) -> Floats:
    # what `rounded` gives, [N, bytes of a row], type -> [R, N]
    """Rounded activations times the transposed matrix: int8 times integers, exact inside a unit,
    then unit after unit in float32.

    A unit is a block of 256 weights, or the 32 weights (16 in NVFP4) that share both scales. Its weights are
    (d * s_j) * c_i - dmin * m_j, with codes c, small integers s and m for each run of weights j (s is 1 where
    the type has none), and floats d and dmin. From acc = +0:

        acc = fma(float32(sum over i of s_j * c_i * q_i), d * dx, acc)
        acc = fma(float32(sum over j of m_j * (sum over i in j of q_i)), -(dmin * dx), acc)
        acc = fma(m, sx, acc)

    The second step is that of types with integer minimums, the third of those with a float minimum m: Q4_1
    and Q5_1, whose sx is Q8_1's sum in float16.
    """
    record = FORMATS[kind.name]
    blocks = data.reshape(-1, kind.block_bytes)
    unit = 16 if kind is NVFP4 else q.shape[1] // dx.shape[1]
    sharing = q.shape[1] // unit // dx.shape[1]  # units that have one of these scales
    dx = np.repeat(dx, sharing, axis=1)
    d = _unit_floats(blocks, record, record.scale, unit).reshape(len(data), -1).T
    codes = _codes(blocks, record) * _weight_integers(blocks, record, record.scale)
    products = _unit_sums(q, codes, unit)
    least = record.minimum
    if least is not None:
        m = _unit_floats(blocks, record, least, unit).reshape(len(data), -1).T
        subtracted = _unit_sums(q, _weight_integers(blocks, record, least), unit)
    acc = np.zeros_like(products[0])
    for u, total in enumerate(products):
        scale = dx[:, u, None]
        acc = fma(total, d[u] * scale, acc)
        if least is not None and least.integers is not None:
            acc = fma(subtracted[u], -(m[u] * scale), acc)
        elif least is not None and sx is not None:
            acc = fma(m[u], sx[:, u, None], acc)
    return acc


def _unit_sums(q: Int8s, integers: Ints, unit: int) -> Floats:  # [R, M], [blocks, weights] -> [units, R, N]
    """The sums of products of a unit's codes with integers: far below 2^53, so exact in any order."""
    codes = _in_units(q, unit)
    matrix = _in_units(integers.reshape(-1, q.shape[1]), unit)
    exact = codes @ matrix.swapaxes(1, 2)
    return exact.astype(np.int64).astype(f32)


def _in_units(rows: NDArray, unit: int) -> Doubles:  # [rows, M] -> [units, rows, weights of a unit]
    units = rows.reshape(len(rows), -1, unit)
    return units.swapaxes(0, 1).astype(np.float64)


# --- what is in a block -------------------------------------------------------------------------------------


def _codes(blocks: Bytes, record: Format) -> Ints:  # [blocks, bytes] -> [blocks, weights]
    codes = [_integers(blocks, part) for part in record.codes]
    return np.concatenate(codes, axis=1)


def _integers(blocks: Bytes, integers: Integers) -> Ints:
    """Bit fields joined by OR; then bytes with a sign, places in a table, or less a bias."""
    fields = [_bit_field(blocks, field) for field in integers.parts]
    joined = np.bitwise_or.reduce(fields)
    if integers.signed:
        signed = joined.astype(np.uint8).view(np.int8)
        joined = signed.astype(np.int64)
    if integers.table:
        return np.array(integers.table)[joined]
    return joined - integers.bias


def _bit_field(blocks: Bytes, field: Bits | Flags | Digit) -> Ints:
    codes = blocks[:, field.at].astype(np.int64)
    if isinstance(field, Flags):
        high = blocks[:, field.at + 1].astype(np.int64)
        flags = codes | high << 8
        bits = flags[:, None] >> np.arange(RUN) & 1
        return bits << field.place
    if isinstance(field, Digit):
        below = codes * field.factor & 255
        return below * 3 >> 8
    bits = codes >> np.array(field.shift) & field.mask
    return bits << field.place


def _small_integers(blocks: Bytes, record: Format, factor: Factor) -> Ints:  # -> [blocks, runs]
    """The small integer of each run of weights, 1 where the type has none."""
    runs = record.weights // RUN
    if factor.integers is None:
        return np.ones((len(blocks), runs), np.int64)
    lanes = list(factor.lanes[:runs])
    integers = _integers(blocks, factor.integers)
    return integers[:, lanes]


def _weight_integers(blocks: Bytes, record: Format, factor: Factor) -> Ints:  # -> [blocks, weights]
    of_runs = _small_integers(blocks, record, factor)
    return np.repeat(of_runs, RUN, axis=1)


def _floats(blocks: Bytes, record: Format, factor: Factor) -> Floats:  # -> [blocks, runs]
    """The float of each run of weights: the block's float16, or a number of a table, which a byte chooses."""
    start = record.start(factor)
    runs = record.weights // RUN
    if factor.table:
        table = np.array(factor.table, f32)
        places = [start + lane for lane in factor.lanes[:runs]]
        return table[blocks[:, places]]
    two_bytes = np.ascontiguousarray(blocks[:, start : start + 2])
    numbers = two_bytes.view(np.float16).astype(f32)
    return np.repeat(numbers, runs, axis=1)


def _unit_floats(blocks: Bytes, record: Format, factor: Factor, unit: int) -> Floats:  # -> [blocks, units]
    of_runs = _floats(blocks, record, factor)
    return of_runs[:, :: unit // RUN]
