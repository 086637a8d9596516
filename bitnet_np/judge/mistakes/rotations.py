"""Mistakes in RoPE that are tried where rotated queries and keys, or what they are rotated from, are not in a dump.

Where a dump has them, readings measure the angles (readings/rotations.py).
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from .. import operations as op
from .. import roundings
from .mistake import Array, Compute, Mistake, Numbers, Site
from .positions import AT, rotated, rotates

_SHIFTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)


def _at(site: Site, positions: Callable[..., NDArray]) -> Compute:
    """RoPE by positions(tokens' own positions)."""
    return site.of(lambda x: rotated(site, x, positions(np.arange(len(x)))))


def _by_angles(site: Site, change: Callable[..., Array]) -> Compute:
    """RoPE by angles [T, 1, J] or [T, H, J] that are made of the right ones [T, 1, J]."""

    def compute(x: Array) -> Array:
        c = site.config
        angle = change(roundings.angles(site.turning, site.dialect, len(x))[:, None, :])
        out = x.reshape(len(x), -1, c.head_dim).copy()
        first, second = op.pair_slices(c)
        a, b = c.rope_magnitude * out[..., first], c.rope_magnitude * out[..., second]
        out[..., first] = a * np.cos(angle) - b * np.sin(angle)
        out[..., second] = a * np.sin(angle) + b * np.cos(angle)
        return out.reshape(x.shape)

    return site.of(compute)


def _shifted(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    for shift in (n for n in _SHIFTS if n <= site.length):
        for sign, which in ((1, "large"), (-1, "small")):
            yield {"which": which, "n": shift}, _at(site, lambda t, s=sign * shift: t + s)


def _bordered(positions: Callable[[NDArray, int], NDArray]) -> Callable[[Site], Iterator[tuple[Numbers, Compute]]]:
    """Positions by positions(tokens' own positions, border)."""

    def compute(site: Site) -> Iterator[tuple[Numbers, Compute]]:
        for border in site.borders:
            yield {"b": border}, _at(site, lambda t, b=border: positions(t, b))

    return compute


def _later(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    for border in site.borders[:24]:
        for shift in (1, 2, 4, 8):
            for sign, which in ((1, "large"), (-1, "small")):
                if shift < border:
                    yield (
                        {"b": border, "n": shift, "which": which},
                        _at(site, lambda t, b=border, s=sign * shift: t + s * (t >= b)),
                    )


def _listed(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    rules: dict[str, Callable[[NDArray], NDArray]] = {
        "positions run backwards": lambda t: t[::-1],
        "every token is rotated as position 1": lambda t: 0 * t + 1,
        "positions count tokens from 1, and the first twice": lambda t: np.maximum(t, 1),
        "positions are halved and cut to whole numbers": lambda t: t // 2,
    }
    for words, positions in rules.items():
        yield {"how": words}, _at(site, positions)


def _heads(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    count = site.config.heads if site.name == "Qcur_rope" else site.config.kv_heads
    head = np.arange(count)
    parts = {
        "the first head is": head == 0,
        "the last head is": head == count - 1,
        "the first half of the heads is": head < count // 2,
        "the second half of the heads is": head >= count // 2,
        "even heads are": head % 2 == 0,
        "odd heads are": head % 2 == 1,
    }
    for words, part in parts.items():
        for other, turned in (("only {} rotated", part), ("{} not rotated", ~part)):
            yield {"how": other.format(words)}, _by_angles(site, lambda angle, m=turned: angle * m[:, None])


def _head_numbers(site: Site) -> Compute:
    def change(angle: Array) -> Array:
        heads = site.config.heads if site.name == "Qcur_rope" else site.config.kv_heads
        return np.arange(heads)[:, None] * site.turning.rope_frequency.astype(np.float64) + 0 * angle

    return _by_angles(site, change)


def _pairs(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    count = site.config.rope_pairs
    pair = np.arange(count)
    for shift, which in ((1, "the next pair"), (-1, "the pair before")):
        first = np.clip(pair + shift, 0, count - 1)
        yield {"how": f"each pair of a head is turned by the frequency of {which}"}, _by_angles(site, lambda a, s=first: a[..., s])
        beyond = site.turning.config.rope_base ** (-shift / count)
        yield (
            {"how": f"pair i of a head is turned by the frequency of pair i {'+' if shift > 0 else '-'} 1"},
            _by_angles(site, lambda a, f=beyond: a * f),
        )
    yield {"how": "frequencies are in the opposite order"}, _by_angles(site, lambda a: a[..., ::-1])
    parts = {
        "the first pair of each head is": pair == 0,
        "the last pair of each head is": pair == count - 1,
        "the first half of the pairs is": pair < count // 2,
        "the second half of the pairs is": pair >= count // 2,
    }
    for words, part in parts.items():
        yield {"how": f"{words} not rotated"}, _by_angles(site, lambda a, m=part: a * ~m)
    width = site.config.head_dim
    for other, words in ((2 * width, "twice"), (width // 2, "half"), (site.config.width, "")):
        exponent = 2 * np.arange(count) / max(other, 1)
        words = f"{words} the head's width" if words else "the model's width"
        yield (
            {"how": f"the exponent of the frequencies is divided by {words}"},
            _by_angles(site, lambda a, e=exponent: np.arange(len(a))[:, None, None] * site.turning.config.rope_base**-e),
        )


def _multiplied(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    factors = site.turning.rope_factors
    if factors is not None:
        square = factors.astype(np.float64) ** 2
        yield {"how": "multiply frequencies instead of dividing them"}, _by_angles(site, lambda a: a * square)
        yield {"how": "are applied twice"}, _by_angles(site, lambda a: a / factors)
        yield {"how": "are in the opposite order"}, _by_angles(site, lambda a: a * factors / factors[::-1])


def _base(site: Site) -> Callable[[float], Compute]:
    return lambda number: site.of(lambda x: rotated(site, x, np.arange(len(x)), base=number))


def _factor(site: Site) -> Callable[[float], Compute]:
    return lambda number: _at(site, lambda t: t * number)


MISTAKES = (
    Mistake("turns.shifted", "positions are too {which} by {n}", AT, rotates, _shifted),
    Mistake("turns.clamped", "positions stop at {b}", AT, rotates, _bordered(np.minimum), together=True),
    Mistake("turns.wrapped", "positions restart every {b} tokens", AT, rotates, _bordered(lambda t, b: t % b), together=True),
    Mistake(
        "turns.restarted",
        "positions restart at position {b}",
        AT,
        rotates,
        _bordered(lambda t, b: np.where(t >= b, t - b, t)),
        together=True,
    ),
    Mistake("turns.later", "positions from {b} on are too {which} by {n}", AT, rotates, _later, together=True),
    Mistake("turns.listed", "positions are others: {how}", AT, rotates, _listed),
    Mistake("turns.heads", "heads are left out of the rotation: {how}", AT, rotates, _heads),
    Mistake(
        "turns.head_numbers",
        "every token is rotated by the number of the head instead of its position",
        AT,
        rotates,
        _head_numbers,
        together=True,
    ),
    Mistake("turns.pairs", "frequencies are others: {how}", AT, rotates, _pairs),
    Mistake("turns.factors", "the factors of frequencies {how}", AT, rotates, _multiplied, together=True),
    Mistake("turns.base", "the frequency base is about {number:.6g}", AT, rotates, search=_base, grid=tuple(np.geomspace(10, 1e9, 17))),
    Mistake(
        "turns.factor",
        "positions are {number:.5g} times what they should be",
        AT,
        rotates,
        search=_factor,
        grid=tuple(np.geomspace(0.02, 50, 15)),
    ),
)
