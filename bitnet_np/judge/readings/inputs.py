"""Inputs of a product that are left out of its sums, or are summed with a factor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..graph import operations
from .product import Product, of_product, token_sizes
from .wrong import FEW, ROWS, Array, Wrong, every, numbered, runs

_MOST_GROUPS = 256
_MOST_WEIGHTS = 2 * 10**7  # of a matrix whose input is solved for
_WORST_CONDITION = 1e8  # of its Gram matrix
_RECOVERED = 1e-9  # NMSE of a solved input


@of_product
def weighted_inputs(wrong: Wrong, product: Product) -> str | None:
    """The inputs that sums leave out, or take twice: blocks, every n-th input, or a part of each block, with one factor in all rows."""
    for labels in _groupings(product.width):
        count = int(labels.max()) + 1
        if count > _MOST_GROUPS or 4 * count > product.theirs.size:
            continue
        parts = _sums(product, labels, count)  # [groups, T * n]
        gram = parts @ parts.T
        fit = np.linalg.lstsq(gram, parts @ product.theirs.ravel(), rcond=1e-10)[0].astype(np.float64)
        if product.accounts((fit @ parts).reshape(product.theirs.shape)):
            return _described(fit, labels)
    return None


def _groupings(width: int) -> Iterator[NDArray[np.int64]]:
    """Yields the group of each input [M]: places in a period of inputs, then blocks, the fewest groups first."""
    places = np.arange(width)
    sizes = [n for n in (2, 4, 8, 16, 32, 64, 128, 256) if n < width]
    for count in (2, 4, 8, 16, 32):
        for period in sizes:
            if period % count == 0:
                yield places % period // (period // count)
    for size in reversed(sizes):
        yield places // size


def _sums(product: Product, labels: NDArray[np.int64], count: int) -> Array:
    return np.stack([(product.inputs[:, labels == g] @ product.matrix[:, labels == g].T).ravel() for g in range(count)])


def _described(fit: Array, labels: NDArray[np.int64]) -> str | None:
    off = np.abs(fit - 1) > 1e-3
    if not off.any() or off.all():
        return None
    factors = fit[off]
    inputs = np.flatnonzero(off[labels])
    whole = every(inputs, labels.size, "input")
    if np.abs(factors).max() < 1e-3:
        return f"{whole} are not summed"
    if np.abs(factors - 2).max() < 1e-3:
        return f"{whole} are summed twice"
    if np.ptp(factors) < 1e-3 * np.abs(factors).max():
        return f"{whole} are multiplied by {factors[0]:.4g}"
    return f"{whole} are multiplied by factors of their own: {', '.join(f'{f:.3g}' for f in factors[:FEW])}"


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
        return _one_pattern(product, sizes[:, 0] * left[:, 0] * size[0], right[0], wrong)
    if any(
        _within(basis, inputs.reshape(len(inputs), -1, size).sum(axis=2)) for size in (16, 32, 64, 128, 256) if not product.width % size
    ):
        return None  # the sums of blocks of inputs: minimums or zero points
    return f"the error has rank {rank}: a low-rank matrix is added or missing, as of a LoRA adapter"


def _one_pattern(product: Product, amounts: Array, pattern: Array, wrong: Wrong) -> str | None:
    """An error of rank 1: a pattern [n] over the outputs, times an amount [T] of each token."""
    bias = wrong.linear.bias
    totals = product.inputs.sum(axis=1)
    if _alike(pattern, product.matrix.sum(axis=1)):
        added = amounts * (pattern @ product.matrix.sum(axis=1)) / (product.matrix.sum(axis=1) ** 2).sum()
        codes = added * product.steps[:, 0]
        if np.ptp(codes) < 1e-3 * np.abs(codes).max() and (product.steps != 1).any():
            return f"{codes.mean():.4g} is added to all codes of the input, and not corrected by the sums of rows"
        return "a number is added to all inputs of a token: an offset that is not corrected by the sums of rows"
    if _alike(amounts, totals):
        return "a number is added to all weights of a row: a zero point, or an offset of codes"
    if bias is not None and _alike(pattern, bias[product.rows].astype(np.float64)):
        shares = amounts * (pattern @ pattern) / (pattern @ bias[product.rows]) * product.scale
        off = np.abs(shares) > 1e-3
        if np.abs(shares[off] + 1).max() < 1e-3:
            there = product.tokens[~off]
            rest = f": it is added at {runs('position', there)} alone" if there.size <= FEW else ""
            return f"the bias is missing at {runs('position', product.tokens[off])}{rest}"
    some = np.abs(amounts) > 1e-3 * np.abs(amounts).max()
    if np.ptp(amounts[some]) < 1e-3 * np.abs(amounts).max():
        return f"a constant is added to each output at {runs('position', product.tokens[some])}"
    return "the error has rank 1: one pattern of outputs, times another number at each position, as a low-rank matrix adds"


def recovered(wrong: Wrong) -> Wrong | None:
    """The input that makes their outputs, beside the right one, where a matrix has enough rows to tell it; None where nothing does."""
    linear, (x,) = wrong.linear, wrong.inputs
    height, width = linear.shape
    if height < width or height * width > _MOST_WEIGHTS:
        return None
    product = Product.of(wrong, np.arange(min(len(x), ROWS)), height)
    if product is None or not product.error.any():
        return None
    gram = product.matrix.T @ product.matrix
    if np.linalg.cond(gram) > _WORST_CONDITION:
        return None
    theirs: Array = np.linalg.solve(gram, product.matrix.T @ product.theirs.T).T.astype(np.float64)
    if not product.accounts(theirs @ product.matrix.T):
        return None
    source = next(o for o in operations(wrong.model, wrong.dialect) if o.key == wrong.operation.inputs[0])
    inputs = [np.asarray(wrong.tensors[key])[: len(theirs)].astype(np.float64) for key in source.inputs if key in wrong.tensors]
    if len(inputs) < len(source.inputs):
        return None
    places = np.abs(theirs - product.inputs) > 1e-4 * np.abs(product.inputs).max()
    return replace(
        wrong, operation=source, inputs=inputs, value=product.inputs, theirs=theirs, places=places, noise=max(wrong.noise, _RECOVERED)
    )


def _within(basis: Array, columns: Array) -> bool:
    """Whether columns [T, K] span all of an orthonormal basis [T, r], and are too few to span anything."""
    if columns.shape[1] + 2 > len(columns):
        return False
    left = np.linalg.qr(columns)[0]
    return bool(np.abs(basis - left @ (left.T @ basis)).max() < 1e-3)


def _alike(a: Array, b: Array) -> bool:
    """Whether vectors are multiples of each other."""
    return bool(abs(a @ b) >= (1 - 1e-6) * np.linalg.norm(a) * np.linalg.norm(b) > 0)
