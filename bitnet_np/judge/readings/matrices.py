"""Wrong products: which rows they are of, of which matrix."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...base.errors import listed
from ...engine.dialects import Dialect
from ...model.records import MATRICES, Linear, Ternary
from ..products import reads_codes, rows_of
from ..roundings import matrix_input
from .elements import moved_said
from .wrong import ROWS, Array, Wrong, matched, runs

_TOKENS = 16  # compared
_LEAST_TOKENS = 4  # independent ones: fewer numbers may be near another row's by chance
_SAMPLED = 64  # outputs that a token's scale is looked for by
_SCREENED = 8  # outputs that are looked for first


def other_rows(wrong: Wrong) -> str | None:
    """The rows, and the matrix of the layer, whose products stand in wrong outputs, if that explains all of these."""
    columns = wrong.wrong_columns
    tokens = np.unique(np.linspace(0, len(wrong.theirs) - 1, min(len(wrong.theirs), _TOKENS)).astype(int))
    x = wrong.inputs[0][tokens]
    if not x.any(axis=1).all() or np.linalg.matrix_rank(x, tol=1e-3 * np.linalg.norm(x, 2)) < _LEAST_TOKENS:
        return None
    sample = columns[np.unique(np.linspace(0, columns.size - 1, _SCREENED).astype(int))]
    found = _found(wrong, tokens, columns) if _found(wrong, tokens, sample) else None
    return None if found is None else _described(columns, *found, wrong.linear.shape[0])


def scales_of_others(wrong: Wrong) -> str | None:
    """The tokens whose activation scales wrong ones are quantised by: their own are not used."""
    if not reads_codes(wrong.linear, wrong.dialect):
        return None
    rows, columns, linear = wrong.wrong_rows[:ROWS], wrong.wrong_columns, wrong.linear
    x, scales = wrong.inputs[0][rows], spec.quantize(wrong.inputs[0][:ROWS])[1]
    matrix = _scaled_matrix(linear)

    def products(scale: Array, some: NDArray[np.intp]) -> Array:
        """Some outputs, [n, C], of codes by these scales, [n, 1] or [1]."""
        y = np.clip(np.rint(x * scale), -128, 127) / scale @ matrix[some].T
        return y if linear.bias is None else y + linear.bias[some]

    sample = columns[:: -(-columns.size // _SAMPLED)]  # enough to tell the scale by
    away = [((products(scale, sample) - wrong.theirs[np.ix_(rows, sample)]) ** 2).sum(axis=1) for scale in scales]
    source = np.argmin(away, axis=0)
    nearest = products(scales[source], np.arange(len(matrix)))
    off = source != rows
    if not off.any() or not wrong.rows(rows).accounts(nearest):
        return None
    said = [f"{runs('position', rows[off & (source == t)])} by that of position {t}" for t in dict.fromkeys(source[off].tolist())]
    return f"activations are quantised by the scale of another token: {listed(said)}"


def _found(wrong: Wrong, tokens: NDArray[np.int64], columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[str]] | None:
    """The row, and the matrix by name, that each of some outputs comes from; None if one comes from nowhere, or from its own row."""
    x, own = wrong.inputs[0][tokens], wrong.linear.bias
    size, theirs = np.linalg.norm(x, axis=1, keepdims=True), wrong.theirs[np.ix_(tokens, columns)]
    without_bias = theirs - (0.0 if own is None else own[columns])
    row, names = np.full(columns.size, -1), [""] * columns.size
    for name, linear in _candidates(wrong):
        products, bias = _products(x, linear, wrong.dialect), 0.0 if linear.bias is None else linear.bias
        for numbers, outputs in ((products + bias, theirs), (products, without_bias)):
            missing = np.flatnonzero(row < 0)
            nearest, same = _nearest(numbers / size, outputs[:, missing] / size, wrong.noise)
            row[missing[same]] = nearest[same]
            for column in missing[same]:
                names[column] = name
    is_own = [not name and r == column for name, r, column in zip(names, row, columns, strict=True)]
    return None if (row < 0).any() or any(is_own) else (row, names)


def _candidates(wrong: Wrong) -> Iterator[tuple[str, Linear]]:
    """Yields the matrices of the layer that have the same input width, by name, "" its own, which comes first."""
    own = wrong.linear
    yield "", own
    for name in MATRICES:
        linear: Linear | None = getattr(wrong.layer, name, None)
        if linear is not None and linear is not own and linear.shape[1] == own.shape[1]:
            yield name, linear


def _products(x: Array, linear: Linear, dialect: Dialect) -> Array:
    """The products without a bias, in float32: several matrices are looked through."""
    weights, matrix, inputs = linear.weights, _scaled_matrix(linear), x
    if reads_codes(linear, dialect):
        codes, steps = spec.quantize(x)
        inputs = codes / steps
    elif dialect.ggml_activations and (table := weights.blocks if isinstance(weights, Ternary) else weights) is not None:
        inputs = matrix_input(x, table)
    return (inputs.astype(np.float32) @ matrix.astype(np.float32).T).astype(np.float64)


def _scaled_matrix(linear: Linear) -> Array:
    scale = 1.0 if linear.scale is None else float(linear.scale)
    scale *= float(linear.weights.scale) if isinstance(linear.weights, Ternary) else 1.0
    return rows_of(linear.weights, np.arange(linear.shape[0])) * scale


def _nearest(products: Array, target: Array, noise: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The nearest of products [T, N] to each column of target [T, C], and whether it is the same."""
    size = (target**2).sum(axis=0)
    distance = (products**2).sum(axis=0)[:, None] - 2 * products.T @ target  # [N, C], less the column's own size
    nearest = distance.argmin(axis=0)
    away = ((products[:, nearest] - target) ** 2).sum(axis=0)
    return nearest, (away <= matched(noise) * size) & (size > 0)


def _described(columns: NDArray[np.int64], source: NDArray[np.int64], names: list[str], count: int) -> str:
    """The rows that stand in the place of others, of which matrices, in words."""
    others = listed([name for name in dict.fromkeys(names) if name])
    if (source == columns).all():
        return f"the weights of {others} are used in the place of {runs('row', columns)}"
    every = np.arange(count)
    every[columns] = source
    return f"weights of other rows are used{f', of {others}' if others else ''}: {moved_said(every, 'row')}"
