"""Kernels for matrices in ggml's block types: weights are computed a few rows at a time and never all at once.

A result has the bits that the kernels of cpu.py give for the same weights as float32.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from . import block_formats
from .cpu import _ROW_BLOCK, _ROWS, _TOKENS, Floats, _launch, _matmul_rows, _parallel, _serial, _weights
from .simd import LANES, dot_block, store_sums, tile_f32, unpack_block



@_serial
def _unpack_row(blocks, first, count, size, out, position):
    """out[position :] = the weights of `count` blocks from the one numbered `first`, each of `size` weights."""
    for i in range(count):
        unpack_block(blocks, first + i, out, position + i * size)


@_serial
def _embed(blocks, tokens, size, out):
    n = blocks.shape[1]
    for r in range(tokens.size):
        _unpack_row(blocks, tokens[r] * n, n, size, out, r * out.shape[1])


def embed(data: NDArray[np.uint8], kind: str, tokens: NDArray[np.int64]) -> Floats:  # [V, bytes of a row], type, [R] -> [R, M]
    blocks, size = _blocks(data, kind)
    out = np.empty((tokens.size, blocks.shape[1] * size), np.float32)
    _embed(blocks, tokens, size, out)
    return out


@_serial
def _gemv_rows(zeros, rows, blocks, size, first, end, x, out):
    """Rows first..end for one token."""
    n = blocks.shape[1]
    totals = np.empty(LANES, np.float32)
    for r in range(first, end, rows):
        valid = min(rows, end - r)
        tile = zeros
        for b in range(n):
            tile = dot_block(tile, blocks, r * n + b, n, valid, x, b * size)
        store_sums(tile, totals)
        for i in range(valid):
            out[0, r + i] = totals[i]


@_serial
def _gemm_rows(zeros, rows, tokens, blocks, size, first, end, x, out):
    """Rows first..end for all tokens, `rows` unpacked at a time."""
    n, width = blocks.shape[1], x.shape[1]
    weights = np.empty((rows, width), np.float32)
    for r in range(first, end, rows):
        valid = min(rows, end - r)
        for i in range(valid):
            _unpack_row(blocks, (r + i) * n, n, size, weights, i * width)
        _matmul_rows(zeros, rows, tokens, weights, 0, valid, x, out[:, r : r + valid])


@_parallel
def _matmul(blocks, size, x, out):
    for block in prange((blocks.shape[0] + _ROW_BLOCK - 1) // _ROW_BLOCK):
        first = block * _ROW_BLOCK
        end = min(first + _ROW_BLOCK, blocks.shape[0])
        if x.shape[0] > 1:
            _gemm_rows(tile_f32(_ROWS, _TOKENS), _ROWS, _TOKENS, blocks, size, first, end, x, out)
        else:
            _gemv_rows(tile_f32(_ROWS, 1), _ROWS, blocks, size, first, end, x, out)


def matmul(x: Floats, data: NDArray[np.uint8], kind: str) -> Floats:  # [R, M], [N, bytes of a row], type -> [R, N]
    """x times the transposed matrix of blocks."""
    blocks, size = _blocks(data, kind)
    out = np.empty((x.shape[0], blocks.shape[0]), np.float32)
    _launch(_matmul, x.size * blocks.shape[0] // 8, blocks, size, x, out)
    return out


def _blocks(data: NDArray[np.uint8], kind: str) -> tuple[NDArray[np.void], int]:
    return _weights(block_formats.blocks(data, kind)), block_formats.FORMATS[kind].weights
