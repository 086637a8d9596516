"""Checks for invalid weights: NaN and infinity, and ternary codes that no writer produces."""

import numpy as np
from numpy.typing import NDArray

from .launching import launch, parallel, read_only, shared

_PARTS = 64  # parts of an array, each checked by one owner


def _words(array: NDArray) -> NDArray[np.uint64]:
    """The bytes of an array as words of eight, filled up with zeros: words keep LLVM's loops in vector registers."""
    data = array.reshape(-1).view(np.uint8)
    if data.size % 8:
        data = np.concatenate([data, np.zeros(-data.size % 8, np.uint8)])
    return read_only(data.view(np.uint64))


@parallel
def _code_three(team, words, hits):
    for part in shared(team, hits.size):
        both = np.uint64(0)
        share = words[part * words.size // hits.size : (part + 1) * words.size // hits.size]
        for i in range(share.size):  # from 0: Numba must allow for negative indices otherwise, and LLVM then stays scalar
            both |= share[i] & (share[i] >> np.uint64(1))
        hits[part] = both & np.uint64(0x5555555555555555)


def has_code_three(codes: NDArray[np.uint8]) -> bool:
    """Whether any two-bit code is 3, which no writer of I2_S produces (bitnet.cpp would count it as +2)."""
    hits = np.zeros(_PARTS, np.uint64)
    launch(_code_three, codes.size, _words(codes), hits)
    return bool(hits.any())


@parallel
def _all_ones(team, words, exponent, one, hits):
    for part in shared(team, hits.size):
        carried = np.uint64(0)
        share = words[part * words.size // hits.size : (part + 1) * words.size // hits.size]
        for i in range(share.size):  # from 0: Numba must allow for negative indices otherwise, and LLVM then stays scalar
            carried |= (share[i] & exponent) + one
        hits[part] = carried & ~exponent


# dtype -> the exponent bits of each number in a word, and the lowest of them, which carries out of an exponent of ones when added
_EXPONENTS = {
    np.dtype(np.float32): (0x7F8000007F800000, 0x0080000000800000),
    np.dtype(np.float16): (0x7C007C007C007C00, 0x0400040004000400),
    np.dtype(np.uint16): (0x7F807F807F807F80, 0x0080008000800080),
}


def has_non_finite(table: NDArray) -> bool:
    """Whether a float32 or float16 array, or one of bfloat16 bits (uint16), has NaN or infinity, an exponent of ones."""
    hits = np.zeros(_PARTS, np.uint64)
    exponent, one = (np.uint64(bits) for bits in _EXPONENTS[table.dtype])
    launch(_all_ones, table.size, _words(table), exponent, one, hits)
    return bool(hits.any())
