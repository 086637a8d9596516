"""What may not be in weights: NaN and infinity, and codes that mean nothing."""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from .launching import launch, parallel, read_only

_PARTS = 64  # of an array that is checked, each by one owner


def _words(array: NDArray) -> NDArray[np.uint64]:
    """The bytes of an array eight at a time, the last ones filled up with zeros: words keep LLVM's loops in vector registers."""
    data = array.reshape(-1).view(np.uint8)
    if data.size % 8:
        data = np.concatenate([data, np.zeros(-data.size % 8, np.uint8)])
    return read_only(data.view(np.uint64))


@parallel
def _code_three(words, found):
    for part in prange(found.size):
        both = np.uint64(0)
        mine = words[part * words.size // found.size : (part + 1) * words.size // found.size]
        for i in range(mine.size):  # from 0: Numba must allow for negative indices otherwise, and LLVM then stays scalar
            both |= mine[i] & (mine[i] >> np.uint64(1))
        found[part] = both & np.uint64(0x5555555555555555)


def has_code_three(codes: NDArray[np.uint8]) -> bool:
    """Whether any two-bit code is 3, which no writer of I2_S produces (bitnet.cpp would count it as +2)."""
    found = np.zeros(_PARTS, np.uint64)
    launch(_code_three, codes.size, _words(codes), found)
    return bool(found.any())


@parallel
def _all_ones(words, exponent, one, found):
    for part in prange(found.size):
        carried = np.uint64(0)
        mine = words[part * words.size // found.size : (part + 1) * words.size // found.size]
        for i in range(mine.size):  # from 0: Numba must allow for negative indices otherwise, and LLVM then stays scalar
            carried |= (mine[i] & exponent) + one
        found[part] = carried & ~exponent


# dtype -> the bits of its exponent in each number of a word, and the lowest of them; added, an exponent of ones runs over
_EXPONENTS = {
    np.dtype(np.float32): (0x7F8000007F800000, 0x0080000000800000),
    np.dtype(np.float16): (0x7C007C007C007C00, 0x0400040004000400),
    np.dtype(np.uint16): (0x7F807F807F807F80, 0x0080008000800080),
}


def has_non_finite(table: NDArray) -> bool:
    """Whether a float32 or float16 array, or one of bfloat16 bits (uint16), has NaN or infinity: an exponent of ones only."""
    found = np.zeros(_PARTS, np.uint64)
    exponent, one = (np.uint64(bits) for bits in _EXPONENTS[table.dtype])
    launch(_all_ones, table.size, _words(table), exponent, one, found)
    return bool(found.any())
