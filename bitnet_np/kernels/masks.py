"""The filling of mask arrays.

`visible_keys` is the rule for one query. Every kernel that fills a mask calls it, on every device.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .launching import Ints, launch, parallel, rule, shared


@rule
def visible_keys(position, window, prefix, block, sinks):
    """The keys that a query at `position` sees: 0..head and low..high. 0 stands for no window, no prefix, no blocks, no sinks."""
    high = position + 1
    low = max(0, high - window) if window else 0
    if block:
        low = max(low, position // block * block)
    return max(prefix, min(sinks, high)), low, high


@parallel
def _fill_mask(team, first, queries, past, keys, window, prefix, block, sinks, seen, hidden, out):
    n = out.shape[1]
    for item in shared(team, out.shape[0] * n):
        b, r = item // n, item % n
        row = out[b, r]
        a, low, c = 0, 0, 0
        if first + r < queries[b]:
            a, low, c = visible_keys(past[b] + first + r, window, prefix, block, sinks)
        a = min(a, keys[b])  # a prefix may be longer than the sequence; nothing else reaches past its keys
        low = max(low, a)
        c = max(c, low)
        for i in range(row.size):  # one plain loop over everything stays in vector registers
            row[i] = hidden if (i >= c) | ((i >= a) & (i < low)) else seen


# dtype -> the integers of its size, and the bits of "seen" and "hidden": Numba has no float16 on the CPU
_BITS: dict[np.dtype, tuple[Any, int, int]] = {
    np.dtype(np.bool_): (np.uint8, 1, 0),
    np.dtype(np.float16): (np.int16, 0, int(np.float16(-np.inf).view(np.int16))),
    np.dtype(np.float32): (np.int32, 0, int(np.float32(-np.inf).view(np.int32))),
    np.dtype(np.float64): (np.int64, 0, int(np.float64(-np.inf).view(np.int64))),
}


def fill_mask(
    out: NDArray, first: int, queries: Ints, past: Ints, keys: Ints, window: int, prefix: int, block: int, sinks: int
) -> None:  # [B, Q, K], [B] x 3
    """Fill rows `first` and on of the masks of B sequences: True and False, or 0 and -infinity.

    Sequence b has queries[b] queries at positions past[b] and on, and keys[b] keys. Rows and columns beyond those see nothing and are
    seen by nothing.
    """
    integer, seen, hidden = _BITS[out.dtype]
    pattern = window, prefix, block, sinks
    launch(_fill_mask, out.size // 8, first, queries, past, keys, *pattern, integer(seen), integer(hidden), out.view(integer))
