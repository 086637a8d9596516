"""Channels of a product's inputs, and the part of its error that follows them: a factor for each channel does, no rounding does.

Such factors are what AWQ, SmoothQuant and fused norms move from an operation to the next one, and what a forgotten half of that leaves.
"""

import numpy as np
from numpy.typing import NDArray

from ...model.records import Weights
from .expected import TINY, Array
from .products import rows_of

_TOKENS, _FEWEST = 64, 8  # inputs that are looked at: a rounding of a single one is a factor for each channel
_VARIED = 0.1  # standard deviation of most channels, of their RMS: numbers that are nearly equal are rounded alike
_EQUATIONS = 4  # for each channel at least, so that chance explains a quarter of the error
_STEPS = 30  # of conjugate gradients, which need not end
_FOLLOWS = 0.9  # of the squared error: 8-bit floats leave up to 0.65
_TAIL = 0.05  # of the channels, at both ends, that the words leave out


def wrong_channels(x: Array, weights: Weights, error: Array) -> str:
    """The factors of channels that make most of the error [T, N] of the product of x [T, M] and a matrix [N, M], in words; or none.

    A common factor is not counted, which numbers that are cut have as well.
    """
    width, tokens = x.shape[1], _spread(len(x), _TOKENS)
    tokens = tokens[np.unique(x[tokens], axis=0, return_index=True)[1]]
    rows = _spread(error.shape[1], -(-2 * _EQUATIONS * width // tokens.size))
    if tokens.size < _FEWEST or tokens.size * rows.size < _EQUATIONS * width:
        return ""
    inputs = x[tokens]
    if np.median(inputs.std(axis=0) / np.sqrt((inputs**2).mean(axis=0) + TINY)) < _VARIED:
        return ""
    matrix, e = rows_of(weights, rows), error[np.ix_(tokens, rows)]
    off, left = _least_squares(inputs, matrix, e)
    value, size = inputs @ matrix.T, max(float((e**2).sum()), TINY)
    share = 1 - (left + float((e * value).sum()) ** 2 / max(float((value**2).sum()), TINY)) / size
    if share < _FOLLOWS:
        return ""
    low, high = 1 + np.quantile(off, [_TAIL, 1 - _TAIL])
    return f"{100 * share:.0f} % of the error follows the channels of the inputs: each has a factor, most of them {low:.3g} to {high:.3g}"


def _spread(size: int, most: int) -> NDArray[np.intp]:
    return np.linspace(0, size - 1, min(size, most)).astype(np.intp)


def _least_squares(inputs: Array, matrix: Array, error: Array) -> tuple[Array, float]:
    """The number for each channel that makes most of an error, and the squares that are left, by conjugate gradients.

    What a number makes is a product of two matrices, so the equations are never written down.
    """
    off, left = np.zeros(inputs.shape[1]), error
    slope = direction = ((inputs.T @ left) * matrix.T).sum(axis=1)
    for _ in range(_STEPS):
        if (size := float(slope @ slope)) <= TINY:
            break
        made = (inputs * direction) @ matrix.T
        step = size / max(float((made**2).sum()), TINY)
        off, left = off + step * direction, left - step * made
        slope = ((inputs.T @ left) * matrix.T).sum(axis=1)
        direction = slope + float(slope @ slope) / size * direction
    return off, float((left**2).sum())
