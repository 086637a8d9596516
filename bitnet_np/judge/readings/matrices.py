"""Wrong products: which weights, inputs, rows and biases they are of."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import Dialect
from ...model import widen
from ...model.records import MATRICES, Linear, Ternary
from .. import operations as op
from ..graph import FIELDS
from ..roundings import matrix_input
from .product import Product
from .wrong import FEW, ROWS, Array, Wrong, every, explained, matched, numbered, runs

_FOLLOWED = 8  # tokens whose sums are followed input by input


def cut_short(wrong: Wrong) -> str | None:
    """The inputs that a sum leaves out at its end or beginning, as a loop over whole vectors does that forgets the rest."""
    product = wrong.product
    if product is None:
        return None
    inputs, matrix, theirs, width = product.inputs, product.matrix, product.theirs, product.width
    late, early = np.zeros(width), np.zeros(width)  # squared errors of sums that stop behind each input, or begin behind it
    for token in np.argsort(-np.abs(product.error).sum(axis=1))[:_FOLLOWED]:  # several: inputs of one may be 0
        sums = np.cumsum(inputs[token] * matrix, axis=1)  # [n, M]
        late += ((sums - theirs[token][:, None]) ** 2).sum(axis=0)
        early += ((sums[:, -1:] - sums - theirs[token][:, None]) ** 2).sum(axis=0)
    ends, begins = int(late.argmin()) + 1, int(early.argmin()) + 1
    for part, missing in ((slice(0, ends), (ends, width)), (slice(begins, None), (0, begins))):
        if missing[0] < missing[1] and explained(inputs[:, part] @ matrix[:, part].T, theirs, wrong.noise):
            one = missing[1] - missing[0] == 1
            return f"{runs('input', np.arange(*missing))} of {width} {'is' if one else 'are'} not summed"
    return None


def shared_scales(wrong: Wrong) -> str | None:
    """Activation scales that are another token's, such as one for each chunk of a prompt."""
    first = np.arange(min(len(wrong.theirs), ROWS))
    product = Product.of(wrong, first) if op.reads_codes(wrong.linear, wrong.dialect) else None
    if product is None:
        return None
    x, steps, theirs = product.raw, product.steps[:, 0], product.theirs
    owner = np.empty(len(x), int)
    for t in range(len(x)):
        rescaled = np.clip(np.rint(x[t] * steps[:, None]), -128, 127) / steps[:, None] @ product.matrix.T  # [T, n]: by each token's scale
        away = ((rescaled - theirs[t]) ** 2).sum(axis=1)
        owner[t] = t if away[t] <= matched(wrong.noise) * (theirs[t] ** 2).sum() else int(away.argmin())
        if away[owner[t]] > matched(wrong.noise) * (theirs[t] ** 2).sum():
            return None
    if (owner == np.arange(len(x))).all():
        return None
    cuts = np.flatnonzero(np.diff(owner)) + 1
    chunks = [run for run in np.split(np.arange(len(x)), cuts) if run.size > 1]
    if chunks:
        shared = ", ".join(f"{run[0]} to {run[-1]}" for run in chunks[:FEW])
        return f"one activation scale serves several tokens, such as all of a chunk, instead of one for each: positions {shared}"
    t = int((owner != np.arange(len(x))).argmax())
    return f"activation scales are another token's: position {t} has that of position {owner[t]}"


def misread(wrong: Wrong) -> str | None:
    """The block of a row of weights that was read from elsewhere, if one was. Products of int8 codes show it: they are integers."""
    columns = np.flatnonzero(wrong.places.any(axis=0))
    marked = np.zeros(wrong.places.shape, bool)
    marked[:, columns] = True
    if columns.size > FEW or not wrong.is_right_outside(marked):
        return None
    linear, x, theirs = wrong.linear, wrong.inputs[0], wrong.theirs
    somewhere = f"only {numbered('element', columns)} of each position: rows of the weights are misread, the others are right"
    weights = linear.weights
    if not isinstance(weights, Ternary) or not op.reads_codes(linear, wrong.dialect):
        return somewhere
    matrix = op.dense(weights).astype(np.float64)
    q, scale = spec.quantize(x)
    factor = float(weights.scale) * (1.0 if linear.scale is None else float(linear.scale)) / scale[:, 0]
    row = int(columns[0])
    product = theirs[:, row] - (0.0 if linear.bias is None else float(linear.bias[row]))
    for block in (128, 64, 32, 16):
        blocks = matrix.shape[1] // block
        cut = matrix[:, : blocks * block].reshape(len(matrix), blocks, block)
        parts = np.einsum("tbm,nbm->nbt", q[:, : blocks * block].reshape(len(q), blocks, block), cut[[row]])[0]  # [blocks, T]
        missing = product / factor - q @ matrix[row]  # what the misread block adds
        for b in range(blocks):
            others = [(r, b) for r in (row - 1, row + 1) if 0 <= r < len(matrix)] + [(row, c) for c in (b - 1, b + 1) if 0 <= c < blocks]
            for r, c in others:
                changed = q[:, b * block : (b + 1) * block] @ cut[r, c] - parts[b]
                if np.abs(changed - missing).max() <= 0.25:  # sums of integers
                    where = f"row {r}" if r != row else f"weights {c * block} to {(c + 1) * block - 1}"
                    return f"weights {b * block} to {(b + 1) * block - 1} of row {row} are read from {where}"
    return somewhere


# --- another bias than a product's own ----------------------------------------------------------------------------------------------------


_OFFSETS = (1, -1, 2, -2, 4, -4)  # elements
_LEAST = 4  # positions: their mean is the bias that was added


def other_bias(wrong: Wrong) -> str | None:
    """The bias that was added, if it is its own several times, or that of another matrix."""
    column = (wrong.theirs - wrong.value).mean(axis=0)
    bias = wrong.linear.bias
    if bias is not None:
        products = wrong.value - bias
        if bias.size >= len(products) and wrong.accounts(products + bias[: len(products), None]):
            return "the bias is added along the wrong axis: its element is that of the position"
        factor = float(((wrong.theirs - bias) * products).sum() / max((products**2).sum(), 1e-300))
        if wrong.accounts(factor * products + bias):
            return f"products are {factor:.5g} times what they should be, the bias is right"
    if len(wrong.theirs) < _LEAST or not wrong.accounts(wrong.value + column):
        return None
    own = np.zeros_like(column) if bias is None else bias.astype(np.float64)
    if own.any():
        times = float((column + own) @ own / (own @ own))
        if wrong.accounts(wrong.value + (times - 1) * own):
            return "the bias is added twice" if abs(times - 2) < 1e-3 else f"the bias is added {times:.4g} times"
        missing = np.isclose(column, -own, rtol=1e-3, atol=1e-4 * np.abs(own).max()) & (np.abs(own) > 1e-3 * np.abs(own).max())
        if wrong.accounts(wrong.value - np.where(missing, own, 0)):
            return f"the bias is missing at {runs('element', np.flatnonzero(missing))}"
        for by in _OFFSETS:
            moved = np.roll(own, -by)
            moved[slice(-by, None) if by > 0 else slice(None, -by)] = 0
            if wrong.accounts(wrong.value - own + moved):
                return f"the bias is read {abs(by)} element{'s' * (abs(by) > 1)} too {'late' if by > 0 else 'early'}"
        added = np.sort(column + own)
        if wrong.accounts(wrong.value + column) and np.allclose(added, np.sort(own), rtol=1e-3, atol=1e-3 * np.abs(own).max()):
            return "the bias's elements are in another order"
    for name, other in _biases(wrong):
        if own.any() and wrong.accounts(wrong.value - own + other):
            return f"the bias of {name} is added instead of its own"
        if wrong.accounts(wrong.value + other):
            return f"the bias of {name} is added" + (" too" if own.any() else ": it has none of its own")
    return None


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
