"""Codes and types of fewer bits: what codes stand for, the scales of activations, narrow accumulators, weights in fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ...model.records import Ternary
from .. import operations as op
from ..mistakes.conversions import in_fewer_bits
from ..mistakes.quantiser import in_groups
from ..precision import DIGITS, NARROW_FLOATS
from ..roundings import to_digits
from .product import Product, of_product
from .wrong import Array, Wrong

_LEAST = 1e-3  # of 1: what codes stand for is known better


@of_product
def other_values(wrong: Wrong, product: Product) -> str | None:
    """The numbers that the codes of ternary weights stand for, where these are not -1, 0 and 1."""
    if not isinstance(product.table, Ternary):
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


@of_product
def other_codes(wrong: Wrong, product: Product) -> str | None:
    """The rule by which activations were made into codes, if one of the known ones gives these products."""
    if not op.reads_codes(wrong.linear, wrong.dialect):
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


# --- scales of activations, fitted to each token ------------------------------------------------------------------------------------------


_TOKENS = 16
_COLUMNS = 12  # small sums, which leave few scales possible
_LEAST_OUTPUTS = 24
_RANGE = (1 / 16, 8)  # times the right scale
_TWICE = "twice"


@of_product
def activation_scales(wrong: Wrong, product: Product) -> str | None:
    """The rule that a quantiser's scales follow: of groups of inputs, of the mean, with a floor, or one for all tokens."""
    if not op.reads_codes(wrong.linear, wrong.dialect) or not isinstance(product.table, Ternary):
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
    for size in (16, 32, 64, 128, 256):
        if product.width % size == 0 and product.width > size and product.accounts(in_groups(product.raw, size) @ product.matrix.T):
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


def narrow_sums(wrong: Wrong) -> str | None:
    """The limits that sums of codes are cut at, or the width in bits in which they wrap around."""
    product = wrong.product
    if product is None or not isinstance(product.table, Ternary) or not op.reads_codes(wrong.linear, wrong.dialect):
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


# --- weights that an engine keeps in fewer bits than the file -----------------------------------------------------------------------------


@of_product
def rounded_weights(wrong: Wrong, product: Product) -> str | None:
    """The type that weights are rounded to, or the digits that they are cut to."""
    types = in_fewer_bits(product.width)
    return next((f"weights are {text}" for text, narrow in types if product.is_by(partial(_narrowed, narrow))), None)


def _narrowed(narrow: Callable[[Array], Array], product: Product) -> Array:
    return narrow(product.matrix)
