"""Tables of float32, float16 or bfloat16: their rows, and products with float32 in the contract's order."""

import numpy as np
from numpy.typing import NDArray

from . import float_products
from .fast.emit import LANES
from .fast.simd import pointer_to, store_sums, tile_f32
from .launching import Floats, launch, parallel, read_only, serial, shared
from .tiles import MANY_ROWS, ROW_BLOCK, STREAM, TOKENS, dot_tile
from .workspace import empty

_FEW = 64  # tokens up to which to copy weights to a strip, while memory waits, costs as much as it saves

# --- embedding ------------------------------------------------------------------------------------------------------------------------


@parallel
def _embed(team, table, tokens, out):
    for r in shared(team, tokens.size):
        float_products.widen_some(table[tokens[r]], 0, out.shape[1], out[r], 0)


def embed(table: NDArray, tokens: NDArray[np.int64]) -> Floats:  # [V, D], [R] -> [R, D]
    out = empty((tokens.size, table.shape[1]))
    launch(_embed, out.size, read_only(table), tokens, out)
    return out


# --- float matmul ---------------------------------------------------------------------------------------------------------------------


@serial
def _few_tokens(zeros, rows, tokens, w, first, end, x, out):
    """Results first..end of all rows of x, in tiles of the shape of `zeros`, which is rows x tokens: weights are read where they lie."""
    totals = np.empty(-(-rows * tokens // LANES) * LANES, np.float32)
    width, stride, ws, xs = x.shape[1], w.strides[0] // w.itemsize, pointer_to(w), pointer_to(x)
    for n in range(first, end, rows):
        valid = min(rows, end - n)
        for t in range(0, x.shape[0], tokens):
            present = min(tokens, x.shape[0] - t)
            ahead = 0 if t else rows * stride if rows > 1 else STREAM // w.itemsize  # the next rows
            store_sums(dot_tile(zeros, ws, n * stride, stride, valid, xs, t * width, width, present, width, rows, ahead), totals)
            for j in range(present):
                for i in range(valid):
                    out[t + j, n + i] = totals[i * tokens + j]


@parallel
def _matmul(team, w, x, out):
    for block in shared(team, (w.shape[0] + ROW_BLOCK - 1) // ROW_BLOCK):
        first = block * ROW_BLOCK
        end = min(first + ROW_BLOCK, w.shape[0])
        if x.shape[0] == 1:
            _few_tokens(tile_f32(1, 1), 1, 1, w, first, end, x, out)
        else:
            _few_tokens(tile_f32(MANY_ROWS, TOKENS), MANY_ROWS, TOKENS, w, first, end, x, out)


def matmul(x: Floats, weights: NDArray) -> Floats:  # [R, M], [N, M] float32, float16 or bfloat16 bits -> [R, N]
    """Contract-order dot products.

    With one row of x, weight rows are read one after the other, so that memory is one stream in order: 28 GB/s on one Zen 4 core, where
    plain reads reach 30. Four weight rows at a time, which share the loads of x, reach 17.
    """
    out, work = empty((x.shape[0], weights.shape[0])), x.shape[0] * weights.size // 8
    if x.shape[0] > _FEW:
        launch(float_products.matmul, work, read_only(weights), 1, float_products.arranged(x), out)
    else:
        launch(_matmul, work, read_only(weights), x, out)
    return out
