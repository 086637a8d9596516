"""Weights that an engine keeps in fewer bits than the file."""

from collections.abc import Callable
from functools import partial

from ..mistakes.conversions import in_fewer_bits
from .product import Product
from .wrong import Array, Wrong


def rounded_weights(wrong: Wrong) -> str | None:
    """The type that weights are rounded to, or the digits that they are cut to."""
    product = wrong.product
    if product is None or not product.error.any():
        return None
    types = in_fewer_bits(product.width)
    return next((f"weights are {text}" for text, narrow in types if product.is_by(partial(_narrowed, narrow))), None)


def _narrowed(narrow: Callable[[Array], Array], product: Product) -> Array:
    return narrow(product.matrix)
