"""Mistakes that any operation can make: its output against the expected one. Their numbers are fitted to the other engine's."""

from collections.abc import Iterator

import numpy as np

from .mistake import Array, Cause


def fitted(theirs: Array, value: Array) -> Iterator[tuple[Cause, Array]]:
    """Yields each mistake with its result, the numbers fitted to theirs, where there is enough to fit them to. [T, width] each."""
    square = max(float((value * value).sum()), 1e-300)
    yield Cause("the sign is flipped", "any.sign"), -value
    ratio = float((theirs * value).sum()) / square
    yield Cause(f"everything is {ratio:.6g} times what it should be", "any.factor"), ratio * value
    if len(value) > 2:
        for shift, which in ((1, "previous"), (-1, "next")):
            rows = np.roll(value, shift, axis=0)
            end = 0 if shift == 1 else -1
            rows[end] = theirs[end]
            yield Cause(f"every row is that of the {which} token", "any.moved"), rows
