"""Scales of activations, fitted to each token: products of ternary weights with int8 codes are whole numbers."""

from collections.abc import Iterator

import numpy as np

from ...model import Ternary
from .. import operations as op
from .product import Product
from .wrong import Array, Wrong

_TOKENS = 16
_COLUMNS = 12  # small sums, which leave few scales possible
_LEAST_OUTPUTS = 24
_RANGE = (1 / 16, 8)  # times the right scale
_TWICE = "twice"


def activation_scales(wrong: Wrong) -> str | None:
    """The rule that a quantiser's scales follow: of groups of inputs, of the mean, with a floor, or one for all tokens."""
    product = wrong.product
    if (
        product is None
        or not op.reads_codes(wrong.matrix, wrong.dialect)
        or not isinstance(product.table, Ternary)
        or not product.error.any()
    ):
        return None
    grouped = _of_groups(product)
    if grouped is not None:
        return grouped
    wrong_tokens = np.flatnonzero((product.error**2).sum(axis=1) > 1e-6 * (product.right**2).sum(axis=1))
    if len(product.matrix) < _LEAST_OUTPUTS or wrong_tokens.size < 2:
        return None
    looked_at = wrong_tokens[np.unique(np.linspace(0, wrong_tokens.size - 1, _TOKENS).astype(int))]
    scales, ways = product.steps[:, 0].copy(), set()
    for t in looked_at:
        fitted = _scale(product.raw[t], product.matrix, product.theirs[t], float(scales[t]))
        if fitted is None:
            return None
        scales[t], how = fitted
        ways.add(how)
    if ways == {_TWICE}:
        return "codes are rounded twice: to 127 steps, and those again with another scale"
    return _rule(product.raw[looked_at], scales[looked_at], wrong_tokens.size == len(scales))


def _of_groups(product: Product) -> str | None:
    x = product.raw
    for size in (16, 32, 64, 128, 256):
        if x.shape[1] % size or x.shape[1] == size:
            continue
        cut = x.reshape(len(x), -1, size)
        step = np.maximum(np.abs(cut).max(axis=2, keepdims=True), 1e-5) / 127
        if product.accounts((np.rint(cut / step) * step).reshape(x.shape) @ product.matrix.T):
            return f"activations have one scale for each {size} inputs instead of one for each token"
    return None


def _codes(x: Array, scale: float, near: float) -> Iterator[tuple[str, Array]]:
    """Yields the codes of a token that quantisers may make with a scale: cut at either end of int8, or rounded to the right codes first."""
    for low in (-128, -127):
        yield "", np.clip(np.rint(x * scale), low, 127)
    yield _TWICE, np.rint(np.rint(x * near) * (scale / near))


def _scale(x: Array, matrix: Array, theirs: Array, near: float) -> tuple[float, str] | None:
    """The steps per unit by which one token's codes give these products [n], if there is one near the right one; how codes are made."""
    order = np.argsort(np.abs(theirs))
    ordered = theirs[order][np.abs(theirs[order]) > 1e-3 * np.abs(theirs).max()]
    if ordered.size < _COLUMNS:
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
        for how, codes in _codes(x, float(scale), near):
            if ((matrix @ codes / scale - theirs) ** 2).sum() <= 1e-6 * (theirs**2).sum():
                return float(scale), how
    return None


def _constant(numbers: Array) -> bool:
    return bool(np.ptp(numbers) <= 1e-3 * np.abs(numbers).max())


def _parts(size: Array) -> Iterator[tuple[str, Array]]:
    """Yields the largest magnitudes of a part of each token's inputs: size [T, M]."""
    width = size.shape[1]
    for parts in (2, 4, 8):
        for part in range(parts):
            cut = slice(part * width // parts, (part + 1) * width // parts)
            yield f"inputs {cut.start} to {cut.stop - 1} of {width}", size[:, cut].max(axis=1)
    for step in (2, 4, 8):
        yield f"every {'second' if step == 2 else f'{step}th'} input", size[:, ::step].max(axis=1)
    for share in (50, 75, 80, 90, 95, 98, 99, 99.5, 99.9):
        yield f"the {share:g} % smallest magnitudes", np.percentile(size, share, axis=1)


def _rule(x: Array, scales: Array, every: bool) -> str:
    """The rule in words. every: whether all tokens looked at are wrong."""
    size = np.abs(x)
    largest, mean, root = size.max(axis=1), size.mean(axis=1), np.sqrt((x**2).mean(axis=1))
    ideal = 127 / np.maximum(largest, 1e-300)
    if np.allclose(np.log2(scales), np.rint(np.log2(scales)), atol=1e-3) and (scales <= 2 * ideal).all() and (scales >= ideal / 2).all():
        return "activation scales are rounded to powers of two"
    if _constant(scales):
        floor = 127 / scales[0]
        if (largest <= floor).all():
            least = f"the largest magnitude is taken for at least {floor:.4g}"
            return f"the activation scale is fixed: {least}" if every else f"the activation scale's floor is wrong: {least}"
        return f"one activation scale, {scales[0]:.5g} steps per unit, is used for all tokens, and codes are cut"
    if _constant(scales * largest):
        return f"activations are scaled to {scales[0] * largest[0]:.4g} steps instead of 127"
    for name, measure in _parts(size):
        if _constant(scales * measure) and abs(scales[0] * measure[0] / 127 - 1) < 1e-3:
            return f"activation scales are of {name} alone, and codes are cut"
    for name, measure in (("mean of their magnitudes", mean), ("root of their mean square", root)):
        if _constant(scales * measure):
            times = 127 / (scales[0] * measure[0])
            return f"activations are scaled by the {name} instead of the largest: 127 steps are {times:.4g} times that"
    return f"activation scales are wrong by factors from {(scales * largest).min() / 127:.4g} to {(scales * largest).max() / 127:.4g}"
