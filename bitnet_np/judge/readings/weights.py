"""Weights that an engine keeps in fewer bits than the file."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import numpy as np

from ..narrow import rounded
from ..roundings import to_digits
from .product import Product
from .wrong import Array, Wrong

CODE_TYPES = {
    "int8": "int8, one scale for each row",
    "int4": "int4, one scale for each row",
    "q8_0": "q8_0",
    "q4_0": "q4_0",
    "q6_K": "q6_K",
}


def rounded_weights(wrong: Wrong) -> str | None:
    """The type that weights are rounded to, or the digits that they are cut to."""
    product = wrong.product
    if product is None or not product.error.any():
        return None
    types = chain(_narrow_types(product.width), _pruned(product.width))
    return next((f"weights are {text}" for text, narrow in types if product.is_by(partial(_narrowed, narrow))), None)


def _narrowed(narrow: Callable[[Array], Array], product: Product) -> Array:
    return narrow(product.matrix)


def _narrow_types(width: int) -> Iterator[tuple[str, Callable[[Array], Array]]]:
    """Yields narrow types in words, and functions that round rows of weights [n, M] to them."""
    for digits in range(11, 1, -1):
        yield f"rounded to {digits} significant bits", partial(to_digits, digits=digits)
        yield f"cut to {digits} significant bits, not rounded", partial(_cut, digits=digits)
    for kind, words in CODE_TYPES.items():
        yield f"rounded to {words}", partial(rounded, kind=kind)
    for bits, most in ((8, 127), (4, 7)):
        for size in (16, 32, 64, 128, 256):
            if width % size == 0:
                yield f"rounded to {bits} bits, one scale for each {size} of them", partial(_in_groups, size=size, most=most)


def _pruned(width: int) -> Iterator[tuple[str, Callable[[Array], Array]]]:
    """Yields sparse weights in words, and functions that leave the largest few of each group."""
    for group, kept in ((4, 2), (4, 1), (2, 1), (8, 4)):
        if width % group == 0:
            yield f"pruned: of each {group} only the {kept} largest are left", partial(_largest, group=group, kept=kept)


def _largest(x: Array, group: int, kept: int) -> Array:
    cut = x.reshape(len(x), -1, group)
    least = np.sort(np.abs(cut), axis=2)[:, :, -kept, None]
    return np.where(np.abs(cut) >= least, cut, 0).reshape(x.shape)


def _cut(x: Array, digits: int) -> Array:
    """x cut to this many significant bits."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.trunc(np.ldexp(fraction, digits)), exponent - digits)


def _in_groups(x: Array, size: int, most: int) -> Array:
    """x in codes of -most to most, in steps of the largest of `size` numbers / most."""
    cut = x.reshape(len(x), -1, size)
    step = np.abs(cut).max(axis=2, keepdims=True) / most
    return (np.rint(cut / np.where(step == 0, 1, step)) * step).reshape(x.shape)
