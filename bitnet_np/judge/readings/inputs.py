"""Wrong products that are linear in what is wrong: factors of inputs, changed matrices."""

from __future__ import annotations

import numpy as np

from .product import Product, of_product, token_sizes
from .wrong import FEW, Array, Wrong, every, numbered

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


@of_product
def low_rank(wrong: Wrong, product: Product) -> str | None:
    """A low-rank error, and the inputs that it comes from if they are few: a changed weight matrix is wrong by a product of thin ones."""
    sizes = token_sizes(product.theirs, product.right)
    error = product.error / sizes
    left, size, right = np.linalg.svd(error, full_matrices=False)
    most = min(product.independent, *error.shape) // 4
    for rank in range(1, most + 1):
        if product.accounts(product.right + sizes * (left[:, :rank] * size[:rank] @ right[:rank])):
            break
    else:
        return None
    tokens, outputs = ((error**2).sum(axis=axis) > 1e-6 * (error**2).sum() for axis in (1, 0))
    if min(tokens.sum(), outputs.sum()) < 4 * rank:
        return None  # a few places are wrong, in any way
    basis, inputs = left[:, :rank], product.inputs / sizes
    outside = ((inputs - basis @ (basis.T @ inputs)) ** 2).sum(axis=0)
    inside = np.flatnonzero((outside <= 1e-6 * (inputs**2).sum(axis=0)) & (inputs != 0).any(axis=0))
    if inside.size == rank:
        return f"only {numbered('input', inside)} of {product.width} {'are' if rank > 1 else 'is'} summed with wrong weights"
    if rank == 1:
        return _one_pattern(product, sizes[:, 0] * left[:, 0] * size[0], right[0])
    return f"the error has rank {rank}: of a low-rank matrix that is added or missing, as a LoRA adapter, or of zero points of blocks"


def _one_pattern(product: Product, amounts: Array, pattern: Array) -> str:
    """An error of rank 1: a pattern [n] over the outputs, times an amount [T] of each token."""
    if _alike(pattern, product.matrix.sum(axis=1)):
        return "a number is added to all inputs of a token: an offset that is not corrected by the sums of rows"
    if _alike(amounts, product.inputs.sum(axis=1)):
        return "a number is added to all weights of a row: a zero point, or an offset of codes"
    return "the error has rank 1: one pattern of outputs, times another number at each position, as a low-rank matrix adds"


def _alike(a: Array, b: Array) -> bool:
    """Whether vectors are multiples of each other."""
    return bool(abs(a @ b) >= (1 - 1e-6) * np.linalg.norm(a) * np.linalg.norm(b) > 0)
