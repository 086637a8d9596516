"""Another bias than a product's own."""

from collections.abc import Iterator

import numpy as np

from ...families import MATRICES
from .wrong import Array, Wrong, every, runs

_OFFSETS = (1, -1, 2, -2, 4, -4)  # elements
_LEAST = 4  # positions: their mean is the bias that was added


def other_bias(wrong: Wrong) -> str | None:
    """The bias that was added, if it is its own several times, or that of another matrix."""
    column = (wrong.theirs - wrong.value).mean(axis=0)
    bias = wrong.matrix.bias
    if bias is not None:
        products = wrong.value - bias
        if bias.size >= len(products) and wrong.accounts(products + bias[: len(products), None]):
            return "the bias is added along the wrong axis: its element is that of the position"
        factor = float(((wrong.theirs - bias) * products).sum() / max((products**2).sum(), 1e-300))
        if wrong.accounts(factor * products + bias):
            return f"products are {factor:.5g} times what they should be, the bias is right"
    if len(wrong.theirs) < _LEAST or not wrong.accounts(wrong.value + column):
        return None
    own = np.zeros_like(column) if bias is None else bias.astype(np.float64)
    if own.any():
        times = float((column + own) @ own / (own @ own))
        if wrong.accounts(wrong.value + (times - 1) * own):
            return "the bias is added twice" if abs(times - 2) < 1e-3 else f"the bias is added {times:.4g} times"
        missing = np.isclose(column, -own, rtol=1e-3, atol=1e-4 * np.abs(own).max()) & (np.abs(own) > 1e-3 * np.abs(own).max())
        if wrong.accounts(wrong.value - np.where(missing, own, 0)):
            return f"the bias is missing at {runs('element', np.flatnonzero(missing))}"
        for by in _OFFSETS:
            moved = np.roll(own, -by)
            moved[slice(-by, None) if by > 0 else slice(None, -by)] = 0
            if wrong.accounts(wrong.value - own + moved):
                return f"the bias is read {abs(by)} element{'s' * (abs(by) > 1)} too {'late' if by > 0 else 'early'}"
        added = np.sort(column + own)
        if wrong.accounts(wrong.value + column) and np.allclose(added, np.sort(own), rtol=1e-3, atol=1e-3 * np.abs(own).max()):
            return "the bias's elements are in another order"
    for name, other in _biases(wrong):
        if own.any() and wrong.accounts(wrong.value - own + other):
            return f"the bias of {name} is added instead of its own"
        if wrong.accounts(wrong.value + other):
            return f"the bias of {name} is added" + (" too" if own.any() else ": it has none of its own")
    return None


def unwritten(wrong: Wrong) -> str | None:
    """The outputs that are their bias alone, at every position."""
    bias = wrong.matrix.bias
    columns = np.flatnonzero(wrong.places.any(axis=0))
    if bias is None or columns.size == wrong.theirs.shape[1]:
        return None
    alone = np.broadcast_to(bias, wrong.theirs.shape)[:, columns]
    if not np.allclose(wrong.theirs[:, columns], alone, rtol=1e-5, atol=1e-6 * np.abs(wrong.value).max()):
        return None
    elements = every(columns, wrong.theirs.shape[1], "element")
    return f"{elements} of each position {'are' if columns.size > 1 else 'is'} the bias alone: no product is written"


def _biases(wrong: Wrong) -> Iterator[tuple[str, Array]]:
    """Yields the biases of other matrices, of as many elements as this one's or the first ones of more, by name."""
    for n, layer in enumerate(wrong.model.layers):
        for name in MATRICES:
            linear = getattr(layer, name)
            height = wrong.theirs.shape[1]
            if linear is None or linear is wrong.matrix or linear.bias is None or linear.bias.size < height:
                continue
            first = f"'s first {height} rows" if linear.bias.size > height else ""
            yield (name if n == wrong.key.layer else f"layer {n}'s {name}") + first, linear.bias[:height].astype(np.float64)
