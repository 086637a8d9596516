"""Wrong embeddings: rows of other tokens."""

import numpy as np
from numpy.typing import NDArray

from .. import operations as op
from .wrong import FEW, ROWS, Array, Wrong, matched

_LARGEST_TABLE = 10**9  # numbers
_SCREENED = 8  # columns compared first


def other_tokens(wrong: Wrong) -> str | None:
    """The tokens whose rows stand in wrong positions."""
    positions = np.flatnonzero(wrong.places.any(axis=1))[:ROWS]
    ids = np.asarray(wrong.inputs[0], np.int64)
    table = wrong.model.token_embd
    if table.shape[0] * table.shape[1] > _LARGEST_TABLE:
        return None
    rows = wrong.theirs[positions]
    found = _rows_of(rows, wrong, np.unique(np.linspace(0, table.shape[1] - 1, _SCREENED).astype(int)))
    right = ids[positions]
    if (found < 0).any() or (found == right).any():
        return None
    pairs = zip(positions, found, right, strict=True)
    moves = [f"position {p} has the row of token {token} instead of {own}" for p, token, own in pairs]
    return ", ".join(moves[:FEW]) + (f", and {len(moves) - FEW} more" if len(moves) > FEW else "")


def _rows_of(rows: Array, wrong: Wrong, columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The token of each row [n, D] in the table; -1 where none is."""
    found = np.full(len(rows), -1)
    most = matched(wrong.noise) * (rows**2).sum(axis=1)
    for block, numbers in op.row_blocks(wrong.model.token_embd):
        away = ((numbers[:, None, columns] - rows[:, columns]) ** 2).sum(axis=2)  # [rows of the table, n]
        for token, row in np.argwhere(away <= most):
            if found[row] < 0 and ((numbers[token] - rows[row]) ** 2).sum() <= most[row]:
                found[row] = block.start + token
    return found
