"""Matrices in ggml's block types: as floats, for spec.py and tests, and as I2_S where that is what they hold."""

import numpy as np
from numpy.typing import NDArray

from .errors import FileFormatError
from .kernels import blocks as kernels
from .kernels.block_formats import FORMATS
from .model import Blocks, Ternary
from .packing import float32, from_i2s
from .tensor_types import TQ1_0, TQ2_0


def dequantize(blocks: Blocks) -> NDArray[np.float32]:  # [N, M]
    """The weights as float32, by gguf-py. Sixteen times the memory of ternary types: for small models."""
    return float32(blocks)


def ternary_of(blocks: Blocks) -> Ternary | None:
    """A TQ1_0 or TQ2_0 matrix as I2_S, if its blocks' scales that are not 0 are equal and positive.

    A block with scale 0 becomes zeros. None for any other matrix or type. Raises FileFormatError for a TQ2_0 code of 3. Nothing is
    widened: the result takes a quarter of a byte for each weight.
    """
    if blocks.type not in (TQ1_0, TQ2_0):
        return None
    if blocks.type is TQ2_0 and kernels.has_code_three(blocks.data):
        raise FileFormatError("a TQ2_0 matrix has the code 3, which means nothing")
    records = blocks.data.view(FORMATS[blocks.type.name].layout).reshape(-1)
    scales = np.unique(records["d"]).view(np.float16)
    scales = scales[scales != 0]
    if scales.size > 1 or not (np.isfinite(scales) & (scales > 0)).all():
        return None
    scale = np.float32(scales[0] if scales.size else 0)
    codes = np.empty(records.size * 64, np.uint8)
    kernels.pack_ternary(blocks.data, blocks.type, codes)
    return from_i2s(codes, scale, blocks.shape)
