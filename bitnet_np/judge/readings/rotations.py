"""Wrong rotations: the frequencies, or the positions, that they have."""

import numpy as np
from numpy.typing import NDArray

from ...base.errors import listed
from ..equivalence import complex_pairs, pair_slices
from .wrong import FEW, ROWS, Array, Wrong, explained, numbered, runs

_BEFORE = 64  # positions before the first, and behind twice the length, that are tried


def rotation(wrong: Wrong) -> str | None:
    """The frequencies that pairs were rotated by, where they are not the model's."""
    c = wrong.config
    before, after = (complex_pairs(c, a[:ROWS]) for a in (wrong.inputs[0], wrong.theirs))
    before = c.rope_magnitude * before
    turn = (after * before.conj()).sum(axis=1)
    size = np.abs(before * after).sum(axis=1)
    if np.abs(turn).sum() < 0.999 * size.sum() or not np.isclose(np.abs(before).sum(), np.abs(after).sum(), rtol=1e-3):
        return None
    fitted = _frequencies(turn / np.maximum(np.abs(turn), 1e-300))
    angle = np.multiply.outer(np.arange(len(turn)), 0.0 if fitted is None else fitted)
    if fitted is None or not explained(before * np.exp(1j * angle)[:, None], after, wrong.noise):
        return None
    right = wrong.model.rope_frequency
    still = fitted < 1e-3 * right
    if still.any() and not still.all():
        return f"{runs('pair', np.flatnonzero(still))} of each head {'are' if still.sum() > 1 else 'is'} not rotated"
    ratio = fitted / right
    off = np.flatnonzero(np.abs(ratio - 1) > 1e-3 + 1e-6 / np.abs(right))
    if not off.size:
        return None
    return f"frequencies are wrong: that of {numbered('pair', off)} is {ratio[off[0]]:.4g} times what it should be, for the first of them"


def positions(wrong: Wrong) -> str | None:
    """The positions that tokens are rotated by, where they are not their own."""
    c, rows = wrong.config, wrong.wrong_rows[:ROWS]
    before, after = (complex_pairs(c, a[rows]) for a in (wrong.inputs[0], wrong.theirs))
    tried = np.arange(-_BEFORE, 2 * len(wrong.theirs) + _BEFORE)
    turns = np.exp(1j * np.multiply.outer(tried, wrong.model.rope_frequency.astype(np.float64)))  # [P, J]
    likeness = np.real((after * before.conj()).sum(axis=1) @ turns.conj().T)
    theirs = tried[likeness.argmax(axis=1)]
    turned = c.rope_magnitude * before * turns[theirs + _BEFORE][:, None]
    computed = wrong.inputs[0][rows].reshape(len(rows), -1, c.head_dim).copy()
    first, second = pair_slices(c)
    computed[..., first], computed[..., second] = turned.real, turned.imag
    if (theirs == rows).all() or not wrong.rows(rows).accounts(computed.reshape(len(rows), -1)):
        return None
    rows, theirs = rows[theirs != rows], theirs[theirs != rows]
    said = [f"{runs('position', rows[theirs == p])} as position {p}" for p in dict.fromkeys(theirs.tolist())]
    return f"tokens are rotated by other positions: {listed(said, FEW)}"


def _frequencies(turn: NDArray) -> Array | None:
    """Radians per position of each pair: the angle of position 1, made more precise by each later one."""
    if len(turn) < 2:
        return None
    frequency = np.angle(turn[1])
    for t in range(2, len(turn)):
        angle = np.angle(turn[t])
        frequency = (angle + 2 * np.pi * np.rint((t * frequency - angle) / (2 * np.pi))) / t
    return frequency
