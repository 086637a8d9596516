"""Tables of float32, float16 or bfloat16: their rows, and products with float32 in the contract's order."""

import numpy as np
from numpy.typing import NDArray

from . import float_products
from .fast.emit import LANES
from .fast.simd import pointer_to, store_sums, tile_f32
from .launching import Floats, launch, parallel, read_only, serial, shared
from .tiles import MANY_ROWS, ROW_BLOCK, STREAM, STREAMS, TOKENS, dot_tile
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
def _few_tokens(zeros, w, first, end, x, out):
    """Results first..end of all rows of x, in tiles of the shape of `zeros`, MANY_ROWS x TOKENS: weights are read where they lie."""
    totals = np.empty(-(-MANY_ROWS * TOKENS // LANES) * LANES, np.float32)
    width, stride, ws, xs = x.shape[1], w.strides[0] // w.itemsize, pointer_to(w), pointer_to(x)
    for n in range(first, end, MANY_ROWS):
        valid = min(MANY_ROWS, end - n)
        for t in range(0, x.shape[0], TOKENS):
            present = min(TOKENS, x.shape[0] - t)
            ahead = 0 if t else MANY_ROWS * stride  # the next rows
            store_sums(dot_tile(zeros, ws, n * stride, stride, valid, xs, t * width, width, present, width, MANY_ROWS, ahead), totals)
            for j in range(present):
                for i in range(valid):
                    out[t + j, n + i] = totals[i * TOKENS + j]


@serial
def _one_token(zeros, w, first, end, x, out):
    """Results first..end of the only row of x, in tiles of the shape of `zeros`, STREAMS x 1: each row of weights is a stream of memory."""
    totals = np.empty(LANES, np.float32)
    width, stride, ws, xs = x.shape[1], w.strides[0] // w.itemsize, pointer_to(w), pointer_to(x)
    length = -(-(end - first) // STREAMS)  # of a stream
    for n in range(first, first + length):
        valid = -(-(end - n) // length)
        store_sums(dot_tile(zeros, ws, n * stride, length * stride, valid, xs, 0, width, 1, width, STREAMS, STREAM // w.itemsize), totals)
        for i in range(valid):
            out[0, n + i * length] = totals[i]


@parallel
def _matmul(team, w, x, out):
    for block in shared(team, (w.shape[0] + ROW_BLOCK - 1) // ROW_BLOCK):
        first = block * ROW_BLOCK
        end = min(first + ROW_BLOCK, w.shape[0])
        if x.shape[0] == 1:
            _one_token(tile_f32(STREAMS, 1), w, first, end, x, out)
        else:
            _few_tokens(tile_f32(MANY_ROWS, TOKENS), w, first, end, x, out)


def matmul(x: Floats, weights: NDArray) -> Floats:  # [R, M], [N, M] float32, float16 or bfloat16 bits -> [R, N]
    """Contract-order dot products. With one row of x, a block of weight rows is read as STREAMS streams, each in order of memory: on Zen 4,
    four neighbouring rows at a time reach 17 GB/s, and one after the other 28.
    """
    out, work = empty((x.shape[0], weights.shape[0])), x.shape[0] * weights.size // 8
    if x.shape[0] > _FEW:
        launch(float_products.matmul, work, read_only(weights), 1, float_products.arranged(x), out)
    else:
        launch(_matmul, work, read_only(weights), x, out)
    return out
