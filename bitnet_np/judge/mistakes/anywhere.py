"""Mistakes that any operation can make: its output against the expected one. Their numbers are fitted to the other engine's."""

from collections.abc import Iterator

import numpy as np

from .mistake import Array, Cause


def fitted(theirs: Array, value: Array) -> Iterator[tuple[Cause, Array]]:
    """Yields each mistake with its result, the numbers fitted to theirs, where there is enough to fit them to. [T, width] each."""
    square = max(float((value * value).sum()), 1e-300)
    yield Cause("the sign is flipped", "any.sign"), -value
    ratio = float((theirs * value).sum()) / square
    yield Cause(_factor_said(ratio), "any.factor"), ratio * value
    if len(value) > 2:
        for shift, which in ((1, "previous"), (-1, "next")):
            rows = np.roll(value, shift, axis=0)
            end = 0 if shift == 1 else -1
            rows[end] = theirs[end]
            yield Cause(f"every row is that of the {which} token", "any.moved"), rows
    if len(value) > 1:
        for row, which in ((value[-1], "last"), (value[0], "first")):
            yield Cause(f"every row is that of the {which} token", "any.one_token"), np.broadcast_to(row, value.shape)


def _factor_said(ratio: float) -> str:
    """A factor in words, with what it comes from if that is known."""
    for steps, others in ((127, 128), (128, 127)):
        if abs(ratio - steps / others) < _SURE:
            return f"codes in steps of 1/{steps} are taken for 1/{others}: everything is {ratio:.6g} times what it should be"
    return f"everything is {ratio:.6g} times what it should be"


_SURE = 1e-5  # of a factor: a hundred roundings of float32
