"""Weights that an engine keeps in fewer bits than the file."""

import numpy as np

from ..narrow import rounded
from ..roundings import to_digits
from .product import Product
from .wrong import Array, Wrong

_NAMES = {11: "float16", 8: "bfloat16"}
_BLOCK_TYPES = {
    "int8": "int8, one scale for each row",
    "int4": "int4, one scale for each row",
    "q8_0": "q8_0",
    "q4_0": "q4_0",
    "q6_K": "q6_K",
}


def rounded_weights(wrong: Wrong) -> str | None:
    """The type that weights are rounded to, or the digits that they are cut to."""
    product = Product.of(wrong)
    if product is None or not product.error.any():
        return None
    for digits in range(11, 1, -1):
        name = f" ({_NAMES[digits]})" if digits in _NAMES else ""
        if product.is_by(lambda p, digits=digits: to_digits(p.matrix, digits)):
            return f"weights are rounded to {digits} significant bits{name}"
        if product.is_by(lambda p, digits=digits: _cut(p.matrix, digits)):
            return f"weights are cut to {digits} significant bits{name}, not rounded"
    for kind, words in _BLOCK_TYPES.items():
        if product.is_by(lambda p, kind=kind: rounded(p.matrix, kind)):
            return f"weights are rounded to {words}"
    for kind, most in (("8", 127), ("4", 7)):
        for size in (16, 32, 64, 128, 256):
            if product.width % size == 0 and product.is_by(lambda p, size=size, most=most: _in_groups(p.matrix, size, most)):
                return f"weights are rounded to {kind} bits, one scale for each {size} of them"
    return None


def _cut(x: Array, digits: int) -> Array:
    """x cut to this many significant bits."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(fraction, digits)), exponent - digits)


def _in_groups(x: Array, size: int, most: int) -> Array:
    """x in codes of -most to most, in steps of the largest of `size` numbers / most."""
    cut = x.reshape(len(x), -1, size)
    step = np.abs(cut).max(axis=2, keepdims=True) / most
    return (np.rint(cut / np.where(step == 0, 1, step)) * step).reshape(x.shape)
