"""int8 codes of activations, and their products with ternary matrices, which are exact sums of integers."""

import numpy as np
from numpy.typing import NDArray

from . import ternary_product, ternary_tiles
from .fast import amx
from .fast.emit import LANES
from .fast.simd import bits_float
from .launching import Floats, inlined, launch, parallel, read_only, shared
from .rows import normed
from .scalar import WIDE_LANES, round_half_even
from .sums import largest_bits
from .workspace import empty

# --- codes of activations -------------------------------------------------------------------------------------------------------------


@inlined
def _quantize_row(row, codes):
    """Write a row's codes, and return its scale."""
    largest = largest_bits(row)
    if largest >= 0x7F800000:
        codes[:] = 0
        return np.float32(np.nan)
    scale = np.float32(127.0) / max(bits_float(largest), np.float32(1e-5))
    for i in range(row.size):
        codes[i] = np.int8(round_half_even(np.float32(row[i] * scale)))
    return scale


@parallel
def _quantize(team, x, codes, scale):
    for r in shared(team, x.shape[0]):
        scale[r] = _quantize_row(x[r], codes[r])


@parallel
def _quantize_normed(team, x, gain, eps, codes, scale):
    lanes, row = np.empty(WIDE_LANES, np.float64), np.empty(x.shape[1], np.float32)
    for r in shared(team, x.shape[0]):
        normed(x[r], gain, eps, lanes, row)
        scale[r] = _quantize_row(row, codes[r])


def quantize(x: Floats) -> tuple[NDArray[np.int8], Floats]:  # [R, M] -> [R, M] int8, [R] steps per unit
    """One scale per row, 127 / max(1e-5, absmax): the b1.58 papers' per-token absmax quantiser.

    Tensors that nobody observes are normed and quantised by one kernel, `quantize_normed`.
    """
    codes, scale = empty(x.shape, np.int8), empty(x.shape[:1])
    launch(_quantize, x.size, x, codes, scale)
    return codes, scale


def quantize_normed(x: Floats, gain: Floats, eps: float) -> tuple[NDArray[np.int8], Floats]:  # [R, M], [M] -> [R, M] int8, [R]
    """`quantize` of the RMS norm of x. A row stays in the first cache in between, while two kernels would wait for memory."""
    codes, scale = empty(x.shape, np.int8), empty(x.shape[:1])
    launch(_quantize_normed, x.size, x, read_only(gain), np.float32(eps), codes, scale)
    return codes, scale


# --- products -------------------------------------------------------------------------------------------------------------------------


def ternary_matmuls(q: NDArray[np.int8], scale: Floats, *matrices: tuple[NDArray[np.uint8], np.float32, int]) -> list[Floats]:
    # [R, M] int8, [R], (packed [N, M] (packing.py), scale, N) each -> [R, N] each
    """Products with up to three matrices that read the same input: exact integers, then (sum - row sum) / scale * w_scale in float32.

    The row sum is there because codes of weights count 0, 1, 2. One call for three matrices, because threads that start and wait for each
    other cost as much as a small matrix.
    """
    rows, m = q.shape
    steps = -(-m // LANES)
    unit = amx.unit() if rows >= ternary_tiles.LEAST else None
    if short := -m % (LANES if unit is None else amx.WIDTH):
        q = np.concatenate([q, np.zeros((rows, short), np.int8)], axis=1)
    absent = matrices[0][0], np.float32(0), 0
    (a, f, i), (b, g, j), (c, h, k) = (*matrices, absent, absent)[:3]
    out = empty((rows * (i + j + k),))
    arguments = out.size * q.shape[1] // 64, read_only(a), read_only(b), read_only(c), (i, j, k), (f, g, h), steps, q, scale, out
    if unit is None:
        launch(ternary_product.many_tokens if rows >= ternary_product.LEAST else ternary_product.few_tokens, *arguments)
    else:
        launch(ternary_tiles.ternary_matmul, *arguments, unit, *ternary_tiles.arranged(q, unit))
    ends = 0, rows * i, rows * (i + j), rows * (i + j + k)
    return [out[ends[n] : ends[n + 1]].reshape(rows, matrix[2]) for n, matrix in enumerate(matrices)]


def ternary_matmul(q: NDArray[np.int8], scale: Floats, codes: NDArray[np.uint8], w_scale: np.float32, width: int) -> Floats:
    # [R, M] int8, [R], packed [N, M], N -> [R, N]
    """`ternary_matmuls` for one matrix."""
    return ternary_matmuls(q, scale, (codes, w_scale, width))[0]
