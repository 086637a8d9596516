"""Sums of int8 codes in an accumulator that is too small."""

import numpy as np

from ...model import Ternary
from .. import operations as op
from ..precision import DIGITS, NARROW_FLOATS
from ..roundings import to_digits
from .product import Product
from .wrong import Array, Wrong


def narrow_partial_sums(wrong: Wrong) -> str | None:
    """The type that sums are kept in while products are added one by one, or in several lanes."""
    product = wrong.product
    if product is None or not product.error.any():
        return None
    few = product.few
    for kind in NARROW_FLOATS:
        for lanes in (1, 4, 8, 16, 32):
            if few.width % lanes == 0 and few.accounts(_added(few, DIGITS[kind], lanes)):
                return f"sums are kept in {kind}" + (f", {lanes} of them side by side" if lanes > 1 else "") + ", product by product"
    return None


def _added(product: Product, digits: int, lanes: int) -> Array:
    """The products, summed in so many lanes and with so few digits, and then the lanes."""
    total = np.zeros((*product.theirs.shape, lanes))
    for i in range(0, product.width, lanes):
        terms = product.inputs[:, None, i : i + lanes] * product.matrix[:, i : i + lanes]
        total = to_digits(total + terms, digits)
    return to_digits(total.sum(axis=-1), digits)


def narrow_sums(wrong: Wrong) -> str | None:
    """The limits that sums of codes are cut at, or the width in bits in which they wrap around."""
    product = wrong.product
    if product is None or not isinstance(product.table, Ternary) or not op.reads_codes(wrong.matrix, wrong.dialect):
        return None
    theirs, right = product.theirs * product.steps, product.right * product.steps  # whole numbers
    low, high = theirs.min(), theirs.max()
    if ((right < low - 0.5) | (right > high + 0.5)).sum() >= 3 and product.accounts(np.clip(right, low, high) / product.steps):
        limits = [f"{limit:.6g}" for limit, cut in ((low, right < low - 0.5), (high, right > high + 0.5)) if cut.any()]
        return f"sums are cut at {' and '.join(limits)}: a narrow accumulator saturates"
    away = np.rint(right - theirs)
    if np.abs(away).max() >= 2.0**63:
        return None
    away = away.astype(np.int64)
    period = int(np.gcd.reduce(away.ravel()))
    half = period // 2
    if period >= 128 and period & (period - 1) == 0 and product.accounts(((right + half) % period - half) / product.steps):
        return f"sums wrap around in {period.bit_length() - 1} bits: a narrow accumulator"
    return None
