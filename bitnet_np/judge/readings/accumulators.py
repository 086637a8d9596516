"""Sums of int8 codes in an accumulator that is too small."""

import numpy as np

from ...model import Ternary
from .. import operations as op
from .wrong import Wrong


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
    away = np.rint(right - theirs).astype(np.int64)
    period = int(np.gcd.reduce(away.ravel()))
    half = period // 2
    if period >= 128 and period & (period - 1) == 0 and product.accounts(((right + half) % period - half) / product.steps):
        return f"sums wrap around in {period.bit_length() - 1} bits: a narrow accumulator"
    return None
