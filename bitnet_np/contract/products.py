"""Matrices: of floats, of ggml's blocks, and of ternary codes. Embeddings are rows of them."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import TensorType
from .arrays import Places, parts
from .blocks import Bytes, product_as_llama_cpp, weights
from .numbers import Floats, Int8s, dot, f32

OUTPUTS = 1 << 10  # rows of a matrix whose weights are in memory at a time
Product = Callable[[NDArray, NDArray], Floats]
"""Of rows [R, M] with some rows of a matrix, in whatever form: -> [R, rows of the matrix]."""

# --- of floats and blocks -----------------------------------------------------------------------------------


def widened(table: NDArray) -> Floats:
    """float32, float16, or the bits of bfloat16 (uint16) as float32, exactly; but -0 becomes +0."""
    if table.dtype == np.uint16:
        bits = table.astype(np.uint32) << 16
        return bits.view(f32) + f32(0)
    return table.astype(f32) + f32(0)


def embed(table: NDArray, tokens: Places) -> Floats:  # [V, D], [R] -> [R, D]
    return widened(table[tokens])


def embed_blocks(data: Bytes, kind: TensorType, tokens: Places) -> Floats:
    # [V, bytes of a row], type, [R] -> [R, D]
    return weights(data[tokens], kind)


def _by_outputs(x: NDArray, matrix: NDArray, product: Product) -> Floats:  # [R, M], [N, ...] -> [R, N]
    """A product with some rows of a matrix at a time: no output depends on another."""
    pieces = parts(len(matrix), len(x), OUTPUTS)
    products = [product(x, matrix[rows]) for rows in pieces]
    return np.concatenate(products, axis=1)


def matmul(x: Floats, table: NDArray) -> Floats:  # [R, M], [N, M] -> [R, N]
    return _by_outputs(x, table, _product)


def _product(x: Floats, table: NDArray) -> Floats:
    return dot(x[:, None], widened(table))


def matmul_blocks(x: Floats, data: Bytes, kind: TensorType) -> Floats:
    # [R, M], [N, bytes of a row], type -> [R, N]
    return _by_outputs(x, data, partial(_block_product, kind))


def _block_product(kind: TensorType, x: Floats, data: Bytes) -> Floats:
    return dot(x[:, None], weights(data, kind))


def matmuls_blocks_as_llama_cpp(x: Floats, *matrices: tuple[Bytes, TensorType]) -> list[Floats]:
    # [R, M], ([N, bytes of a row], type) each -> [R, N] each
    products = []
    for data, kind in matrices:
        product = partial(product_as_llama_cpp, kind)
        products.append(_by_outputs(x, data, product))
    return products


# --- ternary ------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def quantize(x: Floats) -> tuple[Int8s, Floats]:  # [R, M] -> int8 [R, M], steps per unit [R]
    """Codes, and 127 / max(1e-5, absmax) of each row; NaN and zeros for a row that is not finite."""
    magnitude = np.abs(x)
    largest = magnitude.max(axis=1)
    finite = np.isfinite(largest)
    scale = f32(127) / np.maximum(largest, f32(1e-5))
    scale = np.where(finite, scale, f32(np.nan))
    codes = np.rint(x * scale[:, None])
    codes = np.where(finite[:, None], codes, f32(0))
    return codes.astype(np.int8), scale


def ternary_matmul(q: Int8s, scale: Floats, codes: Bytes, w_scale: f32, width: int) -> Floats:
    # int8 [R, M], [R], packed [N, M], float32, N -> [R, N]
    matrix = unpacked(codes, (width, q.shape[1]))
    product = partial(_ternary_product, scale, w_scale)
    return _by_outputs(q, matrix, product)


@np.errstate(all="ignore")
def _ternary_product(scale: Floats, w_scale: f32, q: Int8s, matrix: Int8s) -> Floats:
    wide = matrix.astype(np.float64)
    exact = q.astype(np.float64) @ wide.T  # far below 2^53: exact in any order
    total = exact.astype(np.int64).astype(f32)
    return total / scale[:, None] * w_scale


def ternary_matmuls(q: Int8s, scale: Floats, *matrices: tuple[Bytes, f32, int]) -> list[Floats]:
    return [ternary_matmul(q, scale, *matrix) for matrix in matrices]


def unpacked(codes: Bytes, shape: tuple[int, int]) -> Int8s:  # packed [N, M] -> [N, M] of -1, 0, +1
    """The matrix that packed codes stand for; they count 0, 1, 2.

    16 rows lie side by side, and 64 bytes hold 16 columns of them: column c of the 16 is in byte 4 * row + c
    % 4 at bits 6 - 2 * (c // 4). Rows and columns are padded to multiples of 16.
    """
    n, m = shape
    groups = -(-n // 16)
    steps = -(-m // 16)
    shifts = np.array([6, 4, 2, 0], np.uint8)[:, None]
    packed = codes.reshape(groups, steps, 16, 1, 4)
    fields = packed >> shifts & 3  # group, step, row, c // 4, c % 4
    by_row = fields.swapaxes(1, 2)
    matrix = by_row.reshape(16 * groups, 16 * steps)
    matrix = matrix[:n, :m].astype(np.int8)
    return matrix - np.int8(1)
