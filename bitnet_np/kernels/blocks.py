"""Kernels for matrices in ggml's block types, and the roundings of activations that llama.cpp pairs with each type.

Weights are computed where they are needed, a few rows at a time, and never all at once. Results have the bits that the kernels of cpu.py
give for the same weights as float32. `data` is the bytes of a matrix [N, bytes of a row], C-contiguous, of the type `kind`.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numba import prange
from numpy.typing import NDArray

from .. import tensor_types
from ..tensor_types import GRID_TYPES, TensorType
from . import block_products, block_strips, grids
from .block_formats import FORMATS
from .block_strips import unpack_blocks
from .float_products import room_for
from .launching import Floats, launch, parallel, read_only, rule, serial
from .scalar import round_half_even, round_to_half
from .simd import LANES, dot_block, float_bits, prefetch, store_sums, tile_f32
from .tiles import ROW_BLOCK, ROWS, rows_ahead
from .workspace import empty

Bytes = NDArray[np.uint8]

_CHECKED = 1 << 16  # blocks checked at a time, which bounds the memory
_LARGE_POWER = 253  # the byte of MXFP4 that stands for 2^125, which times the largest code, 12, is infinite


def _blocks(data: Bytes, kind: TensorType) -> NDArray[np.void]:  # -> [N, blocks of a row] records, the same memory
    return read_only(data.view(FORMATS[kind.name].layout))


# --- weights --------------------------------------------------------------------------------------------------------------------------


@serial
def _embed(blocks, size, tokens, out):
    for r in range(tokens.size):
        unpack_blocks(blocks, tokens[r] * blocks.shape[1], blocks.shape[1], size, out, r * out.shape[1])


def embed(data: Bytes, kind: TensorType, tokens: NDArray[np.int64]) -> Floats:  # [V, bytes of a row], type, [R] -> [R, M]
    if kind in GRID_TYPES:
        return grids.embed(data, kind, tokens)
    blocks = _blocks(data, kind)
    out = empty((tokens.size, blocks.shape[1] * kind.block))
    _embed(blocks, kind.block, tokens, out)
    return out


@serial
def _gemv_rows(zeros, rows, data, blocks, size, first, end, x, out):
    """Rows first..end for one token, `rows` at a time: a block of each is computed in registers and used there."""
    n, step, row_bytes = blocks.shape[1], blocks.itemsize, data.shape[1]
    totals = np.empty(LANES, np.float32)
    for r in range(first, end, rows):
        valid = min(rows, end - r)
        tile = zeros
        ahead = r * row_bytes + rows_ahead(rows, row_bytes)
        for b in range(n):
            for i in range(rows):
                for j in range(0, step, 64):
                    prefetch(data, ahead + i * row_bytes + j)
            ahead += step
            tile = dot_block(tile, blocks, r * n + b, n, valid, x, b * size)
        store_sums(tile, totals)
        for i in range(valid):
            out[0, r + i] = totals[i]


@parallel
def _matmul(data, blocks, size, x, out):
    for block in prange((blocks.shape[0] + ROW_BLOCK - 1) // ROW_BLOCK):
        first = block * ROW_BLOCK
        _gemv_rows(tile_f32(ROWS, 1), ROWS, data, blocks, size, first, min(first + ROW_BLOCK, blocks.shape[0]), x, out)


def matmul(x: Floats, data: Bytes, kind: TensorType) -> Floats:  # [R, M], [N, bytes of a row], type -> [R, N]
    """x times the transposed matrix."""
    if kind in GRID_TYPES:
        return grids.matmul(x, data, kind)
    out, blocks = empty((x.shape[0], data.shape[0])), _blocks(data, kind)
    work = x.size * data.shape[0] // 8
    if x.shape[0] == 1:
        launch(_matmul, work, read_only(data), blocks, kind.block, x, out)
    else:
        launch(block_strips.matmul, work, blocks, kind.block, x, room_for(x), out)
    return out


# --- checks of weights ----------------------------------------------------------------------------------------------------------------


def has_non_finite(data: Bytes, kind: TensorType) -> bool:
    """Whether a weight is NaN or infinite. It is if a float16 scale is: finite scales times integers stay far inside float32.

    But those of MXFP4 reach 2^127. Blocks with such a scale are decoded to see.
    """
    parts = (data.reshape(-1, kind.block_bytes)[start : start + _CHECKED] for start in range(0, data.size // kind.block_bytes, _CHECKED))
    return any(_has_non_finite(part, kind) for part in parts)


def _has_non_finite(data: Bytes, kind: TensorType) -> bool:
    """The same for a block in each row."""
    if kind in GRID_TYPES:
        return bool((grids.scales(data, kind) & 0x7C00 == 0x7C00).any())
    blocks = _blocks(data, kind)
    if kind is tensor_types.MXFP4:
        large = data[blocks["e"][:, 0] >= _LARGE_POWER]
        return large.size > 0 and not np.isfinite(embed(large, kind, np.arange(len(large)))).all()
    return any(bool((blocks[half] & 0x7C00 == 0x7C00).any()) for half in FORMATS[kind.name].halves)


def has_code_three(data: Bytes) -> bool:
    """Whether a code of a TQ2_0 matrix is 3, which no writer produces (ggml would count it as +2).

    TQ1_0 has no such code: any byte has five base-3 digits. (13 of the 256 bytes are never written, and decode as their neighbours do.)
    """
    blocks = _blocks(data, tensor_types.TQ2_0).reshape(-1)
    parts = (blocks[start : start + _CHECKED]["qs"] for start in range(0, blocks.size, _CHECKED))
    return any(bool((codes & codes >> 1 & 0x55).any()) for codes in parts)


# --- ternary types as I2_S ------------------------------------------------------------------------------------------------------------

_ZEROS = 0b01010101  # four codes of 1, which stand for 0


@rule
def _digit(byte, power):
    """A digit of a byte that holds a base-3 fraction of 256; power is 3^(digits before it)."""
    below = np.uint32(np.uint32(byte * power) & np.uint32(255))
    return np.uint32(np.uint32(below * np.uint32(3)) >> np.uint32(8))


@serial
def _pack_tq1_0(data, out):
    """Digit n of byte i is weight 32 n + i in the first 32 bytes, 160 + 16 n + i in the next 16, 240 + 4 n + i in the last four."""
    for block in range(data.size // 54):
        source, first, second = data[54 * block :], out[64 * block :], out[64 * block + 32 :]
        for i in range(32):
            byte = np.uint32(source[i])
            first[i] = _digit(byte, 1) << 6 | _digit(byte, 3) << 4 | _digit(byte, 9) << 2 | _digit(byte, 27)
            second[i] = _digit(byte, 81) << 6
        for i in range(16):
            byte = np.uint32(source[32 + i])
            second[i] |= _digit(byte, 1) << 4 | _digit(byte, 9) << 2 | _digit(byte, 81)
            second[16 + i] |= _digit(byte, 3) << 4 | _digit(byte, 27) << 2
        for i in range(16):
            second[16 + i] |= _digit(np.uint32(source[48 + i % 4]), 3 ** (i // 4))
        if source[52] == 0 and source[53] & 0x7F == 0:
            first[:64] = _ZEROS


@serial
def _pack_tq2_0(data, out):
    """A byte holds weights that are 32 apart, as in I2_S, but the first in its lowest bits."""
    for block in range(data.size // 66):
        source, target = data[66 * block :], out[64 * block :]
        for i in range(64):
            byte = source[i]
            target[i] = byte << 6 | (byte & 0x0C) << 2 | byte >> 2 & 0x0C | byte >> 6
        if source[64] == 0 and source[65] & 0x7F == 0:
            target[:64] = _ZEROS


def pack_ternary(data: Bytes, kind: TensorType, out: Bytes) -> None:  # [N, bytes of a row], TQ1_0 or TQ2_0, [at least N * M / 4]
    """The codes of a matrix in I2_S's bytes, without the scales. Codes of blocks whose scale is 0 become zeros."""
    pack = {tensor_types.TQ1_0: _pack_tq1_0, tensor_types.TQ2_0: _pack_tq2_0}[kind]
    pack(read_only(data.reshape(-1)), out)


# --- activations, as llama.cpp rounds them --------------------------------------------------------------------------------------------


@serial
def _largest(numbers):
    """The number of largest magnitude, the first of equal ones; NaN if one is not finite."""
    largest = np.int32(0)  # the bits of magnitudes, which order like the numbers, with NaN above all
    for i in range(numbers.size):
        largest = max(largest, np.int32(float_bits(numbers[i]) & 0x7FFFFFFF))
    if largest >= 0x7F800000:
        return np.float32(np.nan)
    for number in numbers:
        if np.int32(float_bits(number) & 0x7FFFFFFF) == largest:
            return number
    return np.float32(0)


@parallel
def _round_blocks(x, size, signed, codes, scale):
    for r in prange(x.shape[0]):
        for block in range(scale.shape[1]):
            numbers, codes_of_block = x[r, block * size : (block + 1) * size], codes[r, block * size : (block + 1) * size]
            largest = _largest(numbers)
            if signed:
                steps = np.float32(-127.0) / largest
                scale[r, block] = np.float32(1.0) / steps
            else:
                magnitude = abs(largest)
                steps = np.float32(127.0) / magnitude
                half = round_to_half(np.float32(magnitude / np.float32(127.0)))
                scale[r, block] = np.float32(np.inf) if half > np.float32(65504.0) else half
            if abs(steps) < np.inf:
                for i in range(size):
                    codes_of_block[i] = np.int8(round_half_even(np.float32(numbers[i] * steps)))
            else:  # for zeros, numbers too small for float32 to divide by, and NaN
                scale[r, block] = np.float32(np.nan) if np.isnan(largest) else np.float32(0.0)
                codes_of_block[:] = 0


def _rounded_blocks(x: Floats, size: int, signed: bool) -> tuple[NDArray[np.int8], Floats]:
    codes, scale = np.empty(x.shape, np.int8), np.empty((x.shape[0], x.shape[1] // size), np.float32)
    launch(_round_blocks, x.size, x, size, signed, codes, scale)
    return codes, scale


def q8_k(x: Floats) -> tuple[NDArray[np.int8], Floats]:  # [R, M] -> [R, M], [R, M/256]
    """Codes and scales of ggml's Q8_K: 256 numbers to a scale, which has the sign that makes the largest of them -127.

    A number that is not finite makes the scale of its block NaN, here and in `q8_0`.
    """
    return _rounded_blocks(x, 256, True)


def q8_0(x: Floats) -> tuple[NDArray[np.int8], Floats]:  # [R, M] -> [R, M], [R, M/32]
    """Codes and scales of ggml's Q8_0: 32 numbers to a scale. Codes come from the exact scale, which is then rounded to float16."""
    return _rounded_blocks(x, 32, False)


def _widened(codes: NDArray[np.int8], scale: Floats) -> Floats:
    rows, n = scale.shape
    with np.errstate(invalid="ignore"):  # a code of 0 times a scale that is not finite is NaN, as it should be
        return (codes.reshape(rows, n, -1) * scale[:, :, None]).reshape(codes.shape)


def round_as_q8_k(x: Floats) -> Floats:  # [R, M] -> [R, M], M a multiple of 256
    """x as llama.cpp sees it when it multiplies by types of 256 weights to a block: K-quants, TQ and IQ types but IQ4_NL."""
    return _widened(*q8_k(x))


def round_as_q8_0(x: Floats) -> Floats:  # [R, M] -> [R, M], M a multiple of 32
    """x as llama.cpp sees it when it multiplies by types of fewer weights to a block, such as Q8_0, Q4_0, IQ4_NL or MXFP4.

    With Q4_1 and Q5_1 it sees the same x (as Q8_1). There it multiplies minimums by the sum of each 32 numbers, rounded to float16.
    """
    return _widened(*q8_0(x))


def round_as_f16(x: Floats) -> Floats:  # [R, M] -> [R, M]
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def bfloat16_bits(x: Floats) -> NDArray[np.uint16]:
    """The bits of x rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = x.view(np.uint32)
    return np.where(np.isnan(x), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def round_as_bf16(x: Floats) -> Floats:  # [R, M] -> [R, M]
    return (bfloat16_bits(x).astype(np.uint32) << 16).view(np.float32)


def _unrounded(x: Floats) -> Floats:
    return x


ROUNDINGS: dict[TensorType, Callable[[Floats], Floats]] = {
    tensor_types.F32: _unrounded,
    tensor_types.F16: round_as_f16,
    tensor_types.BF16: round_as_bf16,
    **dict.fromkeys(tensor_types.ALL_BLOCK_TYPES, round_as_q8_k),
    **dict.fromkeys([kind for kind in tensor_types.ALL_BLOCK_TYPES if kind.block < 256], round_as_q8_0),
}
"""The type of a matrix -> the rounding of the activations that llama.cpp multiplies it with (on the CPU)."""


def matmuls_as_llama_cpp(x: Floats, *matrices: tuple[Bytes, TensorType]) -> list[Floats]:
    # [R, M], ([N, bytes of a row], type) each -> [R, N] each
    """x as llama.cpp rounds it times up to three transposed matrices, by the definition of block_products.py.

    x is rounded once for all matrices of a type. They are read by one call, because threads that start and wait for each other cost as
    much as a small matrix.
    """
    products: dict[int, Floats] = {}
    for kind in dict.fromkeys(kind for _, kind in matrices):
        places = [i for i, (_, other) in enumerate(matrices) if other is kind]
        products.update(zip(places, _products(x, [matrices[i][0] for i in places], kind), strict=True))
    return [products[i] for i in range(len(matrices))]


def _products(x: Floats, matrices: Sequence[Bytes], kind: TensorType) -> list[Floats]:
    if kind in GRID_TYPES:
        return [grids.matmul(round_as_q8_k(x), data, kind) for data in matrices]
    codes, scale = q8_k(x) if kind.block == 256 else q8_0(x)
    return block_products.products(codes, scale, q8_1_sums(x, codes) if kind in MINIMUM_TYPES else None, matrices, kind)


def q8_1_sums(x: Floats, codes: NDArray[np.int8]) -> Floats:  # [R, M], those of `q8_0` -> [R, M/32], M a multiple of 32
    """The sums of 32 numbers by which llama.cpp multiplies minimums: those of their codes, times their exact scale, rounded to float16."""
    blocks = codes.reshape(len(x), -1, 32)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.abs(x.reshape(blocks.shape)).max(axis=2) / np.float32(127)
        return round_as_f16(blocks.sum(axis=2, dtype=np.int32).astype(np.float32) * exact)


MINIMUM_TYPES = (tensor_types.Q4_1, tensor_types.Q5_1)
"""The types whose minimums llama.cpp multiplies by rounded sums."""
