"""Wrong rotations: the frequencies, or the positions, that they have."""

import numpy as np
from numpy.typing import NDArray

from ...base.errors import listed
from ..equivalence import complex_pairs
from .wrong import FEW, ROWS, Array, Wrong, runs

_BEFORE = 64  # positions before the first, and behind twice the length, that are tried


def rotation(wrong: Wrong) -> str | None:
    """The frequencies that pairs were rotated by, where they are not the model's."""
    right = wrong.model.rope_frequency.astype(np.float64)
    frequency = _frequencies(_turns(wrong.rows(np.arange(min(ROWS, len(wrong.theirs))))))
    if frequency is None or not _accounts(wrong, np.multiply.outer(np.arange(len(wrong.theirs)), frequency)):
        return None
    still = np.flatnonzero(frequency < 1e-3 * right)
    if 0 < still.size < right.size:
        return f"{runs('pair', still)} of each head {'are' if still.size > 1 else 'is'} not rotated"
    ratio = frequency / right
    off = np.flatnonzero(np.abs(ratio - 1) > 1e-3 + 1e-6 / np.abs(right))
    if not off.size:
        return None
    return f"frequencies are wrong: that of {runs('pair', off)} is {ratio[off[0]]:.4g} times what it should be, for the first of them"


def positions(wrong: Wrong) -> str | None:
    """The positions that tokens are rotated by, where they are not their own."""
    rows = wrong.wrong_rows[:ROWS]
    some, tried = wrong.rows(rows), np.arange(-_BEFORE, 2 * len(wrong.theirs) + _BEFORE)
    angles = np.multiply.outer(tried, wrong.model.rope_frequency.astype(np.float64))  # [P, J]
    place = np.real(_turns(some) @ np.exp(-1j * angles).T).argmax(axis=1)
    theirs = tried[place]
    if (theirs == rows).all() or not _accounts(some, angles[place]):
        return None
    rows, theirs = rows[theirs != rows], theirs[theirs != rows]
    texts = [f"{runs('position', rows[theirs == p])} as position {p}" for p in dict.fromkeys(theirs.tolist())]
    return f"tokens are rotated by other positions: {listed(texts, FEW)}"


def _accounts(wrong: Wrong, angles: Array) -> bool:
    """Whether a rotation by these angles [T, J] gives their numbers."""
    step = wrong.step("the angles")
    return step is not None and wrong.accounts(wrong.with_step(step, angles))


def _turns(wrong: Wrong) -> NDArray[np.complex128]:
    """What turns each pair into theirs, about: complex numbers [T, J], over all heads."""
    before, after = (complex_pairs(wrong.model.config, x) for x in (wrong.inputs[0], wrong.theirs))
    return (after * before.conj()).sum(axis=1)


def _frequencies(turns: NDArray) -> Array | None:
    """Radians per position of each pair: the angle of position 1, made more precise by each later one."""
    if len(turns) < 2:
        return None
    frequency = np.angle(turns[1])
    for t in range(2, len(turns)):
        angle = np.angle(turns[t])
        frequency = (angle + 2 * np.pi * np.rint((t * frequency - angle) / (2 * np.pi))) / t
    return frequency
