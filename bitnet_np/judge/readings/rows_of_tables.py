"""Wrong rows of tables and matrices of the model: those of other tokens, and of other experts."""

import numpy as np

from ...base.errors import listed
from ...model import widen
from ...traces.points import TOP_EXPERTS, Key
from ..edits.definition import matrix_product
from ..edits.expression import tensor, value_of
from ..graph import OF_EXPERTS
from .wrong import FEW, Array, Indices, Wrong, runs

_ROWS_AT_ONCE = 1 << 14
_MOST = 64  # wrong rows that are looked for


def tokens(wrong: Wrong) -> str | None:
    """The tokens whose rows of the embedding stand at wrong positions, if that explains all of these."""
    rows = wrong.wrong_rows
    if rows.size > _MOST:
        return None
    table, theirs = wrong.model.token_embd, wrong.theirs[rows]
    nearest, least = np.zeros(rows.size, np.intp), np.full(rows.size, np.inf)
    for begin in range(0, table.shape[0], _ROWS_AT_ONCE):
        some = widen.take(table, slice(begin, begin + _ROWS_AT_ONCE)).astype(np.float64)
        away = (some**2).sum(axis=1) - 2 * theirs @ some.T
        nearer = away.min(axis=1) < least
        nearest[nearer], least[nearer] = begin + away.argmin(axis=1)[nearer], away.min(axis=1)[nearer]
    if not wrong.rows(rows).accounts(widen.take(table, nearest).astype(np.float64)):
        return None
    right = wrong.inputs[0].astype(np.int64)[rows]
    every = zip(rows, nearest, right, strict=True)
    said = [f"position {t} has the row of token {n} instead of {own}" for t, n, own in every if n != own]
    return f"rows of other tokens: {listed(said, FEW)}" if said else None


def experts(wrong: Wrong) -> str | None:
    """The experts whose numbers are wrong wherever they are taken; or whose products, of which token, stand in wrong slots."""
    key = Key(TOP_EXPERTS, wrong.key.layer)
    if key not in wrong.tensors:
        return None
    chosen = wrong.tensors[key].astype(np.intp)
    count = chosen.shape[1]
    slots = np.flatnonzero(wrong.places.reshape(chosen.size, -1).any(axis=1))
    own, right = chosen.ravel()[slots], np.delete(chosen.ravel(), slots)
    guilty = np.unique(own)
    if 4 * guilty.size <= wrong.config.experts and not np.isin(right, guilty).any():
        return f"numbers of {runs('expert', guilty)} alone are wrong, wherever a token takes {'it' if guilty.size == 1 else 'them'}"
    return _products(wrong, slots, count, own) if wrong.key.name in OF_EXPERTS else None


def _products(wrong: Wrong, slots: Indices, count: int, own: Indices) -> str | None:
    """What is said of products in these slots, `count` of a token and of these experts, that are another's, or of another token's input."""
    assert wrong.layer is not None
    linears = [getattr(expert, OF_EXPERTS[wrong.key.name]) for expert in wrong.layer.experts]
    x = wrong.inputs[0]
    if x.shape[1] != linears[0].shape[1]:  # each slot has an input of its own
        return None
    computed = wrong.value.reshape(-1, linears[0].shape[0]).copy()
    tokens, theirs = slots // count, wrong.theirs.reshape(computed.shape)[slots]
    least, nearest, source = np.full(len(own), np.inf), np.zeros_like(theirs), np.stack([tokens, own])

    def offer(some: Indices, of: Indices, expert: int, products: Array) -> None:
        """Products [n, N] of these tokens' inputs with an expert, for some slots."""
        away = ((products - theirs[some]) ** 2).sum(axis=1)
        nearer = away < least[some]
        some = some[nearer]
        source[:, some], least[some], nearest[some] = [of[nearer], np.full(some.size, expert)], away[nearer], products[nearer]

    for expert, linear in enumerate(linears):
        products = value_of(matrix_product(wrong, tensor(wrong.key), linear), {wrong.key: x}.__getitem__, len(x))  # [T, N]
        offer(np.arange(len(own)), tokens, expert, products[tokens])
        mine = np.flatnonzero(own == expert)
        others = ((products**2).sum(axis=1) - 2 * theirs[mine] @ products.T).argmin(axis=1)
        offer(mine, others, expert, products[others])
    computed[slots] = nearest
    if not wrong.accounts(computed.reshape(wrong.value.shape)):
        return None
    said = [
        f"position {t} has that of expert {e} instead of {own[i]}" if t == tokens[i] else f"position {tokens[i]} has that of position {t}"
        for i, (t, e) in enumerate(source.T)
        if (t, e) != (tokens[i], own[i])
    ]
    return f"products of others: {listed(list(dict.fromkeys(said)), FEW)}" if said else None
