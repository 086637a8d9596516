"""Matrices in ggml's types whose weights are rows of a grid (IQ2, IQ3 and IQ1): decoded by gguf-py, each time they are used.

There are no kernels for these types. Results have the bits that the kernels of floats.py give for the same weights as float32. A pass
decodes some tens of millions of weights a second, and holds a few rows of a matrix at a time. `data` is the bytes of a matrix
[N, bytes of a row] of the type `kind`, one of GRID_TYPES. Indices into a grid have as many bits as the grid has rows, so none is too large.
"""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from ...base.tensor_types import IQ1_M, TensorType
from ..floats import matmul as _float_matmul
from ..launching import Floats
from ..workspace import empty

Bytes = NDArray[np.uint8]

_CHUNK = 1 << 22  # weights that are decoded at a time


def weights(data: Bytes, kind: TensorType) -> Floats:  # [N, bytes of a row], type -> [N, M]
    with np.errstate(invalid="ignore", over="ignore"):  # scales may be NaN or infinity: loading refuses those
        return dequantize(data, GGMLQuantizationType(kind.number))


def embed(data: Bytes, kind: TensorType, tokens: NDArray[np.int64]) -> Floats:  # [V, bytes of a row], type, [R] -> [R, M]
    out = empty((tokens.size, data.shape[1] // kind.block_bytes * kind.block))
    if tokens.size:
        out[:] = weights(data[tokens], kind)
    return out


def matmul(x: Floats, data: Bytes, kind: TensorType) -> Floats:  # [R, M], [N, bytes of a row], type -> [R, N]
    """x times the transposed matrix."""
    out = empty((x.shape[0], data.shape[0]))
    step = max(1, _CHUNK // x.shape[1])
    for first in range(0, data.shape[0], step):
        rows = slice(first, first + step)
        out[:, rows] = _float_matmul(x, weights(data[rows], kind))
    return out


def scales(data: Bytes, kind: TensorType) -> NDArray[np.uint16]:
    """The bits of the float16 scale of each block, in order. IQ1_M has four of them above the small scales of each quarter."""
    blocks = data.reshape(-1, kind.block_bytes)
    if kind is not IQ1_M:
        return np.ascontiguousarray(blocks[:, :2]).view("<u2")[:, 0]
    quarters = np.ascontiguousarray(blocks[:, -8:]).view("<u2") >> np.uint16(12)
    return quarters[:, 0] | quarters[:, 1] << np.uint16(4) | quarters[:, 2] << np.uint16(8) | quarters[:, 3] << np.uint16(12)


def with_scales(data: Bytes, kind: TensorType, bits: NDArray[np.uint16]) -> Bytes:
    """A copy of the matrix whose blocks have other scales: `scales` of it gives `bits`."""
    out = data.copy()
    blocks = out.reshape(-1, kind.block_bytes)
    if kind is not IQ1_M:
        blocks[:, :2] = bits.astype("<u2")[:, None].view(np.uint8)
        return out
    nibbles = bits[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & np.uint16(15)
    blocks[:, -7::2] = blocks[:, -7::2] & 15 | (nibbles << np.uint16(4)).astype(np.uint8)
    return out
