"""Kernels for matrices in ggml's block types: their rows, products, and checks.

Weights are computed where they are needed, a few rows at a time, and never all at once. Results have the bits that the kernels of cpu.py
give for the same weights as float32. `data` is the bytes of a matrix [N, bytes of a row], C-contiguous, of the type `kind`.
"""

import numpy as np
from numpy.typing import NDArray

from ...base import tensor_types
from ...base.block_formats import FORMATS
from ...base.tensor_types import GRID_TYPES, TensorType
from .. import float_products
from ..fast.block_floats import dot_block
from ..fast.emit import LANES
from ..fast.simd import address_of, prefetch_line, store_sums, tile_f32
from ..launching import Floats, launch, parallel, serial, shared
from ..tiles import ROW_BLOCK, ROWS
from ..workspace import empty
from . import grids
from .activations import round_as_q8_k
from .products import Bytes, products, records

_CHECKED = 1 << 16  # blocks checked at a time, which bounds the memory
_LARGE_POWER = 253  # the byte of MXFP4 that stands for 2^125, which times the largest code, 12, is infinite


# --- weights --------------------------------------------------------------------------------------------------------------------------


@serial
def _embed(blocks, size, tokens, out):
    for r in range(tokens.size):
        float_products.fill(blocks, tokens[r] * blocks.shape[1], blocks.shape[1], size, out, r * out.shape[1])


def embed(data: Bytes, kind: TensorType, tokens: NDArray[np.int64]) -> Floats:  # [V, bytes of a row], type, [R] -> [R, M]
    if kind in GRID_TYPES:
        return grids.embed(data, kind, tokens)
    blocks = records(data, kind)
    out = empty((tokens.size, blocks.shape[1] * kind.block))
    _embed(blocks, kind.block, tokens, out)
    return out


@parallel
def _matmul(team, blocks, size, x, out):
    """The product with one token: a block of ROWS rows of the matrix is computed in registers and used there."""
    n, row_bytes, data = blocks.shape[1], blocks.shape[1] * blocks.itemsize, address_of(blocks)
    totals, step = np.empty(LANES, np.float32), ROWS * row_bytes
    way = (16383 + step) // step * step  # what is asked for lies whole steps ahead: a way of fewer bytes would miss where new rows begin
    for item in shared(team, (blocks.shape[0] + ROW_BLOCK - 1) // ROW_BLOCK):
        first, end = item * ROW_BLOCK, min((item + 1) * ROW_BLOCK, blocks.shape[0])
        for r in range(first, end, ROWS):
            valid = min(ROWS, end - r)
            tile, ahead = tile_f32(ROWS, 1), data + r * row_bytes + way
            for b in range(n):
                for i in range(ROWS):
                    for j in range(0, blocks.itemsize, 64):
                        prefetch_line(ahead + b * blocks.itemsize + i * row_bytes + j)
                tile = dot_block(tile, blocks, r * n + b, n, valid, x, b * size)
            store_sums(tile, totals)
            for i in range(valid):
                out[0, r + i] = totals[i]


def matmul(x: Floats, data: Bytes, kind: TensorType) -> Floats:  # [R, M], [N, bytes of a row], type -> [R, N]
    """x times the transposed matrix."""
    if kind in GRID_TYPES:
        return grids.matmul(x, data, kind)
    out, blocks = empty((x.shape[0], data.shape[0])), records(data, kind)
    work = x.size * data.shape[0] // 8
    if x.shape[0] == 1:
        launch(_matmul, work, blocks, kind.block, x, out)
    else:
        launch(float_products.matmul, work, blocks, kind.block, float_products.arranged(x), out)
    return out


def matmuls_as_llama_cpp(x: Floats, *matrices: tuple[Bytes, TensorType]) -> list[Floats]:
    # [R, M], ([N, bytes of a row], type) each -> [R, N] each
    """x as llama.cpp rounds it times up to three transposed matrices, by the definition of contract/blocks.py.

    Those of a type are read by one call, because threads that start and wait for each other cost as much as a small matrix.
    """
    found: dict[int, Floats] = {}
    for kind in dict.fromkeys(kind for _, kind in matrices):
        places, its = zip(*((i, data) for i, (data, other) in enumerate(matrices) if other is kind), strict=True)
        results = [grids.matmul(round_as_q8_k(x), data, kind) for data in its] if kind in GRID_TYPES else products(x, its, kind)
        found.update(zip(places, results, strict=True))
    return [found[i] for i in range(len(matrices))]


# --- checks of weights ----------------------------------------------------------------------------------------------------------------


def has_non_finite(data: Bytes, kind: TensorType) -> bool:
    """Whether a weight is NaN or infinite. It is if a float16 scale is: finite scales times integers stay far inside float32.

    But those of MXFP4 reach 2^127. Blocks with such a scale are decoded to see.
    """
    parts = (data.reshape(-1, kind.block_bytes)[start : start + _CHECKED] for start in range(0, data.size // kind.block_bytes, _CHECKED))
    return any(_has_non_finite(part, kind) for part in parts)


def _has_non_finite(data: Bytes, kind: TensorType) -> bool:
    """The same for a block in each row."""
    if kind in GRID_TYPES:
        return bool((grids.scales(data, kind) & 0x7C00 == 0x7C00).any())
    blocks = records(data, kind)
    if kind is tensor_types.MXFP4:
        large = data[blocks["e"][:, 0] >= _LARGE_POWER]
        return large.size > 0 and not np.isfinite(embed(large, kind, np.arange(len(large)))).all()
    return any(bool((blocks[half] & 0x7C00 == 0x7C00).any()) for half in FORMATS[kind.name].float16_fields)


def has_code_three(data: Bytes) -> bool:
    """Whether a code of a TQ2_0 matrix is 3, which no writer produces (ggml would count it as +2).

    TQ1_0 has no such code: any byte has five base-3 digits. (13 of the 256 bytes are never written, and decode as their neighbours do.)
    """
    blocks = records(data, tensor_types.TQ2_0).reshape(-1)
    parts = (blocks[start : start + _CHECKED]["qs"] for start in range(0, blocks.size, _CHECKED))
    return any(bool((codes & codes >> 1 & 0x55).any()) for codes in parts)
