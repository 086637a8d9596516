"""Checks for invalid weights: NaN and infinity, and ternary codes that no writer produces."""

import numpy as np
from numpy.typing import NDArray

from .launching import launch, parallel, read_only, shared

_PARTS = 64  # parts of an array, each checked by one owner


@parallel
def _carries(team, words, bits, neighbours, one, hits):
    for part in shared(team, hits.size):
        carried = np.uint64(0)
        share = words[part * words.size // hits.size : (part + 1) * words.size // hits.size]
        for i in range(share.size):  # from 0: Numba must allow for negative indices otherwise, and LLVM then stays scalar
            carried |= (share[i] & bits) + (share[i] >> np.uint64(1) & neighbours) + one
        hits[part] = carried & ~bits


def _any_carries(array: NDArray, bits: int, neighbours: int, one: int) -> bool:
    """Whether these bits of any eight bytes, plus `one` and the bits above the `neighbours`, carry into other bits."""
    data = array.reshape(-1).view(np.uint8)
    if data.size % 8:
        data = np.concatenate([data, np.zeros(-data.size % 8, np.uint8)])
    hits = np.zeros(_PARTS, np.uint64)
    launch(_carries, array.size, read_only(data.view(np.uint64)), np.uint64(bits), np.uint64(neighbours), np.uint64(one), hits)
    return bool(hits.any())


def has_code_three(codes: NDArray[np.uint8]) -> bool:
    """Whether any two-bit code is 3, which no writer of I2_S produces (bitnet.cpp would count it as +2)."""
    return _any_carries(codes, 0x5555555555555555, 0x5555555555555555, 0)


# dtype -> the exponent bits of each number in a word, and the lowest of them, which carries out of an exponent of ones when added
_EXPONENTS = {
    np.dtype(np.float32): (0x7F8000007F800000, 0x0080000000800000),
    np.dtype(np.float16): (0x7C007C007C007C00, 0x0400040004000400),
    np.dtype(np.uint16): (0x7F807F807F807F80, 0x0080008000800080),
}


def has_non_finite(table: NDArray) -> bool:
    """Whether a float32 or float16 array, or one of bfloat16 bits (uint16), has NaN or infinity, an exponent of ones."""
    exponent, one = _EXPONENTS[table.dtype]
    return _any_carries(table, exponent, 0, one)
