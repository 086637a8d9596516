"""Matrices: of floats, of ggml's blocks, and of ternary codes. Embeddings are rows of them."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import TensorType
from .arrays import Places, parts
from .blocks import Bytes, product_as_llama_cpp, weights
from .numbers import Floats, dot, f32

OUTPUTS = 1 << 10  # rows of a matrix whose weights are in memory at a time

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


def _by_outputs(rows: int, outputs: int, product: Callable[[slice], Floats]) -> Floats:  # -> [rows, outputs]
    """A product, some of its outputs at a time: no output depends on another."""
    products = [product(part) for part in parts(outputs, rows, OUTPUTS)]
    return np.concatenate(products, axis=1)


def matmul(x: Floats, table: NDArray) -> Floats:  # [R, M], [N, M] -> [R, N]
    def product(part: slice) -> Floats:
        return dot(x[:, None], widened(table[part]))

    return _by_outputs(len(x), len(table), product)


def matmul_blocks(x: Floats, data: Bytes, kind: TensorType) -> Floats:
    # [R, M], [N, bytes of a row], type -> [R, N]
    def product(part: slice) -> Floats:
        return dot(x[:, None], weights(data[part], kind))

    return _by_outputs(len(x), len(data), product)


def matmuls_blocks_as_llama_cpp(x: Floats, *matrices: tuple[Bytes, TensorType]) -> list[Floats]:
    # [R, M], ([N, bytes of a row], type) each -> [R, N] each
    products = []
    for data, kind in matrices:
        of_rows = partial(_rows_as_llama_cpp, x, data, kind)
        products.append(_by_outputs(len(x), len(data), of_rows))
    return products


def _rows_as_llama_cpp(x: Floats, data: Bytes, kind: TensorType, part: slice) -> Floats:
    return product_as_llama_cpp(x, data[part], kind)


# --- ternary ------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:  # [R, M] -> int8 [R, M], steps per unit [R]
    """Codes, and 127 / max(1e-5, absmax) of each row; NaN and zeros for a row that is not finite."""
    largest = np.abs(x).max(axis=1)
    scale = f32(127) / np.maximum(largest, f32(1e-5))
    scale = np.where(np.isfinite(largest), scale, f32(np.nan))
    codes = np.rint(x * scale[:, None])
    codes = np.where(np.isnan(scale)[:, None], f32(0), codes)
    return codes.astype(np.int8), scale


@np.errstate(all="ignore")
def ternary_matmul(q: NDArray[np.int8], scale: Floats, codes: Bytes, w_scale: f32, width: int) -> Floats:
    # int8 [R, M], [R], packed [N, M], float32, N -> [R, N]
    matrix = unpacked(codes, (width, q.shape[1]))

    def product(outputs: slice) -> Floats:
        rows = matrix[outputs].astype(np.float64)
        total = q.astype(np.float64) @ rows.T  # far below 2^53: exact in any order
        rounded = total.astype(np.int64).astype(f32)
        return rounded / scale[:, None] * w_scale

    return _by_outputs(len(q), width, product)


def ternary_matmuls(q: NDArray[np.int8], scale: Floats, *matrices: tuple[Bytes, f32, int]) -> list[Floats]:
    return [ternary_matmul(q, scale, *matrix) for matrix in matrices]


def unpacked(codes: Bytes, shape: tuple[int, int]) -> NDArray[np.int8]:
    # packed [N, M] -> [N, M] of -1, 0, +1
    """The matrix that packed codes stand for; they count 0, 1, 2.

    16 rows lie side by side, and 64 bytes hold 16 columns of them: column c of the 16 is in byte 4 * row + c
    % 4 at bits 6 - 2 * (c // 4). Rows and columns are padded to multiples of 16.
    """
    groups, steps = (-(-size // 16) for size in shape)
    shifts = np.array([[6], [4], [2], [0]], np.uint8)
    fields = codes.reshape(groups, steps, 16, 1, 4) >> shifts & 3  # group, step, row, c // 4, c % 4
    by_row = fields.transpose(0, 2, 1, 3, 4)
    matrix = by_row.reshape(16 * groups, 16 * steps)
    matrix = matrix[: shape[0], : shape[1]].astype(np.int8)
    return matrix - np.int8(1)
