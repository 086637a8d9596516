"""The draw of a token from its logits, without sorting them.

Tokens are ordered by falling logit, equals by rising id. Their probabilities are integers, so the order of a sum is free: sums over groups
of tokens lead to the one at which the running sum passes a target.
"""

import numpy as np

from .launching import Floats, read_only, serial

UNIT = 2.0**-40
"""Of a probability, relative to that of the likeliest token."""
MOST_TOKENS = 1 << 22
"""So many probabilities at most: their sum fits 64 bits."""
_BITS = 11  # of a key that are told apart at a time: 2,048 sums lie in a first-level cache


@serial
def _keys(logits):
    """An integer for each logit, in the same order; 0 and -0 have the same."""
    bits, keys = logits.view(np.uint32), np.empty(logits.size, np.uint32)
    for i in range(logits.size):
        sign = np.uint32(np.int32(bits[i]) >> np.int32(31))
        keys[i] = np.uint32(1 << 31) if logits[i] == 0 else bits[i] ^ (sign | np.uint32(1 << 31))
    return keys


@serial
def _first_past(keys, weights, target):
    """The first token, in order, at which the sum of the weights exceeds the target, and this sum. The sum of all must exceed it."""
    key, total = np.uint64(0), np.int64(0)
    for shift in range(2 * _BITS, -1, -_BITS):
        sums = np.zeros(1 << _BITS, np.int64)
        for i in range(keys.size):
            if np.uint64(keys[i]) >> np.uint64(shift + _BITS) == key:
                sums[(keys[i] >> np.uint32(shift)) % sums.size] += weights[i]
        digit = sums.size - 1
        while total + sums[digit] <= target:
            total += sums[digit]
            digit -= 1
        key = key << np.uint64(_BITS) | np.uint64(digit)
    token = -1
    while total <= target:
        token += 1
        if keys[token] == key:
            total += weights[token]
    return token, total


@serial
def _drawn(logits, probabilities, top_p, uniform):
    keys, weights, total = _keys(logits), np.empty(logits.size, np.int64), np.int64(0)
    for i in range(logits.size):
        weights[i] = np.int64(probabilities[i] * np.float32(1 / UNIT))
        total += weights[i]
    if top_p < 1:
        _, total = _first_past(keys, weights, min(np.int64(np.ceil(top_p * total)), total) - 1)
    token, _ = _first_past(keys, weights, min(np.int64(uniform * total), total - 1))  # the product may round to the total itself
    return token


def drawn(logits: Floats, probabilities: Floats, top_p: float, uniform: float) -> int:  # [V] x 2
    """The first token, in order, whose running sum of probabilities exceeds `uniform` of all, or of the fewest that hold `top_p` of all.

    Logits are no NaN. Probabilities are relative to the largest, which is 1; they are counted in UNITs, rounded down.
    """
    return int(_drawn(read_only(logits), probabilities, top_p, uniform))
