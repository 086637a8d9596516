"""Products of int8 codes: the scales of activations, and sums in narrow accumulators."""

from __future__ import annotations

import numpy as np

from ...model.records import Ternary
from .. import operations as op
from ..precision import DIGITS, NARROW_FLOATS
from ..roundings import to_digits
from .product import Product, of_product
from .wrong import FEW, Array, Wrong, matched

# --- scales of activations, fitted to each token ------------------------------------------------------------------------------------------


_COLUMNS = 12  # small sums, which leave few scales possible
_LEAST_OUTPUTS = 24
_RANGE = (1 / 16, 8)  # times the right scale


@of_product
def activation_scales(wrong: Wrong, product: Product) -> str | None:
    """The rule that a quantiser's scales follow: other tokens', one for all, a floor, another number of steps."""
    if not op.reads_codes(wrong.linear, wrong.dialect) or not isinstance(product.table, Ternary):
        return None
    if np.median((product.error**2).sum(axis=0) / (product.right**2).sum(axis=0)) <= matched(wrong.noise):
        return None  # a scale is in all outputs
    right = product.steps[:, 0]
    scales, tokens = right.copy(), np.flatnonzero((product.error**2).sum(axis=1) > 1e-6 * (product.right**2).sum(axis=1))
    for t in tokens:
        codes = np.clip(np.rint(product.raw[t] * product.steps), -128, 127)
        away = ((codes @ product.matrix.T / product.steps - product.theirs[t]) ** 2).sum(axis=1)  # by each token's scale
        shared = away.min() <= matched(wrong.noise) * (product.theirs[t] ** 2).sum()
        fitted = float(right[away.argmin()]) if shared else _scale(product.raw[t], product.matrix, product.theirs[t], float(scales[t]))
        if fitted is None:
            return None
        scales[t] = fitted
    return _of_others(scales, right) or (
        None if tokens.size < 2 else _rule(product.raw[tokens], scales[tokens], tokens.size == len(scales))
    )


def _scale(x: Array, matrix: Array, theirs: Array, near: float) -> float | None:
    """The steps per unit by which one token's codes give these products [n], if there is one near the right one."""
    order = np.argsort(np.abs(theirs))
    ordered = theirs[order][np.abs(theirs[order]) > 1e-3 * np.abs(theirs).max()]
    if len(matrix) < _LEAST_OUTPUTS or ordered.size < _COLUMNS:
        return None
    small = ordered[:_COLUMNS]
    largest = np.abs(small).max() * near * _RANGE[1]
    count = int(np.log(_RANGE[1] / _RANGE[0]) * largest * 8) + 2
    if count > 10**6:
        return None
    candidates = near * np.exp(np.linspace(np.log(_RANGE[0]), np.log(_RANGE[1]), count))
    off = np.abs(np.multiply.outer(candidates, small) - np.rint(np.multiply.outer(candidates, small))).max(axis=1)
    candidates = candidates[off < 0.2]
    for k in (_COLUMNS, 2 * _COLUMNS, ordered.size):  # sums tell a scale the better the larger they are
        sums = np.rint(np.multiply.outer(candidates, ordered[:k]))
        candidates = sums @ ordered[:k] / (ordered[:k] ** 2).sum()
    whole = np.multiply.outer(candidates, ordered)
    candidates = candidates[np.abs(whole - np.rint(whole)).max(axis=1, initial=0) < 0.05]
    for scale in np.unique(candidates[candidates > 0]):
        for low in (-128, -127):
            if ((matrix @ np.clip(np.rint(x * scale), low, 127) / scale - theirs) ** 2).sum() <= 1e-6 * (theirs**2).sum():
                return float(scale)
    return None


def _of_others(scales: Array, right: Array) -> str | None:
    """The tokens whose scales they are, where all are some token's."""
    away = np.abs(np.multiply.outer(scales, 1 / right) - 1)
    if away.min(axis=1).max() > 1e-6:
        return None
    owner = away.argmin(axis=1)
    if (owner == np.arange(len(owner))).all():
        return None
    runs = np.split(np.arange(len(owner)), np.flatnonzero(np.diff(owner)) + 1)
    chunks = [f"{run[0]} to {run[-1]}" for run in runs if run.size > 1]
    if chunks:
        shared = ", ".join(chunks[:FEW])
        return f"one activation scale serves several tokens, such as all of a chunk, instead of one for each: positions {shared}"
    t = int((owner != np.arange(len(owner))).argmax())
    return f"activation scales are another token's: position {t} has that of position {owner[t]}"


def _constant(numbers: Array) -> bool:
    return bool(np.ptp(numbers) <= 1e-3 * np.abs(numbers).max())


def _rule(x: Array, scales: Array, every: bool) -> str:
    """The rule in words. every: whether all tokens are wrong."""
    largest = np.abs(x).max(axis=1)
    ideal = 127 / np.maximum(largest, 1e-300)
    if np.allclose(np.log2(scales), np.rint(np.log2(scales)), atol=1e-3) and (scales <= 2 * ideal).all() and (scales >= ideal / 2).all():
        return "activation scales are rounded to powers of two"
    if _constant(scales) and (largest <= (floor := 127 / scales[0])).all():
        least = f"the largest magnitude is taken for at least {floor:.4g}"
        return f"the activation scale is fixed: {least}" if every else f"the activation scale's floor is wrong: {least}"
    if _constant(scales * largest):
        return f"activations are scaled to {scales[0] * largest[0]:.4g} steps instead of 127"
    for name, measure in (("mean magnitude", np.abs(x).mean(axis=1)), ("root mean square", np.sqrt((x**2).mean(axis=1)))):
        if _constant(scales * measure):
            return f"{127 / (scales[0] * measure[0]):.4g} times the {name} instead of the largest magnitude"
    return f"activation scales are wrong by factors from {(scales * largest).min() / 127:.4g} to {(scales * largest).max() / 127:.4g}"


# --- sums of int8 codes in an accumulator that is too small -------------------------------------------------------------------------------


@of_product
def narrow_partial_sums(wrong: Wrong, product: Product) -> str | None:
    """The type that sums are kept in while products are added one by one, or in several lanes."""
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
