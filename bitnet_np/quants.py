"""Matrices in ggml's block types: as floats, for spec.py and tests, and as I2_S where that is what they hold."""

import numpy as np
from numpy.typing import NDArray

from .errors import FileFormatError
from .kernels import blocks as kernels
from .kernels.block_formats import FORMATS
from .model import Blocks, Ternary
from .packing import float32, from_i2s
from .tensor_types import TQ1_0, TQ2_0

_CHUNK = 1 << 14  # blocks of 256 weights that are converted in one go: some megabytes


def dequantize(blocks: Blocks) -> NDArray[np.float32]:  # [N, M]
    """The weights as float32, by gguf-py. Sixteen times the memory of ternary types: for small models."""
    return float32(blocks)


def ternary_of(blocks: Blocks) -> Ternary | None:
    """A TQ1_0 or TQ2_0 matrix as I2_S, if its blocks' scales that are not 0 are equal and positive.

    A block with scale 0 becomes zeros. None for any other matrix or type. Raises FileFormatError for a TQ2_0 code of 3. Nothing is
    widened: the result takes a quarter of a byte for each weight, and the work some megabytes.
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
    halves = codes.reshape(-1, 2, 32)  # 128 weights each
    convert = _from_tq1_0 if blocks.type is TQ1_0 else _from_tq2_0
    for start in range(0, records.size, _CHUNK):
        part, out = records[start : start + _CHUNK], halves[start : start + _CHUNK]
        convert(part, out)
        out[part["d"] & 0x7FFF == 0] = _ZEROS
    return from_i2s(codes, scale, blocks.shape)


_BYTE = np.arange(256)
_ZEROS = 0b01010101  # four codes of 1, which stand for 0
_REVERSED = (_BYTE << 6 | _BYTE << 2 & 0x30 | _BYTE >> 2 & 0x0C | _BYTE >> 6).astype(np.uint8)  # two-bit fields, last one first
# digit n of a byte of TQ1_0, a code as in I2_S
_DIGITS = np.stack([(_BYTE * 3**n % 256 * 3 >> 8).astype(np.uint8) for n in range(5)])
_FIRST_FOUR = _DIGITS[0] << 6 | _DIGITS[1] << 4 | _DIGITS[2] << 2 | _DIGITS[3]


def _from_tq2_0(records: NDArray[np.void], out: NDArray[np.uint8]) -> None:
    """Like I2_S, a byte holds weights that are 32 apart, but the first in its lowest bits."""
    np.take(_REVERSED, records["qs"].reshape(out.shape), out=out)


def _from_tq1_0(records: NDArray[np.void], out: NDArray[np.uint8]) -> None:
    """Digit n of the first 32 bytes is weight 32 n + i, of the next 16 weight 160 + 16 n + i, of the last four weight 240 + 4 n + i."""
    first, second, last = records["qs"][:, :32], records["qs"][:, 32:], records["qh"]
    np.take(_FIRST_FOUR, first, out=out[:, 0])
    fifth = _DIGITS[4][first] << 6
    out[:, 1, :16] = fifth[:, :16] | _DIGITS[0][second] << 4 | _DIGITS[2][second] << 2 | _DIGITS[4][second]
    ends = np.concatenate([_DIGITS[n][last] for n in range(4)], axis=1)
    out[:, 1, 16:] = fifth[:, 16:] | _DIGITS[1][second] << 4 | _DIGITS[3][second] << 2 | ends
