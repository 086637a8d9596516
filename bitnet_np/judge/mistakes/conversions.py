"""Weights that an engine converted to a type of fewer bits."""

from collections.abc import Iterator

import numpy as np

from ... import widen
from ...model import Linear, Table, Ternary
from ..graph import FIELDS, LOGITS
from ..narrow import rounded
from ..precision import DIGITS, HEADS, NARROW_FLOATS
from ..roundings import to_digits
from . import norms
from .mistake import Array, Compute, Mistake, Numbers, Site

AT = (*FIELDS, LOGITS.name, *norms.AT)


def _converted(x: Array, kind: str) -> Array:
    return to_digits(x, DIGITS[kind]) if kind in DIGITS else rounded(x, kind)


def _narrow(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if site.name in norms.AT:
        gain = norms.gain_of(site)
        for kind in NARROW_FLOATS:
            narrow = _converted(gain, kind)
            if not np.array_equal(narrow, gain):
                yield {"kind": kind}, norms.weighted(site, narrow)
        return
    linear, weights = site.linear, site.linear.weights
    if isinstance(weights, Ternary):
        return
    for kind in HEADS[1:]:
        yield {"kind": kind}, _product(site, linear, weights, kind)


def _product(site: Site, linear: Linear, table: Table, kind: str) -> Compute:
    """The product with a converted matrix; NaN where the conversion changes nothing."""

    def compute(x: Array) -> Array:
        matrix = widen.float32(table).astype(np.float64)
        narrow = _converted(matrix, kind)
        if np.array_equal(narrow, matrix):
            return np.full((len(x), len(matrix)), np.nan)
        scale = 1.0 if linear.scale is None else float(linear.scale)
        bias = np.zeros(len(matrix)) if linear.bias is None else linear.bias.astype(np.float64)
        return x @ narrow.T * scale + (_converted(bias, kind) if kind in NARROW_FLOATS else bias)

    return site.of(compute)


MISTAKES = (Mistake("weights.narrow", "weights are rounded to {kind}", AT, compute=_narrow, fault=False),)
