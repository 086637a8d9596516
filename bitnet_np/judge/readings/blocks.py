"""The factor, and the constant, that each block of the weights of a row has: solved for where there are more positions than blocks."""

from collections.abc import Iterator

import numpy as np

from ...base.block_formats import FORMATS, RUN
from ...contract.blocks import factors_of
from ...model.records import Blocks
from ..law.expression import Matrix, Node
from .structure import Numbers, loose_structure, structure
from .wrong import Array, Indices, Wrong, matched

_SIZES = (32, 64, 128, 16, 256)  # of blocks
_ROWS = 256  # of a matrix that are looked at
_SPARE = 4  # positions beyond those that the unknowns need
_LEFT = 1e-3  # of the error
_SAME = 1e-4  # relative: a factor of 1


def block_factors(wrong: Wrong, node: Node, needed: Array) -> str | None:
    """What the factors, or constants, of blocks of weights have in common with the right ones, if a product is right with them.

    needed: what the product should have given, [T, N].
    """
    if node.kind != "matmul" or not node.inputs[1].is_matrix:
        return None
    matrix, tokens, columns = wrong.steps[node.inputs[1]], wrong.wrong_rows, wrong.wrong_columns
    columns = columns[:: -(-columns.size // _ROWS)]
    x, y = wrong.steps[node.inputs[0]][tokens], needed[np.ix_(tokens, columns)]
    for size, name, right in _cuts(matrix, columns):
        solved = _solved(x, matrix.rows(columns), y, size, wrong.noise)
        if solved is None:
            continue
        factors, constants = solved
        scale = np.ones(factors.shape) if right is None else right
        numbers = Numbers(factors * scale, scale, ("row", "block"))
        text = structure(numbers) or loose_structure(numbers)
        if text is None:
            off = (np.abs(factors - 1) > _SAME).mean()
            text = f"{100 * off:.0f} % of them are {factors.min():.4g} to {factors.max():.4g} times what is right" if off else "right"
        said = f"{name}: {'factors' if right is None else 'scales'} of blocks of {size} weights of a row: {text}"
        if constants is None:
            return said
        added = np.abs(constants / scale)
        zero = f"{name}: a number is added to the weights of each block of {size}, {added.min():.4g} to {added.max():.4g} times its factor"
        return f"{zero}, as by another zero point or minimum" + ("" if np.abs(factors - 1).max() <= _SAME else f"; {said}")
    return None


def _cuts(matrix: Matrix, columns: Indices) -> Iterator[tuple[int, str, Array | None]]:
    """Yields sizes of blocks, the name of the type, and the right scales [N, blocks], where the type has them."""
    width, table = matrix.shape[1], matrix.weights
    if isinstance(table, Blocks) and table.type.name in FORMATS:
        form = FORMATS[table.type.name]
        blocks = np.ascontiguousarray(table.data[columns]).view(np.uint8).reshape(-1, form.layout.itemsize)
        factors = factors_of(blocks, form, form.scale).reshape(len(columns), width).astype(np.float64)
        share = form.weights // len(set(form.scale.lanes[: form.weights // RUN])) if form.scale.integers is not None else form.weights
        yield from ((size, table.type.name, factors[:, ::size]) for size in dict.fromkeys((share, form.weights)))
    yield from ((size, "the matrix", None) for size in _SIZES if width % size == 0 and width > size)


def _solved(x: Array, weights: Array, y: Array, size: int, noise: float) -> tuple[Array, Array | None] | None:
    """The factor of each block of each row of weights [N, M], and the number that is added to its weights, if these give y [T, N] of
    x [T, M]: one equation for each position. Without such numbers if factors alone do."""
    count = x.shape[1] // size
    parts = x.reshape(len(x), count, size)
    sums = np.einsum("tbi,nbi->ntb", parts, weights.reshape(len(weights), count, size))  # [N, T, blocks]
    error = ((y - x @ weights.T) ** 2).sum()
    most = min(_LEFT * error, matched(noise) * (y**2).sum())
    added = np.broadcast_to(parts.sum(axis=2), sums.shape)
    for design in (sums, np.concatenate([sums, added], axis=2)):
        if len(x) < design.shape[2] + _SPARE:
            break
        solved = np.einsum("nbt,tn->nb", np.linalg.pinv(design, rcond=1e-9), y)
        if ((np.einsum("ntb,nb->tn", design, solved) - y) ** 2).sum() <= most:
            return solved[:, :count], solved[:, count:] if design is not sums else None
    return None
