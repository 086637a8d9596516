"""Wrong rotations: the pairs, the frequencies, or the positions, that they have."""

import numpy as np
from numpy.typing import NDArray

from ...base.errors import listed
from ..equivalence import complex_pairs
from ..evidence import FEWEST, LITTLE, NEAR, SAME, matched, rough
from ..law import formats
from ..law.expression import Array
from ..law.functions import pairs
from ..words import FEW, Indices, moves_in_words, plain, runs
from .wrong import ROWS, Wrong

_CLEAR = 3  # times what roundings make of an angle
_BEFORE = 64  # positions before the first, and behind twice the length, that are tried


def rotation(wrong: Wrong) -> str | None:
    """The frequencies that pairs were rotated by, where they are not the model's."""
    right, first = wrong.model.rope_frequency.astype(np.float64), int(wrong.wrong_rows[0])
    first = first if first > 1 else 0  # at position 0 nothing turns, whatever frequencies are
    at = np.arange(first, len(wrong.theirs))
    frequency = _frequencies(_turns(wrong.rows(at[:ROWS])), first)
    if frequency is None or not _accounts(wrong.rows(at), np.multiply.outer(at, frequency)):
        return None
    still = np.abs(frequency) < 1e-3 * right
    if not 0 < still.sum() < right.size:
        text = _law(wrong, frequency, right)
    else:
        law = _law(wrong, frequency[~still], right) if not still[: still.size - still.sum()].any() else ""
        which = np.flatnonzero(still)
        text = f"{runs('pair', which)} of each head {'are' if which.size > 1 else 'is'} not rotated" + (f"; {law}" if law else "")
    return f"{f'from position {first} on ' * (first > 0)}{text}" if text else None


def whole_turns(wrong: Wrong) -> str | None:
    """The number by which whole turns are taken off angles, where that is not 2 pi: it is found by the errors that grow with them."""
    step = wrong.step("the angles")
    assert step is not None
    angles = wrong.steps[step]
    error = np.angle(_turns(wrong) * np.exp(-1j * angles))
    for count in (rule(angles / (2 * np.pi)) for rule in (np.rint, np.floor)):
        by = float((error * count).sum() / max((count**2).sum(), 1))
        if abs(by) > LITTLE**2 and _accounts(wrong, angles + by * count):
            return f"whole turns are taken off angles by {2 * np.pi - by:.6g} instead of 2 pi: angles drift with the position"
    return None


def other_turns(wrong: Wrong) -> str | None:
    """The frequencies that the two numbers of a pair are turned by, where these are not the same: solved for over all heads."""
    c, tokens = wrong.model.config, np.arange(min(ROWS, len(wrong.theirs)))
    before, after = (complex_pairs(c, x[tokens]) for x in (wrong.inputs[0], wrong.theirs))
    laws, left = [], 0.0
    for first in (1, -1j):  # what makes each number of a pair the first one
        z, y = first * before, (first * after).real  # [T, H, J]
        turn = np.linalg.pinv(np.stack([z.real, -z.imag], axis=-1).swapaxes(1, 2)) @ y.swapaxes(1, 2)[..., None]  # [T, J, 2, 1]
        frequency = _frequencies(turn[..., 0, 0] + 1j * turn[..., 1, 0])
        if frequency is None:
            return None
        turned = c.rope_magnitude * z * np.exp(1j * np.multiply.outer(tokens, frequency))[:, None]
        left += float(((turned.real - y) ** 2).sum())
        laws.append(_law(wrong, frequency, wrong.model.rope_frequency.astype(np.float64)) or "frequencies are right")
    if left > matched(wrong.noise) * (np.abs(after) ** 2).sum() or laws[0] == laws[1]:
        return None
    return f"the two numbers of a pair are turned by two angles: of the first {laws[0]}; of the second {laws[1]}"


def other_pairs(wrong: Wrong) -> str | None:
    """The pairs of elements that are rotated together, where they are not the model's: what one loses of its square the other has."""
    c, tokens = wrong.model.config, np.arange(min(ROWS, len(wrong.theirs)))
    before, after = (x[tokens].reshape(len(tokens), -1, c.head_dim) for x in (wrong.inputs[0], wrong.theirs))
    touched = (np.abs(after - c.rope_magnitude * before) > SAME * np.abs(before).max()).any(axis=(0, 1))
    change = (after**2 - (c.rope_magnitude * before) ** 2).reshape(-1, c.head_dim).T[touched]
    if touched.sum() < 2 or touched.sum() % 2 or change.shape[1] < FEWEST:
        return None
    left = ((change[:, None] + change) ** 2).sum(axis=2)
    np.fill_diagonal(left, np.inf)
    other, elements = left.argmin(axis=1), np.flatnonzero(touched)
    if (other[other] != np.arange(len(other))).any() or (left.min(axis=1) > SAME * (change**2).sum(axis=1)).any():
        return None
    first = np.flatnonzero(np.arange(len(other)) < other)
    a, b = elements[first], elements[other[first]]
    own = pairs(c.rope, c.rope_pairs, c.head_dim)
    if set(zip(a, b, strict=True)) <= set(zip(*own, strict=True)):
        return None
    x, y = (z[..., a] + 1j * z[..., b] for z in (before, after))
    frequency = _frequencies((y * x.conj()).sum(axis=1))
    if frequency is None:
        return None
    turned = c.rope_magnitude * x * np.exp(1j * np.multiply.outer(tokens, frequency))[:, None]
    if (np.abs(turned - y) ** 2).sum() > matched(wrong.noise) * (np.abs(y) ** 2).sum():
        return None
    law = _law(wrong, frequency, wrong.model.rope_frequency.astype(np.float64))
    return f"pairs are {_pairs_in_words(a, b)} instead of {_pairs_in_words(*own)}" + (f"; {law}" if law else "")


def _pairs_in_words(a: Indices, b: Indices) -> str:
    if np.unique(b - a).size == 1:
        if (b - a == 1).all() and len(a) > 1:
            return "neighbours (2i, 2i + 1)"
        return f"(i, i + {b[0] - a[0]})"
    return listed([f"({i}, {j})" for i, j in zip(a, b, strict=True)], FEW)


def _law(wrong: Wrong, frequency: Array, right: Array) -> str:
    """How frequencies differ from the right ones, in words; "" if they do not."""
    base, count = wrong.model.config.rope_base, len(frequency)
    known = min(count, len(right))
    spread = LITTLE + _CLEAR * rough(wrong.noise) / (np.abs(frequency) * min(ROWS, len(wrong.theirs)))  # relative: slow ones turn little
    ratio = frequency[:known] / right[:known]
    is_sure = spread[:known] < 0.1
    off = np.flatnonzero((np.abs(ratio - 1) > spread[:known]) & is_sure)
    if not is_sure.any() or (not off.size and count <= len(right)):
        return ""
    if np.ptp(ratio[is_sure]) < 2 * spread[:known][is_sure].max() and known > 1:
        return f"frequencies are {np.median(ratio[is_sure]):.4g} times what they should be"
    longrope, own = wrong.model.config.longrope, wrong.model.config.rope_base ** (-np.arange(count) / max(len(right), 1))
    for which in ("short", "long") if longrope is not None and count == len(right) else ():
        if (np.abs(frequency * np.array(getattr(longrope, which)) / own - 1) < spread)[is_sure].all():
            return f"frequencies are those of the {which} factors"
    factors = wrong.model.rope_factors
    if factors is not None and count == len(right) and (np.abs(np.exp(1j * (frequency - factors)) - 1) < LITTLE).all():
        return "frequencies are the factors that they should be divided by"
    if (frequency > 0).all() and (spread < 0.1).sum() > 2:
        place = np.arange(count)
        slope, start = np.polyfit(place, np.log(frequency), 1, w=1 / spread)
        if (np.abs(slope * place + start - np.log(frequency)) < spread).all():
            times = "" if abs(start) < LITTLE + 2 * spread[0] else f", times {np.exp(start):.4g}"
            rotated = -2 * np.log(base) / slope
            own_base = float(np.exp(-slope * len(right)))
            if times and abs(own_base / base - 1) < SAME:
                return f"all frequencies are {np.exp(start):.4g} times powers of {base:g}, and none is scaled otherwise"
            powers = f"powers of {plain(own_base, 2 * SAME + rough(wrong.noise))} instead of {base:g}"
            near = max(SAME, rough(wrong.noise) / 10)
            if abs(rotated - np.rint(rotated / 2) * 2) < near * rotated and np.rint(rotated) != 2 * len(right):
                return f"frequencies are those of a width of {rotated:.0f} instead of {2 * len(right)}, or {powers}{times}"
            return f"frequencies are {powers}{times}"
    source = np.abs(np.log(np.maximum(frequency, 1e-300))[:, None] - np.log(right)).argmin(axis=1)
    if count == len(right) and (np.abs(frequency / right[source] - 1) < spread).all():
        return moves_in_words(source, "pair", "the frequency")
    if count == len(right) and np.ptp(right / own) > LITTLE > np.ptp((frequency + right) / own):
        return "kept and slowed frequencies are mixed the wrong way round: pairs that should keep theirs are slowed"
    slowest = float((own[:known] / right[:known]).max())
    if count == len(right) and longrope is None and min(slowest - 1, np.ptp(right / own)) > NEAR:
        parts = [(x / own * slowest - 1) / (slowest - 1) for x in (frequency, right)]
        room = np.maximum(spread, NEAR) * slowest / (slowest - 1)
        kept, slowed = ([np.flatnonzero(x) for x in marks] for marks in ([x > 1 - room for x in parts], [x < room for x in parts]))
        fall = all((np.diff(x[is_sure]) < NEAR).all() and ((x > -room) & (x < 1 + room))[is_sure].all() for x in parts)
        if fall and all(x.size for x in (*kept, *slowed)):
            borders = [f"{runs('pair', a)} kept and {runs('pair', b)} slowed" for a, b in zip(kept, slowed, strict=True)]
            if borders[0] != borders[1]:
                return f"kept and slowed frequencies are blended by other borders: {' instead of '.join(borders)}"
    sure = ratio[is_sure]
    falls = (np.diff(sure) <= LITTLE).all() or (np.diff(sure) >= -LITTLE).all()
    if off.size > 2 and off[0] > 0 and falls and off[-1] == np.flatnonzero(is_sure)[-1]:
        slow = f"{ratio[off[-1]]:.4g} times what they should be at pair {off[-1]}"
        return f"frequencies of slow pairs are scaled: right up to pair {off[0] - 1}, {slow}"
    if off.size > 2 and off[0] == 0 and off[-1] < known - 1 and falls and (np.diff(off) == 1).all():
        fast = f"{ratio[0]:.4g} times what they should be at pair 0, right from pair {off[-1] + 1} on"
        return f"frequencies of fast pairs are scaled: {fast}"
    if not off.size:
        return ""
    return f"frequencies are wrong: that of {runs('pair', off)} is {ratio[off[0]]:.4g} times what it should be, for the first of them"


def positions(wrong: Wrong) -> str | None:
    """The positions that tokens are rotated by, where they are not their own."""
    rows, c = wrong.wrong_rows[:ROWS], wrong.model.config
    tried = np.arange(-_BEFORE, 2 * len(wrong.theirs) + _BEFORE)
    angles = np.multiply.outer(tried, wrong.model.rope_frequency.astype(np.float64))  # [P, J]
    before, after = (complex_pairs(c, x[rows]) for x in (wrong.inputs[0], wrong.theirs))
    place = np.real((after * before.conj()) @ np.exp(-1j * angles).T)  # [T, H, P]
    both = place.sum(axis=1).argmax(axis=1)  # [T]
    if (tried[both] != rows).any() and _accounts(wrong.rows(rows), angles[both]):
        theirs = tried[both]
        for kind in (kind for kind in formats.EACH if (formats.EACH[kind](rows.astype(np.float64)) == theirs).all()):
            return f"positions are rounded to {kind}"
        rows, theirs = rows[theirs != rows], theirs[theirs != rows]
        by, texts = theirs - rows, [f"{runs('position', rows[theirs == p])} as position {p}" for p in dict.fromkeys(theirs.tolist())]
        if len(np.unique(by)) < min(len(texts), FEW):  # few distances say more than many positions
            of = ((f"{abs(n)} too {'large' if n > 0 else 'small'}", rows[by == n]) for n in dict.fromkeys(by.tolist()))
            texts = [f"{how} at {runs('position', some)}" for how, some in of]
        return f"tokens are rotated by other positions: {listed(texts, FEW)}"
    each = place.argmax(axis=2)  # [T, H]
    turned = c.rope_magnitude * before * np.exp(1j * angles[each])
    if (np.abs(turned - after) ** 2).sum() > matched(wrong.noise) * (np.abs(after) ** 2).sum():
        return None
    theirs, heads = tried[each], np.arange(each.shape[1])
    if (theirs == heads).all():
        return "every token is rotated by the number of the head instead of its position"
    off = np.flatnonzero((theirs != rows[:, None]).any(axis=0))
    if not 0 < off.size < len(heads):
        return None
    t, are = int((theirs[:, off[0]] != rows).argmax()), "are" if off.size > 1 else "is"
    return f"{runs('head', off)} alone {are} rotated by other positions: position {rows[t]} as {theirs[t, off[0]]}"


def _accounts(wrong: Wrong, angles: Array) -> bool:
    """Whether a rotation by these angles [T, J] gives their numbers."""
    step = wrong.step("the angles")
    return step is not None and wrong.accounts(wrong.with_step(step, angles))


def _turns(wrong: Wrong) -> NDArray[np.complex128]:
    """What turns each pair into theirs, about: complex numbers [T, J], over all heads."""
    before, after = (complex_pairs(wrong.model.config, x) for x in (wrong.inputs[0], wrong.theirs))
    return (after * before.conj()).sum(axis=1)


def _frequencies(turns: NDArray, first: int = 0) -> Array | None:
    """Radians per position of each pair: the angle between two positions, the second of which is behind `first`, made more precise by each
    later one."""
    if len(turns) < 2:
        return None
    frequency = np.angle(turns[1] * turns[0].conj()) if first else np.angle(turns[1])
    for t in range(first + 2 if first else 2, first + len(turns)):
        angle = np.angle(turns[t - first])
        frequency = (angle + 2 * np.pi * np.rint((t * frequency - angle) / (2 * np.pi))) / t
    return frequency
