"""Wrong products whose inputs have factors."""

from __future__ import annotations

import numpy as np

from .product import Product, of_product
from .wrong import FEW, Array, Wrong, every

_MOST_UNKNOWNS = 1024
_EQUATIONS = 4  # for each unknown
_SEEN = 1e-9  # of the largest share in outputs: the factor of an input of less is taken to be right
_SAME = 0.02  # of the largest factor: two that are so near are one


@of_product
def weighted_inputs(wrong: Wrong, product: Product) -> str | None:
    """The inputs that sums leave out, or take with a factor, the same in all rows: by least squares, each or in groups.

    Outputs are linear in the factors. Their Gram matrix is the product, number by number, of those of inputs and of columns.
    """
    x, matrix, places = product.inputs, product.matrix, np.arange(product.width)
    gram = (x.T @ x) * (matrix.T @ matrix)
    error = ((x.T @ product.error) * matrix.T).sum(axis=1)
    size = -(-product.width // min(_MOST_UNKNOWNS, max(product.theirs.size // _EQUATIONS, 1)))
    for labels in (places // size, places % -(-product.width // size))[: 1 + (size > 1)]:
        groups = np.eye(int(labels.max()) + 1)[labels]  # [M, groups]
        grouped = groups.T @ gram @ groups
        seen = _SEEN * np.trace(grouped) * np.eye(len(grouped))
        away: Array = np.linalg.solve(grouped + seen, groups.T @ error)[labels]
        if product.accounts(x * (1 + away) @ matrix.T):
            return _described(product, away)
    return None


def _described(product: Product, away: Array) -> str | None:
    """Factors of inputs, given less 1, in words; None where one of all would do."""
    off = np.abs(away) > _SAME * np.abs(away).max()
    if off.all():
        return None
    where, factors = np.flatnonzero(off), 1 + away[off]
    inputs = f"{every(where, product.width, 'input')} {'is' if where.size == 1 else 'are'}"
    for factor, said in ((0.0, "not summed"), (2.0, "summed twice"), (float(np.median(factors)), "multiplied by {:.4g}")):
        if product.accounts(product.inputs * np.where(off, factor, 1) @ product.matrix.T):
            return f"{inputs} {said.format(factor)}"
    some = list(dict.fromkeys(f"{f:.3g}" for f in factors))
    return f"{inputs} multiplied by factors of their own: {', '.join(some[:FEW])}"
