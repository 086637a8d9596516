"""Inputs that are another tensor's rows, or rows at an offset: the operation is computed again from them."""

from collections.abc import Iterator

import numpy as np

from ...traces.points import Key
from .wrong import Array, Wrong

_OFFSETS = (1, -1, 2, -2, 4, -4, 8, -8)  # elements


def stale_inputs(wrong: Wrong) -> str | None:
    """The input that is the layer's before, an earlier chunk's, or read at an offset, if the operation gives their numbers of it."""
    with np.errstate(all="ignore"):
        for i, key in enumerate(wrong.operation.inputs):
            for text, x in _others(wrong, key, wrong.inputs[i]):
                inputs = [*wrong.inputs[:i], x, *wrong.inputs[i + 1 :]]
                if wrong.accounts(wrong.operation.evaluate(*inputs).value):
                    return f"{key.name} is {text}"
    return None


def _others(wrong: Wrong, key: Key, x: Array) -> Iterator[tuple[str, Array]]:
    before = None if not key.layer else wrong.tensors.get(Key(key.name, key.layer - 1))
    if before is not None and before.shape == x.shape:
        yield "that of the layer before: its buffer was not written in this layer", before
    begin = int(wrong.places.any(axis=1).argmax())
    if len(x) <= 2 * begin:
        yield (
            f"from position {begin} on that of position 0 on: the rows of an earlier chunk",
            np.concatenate([x[:begin], x[: len(x) - begin]]),
        )
    if x.dtype.kind != "f":
        return
    for by in _OFFSETS:
        side = "late" if by > 0 else "early"
        text = f"read {abs(by)} element{'s' * (abs(by) > 1)} too {side}"
        flat = np.roll(x.ravel(), -by)
        flat[slice(-by, None) if by > 0 else slice(None, -by)] = 0
        yield text, flat.reshape(x.shape)
        rows = np.roll(x, -by, axis=1)
        rows[:, slice(-by, None) if by > 0 else slice(None, -by)] = 0
        yield f"{text}, with zeros at the end of a row", rows
