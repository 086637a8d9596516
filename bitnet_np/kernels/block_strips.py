"""Products of several tokens with matrices in ggml's block types by the definition: weights are computed a strip at a time."""

import numpy as np
from numba import prange

from .float_products import STRIDE, arrange, multiply_strip, new_strip, new_sums, piece, pieces, strip_after
from .launching import parallel, serial
from .simd import unpack_block
from .tiles import DEPTH, MANY_ROWS


@serial
def unpack_blocks(blocks, first, count, size, out, position):
    """out[position :] = `count` blocks of `size` weights each."""
    for i in range(count):
        unpack_block(blocks, first + i, out, position + i * size)


@serial
def _some_rows(blocks, size, first, end, x, token, tokens, out):
    """Results first..end of some rows of x, which is arranged."""
    n, width = blocks.shape[1], blocks.shape[1] * size
    strip, sums = new_strip(), new_sums(end - first, tokens)
    for begin in range(0, width, DEPTH):
        count = min(DEPTH, width - begin)
        for r in range(first, end, MANY_ROWS):
            rows = min(MANY_ROWS, end - r)
            for i in range(rows):
                unpack_blocks(blocks, (r + i) * n + begin // size, count // size, size, strip, i * STRIDE)
            ahead = strip_after(blocks, size, r, begin, first, end)
            multiply_strip(strip, r, rows, begin, width, x, token, tokens, sums[r - first :], out, ahead)


@parallel
def matmul(blocks, size, x, arranged, out):
    """As the kernel of blocks.py. It is one of its own: a single token has no activations to arrange, and should not wait for threads."""
    for t in prange(x.shape[0]):
        arrange(x, t, arranged)
    for item in prange(pieces(blocks.shape[0], x.shape[0])):
        first, end, token, tokens = piece(np.int64(item), blocks.shape[0], x.shape[0])
        _some_rows(blocks, size, first, end, arranged, token, tokens, out)
