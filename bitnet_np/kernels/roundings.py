"""Numbers as narrower types hold them: keys and values in a KV cache, inputs of matrices, float16 between steps.

Every type rounds each row independently, so it does not matter which rows are computed together. Sources: IEEE 754 for the float types;
ggml's quantize_row_q8_0 and quantize_row_q4_0 (ggml-quants.c), whose blocks are 32 numbers with a float16 step.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .ggml.activations import Q8_0, round_as_q8_0
from .launching import Floats


def round_as(x: Floats, kind: str) -> Floats:  # [..., M], one of ROUNDINGS -> [..., M]
    """The numbers that a type keeps of x, as float32."""
    return ROUNDINGS[kind](x.reshape(-1, x.shape[-1])).reshape(x.shape)


def _as_float16(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def _bfloat16_bits(x: Floats) -> NDArray[np.uint16]:
    """The bits of x rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = x.view(np.uint32)
    return np.where(np.isnan(x), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _as_bfloat16(x: Floats) -> Floats:
    return (_bfloat16_bits(x).astype(np.uint32) << 16).view(np.float32)


def _as_int8(x: Floats) -> Floats:
    """int8 codes in steps of the row's largest number / 127."""
    step = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(step == 0, np.float32(1), step)) * step


def _as_q4_0(x: Floats) -> Floats:
    """Codes of 4 bits, -8 to 7, in steps that make the largest number of a block -8."""
    parts = x.reshape(len(x), -1, Q8_0)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=2, keepdims=True), axis=2)
    step = largest / np.float32(-8)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(step == 0, np.float32(0), np.float32(1) / step)
    codes = np.clip(np.floor(parts * inverse + np.float32(8.5)), 0, 15) - np.float32(8)
    return (codes * _as_float16(step)).reshape(x.shape)


ROUNDINGS: dict[str, Callable[[Floats], Floats]] = {
    "float16": _as_float16,
    "bfloat16": _as_bfloat16,
    "int8": _as_int8,
    "q8_0": round_as_q8_0,
    "q4_0": _as_q4_0,
}
"""The rounding of rows [N, M] by type. int8: one step for each row."""
