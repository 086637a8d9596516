"""Wrong embeddings: rows of other tokens, or rows that were misread or rounded."""

import numpy as np
from numpy.typing import NDArray

from .. import operations as op
from ..edits.weights import CODE_TYPES
from ..narrow import rounded
from ..roundings import to_digits
from .product import accounts
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


def sinusoids(wrong: Wrong) -> str | None:
    """Whether sines and cosines of positions are added, as the first transformers have them."""
    tokens, width = wrong.theirs.shape
    angles = np.multiply.outer(np.arange(tokens), 10000.0 ** (-np.arange(width // 2) / (width // 2)))
    sines, cosines = np.sin(angles), np.cos(angles)
    error = wrong.theirs[:, : 2 * (width // 2)] - wrong.value[:, : 2 * (width // 2)]
    for table in (np.concatenate([sines, cosines], axis=1), np.stack([sines, cosines], axis=2).reshape(tokens, -1)):
        factor = float((error * table).sum() / (table * table).sum())
        added = np.zeros_like(wrong.value)
        added[:, : table.shape[1]] = factor * table
        if wrong.accounts(wrong.value + added):
            return f"sines and cosines of positions are added, times {factor:.4g}"
    return None


def misread_rows(wrong: Wrong) -> str | None:
    """What is wrong in reading or keeping the table: bits, scales, orders of blocks; roundings."""
    theirs, right = wrong.theirs[:ROWS], wrong.value[:ROWS]

    def is_it(numbers: Array) -> bool:
        return accounts(numbers, theirs, right, wrong.noise)

    for digits in range(11, 1, -1):
        if is_it(to_digits(right, digits)):
            return f"numbers are rounded to {digits} significant bits" + (": an 8-bit float" if digits in (3, 4) else "")
    for kind, words in CODE_TYPES.items():
        if is_it(rounded(right, kind)):
            return f"numbers are rounded to {words}"
    table = wrong.model.token_embd
    if isinstance(table, np.ndarray):
        places = np.add.outer(np.asarray(wrong.inputs[0], np.int64)[:ROWS], np.arange(table.shape[1]) * len(table))
        if is_it(table.reshape(-1)[places].astype(np.float64)):
            return "the table is read column by column, not row by row"
    for by in (1, 2, 4, 8, 16, 32):
        for here, there, side in ((slice(None, -by), slice(by, None), "late"), (slice(by, None), slice(None, -by), "early")):
            if np.abs(theirs[:, here] - right[:, there]).max() <= 1e-4 * np.abs(right).max():
                return f"rows are read {by} element{'s' * (by > 1)} too {side}: an offset in the table"
    for size in (32, 16):
        if right.shape[1] % size == 0 and is_it(right + _by_block(theirs - right, size)):
            return f"a number is added to all numbers of a block of {size}: a zero point or a minimum is misread"
    return None


def _by_block(x: Array, size: int) -> Array:
    """The mean of each block, for each of its numbers."""
    blocks = x.reshape(len(x), -1, size)
    return np.broadcast_to(blocks.mean(axis=2, keepdims=True), blocks.shape).reshape(x.shape)
