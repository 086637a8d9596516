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
    for bits in (8, 15, 16):
        if (found == right % (1 << bits)).all():
            return f"token ids are kept in {bits} bits: position {positions[0]} has the row of token {found[0]} instead of {right[0]}"
    if (found == found[0]).all() and found.size > 1:
        return f"wrong positions, {positions.size} of them, all have the row of token {found[0]}"
    moved = positions - 1
    if found.size > 1 and positions[-1] == len(ids) - 1 and (np.diff(positions) == 1).all() and (found == ids[moved]).all():
        return f"the token of position {moved[0]} is there twice: those from position {positions[0]} on are one place late"
    first = {int(token): t for t, token in reversed(list(enumerate(ids)))}
    if all(int(token) in first for token in found):
        moves = [f"position {p} has the token of position {first[int(token)]}" for p, token in zip(positions, found, strict=True)]
    elif (found - right == found[0] - right[0]).all() and found.size > 1:
        return f"token ids are off by {found[0] - right[0]}: position {positions[0]} has the row of token {found[0]} instead of {right[0]}"
    else:
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
