"""What both ways to multiply by ternary matrices share: the arrays of a product, its matrices, and how results are stored."""

from typing import Any, NamedTuple

import numpy as np

from . import simd
from .launching import inlined, rule, serial
from .simd import LANES
from .ternary_simd import MODERATE, store_scaled, store_scaled_by_reciprocal
from .tiles import TOKENS

_LEAST, _MOST = MODERATE if simd.has_fma() else (np.inf, np.inf)


class Product(NamedTuple):
    """The arrays of a product with up to three matrices.

    A tile reads scales and sums of TOKENS tokens from its first on, however many there are: they are that much longer than n.
    """

    codes: Any  # packed (packing.py), of the first matrix; offsets from it lead to the others
    steps: Any  # steps of LANES columns of the weights: 16 rows have STEP bytes for each
    q: Any  # [n, at least steps * LANES] int8
    scale: Any  # [n + TOKENS]
    inverse: Any  # [n + TOKENS], 1 / scale
    moderate: Any  # whether `inverse` can be used
    sums: Any  # [n + TOKENS] int32, of the rows of q, to be filled in
    out: Any  # flat, of all matrices


class Matrix(NamedTuple):
    """One matrix of a product."""

    begin: Any  # offset of its codes from the first matrix's
    factor: Any  # the scale of its weights
    place: Any  # offset of its results [n, width] in `out`
    width: Any  # its rows, which are columns of its results


@serial
def with_reciprocals(scale):
    """The scales and their reciprocals, TOKENS longer, and whether the reciprocals can be used."""
    padded, inverse = np.empty(scale.size + TOKENS, np.float32), np.empty(scale.size + TOKENS, np.float32)
    moderate = True
    for i in range(padded.size):
        padded[i] = scale[min(i, scale.size - 1)]
        inverse[i] = np.float32(1) / padded[i]
        moderate &= _LEAST <= padded[i] <= _MOST
    return padded, inverse, moderate


@inlined
def store_ternary(tile, groups, tokens, product, matrix, group, token, edge):
    """Store a finished tile. One that does not lie wholly inside the matrix's results is stored in `edge` and copied from there."""
    column, start, width = group * LANES, matrix.place + token * matrix.width, matrix.width
    columns, rows = min(groups * LANES, width - column), min(tokens, product.q.shape[0] - token)
    inside = columns == groups * LANES and rows == tokens
    address = np.int64(product.out.ctypes.data) + (start + column) * 4 if inside else np.int64(edge.ctypes.data)
    stride = width * 4 if inside else groups * LANES * 4
    if product.moderate:
        store_scaled_by_reciprocal(tile, product.sums, product.scale, product.inverse, token, matrix.factor, address, stride)
    else:
        store_scaled(tile, product.sums, product.scale, product.inverse, token, matrix.factor, address, stride)
    if not inside:
        for j in range(rows):
            for i in range(columns):
                product.out[start + j * width + column + i] = edge[j * groups * LANES + i]


@rule
def blocks_of(widths, size):
    """Three matrices are cut into so many blocks of `size` columns, one matrix after another."""
    return -(-widths[0] // size) - (-widths[1] // size) - (-widths[2] // size)


@serial
def matrix_of(codes, widths, factors, n, size, block):
    """The matrix that a block belongs to, of three with these codes, and the block's number in it. The product has n tokens."""
    first, second = -(-widths[0] // size), -(-widths[1] // size)
    if block < first:
        return Matrix(np.int64(0), factors[0], 0, widths[0]), block
    start = np.int64(codes[0].ctypes.data)  # three arrays as if they were one
    if block < first + second:
        return Matrix(np.int64(codes[1].ctypes.data) - start, factors[1], n * widths[0], widths[1]), block - first
    return Matrix(np.int64(codes[2].ctypes.data) - start, factors[2], n * (widths[0] + widths[1]), widths[2]), block - first - second


@serial
def row_sums(q, first, end, sums):
    for r in range(first, end):
        row, total = q[r], np.int32(0)
        for i in range(row.size):
            total = np.int32(total + row[i])
        sums[r] = total
