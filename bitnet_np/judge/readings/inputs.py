"""Wrong products that are linear in what is wrong: factors of inputs and of blocks, changed matrices, another input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...model.records import Ternary
from ..graph import operations
from .product import Product, of_product, token_sizes
from .wrong import FEW, ROWS, Array, Indices, Wrong, every, numbered, runs

_MOST_UNKNOWNS = 1024
_EQUATIONS = 4  # for each unknown
_SEEN = 1e-9  # of the largest share in outputs: the factor of an input of less is taken to be right
_SAME = 0.02  # of the largest factor: two that are so near are one
_MOST_WEIGHTS = 2 * 10**7  # of a matrix whose input is solved for
_WORST_CONDITION = 1e8  # of its Gram matrix
_RECOVERED = 1e-9  # NMSE of a solved input


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
def block_factors(wrong: Wrong, product: Product) -> str | None:
    """Blocks of weights whose scales, or whose zero points, are others: fitted to each row, where tokens are more than blocks."""
    for size in (256, 128, 64, 32, 16):
        count = product.width // size
        if isinstance(product.table, Ternary) or product.width % size or count < 2:
            continue
        cut = product.inputs.reshape(len(product.inputs), count, size)
        for zero_points in (False, True):
            if count * (1 + zero_points) + 2 > product.independent:
                continue
            design = np.einsum("tkb,nkb->ntk", cut, product.matrix.reshape(-1, count, size))
            if zero_points:
                design = np.concatenate([design, np.broadcast_to(cut.sum(axis=2), design.shape)], axis=2)
            fits = np.einsum("nkt,tn->nk", np.linalg.pinv(design, rcond=1e-9), product.theirs)
            if product.accounts(np.einsum("ntk,nk->tn", design, fits)):
                return _of_blocks(size, fits, count, product.rows)
    return None


def _of_blocks(size: int, fits: Array, count: int, rows: Indices) -> str | None:
    away = np.abs(fits[:, :count] - 1).max(axis=1)
    worst = int(away.argmax())
    if fits.shape[1] > count and away[worst] < 1e-3:
        return f"a number is added to all weights of a block of {size}: minimums or zero points are misread"
    if np.ptp(fits[:, :count]) < 1e-3:
        return None  # one factor for everything: known mistakes
    factors = ", ".join(f"{f:.3g}" for f in np.round(fits[worst, :count][:FEW], 6) + 0.0) + (", ..." if count > FEW else "")
    zero_points = ", and other minimums or zero points" if fits.shape[1] > count else ""
    return f"blocks of {size} weights have other scales: {factors} times the right ones in row {rows[worst]}{zero_points}"


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
    product = Product.of(wrong, np.arange(min(len(x), ROWS)), np.arange(height))
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
