"""Wrong orders of the weights of a row."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)  # of the pieces that are in disorder, and of runs inside them


def orders(width: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Yields wrong orders of the weights of a row, in words, and the place in the row that each weight is read from.

    Bytes that hold several weights, and registers of several lanes, are filled in runs or in turns: one taken for the other interleaves
    runs. Byte order and the order of fields reverse them. A pointer that is not moved on reads the first ones again.
    """
    everything = np.arange(width)
    for size in _SIZES:
        if width % size:
            continue
        pieces = everything.reshape(-1, size)
        parts = [n for n in _SIZES if n < size and size % n == 0]
        for run in parts:
            for together in (1, *(n for n in parts if n < run and run % n == 0)):
                turns = pieces.reshape(len(pieces), size // run, run // together, together).transpose(0, 2, 1, 3)
                yield _interleaved(size, run, together), turns.ravel()
        for run in parts:
            yield f"the first {run} of each {size} weights are read again and again", pieces[:, np.arange(size) % run].ravel()
        for run in (1, *parts):
            yield _reversed(size, run), pieces.reshape(len(pieces), -1, run)[:, ::-1].ravel()


def _interleaved(size: int, run: int, together: int) -> str:
    runs = f"the two halves of each {size} weights" if 2 * run == size else f"the {size // run} runs of {run} in each {size} weights"
    return f"{runs} are interleaved" + (f", {together} at a time" if together > 1 else "")


def _reversed(size: int, run: int) -> str:
    if run == 1:
        return f"each {size} weights are in the opposite order"
    if 2 * run == size:
        return f"the two halves of each {size} weights are exchanged"
    return f"the {size // run} runs of {run} in each {size} weights are in the opposite order"
