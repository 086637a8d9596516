"""Tiles of dot products, which floats.py, attention.py and others are made of: their sizes on this processor, and one step of theirs."""

from . import simd
from .launching import inlined
from .simd import LANES, dot_step, dot_tail, prefetch

# Accumulators that fit the registers: 16 of AVX-512's 32; else the same tile would be spilled to memory at every step.
WIDE = simd.is_wide()
ROWS, TOKENS = (4, 4) if WIDE else (2, 2)
VALUE_COLUMNS = 4 if WIDE else 2
SPAN = VALUE_COLUMNS * LANES
ROW_BLOCK = 32  # weight rows that one step of a parallel loop owns: a tile's activations stay in cache while these pass
STREAM = 1 << 13  # bytes that a single stream of weights is asked for ahead: the processor's own foresight ends with each page of 4 KB


@inlined
def dot_tile(zeros, w, w_start, w_stride, w_valid, x, x_start, x_stride, x_valid, count, rows=1, ahead=0):
    """Dot products of some rows of w with some rows of x over `count` elements, unfinished: 16 lanes each.

    With `ahead`, ask for the elements of w that many places on, for each of `rows`: of several streams at once processors lose track.
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
