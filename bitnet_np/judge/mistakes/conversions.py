"""Weights that an engine converted to a type of fewer bits."""

from dataclasses import replace

import numpy as np

from ...model import widen
from ...model.records import Linear, Table, Ternary
from .. import operations as op
from ..graph import FIELDS, LOGITS, OF_EXPERTS
from ..narrow import rounded
from ..precision import DIGITS, HEADS, NARROW_FLOATS
from ..roundings import to_digits
from . import norms
from .mistake import Array, Compute, Computes, Mistake, Site

MATRICES_AT = (*FIELDS, LOGITS.name)
AT = (*MATRICES_AT, *OF_EXPERTS, *norms.AT)


def _converted(x: Array, kind: str) -> Array:
    return to_digits(x, DIGITS[kind]) if kind in DIGITS else rounded(x, kind)


def _matrices(site: Site) -> Computes:
    """Products with converted matrices whose biases are float32, as in GGUF files."""
    yield from _narrow(site, biases=False)


def _narrow(site: Site, biases: bool = True) -> Computes:
    if site.name in norms.AT:
        yield from norms.narrow(site)
        return
    if site.name in OF_EXPERTS:
        yield from _of_experts(site)
        return
    linear, weights = site.linear, site.linear.weights
    if isinstance(weights, Ternary):
        return
    for kind in HEADS[1:]:
        yield {"kind": kind}, _product(site, linear, weights, kind, biases)


def _of_experts(site: Site) -> Computes:
    """Products with the converted matrices of experts."""
    assert site.layer is not None
    linears: list[Linear] = [getattr(expert, OF_EXPERTS[site.name]) for expert in site.layer.experts]
    matrices = [widen.float32(x.weights).astype(np.float64) for x in linears if not isinstance(x.weights, Ternary)]
    if len(matrices) < len(linears):
        return
    for kind in NARROW_FLOATS:
        narrow = [_converted(matrix, kind) for matrix in matrices]
        if not all(map(np.array_equal, narrow, matrices)):
            changed = [replace(linear, weights=x.astype(np.float32)) for linear, x in zip(linears, narrow, strict=True)]
            yield {"kind": kind}, site.of(lambda x, chosen, some=changed: op.of_experts(some, site.dialect, x, chosen).value)


def _product(site: Site, linear: Linear, table: Table, kind: str, biases: bool) -> Compute:
    """The product with a converted matrix; NaN where the conversion changes nothing."""

    def compute(x: Array) -> Array:
        matrix = widen.float32(table).astype(np.float64)
        narrow = _converted(matrix, kind)
        if np.array_equal(narrow, matrix):
            return np.full((len(x), len(matrix)), np.nan)
        scale = 1.0 if linear.scale is None else float(linear.scale)
        bias = np.zeros(len(matrix)) if linear.bias is None else linear.bias.astype(np.float64)
        return site.finished(x @ narrow.T * scale + (_converted(bias, kind) if biases and kind in NARROW_FLOATS else bias))

    return site.of(compute)


MISTAKES = (
    Mistake("weights.narrow", "weights are rounded to {kind}", AT, compute=_narrow, fault=False),
    Mistake("weights.narrow_matrices", "matrices are rounded to {kind}", MATRICES_AT, compute=_matrices, fault=False),
)
