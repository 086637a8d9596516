"""Codes of ggml's blocks, and the part of a product's error that follows them: a wrong table does, no rounding does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.block_formats import FORMATS, RUN, Factor, Format
from ...base.tensor_types import GRID_TYPES, IQ1_M
from ...contract.blocks import factors_of, weights_as
from ...model.records import Blocks, Weights
from .expected import TINY, Array
from .products import rows_of

_ROWS = 64  # of a matrix that are looked at, and of its inputs
_EQUATIONS = 8  # for each code
_MOST = 256  # codes
_EXACT = 1e-3  # of the squared error, or of the range of codes: what is left where they alone are wrong
_FOLLOWS = 0.6  # of the squared error: weights that are rounded again to int8, a scale for each row, leave 0.51 to codes at most
AGAIN = 2.0**-7
"""Level of noise up to which weights may have been rounded again, to int8 in blocks of 32: that is a table as well, and has 2^-7.2."""
_DIGITS = 4  # of a weight in units of its block, whose scale is a float16


Order = NDArray[np.intp] | slice
_ALL = slice(None)


class Codes(NamedTuple):
    """What some weights [n, M] are made of: a unit times a code, and a number that is added where the type has one."""

    units: Array  # [n, M]
    values: Array  # [C], those of the codes, ascending
    which: NDArray[np.integer]  # [n, M] numbers of codes


def codes_of(table: Blocks, rows: NDArray[np.integer]) -> Codes | None:
    """The codes of some rows. Of a type whose codes are rows of a grid, they are the sizes of weights in units of the block's float16."""
    if table.type is IQ1_M:  # whose float16 lies in four parts
        return None
    if table.type in GRID_TYPES:
        weights = rows_of(table, rows)
        scale = table.data[rows].reshape(-1, table.type.block_bytes)[:, :2].copy().view(np.float16).astype(np.float64)
        units = np.repeat(scale, table.type.block).reshape(weights.shape)
        codes = np.round(np.abs(weights) / np.where(units == 0, 1.0, np.abs(units)), _DIGITS)
        units = np.copysign(units, weights)
    else:
        units, codes = scales_and_codes(table, rows)
    values, which = np.unique(codes, return_inverse=True)
    return Codes(units, values, which.reshape(codes.shape))


def scales_and_codes(table: Blocks, rows: NDArray[np.integer]) -> tuple[Array, Array]:  # -> [n, M] each
    """The scale and the code of each weight of some rows, of a type that has integers."""
    form = FORMATS[table.type.name]
    codes, data = _codes(table, rows, form), np.ascontiguousarray(table.data[rows]).view(np.uint8)
    return factors_of(data.reshape(-1, form.layout.itemsize), form, form.scale).reshape(codes.shape).astype(np.float64), codes


def _codes(table: Blocks, rows: NDArray[np.integer], form: Format) -> Array:
    data = np.ascontiguousarray(table.data[rows]).view(np.uint8)
    return weights_as(data, unscaled(form)).astype(np.float64)


def unscaled(form: Format) -> Format:
    """The format whose weights are the codes of this one."""
    return replace(form, scale=Factor(form.scale.half, lanes=(0,) * RUN, table=(1.0,) * 256), minimum=None)


class Planes(NamedTuple):
    """What some weights [n, M] are made of: a scale times the sum of planes of bits, and a number that is added."""

    scales: Array  # [n, M]
    planes: Sequence[Array]  # [n, M] each, the low bits first; one of whole codes where these have a sign or a table
    added: Array  # [n, M]

    @classmethod
    def of(cls, table: Blocks, rows: NDArray[np.integer]) -> "Planes":
        form, (scales, codes) = FORMATS[table.type.name], scales_and_codes(table, rows)
        parts, planes = range(len(form.codes[0].parts)), [codes]
        if len(parts) > 1:
            single = [tuple(replace(each, parts=(each.parts[k],), bias=0) for each in form.codes) for k in parts]
            planes = [_codes(table, rows, replace(form, codes=codes)) for codes in single]
        return cls(scales, planes, rows_of(table, rows) - scales * sum(planes))

    def read(self, codes: Order = _ALL, scales: Order = _ALL, low: Order = _ALL) -> Array:
        """The weights, if codes, scales with what is added, or the low bits of codes alone are taken in another order."""
        first = self.planes[0][:, low if low is not _ALL else codes]
        return self.scales[:, scales] * sum((plane[:, codes] for plane in self.planes[1:]), first) + self.added[:, scales]


def wrong_codes(x: Array, weights: Weights, error: Array) -> str:
    """The codes of a matrix [N, M] that make most of the error [T, N] of its product with x [T, M], in words; or none.

    A common factor of all weights, which numbers that are cut have as well, is not counted.
    """
    if not isinstance(weights, Blocks):
        return ""
    tokens, rows = (np.arange(size)[:: -(-size // _ROWS)] for size in error.shape)
    codes = codes_of(weights, rows)
    if codes is None or len(codes.values) > min(_MOST, tokens.size * rows.size / _EQUATIONS):
        return ""
    inputs, e = x[tokens], error[np.ix_(tokens, rows)].ravel()
    made = np.stack([(inputs @ np.where(codes.which == c, codes.units, 0.0).T).ravel() for c in range(len(codes.values))], axis=1)
    value = (inputs @ rows_of(weights, rows).T).ravel()
    of_factor = float(e @ value) ** 2 / max(float(value @ value), TINY)
    off = np.linalg.lstsq(made.T @ made, made.T @ e, rcond=1e-12)[0]
    whole, size, counted = float(e @ made @ off), max(float(e @ e), TINY), codes.values + off
    top = round(float(counted.max()), 3) + 0.0
    if whole > (1 - _EXACT) * size and np.abs(counted - np.minimum(codes.values, top)).max() < _EXACT * np.ptp(codes.values):
        return f"{weights.type.name}: codes above {top:.6g} count as {top:.6g}"
    share = (whole - of_factor) / size
    if share < _FOLLOWS:
        return ""
    most = int((off**2 * (made**2).sum(axis=0)).argmax())
    counts = f"{codes.values[most]:.6g} counts as {counted[most]:.6g}"
    return f"{weights.type.name}: {100 * share:.0f} % of the error follows the codes of the weights, as in a wrong table: {counts}"
