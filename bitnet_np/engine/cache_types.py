"""The types that engines keep keys and values in, and how each rounds them.

Every type rounds a row of a head by itself, so that it does not matter which rows are computed together. Sources: IEEE 754 for the float
types; ggml's quantize_row_q8_0 and quantize_row_q4_0 (ggml-quants.c), whose blocks are 32 numbers with a float16 step.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..base.errors import UnsupportedError
from ..base.validate import choice
from ..kernels.ggml import activations

Floats = NDArray[np.float32]

BLOCK = 32
"""Numbers of a block of q8_0 and q4_0."""


def check(kind: str, head_dim: int) -> None:
    """Raises OptionError for no type of ROUNDINGS, UnsupportedError for one whose blocks do not fit into a row of a head."""
    choice("kv", kind, ROUNDINGS)
    if kind in ("q8_0", "q4_0") and head_dim % BLOCK:
        raise UnsupportedError(f"the head width is {head_dim}, expected a multiple of {BLOCK} for a KV cache of {kind}")


def rounded(x: Floats, kind: str) -> Floats:
    """Keys or values [R, G, K] as a cache of this type, one of ROUNDINGS, gives them back: [R, G, K]."""
    return ROUNDINGS[kind](x.reshape(-1, x.shape[-1])).reshape(x.shape)


def _round_as_int8(x: Floats) -> Floats:
    """int8 codes in steps of the row's largest number / 127."""
    step = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(step == 0, np.float32(1), step)) * step


def _round_as_q4_0(x: Floats) -> Floats:
    """Codes of 4 bits, -8 to 7, in steps that make the largest number of a block -8."""
    parts = x.reshape(len(x), -1, BLOCK)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=2, keepdims=True), axis=2)
    step = largest / np.float32(-8)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(step == 0, np.float32(0), np.float32(1) / step)
    codes = np.clip(np.floor(parts * inverse + np.float32(8.5)), 0, 15) - np.float32(8)
    return (codes * activations.round_as_f16(step)).reshape(x.shape)


ROUNDINGS: dict[str, Callable[[Floats], Floats]] = {
    "float32": lambda x: x,
    "float16": activations.round_as_f16,
    "bfloat16": activations.round_as_bf16,
    "int8": _round_as_int8,
    "q8_0": activations.round_as_q8_0,
    "q4_0": _round_as_q4_0,
}
"""The types of a KV cache: rows [N, K] -> the same rows rounded. int8: one step for each row."""
