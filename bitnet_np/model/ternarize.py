"""Ternary matrices out of what files hold: I2_S codes, master weights, and ggml's ternary block types."""

import numpy as np
from numpy.typing import NDArray

from ..base.block_formats import FORMATS
from ..base.errors import FileFormatError, ShapeError
from ..base.tensor_types import TERNARY_TYPES, TQ2_0
from ..kernels import packing as kernels
from ..kernels.ggml import blocks as block_kernels
from .packing import i2s_row_bytes
from .records import Blocks, Ternary, frozen


def from_i2s(codes: NDArray[np.uint8], scale: float | np.float32, shape: tuple[int, int]) -> Ternary:
    """The codes of an I2_S tensor [N * i2s_row_bytes(M)], with or without its trailer, packed. Raises ShapeError if there are too few."""
    size = shape[0] * i2s_row_bytes(shape[1])
    if codes.size < size:
        raise ShapeError(f"a ternary matrix of shape {shape} has {codes.size} bytes of I2_S codes, expected {size}")
    return frozen(Ternary(kernels.from_i2s(codes[:size], shape), np.float32(scale), shape))


def from_masters(masters: NDArray) -> Ternary:  # [N, M] float32, float16 or bfloat16's bits, C-contiguous and finite
    """Master weights quantised by their mean magnitude, as the forward pass of BitNet b1.58 does (arXiv 2402.17764, equations 1 to 3).

    With s = 1 / max(mean |W|, 1e-5) the codes are W * s, rounded half to even and cut to -1, 0, +1; the scale is 1 / s, rounded to float32
    once. The floor of 1e-5 is transformers' (integrations/bitnet.py, WeightQuant).
    """
    steps = 1 / max(mean_magnitude(masters), 1e-5)
    return frozen(Ternary(kernels.from_masters(masters, steps), np.float32(1 / steps), masters.shape))


def mean_magnitude(table: NDArray) -> float:  # [N, M] float32, float16 or bfloat16's bits
    """The mean of |x|: the exact sum, rounded to float64, divided by the number of elements."""
    total = sum(count << max(exponent, 1) for exponent, count in enumerate(kernels.magnitude_sums(table).tolist()))
    return total / (1 << 150) / table.size


def from_blocks(blocks: Blocks) -> Ternary | None:
    """A TQ1_0 or TQ2_0 matrix packed, if its blocks' scales that are not 0 are equal and positive.

    A block with scale 0 becomes zeros. None for any other matrix or type. Raises FileFormatError for a TQ2_0 code of 3. A few rows are
    widened at a time: the result takes a quarter of a byte for each weight.
    """
    if blocks.type not in TERNARY_TYPES:
        return None
    if blocks.type is TQ2_0 and block_kernels.has_code_three(blocks.data):
        raise FileFormatError("a TQ2_0 matrix has the code 3, which means nothing")
    records = blocks.data.view(FORMATS[blocks.type.name].layout).reshape(-1)
    scales = np.unique(records["d"]).view(np.float16)
    scales = scales[scales != 0]
    if scales.size > 1 or not (np.isfinite(scales) & (scales > 0)).all():
        return None
    scale = np.float32(scales[0] if scales.size else 0)
    packed = kernels.from_blocks(blocks.data, blocks.type, 1 / float(scale) if scale else 0.0)
    return frozen(Ternary(packed, scale, blocks.shape))
