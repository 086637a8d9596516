"""Tiles of dot products: their sizes on this processor, and how one is filled. floats.py, attention.py and others are made of them."""

from .fast.emit import LANES, is_wide
from .fast.simd import dot_step, dot_tail, prefetch
from .launching import inlined
from .processor import is_amd

# As many accumulators as the registers hold together with the operands: 16 of AVX-512's 32 registers, 8 of fewer and narrower ones.
WIDE = is_wide()
ROWS, TOKENS = (4, 4) if WIDE else (2, 2)
MANY_ROWS = 6 if WIDE else 2  # in place of ROWS where activations come from the second-level cache: 24 accumulators read them less often
VALUE_COLUMNS = 4 if WIDE else 2
SPAN = VALUE_COLUMNS * LANES
ROW_BLOCK = 48  # weight rows that one step of a parallel loop owns: a tile's activations stay in cache during that time
DEPTH = 1024  # columns of a strip of weights, whole blocks of each type: a few rows of it stay in the first cache
PART = 128  # tokens that one block of weight rows after another is multiplied by: they stay in the caches during that time
STREAMS = 1 if WIDE and is_amd() else 4
"""Parts of a matrix that a token reads at once, far from each other. One core reads 11 to 14 GB/s from one stream and 17 to 20 from four on
Zen 3, and 13 to 14 and 19 to 20 on an Emerald Rapids Xeon; one stream gives 28 of 30 on Zen 4, and 38 of 42 on Zen 5,
where four streams of packed weights decode 12 % slower."""
STREAM = 1 << 13 if STREAMS == 1 else 1 << 11 if WIDE else 1 << 10
"""Bytes by which prefetches of a stream run ahead: the processor's own end with each page of 4 KB."""


@inlined
def dot_tile(zeros, w, w_start, w_stride, w_valid, x, x_start, x_stride, x_valid, count, rows=1, ahead=0):
    """Dot products of some rows of w with some rows of x over `count` elements, each as the sums of its 16 lanes.

    With `ahead`, the elements of w that many places on are prefetched, for each of `rows`: processors lose track of several streams.
    """
    tile = zeros
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        if ahead:
            for row in range(rows):
                prefetch(w, w_start + row * w_stride + i + ahead)
        tile = dot_step(tile, w, w_start + i, w_stride, w_valid, x, x_start + i, x_stride, x_valid, LANES)
    if whole < count:
        tile = dot_tail(tile, w, w_start + whole, w_stride, w_valid, x, x_start + whole, x_stride, x_valid, count - whole)
    return tile
