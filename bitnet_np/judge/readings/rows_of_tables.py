"""Wrong rows of tables and matrices of the model: those of other tokens, and of other experts."""

import numpy as np

from ...base.errors import listed
from ...model import widen
from .. import operations as op
from ..graph import OF_EXPERTS
from .wrong import FEW, Wrong, explained, runs

_ROWS_AT_ONCE = 1 << 14
_MOST = 64  # wrong rows that are looked for


def tokens(wrong: Wrong) -> str | None:
    """The tokens whose rows of the embedding stand at wrong positions, if that explains all of these."""
    rows = np.flatnonzero(wrong.places.any(axis=1))
    if rows.size > _MOST:
        return None
    table, theirs = wrong.model.token_embd, wrong.theirs[rows]
    nearest, least = np.zeros(rows.size, np.intp), np.full(rows.size, np.inf)
    for begin in range(0, table.shape[0], _ROWS_AT_ONCE):
        some = widen.take(table, slice(begin, begin + _ROWS_AT_ONCE)).astype(np.float64)
        away = (some**2).sum(axis=1) - 2 * theirs @ some.T
        nearer = away.min(axis=1) < least
        nearest[nearer], least[nearer] = begin + away.argmin(axis=1)[nearer], away.min(axis=1)[nearer]
    if not explained(widen.take(table, nearest).astype(np.float64), theirs, wrong.noise):
        return None
    right = wrong.inputs[0].astype(np.int64)[rows]
    every = zip(rows, nearest, right, strict=True)
    said = [f"position {t} has the row of token {n} instead of {own}" for t, n, own in every if n != own]
    return f"rows of other tokens: {listed(said, FEW)}" if said else None


def experts(wrong: Wrong) -> str | None:
    """The experts whose products stand in wrong slots, or those that are wrong themselves."""
    assert wrong.layer is not None
    linears = [getattr(expert, OF_EXPERTS[wrong.key.name]) for expert in wrong.layer.experts]
    x, chosen = wrong.inputs[0], wrong.inputs[1].astype(np.intp)
    count = chosen.shape[1]
    theirs, places = (a.reshape(chosen.size, -1) for a in (wrong.theirs, wrong.places))
    slots = np.flatnonzero(places.any(axis=1))
    inputs = x.reshape(-1, linears[0].shape[1])
    inputs = inputs[slots // (chosen.size // len(inputs))]
    own = chosen.ravel()[slots]
    guilty = np.unique(own)
    if guilty.size <= max(1, len(linears) // 4) and not np.isin(np.delete(chosen.ravel(), slots), guilty).any():
        return f"products of {runs('expert', guilty)} alone are wrong, wherever a token takes {'it' if guilty.size == 1 else 'them'}"
    source, least, nearest = own.copy(), np.full(len(slots), np.inf), np.zeros_like(theirs[slots])
    for expert, linear in enumerate(linears):
        products = op.product(inputs, linear, wrong.dialect).value
        away = ((products - theirs[slots]) ** 2).sum(axis=1)
        nearer = away < least
        source[nearer], least[nearer], nearest[nearer] = expert, away[nearer], products[nearer]
    if not explained(nearest, theirs[slots], wrong.noise):
        return None
    every = zip(slots // count, source, own, strict=True)
    said = [f"position {t} has that of expert {n} instead of {e}" for t, n, e in every if n != e]
    return f"products of other experts: {listed(said, FEW)}" if said else None
