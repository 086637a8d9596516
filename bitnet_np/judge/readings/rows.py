"""Outputs of a product that are those of other rows: of the same matrix, of another one, or of another layer's."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ... import spec, widen
from ...dialects import Dialect
from ...families import MATRICES
from ...model import Linear, Ternary
from .. import operations as op
from ..graph import FIELDS
from ..roundings import matrix_input
from .wrong import FEW, Array, Wrong, matched

_TOKENS = 16  # compared
_LEAST_TOKENS = 4  # independent ones: fewer numbers may be near another row's by chance
_SCREENED = 8  # outputs by which matrices are chosen
_MOST_WEIGHTS = 2 * 10**7  # looked through


def other_rows(wrong: Wrong) -> str | None:
    """The rows, and the matrix, whose products stand in wrong outputs, if that explains all of these."""
    columns = np.flatnonzero(wrong.places.any(axis=0))
    tokens = np.unique(np.linspace(0, len(wrong.theirs) - 1, min(len(wrong.theirs), _TOKENS)).astype(int))
    x = wrong.inputs[0][tokens]
    if not x.any(axis=1).all() or np.linalg.matrix_rank(x, tol=1e-3 * np.linalg.norm(x, 2)) < _LEAST_TOKENS:
        return None
    sample = columns[np.unique(np.linspace(0, columns.size - 1, _SCREENED).astype(int))]
    screened = _Sources(wrong, tokens, sample)
    matrices: list[tuple[str, Linear]] = []
    work = 0
    for name, linear in _candidates(wrong):
        work += linear.shape[0] * linear.shape[1]
        if work > _MOST_WEIGHTS and matrices:
            return None
        if screened.look(name, linear):
            matrices.append((name, linear))
        if not screened.missing.size:
            break
    else:
        return None
    sources = _Sources(wrong, tokens, columns)
    for name, linear in matrices:
        sources.look(name, linear)
    own = [not name and row == column for name, row, column in zip(sources.name, sources.row, columns, strict=True)]
    return None if sources.missing.size or any(own) else _described(columns, sources.row, sources.name, wrong.matrix.shape[0])


class _Sources:
    """The row, and the matrix by name, that each of some outputs comes from, as far as it is known."""

    def __init__(self, wrong: Wrong, tokens: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        self.wrong, self.x = wrong, wrong.inputs[0][tokens]
        self.outputs = wrong.theirs[np.ix_(tokens, columns)]
        own = wrong.matrix.bias
        self.bias = np.zeros(columns.size) if own is None else own[columns].astype(np.float64)
        self.row, self.name = np.full(columns.size, -1), [""] * columns.size

    @property
    def missing(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.row < 0)

    def look(self, name: str, linear: Linear) -> bool:
        """Whether some of the missing rows are of this matrix: with its own bias, or with those of the outputs."""
        size = np.linalg.norm(self.x, axis=1, keepdims=True)  # tokens count alike, whatever their size
        products, before = _products(self.x, linear, self.wrong.dialect), self.missing.size
        bias = 0.0 if linear.bias is None else linear.bias
        for numbers, outputs in ((products + bias, self.outputs), (products, self.outputs - self.bias)):
            missing = self.missing
            nearest, same = _nearest(numbers / size, outputs[:, missing] / size, self.wrong.noise)
            self.row[missing[same]] = nearest[same]
            for column in missing[same]:
                self.name[column] = name
        return self.missing.size < before


def _candidates(wrong: Wrong) -> Iterator[tuple[str, Linear]]:
    """Yields all matrices of the same input width by name, "" its own: those of the same name in other layers first."""
    own, layer = wrong.matrix, wrong.key.layer
    yield "", own
    if layer is None:
        if wrong.model.token_embd.shape == own.shape:
            yield "the embedding", Linear(wrong.model.token_embd)
        return
    field, layers = FIELDS[wrong.key.name], wrong.model.layers
    for name in (field, *(m for m in MATRICES if m != field)):
        for n in sorted(range(len(layers)), key=lambda n: abs(n - layer)):
            linear: Linear | None = getattr(layers[n], name)
            if linear is not None and linear is not own and linear.shape[1] == own.shape[1]:
                yield (name if n == layer else f"layer {n}'s {name}"), linear


def _products(x: Array, linear: Linear, dialect: Dialect) -> Array:
    """The products without a bias, in float32: many matrices are looked through."""
    weights, scale = linear.weights, 1.0 if linear.scale is None else float(linear.scale)
    if op.reads_codes(linear, dialect):
        codes, steps = spec.quantize(x)
        x = codes / steps
    elif dialect.ggml_activations and not isinstance(weights, Ternary):
        x = matrix_input(x, weights)
    if isinstance(weights, Ternary):
        matrix, scale = op.dense(weights), scale * float(weights.scale)
    else:
        matrix = widen.float32(weights)
    return (x.astype(np.float32) @ matrix.T).astype(np.float64) * scale


def _nearest(products: Array, target: Array, noise: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The nearest of products [T, N] to each column of target [T, C], and whether it is the same."""
    size = (target**2).sum(axis=0)
    distance = (products**2).sum(axis=0)[:, None] - 2 * products.T @ target  # [N, C], less the column's own size
    nearest = distance.argmin(axis=0)
    away = ((products[:, nearest] - target) ** 2).sum(axis=0)
    return nearest, (away <= matched(noise) * size) & (size > 0)


def _described(columns: NDArray[np.int64], source: NDArray[np.int64], names: list[str], count: int) -> str:
    moved = (columns - source) % count
    if len(set(names)) == 1 and columns.size > 0.9 * count and (moved == moved[0]).all():
        if moved[0] == 0:
            return f"the weights of {names[0]} are used"
        step = min(int(moved[0]), count - int(moved[0]))
        which = f"row {source[0]} stands where row {columns[0]} belongs"
        return f"rows of the weights are shifted by {'one' if step == 1 else step}: {which}" + (f", in {names[0]}" if names[0] else "")
    other_name = np.array([a != b for a, b in zip(names[1:], names, strict=False)], bool)
    ends = np.flatnonzero((np.diff(columns) != 1) | (np.diff(source) != 1) | other_name) + 1
    runs = list(zip(np.split(columns, ends), np.split(source, ends), strict=True))
    starts = [0, *ends]
    spans = [_stands(a, b, names[start], columns) for (a, b), start in zip(runs[:FEW], starts, strict=False)]
    more = f", and {len(runs) - FEW} runs more" if len(runs) > FEW else ""
    return f"weights of other rows are used: {', '.join(spans)}{more}"


def _span(rows: NDArray[np.int64]) -> str:
    return f"row {rows[0]}" if rows.size == 1 else f"rows {rows[0]} to {rows[-1]}"


def _stands(rows: NDArray[np.int64], source: NDArray[np.int64], name: str, wrong: NDArray[np.int64]) -> str:
    """The rows, and those that stand in their place."""
    one = rows.size == 1
    if not name and not np.isin(source, wrong).any():
        return f"{_span(rows)} {'repeats' if one else 'repeat'} {_span(source)}"
    return f"{_span(rows)} {'is that of' if one else 'are those of'} {_span(source)}" + (f" of {name}" if name else "")
