"""The few inputs, or weights of them, that make all of a product's error: found as directions of its rows and columns.

An error of few inputs is the sum of few products of a column and a row: E = sum_j a_j b_j. Where weights of input j are wrong, a_j is
that input at all positions; where the input itself is wrong, b_j is its weights. So the inputs whose columns lie in the few directions of
an error are those that make it, even where there are more inputs than positions or outputs, and no system of equations could be solved.
(Multiple signal classification, MUSIC, finds the sources of waves so.)
"""

from typing import NamedTuple

import numpy as np

from ...base.block_formats import FORMATS
from ...model.records import Blocks, Weights
from ..evidence import LITTLE, SPARE, WHOLE, matched, sources
from ..law.codes import scales_and_codes
from ..law.expression import Array, Node
from ..words import Indices, least_to_largest, moves_in_words, parts_of, runs
from .structure import Numbers, structure
from .wrong import Wrong

_LARGE = 1 << 22  # numbers of an error, and of a matrix, whose directions are looked at
_MOSTLY = 0.8  # of rows or columns: where more are wrong, all are
_OTHERS = ("", "of the next {}", "of the {} before")


class _Found(NamedTuple):
    """The columns of a table [n, M], or of what lies behind and before each row in memory, that span an error's columns."""

    at: Indices  # places in [n, 3 M + 1], whose last column is the sum of each row
    more: Array  # [m, C], what each of them is multiplied by in each row of the error
    width: int  # M

    @property
    def is_sum(self) -> bool:
        return bool((self.at == 3 * self.width).all())

    @property
    def is_own(self) -> bool:
        """Whether these are the inputs of the product themselves."""
        return bool((self.at < self.width).all())

    def words(self, noun: str, row: str) -> str:
        return f"{runs(noun, self.at % self.width)} {_OTHERS[int(self.at[0]) // self.width].format(row)}".strip()


def few_inputs(wrong: Wrong, node: Node, needed: Array) -> str | None:
    """The inputs whose numbers, or whose weights, are others, if these make all of a product's error [T, N]."""
    x, matrix = (wrong.steps[child] for child in node.inputs)
    rows, columns = wrong.wrong_rows, wrong.wrong_columns
    if rows.size * columns.size > _LARGE or matrix.shape[0] * matrix.shape[1] > _LARGE:
        return None
    weights, theirs = matrix.whole(), needed[np.ix_(rows, columns)]
    error = theirs - wrong.steps[node][np.ix_(rows, columns)]
    most = min(LITTLE * float((error**2).sum()), matched(wrong.noise) * float((theirs**2).sum()))
    left, size, right = np.linalg.svd(error, full_matrices=False)
    rank = int((np.cumsum(size[::-1] ** 2)[::-1] > most).sum())
    text = None
    if (of := _spanning(weights, columns, right[:rank].T, error.T, most)) is not None:
        memory, near = _memory(x)[rows], LITTLE * float(np.abs(x).max())
        if not of.is_own and not of.is_sum and (found := sources(memory.T, of.more.T, near)) is not None:
            inputs = of._replace(at=found, width=x.shape[1])
            text = f"products of {inputs.words('input', 'position')} with {of.words('weight', 'row')} are summed too"
        elif of.is_sum:
            why = "a zero point that is not corrected for, or corrected twice"
            text = f"a number is added to all inputs, {least_to_largest(of.more)} by position: {why}"
        elif of.is_own:
            own = x[np.ix_(rows, of.at)]
            law = structure(Numbers(own + of.more, own, ("position", "input"), wrong.noise))
            text = f"{of.words('input', '')} {'is another' if len(of.at) == 1 else 'are others'}{f': {law}' if law else ''}"
    elif (of := _spanning(x, rows, left[:, :rank], error, most)) is not None and of.is_own:
        law = _of_weights(weights[columns], of.at, of.more, matrix.weights, columns)
        text = f"weights of {of.words('input', '')} are others{law}"
    where = parts_of(wrong.places, _MOSTLY)
    return text and (f"at {' and '.join(where)}: {text}" if where else text)


def _memory(table: Array) -> Array:
    """The numbers of each row, of the next one, and of the one before, and their sum: [n, 3 M + 1]."""
    nothing = np.zeros_like(table[:1])
    every = (table, np.append(table[1:], nothing, axis=0), np.append(nothing, table[:-1], axis=0), table.sum(axis=1, keepdims=True))
    return np.concatenate(every, axis=1)


def _spanning(table: Array, some: Indices, basis: Array, error: Array, most: float) -> _Found | None:
    """What spans the columns of an error [n, m], by the directions [n, rank] that it has; None where these are too many, or no such
    columns leave no more than `most`."""
    distinct, rank = np.unique(table[some], axis=0).shape[0], basis.shape[1]
    if not 0 < 2 * rank <= distinct - SPARE:
        return None
    known = _memory(table)[some]
    size, outside = np.linalg.norm(known, axis=0), np.linalg.norm(known - basis @ (basis.T @ known), axis=0)
    at = np.flatnonzero(outside <= LITTLE * np.where(size > 0, size, -1))
    if at.size != rank or np.unique(at // table.shape[1]).size > 1:
        return None
    more: Array = np.linalg.lstsq(known[:, at], error, rcond=None)[0].astype(np.float64)
    return _Found(at, more.T, table.shape[1]) if ((error - known[:, at] @ more) ** 2).sum() <= most else None


def _of_weights(right: Array, at: Indices, more: Array, table: Weights, rows: Indices) -> str:
    """What the weights of these inputs are, in words: those of other inputs, other codes of their blocks, or what structure says."""
    theirs = right[:, at] + more
    source = sources(right.T, theirs.T, LITTLE * float(np.abs(right).max()))
    if source is not None and (source != at).all():
        every = np.arange(right.shape[1])
        every[at] = source
        return f": {moves_in_words(every, 'input', 'those')}"
    if isinstance(table, Blocks) and table.type.name in FORMATS:
        scales, codes = (y[:, at] for y in scales_and_codes(table, rows))
        code = (theirs - (right[:, at] - scales * codes)) / np.where(scales == 0, 1, scales)
        if np.abs(code - np.rint(code)).max() < WHOLE:
            return f": they have other codes of {table.type.name}, {least_to_largest(np.rint(code))}, as if these were written over"
    law = structure(Numbers(theirs, right[:, at], ("row", "input")))
    return f": {law}" if law else ""
