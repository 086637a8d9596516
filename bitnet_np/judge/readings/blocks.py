"""Wrong products of ggml's block types, or of rows of weights in another order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...kernels.block_formats import FORMATS
from ...model.records import Blocks, Ternary
from ..mistakes import blocks as mistakes
from ..mistakes.blocks import Parts
from ..mistakes.orders import orders
from .product import Product, of_product
from .wrong import FEW, Array, Wrong


def misreadings(blocks: Blocks, rows: NDArray[np.int64]) -> Iterator[tuple[str, Array]]:
    """Yields rows of a table read with one thing wrong, in words and as weights [n, M]."""
    parts = Parts.of(blocks, rows)
    for text, misread in mistakes.misreadings(parts.form, blocks.shape[1]):
        yield text, misread(parts)


@of_product
def misread_blocks(wrong: Wrong, product: Product) -> str | None:
    """What is wrong in reading blocks of weights, or the order in which weights of any type are read."""
    if isinstance(product.table, Blocks) and product.table.type.name in FORMATS:
        zero = _zero_point(product, Parts.of(product.table, product.rows))
        if zero is not None:
            return zero
        few, parts = product.few, Parts.of(product.table, product.few.rows)
        for text, misread in mistakes.misreadings(parts.form, product.width):
            if few.accounts(few.inputs @ misread(parts).T):
                matrix = misread(Parts.of(product.table, product.rows))
                if product.accounts(product.inputs @ matrix.T):
                    return text
    for text, source in orders(product.width):
        if product.is_by(partial(_reordered, source)):
            return f"weights of each row are read in another order: {text}"
    return None


def _reordered(source: NDArray[np.int64], product: Product) -> Array:
    return product.matrix[:, source]


def _zero_point(product: Product, parts: Parts) -> str | None:
    """The number that is subtracted from all codes, or the factor of all minimums, where it is another."""
    x = product.inputs
    columns = [x @ (parts.scale * parts.codes).T, x @ parts.scale.T] + ([x @ parts.minimum.T] if parts.minimum.any() else [])
    design = np.stack([c.ravel() for c in columns], axis=1)
    if design.shape[0] < 4 * design.shape[1]:
        return None
    fit = np.linalg.lstsq(design, product.theirs.ravel(), rcond=1e-9)[0]
    if not product.accounts((design @ fit).reshape(product.theirs.shape)):
        return None
    factor, offset, minimums = (*fit, 1.0)[:3]
    scaled, moved, changed = abs(factor - 1) > 1e-3, abs(offset) > 1e-2, abs(minimums - 1) > 1e-3
    if moved and not scaled and not changed:
        subtracted = parts.bias - offset
        if abs(subtracted) < 1e-2:
            return f"{parts.bias} is not subtracted from codes: the zero point is missing"
        return f"{subtracted:.4g} is subtracted from codes instead of {parts.bias}: another zero point"
    if changed and not scaled and not moved:
        if abs(minimums) < 1e-3:
            return "minimums of blocks are left out"
        return (
            "minimums of blocks have the wrong sign"
            if abs(minimums + 1) < 1e-3
            else f"minimums of blocks are {minimums:.4g} times their right size"
        )
    return None


@of_product
def block_factors(wrong: Wrong, product: Product) -> str | None:
    """Blocks of weights whose scales, or whose zero points, are others: fitted to each row, where tokens are more than blocks."""
    if isinstance(product.table, Ternary):
        return None
    known = product.independent
    for size in (256, 128, 64, 32, 16):
        count = product.width // size
        if product.width % size or count < 2:
            continue
        cut = product.inputs.reshape(len(product.inputs), count, size)
        for zero_points in (False, True):
            if count * (1 + zero_points) + 2 > known:
                continue
            fits, computed = [], np.empty_like(product.theirs)
            for row in range(len(product.rows)):
                design = np.einsum("tkb,kb->tk", cut, product.matrix[row].reshape(count, size))
                if zero_points:
                    design = np.concatenate([design, cut.sum(axis=2)], axis=1)
                fit = np.linalg.lstsq(design, product.theirs[:, row], rcond=1e-9)[0]
                computed[:, row] = design @ fit
                fits.append(fit)
            if product.accounts(computed):
                return _described(size, np.array(fits), count, product.rows)
    return None


def _described(size: int, fits: Array, count: int, rows: NDArray[np.int64]) -> str | None:
    away = np.abs(fits[:, :count] - 1).max(axis=1)
    worst = int(away.argmax())
    if fits.shape[1] > count and away[worst] < 1e-3:
        return f"a number is added to all weights of a block of {size}: minimums or zero points are misread"
    if np.ptp(fits[:, :count]) < 1e-3:
        return None  # one factor for everything: known mistakes
    factors = ", ".join(f"{f:.3g}" for f in np.round(fits[worst, :count][:FEW], 6) + 0.0) + (", ..." if count > FEW else "")
    zero_points = ", and other minimums or zero points" if fits.shape[1] > count else ""
    return f"blocks of {size} weights have other scales: {factors} times the right ones in row {rows[worst]}{zero_points}"
