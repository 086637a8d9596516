"""Mistakes in RoPE. Those of `ACROSS` are searched for where none of the others explains queries or keys."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import BITNET_CPP, EXACT
from ...model.records import with_rope_of
from .. import operations as op
from .. import roundings
from ..precision import DIGITS, NARROW_FLOATS
from .edited import named, numbered
from .mistake import Array, Compute, Computes, Mistake, Numbers, Site, alike

AT = ("Qcur_rope", "Kcur_rope")
BASES = (1e4, 5e5, 1e6)
_IN_ROPE = "in RoPE: "
PERIODS = (1, 2, 4, 8, 16, 32, 64)
"""Lengths of chunks after which positions restart. Any others are read off a dump of queries or keys."""


# --- one rotation ---------------------------------------------------------------------------------------------------------------------


def rotated(site: Site, x: Array, position: NDArray, whole: bool = False) -> Array:
    """RoPE with other positions. whole: of all of each head, without the factors of its frequencies."""
    model = site.turning
    c = model.config
    divisors: Any = 1.0 if model.rope_factors is None or whole else model.rope_factors.astype(np.float64)
    heads, width = x.reshape(len(x), -1, c.head_dim), None if whole else c.rope_width
    return spec.rope(heads, position / c.rope_scaling, c.rope_base, c.rope, width, divisors, c.rope_magnitude).reshape(x.shape)


def _at(site: Site, positions: Callable[..., NDArray], whole: bool = False) -> Compute:
    """RoPE by positions(tokens' own positions)."""
    return site.of(lambda x: rotated(site, x, positions(np.arange(len(x))), whole))


def _by_angles(site: Site, of_angle: Callable[..., Array] = lambda a: a, of_turn: Callable[[Array], Array] = lambda a: a) -> Compute:
    """RoPE by other angles [T, 1, J] or [T, H, J], or other sines and cosines."""

    def compute(x: Array) -> Array:
        c = site.config
        angle = of_angle(roundings.angles(site.turning, site.dialect, len(x))[:, None, :])
        cos, sin = (c.rope_magnitude * of_turn(f(angle)) for f in (np.cos, np.sin))
        out = x.reshape(len(x), -1, c.head_dim).copy()
        first, second = op.pair_slices(c)
        a, b = out[..., first].copy(), out[..., second].copy()
        out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
        return out.reshape(x.shape)

    return site.of(compute)


def _other_angles(site: Site) -> Computes:
    for dialect in (BITNET_CPP, EXACT):
        if dialect.stepped_angles != site.dialect.stepped_angles:
            how = "are stepped in float32, as ggml does" if dialect.stepped_angles else "are not stepped in float32"
            yield {"how": how, "name": dialect.name}, site.of(lambda x, d=dialect: op.rope(site.turning, d, x).value)


def _bases(site: Site) -> Iterator[tuple[Numbers, float]]:
    right = site.turning.config.rope_base
    for value in BASES:
        if value != right:
            yield {"value": value, "right": right}, value


def _exponents(site: Site) -> Iterator[tuple[Numbers, float]]:
    base = site.turning.config.rope_base
    yield {"how": "is halved: -i / K"}, base**0.5
    yield {"how": "is doubled: -4i / K"}, base**2


def _no_magnitude(site: Site) -> Iterator[tuple[Numbers, float]]:
    if site.config.rope_magnitude != 1:
        yield {}, 1.0


def _whole_head(site: Site) -> Compute | None:
    return None if site.config.rope_width is None else _at(site, lambda t: t, whole=True)


def _other_layers(site: Site) -> Computes:
    local = site.config.local_layers
    if local:
        which, other = ("global", site.model) if site.index in local else ("local", with_rope_of(site.model, local[0]))
        yield {"which": which}, site.of(lambda x: op.rope(other, site.dialect, x).value)


def _scaled_local(site: Site) -> Compute | None:
    scaling = site.config.rope_scaling
    return _at(site, lambda t: 1 / scaling * t) if scaling != 1 and site.index in site.config.local_layers else None


def _narrow(site: Site) -> Computes:
    for kind in NARROW_FLOATS:
        yield {"kind": kind}, _by_angles(site, of_turn=partial(roundings.to_digits, digits=DIGITS[kind]))


def _restarts(site: Site) -> Computes:
    def compute(period: int, x: Array) -> Array:
        return rotated(site, x, np.arange(len(x)) % period) if period < len(x) else np.full_like(x, np.nan)

    for period in PERIODS:  # of shorter sequences the longer ones change nothing, and so explain nothing
        yield {"period": period}, site.of(partial(compute, period))


def _whole_row(site: Site) -> Compute:
    return site.of(lambda x: spec.rope(x[:, None, :], np.arange(len(x)), site.turning.config.rope_base)[:, 0])


_OTHER_LAYERS = "queries and keys are rotated as in {which} layers"
_EXPONENT = "the exponent of the frequencies {how} instead of -2i / K"
_ANGLES = "angles {how}: declare the dialect {name} (--as {name})"
_NO_FACTORS = "left_out: the factors of the frequencies are not divided out"
_FORWARD = "turns: the second of each pair is turned with the first one's new value"
MISTAKES = (
    *named(
        "rope",
        AT,
        ("pairs", "turns: pairs are {X}", "pairs are {X}", _IN_ROPE),
        ("missing", "left_out: everything is left out", "the rotation is missing", _IN_ROPE),
        (
            "backwards",
            "turns: the sine has the wrong sign: the rotation turns the other way",
            "the rotation turns the other way",
            _IN_ROPE,
        ),
        ("unscaled", "left_out: the position scale is not divided out", "positions are not scaled", _IN_ROPE),
        (
            "factors",
            "left_out: the factors of the frequencies are not divided out",
            "the factors of the frequencies are not applied",
            _IN_ROPE,
        ),
        ("position_plus_1", "positions: positions are too large by 1", "positions are too large by one"),
        ("position_minus_1", "positions: positions are too small by 1", "positions are too small by one"),
        ("twice", "twice: it is done twice", "the rotation is applied twice"),
        ("last_position", "positions: positions are all the last one", "every token is rotated as the last position"),
        ("fed_twice", "positions: the last token is one position too far", "the last token is one position too far: it was fed twice"),
        ("sin_cos_swapped", "turns: sines and cosines are exchanged", "sine and cosine are swapped"),
        ("in_place", _FORWARD, "the second number of a pair is turned with the first one's new value"),
    ),
    *numbered(
        "rope",
        AT,
        ("base", "the frequency base", "the frequency base is {value:g} instead of {right:g}", _bases),
        ("magnitude", "RoPE's magnitude", "cosines and sines are not multiplied by RoPE's magnitude", _no_magnitude),
        everywhere=_IN_ROPE,
    ),
    *alike(
        "rope",
        AT,
        ("other_layers", "queries and keys are rotated as in {which} layers", _other_layers),
        ("scaled_local", "positions are scaled in local layers, too", _scaled_local),
        ("whole_head", "all of each head is rotated, not a part", _whole_head),
        everywhere=_IN_ROPE,
    ),
    Mistake("dialect.angles", _ANGLES, AT, compute=_other_angles, fault=False),
    *numbered("rope", AT, ("exponent", "the frequency base", "the exponent of the frequencies {how} instead of -2i / K", _exponents)),
    *alike(
        "rope",
        AT,
        ("whole_row", "one head width serves all heads: frequencies run over the whole row", _whole_row),
        ("restarts", "positions restart every {period} tokens", _restarts),
    ),
    *named("rope", AT, ("narrow_angles", "rounded: the angles: rounded to {kind}", "angles are rounded to {kind}"), fault=False),
    Mistake("rope.narrow_turns", "sines and cosines are rounded to {kind}", AT, compute=_narrow, fault=False),
)


# --- across operations ----------------------------------------------------------------------------------------------------------------


def _later(site: Site) -> Computes:
    for border in site.borders[:24]:
        for shift in (n for n in (1, 2, 4, 8) if n < border):
            for sign, which in ((1, "large"), (-1, "small")):
                yield {"b": border, "n": shift, "which": which}, _at(site, lambda t, b=border, s=sign * shift: t + s * (t >= b))


def _head_count(site: Site) -> int:
    return site.config.heads if site.name == "Qcur_rope" else site.config.kv_heads


def _heads(site: Site) -> Computes:
    count = _head_count(site)
    head = np.arange(count)
    parts = {
        "the first head is": head == 0,
        "the last head is": head == count - 1,
        "the first half of the heads is": head < count // 2,
        "even heads are": head % 2 == 0,
    }
    for words, part in parts.items():
        for other, turned in (("only {} rotated", part), ("{} not rotated", ~part)):
            yield {"how": other.format(words)}, _by_angles(site, lambda angle, m=turned: angle * m[:, None])


def _head_numbers(site: Site) -> Compute:
    frequency = site.turning.rope_frequency.astype(np.float64)
    return _by_angles(site, lambda angle: np.arange(_head_count(site))[:, None] * frequency + 0 * angle)


def _frequencies(site: Site) -> Computes:
    count = site.config.rope_pairs
    pair = np.arange(count)
    for shift, which in ((1, "the next pair"), (-1, "the pair before")):
        first = np.clip(pair + shift, 0, count - 1)
        yield {"how": f"each pair of a head is turned by the frequency of {which}"}, _by_angles(site, lambda a, s=first: a[..., s])
        beyond = site.turning.config.rope_base ** (-shift / count)
        how = f"pair i of a head is turned by the frequency of pair i {'+' if shift > 0 else '-'} 1"
        yield {"how": how}, _by_angles(site, lambda a, f=beyond: a * f)
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
    for other, words in (
        (2 * width, "twice the head's width"),
        (width // 2, "half the head's width"),
        (site.config.width, "the model's width"),
    ):
        each = site.turning.config.rope_base ** -(2 * pair / max(other, 1))
        how = f"the exponent of the frequencies is divided by {words}"
        yield {"how": how}, _by_angles(site, lambda a, f=each: np.arange(len(a))[:, None, None] * f)


_BY_HEAD = "every token is rotated by the number of the head instead of its position"
ACROSS = (
    Mistake("turns.later", "positions from {b} on are too {which} by {n}", AT, compute=_later, together=True),
    Mistake("turns.heads", "heads are left out of the rotation: {how}", AT, compute=_heads),
    Mistake("turns.head_numbers", _BY_HEAD, AT, compute=_head_numbers, together=True),
    Mistake("turns.pairs", "frequencies are others: {how}", AT, compute=_frequencies),
)
