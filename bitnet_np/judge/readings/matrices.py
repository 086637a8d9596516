"""Wrong products: which weights, inputs, rows and biases they are of."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...engine.dialects import Dialect
from ...model.records import MATRICES, Linear
from ..graph import FIELDS
from .product import Product, multiplied, unscaled
from .wrong import FEW, Array, Wrong, every, matched, numbered, runs


def misread(wrong: Wrong) -> str | None:
    """The block of a row of weights that was read from elsewhere, if one was."""
    columns = np.flatnonzero(wrong.places.any(axis=0))
    marked = np.zeros(wrong.places.shape, bool)
    marked[:, columns] = True
    if columns.size > FEW or not wrong.is_right_outside(marked):
        return None
    row = int(columns[0])
    product = Product.of(wrong, rows=columns[:1])
    assert product is not None  # only logits are capped
    for size in (128, 64, 32, 16):
        for begin in range(0, product.width - size + 1, size):
            at = slice(begin, begin + size)
            left = product.inputs[:, at] @ product.matrix[0, at]
            for r, c in ((row - 1, begin), (row + 1, begin), (row, begin - size), (row, begin + size)):
                if 0 <= r < wrong.linear.shape[0] and 0 <= c <= product.width - size:
                    read = product.inputs[:, at] @ unscaled(wrong.linear, np.array([r]))[0][0, c : c + size]
                    if product.accounts(product.right + (read - left)[:, None]):
                        where = f"row {r}" if r != row else f"weights {c} to {c + size - 1}"
                        return f"weights {begin} to {begin + size - 1} of row {row} are read from {where}"
    return f"only {numbered('element', columns)} of each position: rows of the weights are misread, the others are right"


# --- another bias than a product's own ----------------------------------------------------------------------------------------------------


_OFFSETS = (1, -1, 2, -2, 4, -4)  # elements
_LEAST = 4  # positions: their mean is the bias that was added


def other_bias(wrong: Wrong) -> str | None:
    """The bias that was added, if it is its own in part or in another order, or that of another matrix."""
    column, bias, count = (wrong.theirs - wrong.value).mean(axis=0), wrong.linear.bias, len(wrong.theirs)
    if bias is not None and bias.size >= count and wrong.accounts(wrong.value - bias + bias[:count, None]):
        return "the bias is added along the wrong axis: its element is that of the position"
    if count < _LEAST or not wrong.accounts(wrong.value + column):
        return None
    own = np.zeros_like(column) if bias is None else bias.astype(np.float64)
    if own.any():
        size = np.abs(own).max()
        missing = np.isclose(column, -own, rtol=1e-3, atol=1e-4 * size) & (np.abs(own) > 1e-3 * size)
        if wrong.accounts(wrong.value - np.where(missing, own, 0)):
            return f"the bias is missing at {runs('element', np.flatnonzero(missing))}"
        times = float((column + own) @ own / (own @ own))
        if wrong.accounts(wrong.value + (times - 1) * own):
            return f"the bias is added {times:.4g} times"
        for by in _OFFSETS:
            if np.allclose(_moved(own, by), column + own, rtol=1e-3, atol=1e-3 * size):
                return f"the bias is read {abs(by)} element{'s' * (abs(by) > 1)} too {'late' if by > 0 else 'early'}"
        if np.allclose(np.sort(column + own), np.sort(own), rtol=1e-3, atol=1e-3 * size):
            return "the bias's elements are in another order"
    for name, other in _biases(wrong):
        if own.any() and wrong.accounts(wrong.value - own + other):
            return f"the bias of {name} is added instead of its own"
        if wrong.accounts(wrong.value + other):
            return f"the bias of {name} is added" + (" too" if own.any() else ": it has none of its own")
    return None


def _moved(bias: Array, by: int) -> Array:
    """The elements `by` places further on, and 0 behind the last."""
    moved = np.roll(bias, -by)
    moved[slice(-by, None) if by > 0 else slice(None, -by)] = 0
    return moved


def unwritten(wrong: Wrong) -> str | None:
    """The outputs that are their bias alone, at every position."""
    bias = wrong.linear.bias
    columns = np.flatnonzero(wrong.places.any(axis=0))
    if bias is None or columns.size == wrong.theirs.shape[1]:
        return None
    alone = np.broadcast_to(bias, wrong.theirs.shape)[:, columns]
    if not np.allclose(wrong.theirs[:, columns], alone, rtol=1e-5, atol=1e-6 * np.abs(wrong.value).max()):
        return None
    elements = every(columns, wrong.theirs.shape[1], "element")
    return f"{elements} of each position {'are' if columns.size > 1 else 'is'} the bias alone: no product is written"


def _biases(wrong: Wrong) -> Iterator[tuple[str, Array]]:
    """Yields the biases of other matrices, of as many elements as this one's or the first ones of more, by name."""
    for n, layer in enumerate(wrong.model.layers):
        for name in MATRICES:
            linear = getattr(layer, name)
            height = wrong.theirs.shape[1]
            if linear is None or linear is wrong.linear or linear.bias is None or linear.bias.size < height:
                continue
            first = f"'s first {height} rows" if linear.bias.size > height else ""
            yield (name if n == wrong.key.layer else f"layer {n}'s {name}") + first, linear.bias[:height].astype(np.float64)


# --- outputs of a product that are those of other rows ------------------------------------------------------------------------------------


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
    return None if sources.missing.size or any(own) else _described(columns, sources.row, sources.name, wrong.linear.shape[0])


class _Sources:
    """The row, and the matrix by name, that each of some outputs comes from, as far as it is known."""

    def __init__(self, wrong: Wrong, tokens: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        self.wrong, self.x = wrong, wrong.inputs[0][tokens]
        self.outputs = wrong.theirs[np.ix_(tokens, columns)]
        own = wrong.linear.bias
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
    own, layer = wrong.linear, wrong.key.layer
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
    matrix, scale = unscaled(linear, np.arange(linear.shape[0]))
    inputs, _ = multiplied(x, linear, dialect)
    return (inputs.astype(np.float32) @ matrix.astype(np.float32).T).astype(np.float64) * scale


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
