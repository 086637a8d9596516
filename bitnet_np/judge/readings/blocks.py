"""The factor, and the constant, that each block of the weights of a row has: solved for where there are more positions than blocks."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.block_formats import FORMATS, RUN
from ...base.errors import listed
from ...model.records import Blocks
from ..edits.blocks import orders
from ..evidence import LITTLE, NEAR, SAME, SPARE, matched
from ..law.codes import Planes, scales_and_codes, wrong_codes
from ..law.expression import Array, Matrix, Node
from ..law.products import rows_of
from ..words import FEW, Indices, least_to_largest, moves_in_words, places_of, runs
from .structure import Numbers, loose_structure, structure, times
from .wrong import Wrong

_SIZES = (32, 64, 128, 16, 256)  # of blocks
_ROWS = 256  # of a matrix that are looked at
_LARGE = 1 << 22  # weights: of a larger matrix wrong rows alone are compared
_FARTHEST = 64  # blocks that a scale is read from its place
_WIDEST = 1024  # numbers of a row of a table
_NUMBERS = 32  # of a product: in fewer two orders are found by chance
_FEW = 16  # of them, and of positions, by which orders of bits are told


def block_factors(wrong: Wrong, node: Node, needed: Array) -> str | None:
    """What the factors, or constants, of blocks of weights have in common with the right ones, if a product is right with them.

    needed: what the product should have given, [T, N]; or the rows of a table, [T, M], which are its products with the unit matrix.
    """
    tokens, columns, is_table = wrong.wrong_rows, wrong.wrong_columns, node.kind == "rows"
    x, matrix = (wrong.steps[child] for child in (node.inputs[::-1] if is_table else node.inputs))
    if is_table and matrix.shape[1] > _WIDEST:
        return None
    columns, first = np.unique(x[tokens].astype(np.intp) % matrix.shape[0], return_index=True) if is_table else (columns, 0 * columns)
    columns, first = (some[:: -(-columns.size // _ROWS)] for some in (columns, first))
    x, y = (np.eye(matrix.shape[1]), needed[tokens[first]].T) if is_table else (x[tokens], needed[np.ix_(tokens, columns)])
    every = np.arange(matrix.shape[0]) if matrix.shape[0] * matrix.shape[1] <= _LARGE and not is_table else columns
    for i, cut in enumerate(_cuts(matrix, columns)):
        if (solved := _solved(x, cut, y, wrong.noise)) is not None:
            whole = next(islice(_cuts(matrix, every), i, None))
            factors, constants = whole.factors.copy(), whole.constants.copy()
            at = np.searchsorted(every, columns)
            factors[at], constants[at] = solved
            return f"{cut.name}: {_in_words(whole, factors, constants)}"
    own = matrix.weights if isinstance(matrix.weights, Blocks) and matrix.weights.type.name in FORMATS else None
    if own is None or y.size < _NUMBERS:
        return None
    return next((text for way in (_in_order, _of_scales, _of_rows) if (text := way(x, own, columns, y, wrong))), None)


def wrong_codes_of(wrong: Wrong, node: Node, needed: Array) -> str | None:
    """The codes of the matrix that make most of a product's error, as in a wrong table."""
    return wrong_codes(wrong.steps[node.inputs[0]], wrong.steps[node.inputs[1]].weights, needed - wrong.steps[node]) or None


def _in_order(x: Array, table: Blocks, columns: Indices, y: Array, wrong: Wrong) -> str | None:
    """The order that codes, the bits of each plane of them, or scales are read in, if that gives y [T, N] of x [T, M].

    Products with planes add up, so any two orders of two planes are tried at the price of one each.
    """
    made, whole, few = Planes.of(table, columns[:_FEW]), Planes.of(table, columns), slice(None, _FEW)
    every = [("", np.arange(table.shape[1])), *(order[:2] for order in orders(table.shape[1]))]

    def sums(weights: Callable[[Indices], Array]) -> Array:
        return np.stack([(x[few] @ weights(order).T).ravel() for _, order in every])

    def of_plane(plane: Array) -> Array:
        return sums(lambda order: made.scales * plane[:, order])

    *of_low, of_rest = map(of_plane, made.planes)
    rest = y[few, few].ravel() - sums(lambda order: made.added)[:1] - (of_low[0] if of_low else 0)  # [orders of low bits, n], or [1, n]
    left = (rest**2).sum(axis=1)[:, None] - 2 * rest @ of_rest.T + (of_rest**2).sum(axis=1)
    by_scales = ((sums(lambda order: made.read(scales=order)) - y[few, few].ravel()) ** 2).sum(axis=1)
    (low, _), (codes, _), (scales, _) = found = [every[i] for i in (*np.unravel_index(left.argmin(), left.shape), by_scales.argmin())]
    if by_scales.min() < left.min():
        said, theirs = f"scales are those of other weights: {scales.format('weights')}", whole.read(scales=found[2][1])
    elif not of_low:
        said, theirs = f"codes are read in another order: {codes.format('codes')}", whole.read(found[1][1])
    else:
        bits = [words.format(f"{which} bits of codes") for which, words in (("low", low), ("upper", codes)) if words]
        said, theirs = f"bits are read in another order: {'; '.join(bits)}", whole.read(found[1][1], low=found[0][1])
    most = min(LITTLE * ((x @ whole.read().T - y) ** 2).sum(), matched(wrong.noise) * (y**2).sum())
    return f"{table.type.name}: {said}" if ((x @ theirs.T - y) ** 2).sum() <= most else None


def _of_scales(x: Array, table: Blocks, columns: Indices, y: Array, wrong: Wrong) -> str | None:
    """How far behind their place the scales of blocks are read at each position, if that gives y [T, N] of x [T, M]; or whether each scale
    times a number of its block's inputs is added. Raises TimeIsOver."""
    cut = _every(table)
    if cut.codes.size > _LARGE or len(x) < SPARE:
        return None
    sums = np.einsum("tbi,nbi->tnb", x.reshape(len(x), *cut.codes.shape[1:]), cut.codes[columns])
    place, flat = columns[:, None] * cut.codes.shape[1] + np.arange(cut.codes.shape[1]), cut.factors.ravel()
    tried, error = np.arange(-_FARTHEST, _FARTHEST + 1), y - x @ rows_of(table, columns).T
    rest, most = y - error - np.einsum("tnb,nb->tn", sums, flat[place]), min(LITTLE * (error**2).sum(), matched(wrong.noise) * (y**2).sum())

    def read_behind(by: int) -> Array:
        wrong.go_on()
        return np.einsum("tnb,nb->tn", sums, flat[(place + by).clip(0, flat.size - 1)])

    made = np.stack([read_behind(by) for by in tried.tolist()]) + rest  # [offsets, T, N]
    left = ((made - y) ** 2).sum(axis=2)
    by = tried[left.argmin(axis=0)]
    if left.min(axis=0).sum() <= most:
        law = "the number of the position" if (np.diff(by) == 1).all() else least_to_largest(by.astype(np.float64))
        return f"{table.type.name}: scales of blocks are read behind their place, by {law}"
    factors = cut.factors[columns]  # [N, blocks]
    if len(factors) < factors.shape[1] + SPARE or ((error - error @ np.linalg.pinv(factors.T) @ factors.T) ** 2).sum() > most:
        return None
    return f"{table.type.name}: each block's scale is added times a number of each position, as by a zero point of other sums"


def _of_rows(x: Array, table: Blocks, columns: Indices, y: Array, wrong: Wrong) -> str | None:
    """The rows whose codes are read with the scales of wrong ones, if that gives y [T, N] of x [T, M]."""
    cut = _every(table)
    parts, (n, blocks, _) = x.reshape(len(x), *cut.codes.shape[1:]), cut.codes.shape
    if n * len(x) * columns.size > _LARGE or cut.codes.size > _LARGE or len(x) < SPARE:
        return None
    sums = np.einsum("tbi,nbi->ntb", parts, cut.codes).reshape(-1, blocks)
    made = (sums @ cut.factors[columns].T).reshape(n, len(x), -1) + parts.sum(axis=2) @ cut.constants[columns].T  # [rows, T, N]
    left, source = ((made - y) ** 2).sum(axis=1), np.arange(n)
    source[columns] = left.argmin(axis=0)
    most = min(LITTLE * ((x @ rows_of(table, columns).T - y) ** 2).sum(), matched(wrong.noise) * (y**2).sum())
    if left.min(axis=0).sum() > most:
        return None
    return f"{table.type.name}: codes are those of other rows, and scales are right: {moves_in_words(source, 'row', 'the codes')}"


class _Cut(NamedTuple):
    """Rows of a matrix in blocks: codes times a factor of each block, and a constant."""

    name: str
    noun: str  # of factors
    codes: Array  # [N, blocks, size]
    factors: Array  # [N, blocks]
    constants: Array  # [N, blocks]

    @property
    def of_blocks(self) -> str:
        return f"of blocks of {self.codes.shape[2]} weights of a row"


def _every(table: Blocks) -> _Cut:
    """All rows, in the blocks of their type."""
    return next(_cuts(Matrix(table.shape, lambda rows: rows_of(table, rows), weights=table), np.arange(table.shape[0])))


def _cuts(matrix: Matrix, columns: Indices) -> Iterator[_Cut]:
    """Yields the ways to cut some rows of a matrix into blocks: that of its type, and any, where all factors are 1."""
    width, table, weights = matrix.shape[1], matrix.weights, matrix.rows(columns)
    if isinstance(table, Blocks) and table.type.name in FORMATS:
        form = FORMATS[table.type.name]
        scales, codes = scales_and_codes(table, columns)
        share = form.weights // len(set(form.scale.lanes[: form.weights // RUN])) if form.scale.integers is not None else form.weights
        for size in dict.fromkeys((share, form.weights, share // 2)):
            if (np.diff(scales.reshape(-1, size)) == 0).all():
                constants = (weights - codes * scales)[:, ::size]
                yield _Cut(table.type.name, "scales", codes.reshape(len(columns), -1, size), scales[:, ::size], constants)
    for size in (size for size in _SIZES if width % size == 0 and width > size):
        blocks = weights.reshape(len(columns), -1, size)
        yield _Cut("the matrix", "factors", blocks, np.ones(blocks.shape[:2]), np.zeros(blocks.shape[:2]))


def _solved(x: Array, cut: _Cut, y: Array, noise: float) -> tuple[Array, Array] | None:
    """The factor and the constant of each block of each row [N, blocks], if these give y [T, N] of x [T, M]: one equation for each
    position. Constants stay as they are if factors alone do."""
    parts = x.reshape(len(x), *cut.codes.shape[1:])
    sums = np.einsum("tbi,nbi->ntb", parts, cut.codes)  # [N, T, blocks]
    added = np.broadcast_to(parts.sum(axis=2), sums.shape)
    least = np.einsum("ntb,nb->tn", added, cut.constants)
    right = np.einsum("ntb,nb->tn", sums, cut.factors)
    most = min(LITTLE * ((y - least - right) ** 2).sum(), matched(noise) * (y**2).sum())
    equations = len(np.unique(x, axis=0))  # a token that comes twice has the same input in the first layer
    for design, target in ((sums, y - least), (added, y - right), (np.concatenate([sums, added], axis=2), y)):
        if equations < design.shape[2] + SPARE:
            break
        solved = np.einsum("nbt,tn->nb", np.linalg.pinv(design, rcond=1e-9), target)
        if ((np.einsum("ntb,nb->tn", design, solved) - target) ** 2).sum() <= most:
            factors, constants = (cut.factors, solved) if design is added else np.split(solved, [parts.shape[1]], axis=1)
            return factors, constants if constants.size else cut.constants
    return None


def _in_words(cut: _Cut, factors: Array, constants: Array) -> str:
    """What these factors and constants of blocks have in common with the right ones, in words."""
    size = np.where(cut.factors == 0, np.abs(cut.factors).mean(), cut.factors)
    added, texts = np.abs((constants - cut.constants) / size), []
    if cut.constants.any() and np.ptp(added) > NEAR * added.max():
        texts.append(f"minimums {cut.of_blocks}: {_how(cut.constants, constants)}")
    elif added.any():
        which = f"each block of {cut.codes.shape[2]}, {least_to_largest(added)} times its factor"
        texts.append(f"a number is added to the weights of {which}, as by another zero point or minimum")
    if not texts or np.abs((factors - cut.factors) / size).max() > SAME:
        texts.append(f"{cut.noun} {cut.of_blocks}: {_how(cut.factors, factors)}")
    return "; ".join(texts)


def _how(right: Array, theirs: Array) -> str:
    numbers = Numbers(theirs, right, ("row", "block"))
    if (text := structure(numbers) or loose_structure(numbers)) is not None:
        return text
    ratio = np.where(right == 0, 1, theirs / np.where(right == 0, 1, right))
    is_off = np.abs(ratio - 1) > SAME
    if not is_off.any():
        return "right"
    blocks = np.flatnonzero(is_off.any(axis=0))
    if blocks.size <= FEW:
        parts = ((runs("block", blocks[[i]]), is_off[:, b], ratio[is_off[:, b], b]) for i, b in enumerate(blocks))
        said = (
            (words, times(float(x.mean())) if np.ptp(x) < SAME else f"{least_to_largest(x)} times what is right", off)
            for words, off, x in parts
        )
        return listed([f"{words} is {how}{_of_rows_in_words(off)}" for words, how, off in said])
    return f"{100 * is_off[right != 0].mean():.0f} % of them are {least_to_largest(ratio)} times what is right"


def _of_rows_in_words(is_off: NDArray[np.bool_]) -> str:
    off, count = np.flatnonzero(is_off), is_off.size
    some = places_of(off, count, "row")
    return "" if off.size == count else f" in {some if ' more' not in some else f'{off.size} of {count} rows'}"
