"""Another bias than a product's own."""

from collections.abc import Iterator

import numpy as np

from ...families import MATRICES
from .wrong import Array, Wrong

_LEAST = 4  # positions: their mean is the bias that was added


def other_bias(wrong: Wrong) -> str | None:
    """The bias that was added, if it is its own several times, or that of another matrix."""
    column = (wrong.theirs - wrong.value).mean(axis=0)
    if len(wrong.theirs) < _LEAST or not wrong.accounts(wrong.value + column):
        return None
    own = np.zeros_like(column) if wrong.matrix.bias is None else wrong.matrix.bias.astype(np.float64)
    if own.any():
        times = float((column + own) @ own / (own @ own))
        if wrong.accounts(wrong.value + (times - 1) * own):
            return "the bias is added twice" if abs(times - 2) < 1e-3 else f"the bias is added {times:.4g} times"
    for name, bias in _biases(wrong):
        if own.any() and wrong.accounts(wrong.value - own + bias):
            return f"the bias of {name} is added instead of its own"
        if wrong.accounts(wrong.value + bias):
            return f"the bias of {name} is added" + (" too" if own.any() else ": it has none of its own")
    return None


def _biases(wrong: Wrong) -> Iterator[tuple[str, Array]]:
    """Yields the biases of other matrices of the same height, by name."""
    for n, layer in enumerate(wrong.model.layers):
        for name in MATRICES:
            linear = getattr(layer, name)
            if linear is None or linear is wrong.matrix or linear.bias is None or linear.bias.size != wrong.theirs.shape[1]:
                continue
            yield (name if n == wrong.key.layer else f"layer {n}'s {name}"), linear.bias.astype(np.float64)
