"""Weights that an engine converted to a type of fewer bits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

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

CODE_TYPES = {
    "int8": "int8, one scale for each row",
    "int4": "int4, one scale for each row",
    "q8_0": "q8_0",
    "q4_0": "q4_0",
    "q6_K": "q6_K",
}

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


def in_fewer_bits(width: int) -> Iterator[tuple[str, Callable[[Array], Array]]]:
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
    for group, count in ((4, 2), (4, 1), (2, 1), (8, 4)):
        if width % group == 0:
            yield f"pruned: of each {group} only the {count} largest are left", partial(_largest, group=group, count=count)


def _largest(x: Array, group: int, count: int) -> Array:
    """x with zeros for all but the `count` largest of each group."""
    cut = x.reshape(len(x), -1, group)
    least = np.sort(np.abs(cut), axis=2)[:, :, -count, None]
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


MISTAKES = (
    Mistake("weights.narrow", "weights are rounded to {kind}", AT, compute=_narrow, fault=False),
    Mistake("weights.narrow_matrices", "matrices are rounded to {kind}", MATRICES_AT, compute=_matrices, fault=False),
)
