"""Pooling: the rows of a sequence after the final norm -> the one vector that an embedding model gives for
it.

The mean is summed in float64 in the order of positions, divided by their number, and rounded to float32 once:
a batch, a path or a number of threads changes no bit.
"""

import numpy as np
from numpy.typing import NDArray

from ..model.records import Pooling

Floats = NDArray[np.float32]


def pool(rows: Floats, pooling: Pooling) -> Floats:
    """The mean of all rows of a sequence, its first row (cls) or its last: [T, D] -> [1, D]."""
    if pooling != "mean":
        return rows[:1] if pooling == "cls" else rows[-1:]
    total = np.zeros((1, rows.shape[1]))
    for row in rows:
        total += row
    return (total / len(rows)).astype(np.float32)
