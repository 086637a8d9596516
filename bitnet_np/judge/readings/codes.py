"""Codes that stand for other numbers: those of ternary weights, and those of activations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...model import Ternary
from .. import operations as op
from .product import Product
from .wrong import Array, Wrong

_LEAST = 1e-3  # of 1: what codes stand for is known better


def other_values(wrong: Wrong) -> str | None:
    """The numbers that the codes of ternary weights stand for, where these are not -1, 0 and 1."""
    product = wrong.product
    if product is None or not isinstance(product.table, Ternary) or not product.error.any():
        return None
    sums = np.stack([product.inputs @ (product.matrix == code).T for code in (-1, 0, 1)])  # [3, T, n]
    values = np.linalg.lstsq(sums.reshape(3, -1).T, product.theirs.ravel(), rcond=1e-9)[0]
    if not product.accounts(np.tensordot(values, sums, 1)):
        return None
    if abs(values[1]) < _LEAST and abs(values[0] + values[2]) < _LEAST:
        return None  # a factor of everything
    known = {code: round(x) if abs(x - round(x)) < _LEAST else x for code, x in zip((-1, 0, 1), values, strict=True)}
    off = [f"{code} as {x:.4g}" for code, x in known.items() if abs(x - code) > _LEAST]
    return f"codes of ternary weights stand for other numbers: {', '.join(off)}"


def other_codes(wrong: Wrong) -> str | None:
    """The rule by which activations were made into codes, if one of the known ones gives these products."""
    product = wrong.product
    if product is None or not op.reads_codes(wrong.matrix, wrong.dialect) or not product.error.any():
        return None
    few = product.few
    with np.errstate(all="ignore"):
        for text, inputs in _coded(product):
            if few.accounts(inputs @ few.matrix.T) and product.accounts(inputs @ product.matrix.T):
                return text
    return None


def _coded(product: Product) -> Iterator[tuple[str, Array]]:
    """Yields inputs as other quantisers have them, [T, M]."""
    x, steps = product.raw, product.steps
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    wide = 255 / (high - low)
    codes = np.rint((x - low) * wide)
    zero = np.rint(-low * wide)
    for how, made in (("", codes), (", rounded", np.clip(np.rint(x * wide) + zero, 0, 255))):
        yield f"activations are in codes of 0 to 255 with a zero point{how}", (made - zero) / wide if how else made / wide + low
        yield f"activations are in codes of 0 to 255 with a zero point{how}, which is not subtracted", made / wide
    right = np.rint(x * steps)
    for most in range(126, 0, -1):
        yield f"codes are clipped to -{most}..{most}", np.clip(right, -most, most) / steps
    yield "codes are rounded up", np.ceil(x * steps) / steps
    yield "codes are rounded half away from zero", np.trunc(x * steps + np.copysign(0.5, x)) / steps
    column = 127 / np.maximum(np.abs(x).max(axis=0, keepdims=True), 1e-5)
    yield "activations have one scale for each input, the same for all tokens, not one for each token", np.rint(x * column) / column
    for by, which in ((1, "before"), (-1, "after")):
        others = np.roll(steps, by, axis=0)
        others[0 if by == 1 else -1] = steps[0 if by == 1 else -1]
        for cut, said in ((lambda q: q, ""), (lambda q: np.clip(q, -128, 127), ", and codes are cut")):
            yield f"the activation scale is that of the token {which}{said}", cut(np.rint(x * others)) / others
            yield f"sums are divided by the activation scale of the token {which}{said}", cut(right) / others
