"""Mistakes in RoPE. Those of `ACROSS` are searched for where none of the others explains queries or keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine.dialects import BITNET_CPP, EXACT, Dialect
from ...kernels import cpu
from ...model.records import Model, with_rope_of
from ...model.rope import rope_frequencies
from .. import operations as op
from .. import roundings
from ..precision import DIGITS, NARROW_FLOATS
from ..variant import Floats, Variant
from .mistake import Array, Compute, Computes, Engines, Mistake, Numbers, Site, alike

AT = ("Qcur_rope", "Kcur_rope")
BASES = (1e4, 5e5, 1e6)
IN_ROPE: Numbers = {"where": "in RoPE: "}
PERIODS = (1, 2, 4, 8, 16, 32, 64)
"""Lengths of chunks after which positions restart. Any others are read off a dump of queries or keys."""


def rotates(model: Model, dialect: Dialect) -> bool:
    """Whether the model has RoPE."""
    return model.config.rope != "none"


def _has_local_layers(model: Model, dialect: Dialect) -> bool:
    return bool(model.config.local_layers)


# --- one rotation ---------------------------------------------------------------------------------------------------------------------


def rotated(
    site: Site,
    x: Array,
    position: NDArray,
    *,
    base: float | None = None,
    pairs: str | None = None,
    whole: bool = False,
    factors: bool = True,
    scaling: bool = True,
    magnitude: bool = True,
) -> Array:
    """RoPE with other positions, another base or kind of pairs; whole: of all of each head; the others: False leaves them out."""
    model = site.turning
    c = model.config
    divisors: Any = 1.0 if model.rope_factors is None or not factors else model.rope_factors.astype(np.float64)
    turned = spec.rope(
        x.reshape(len(x), -1, c.head_dim),
        position / (c.rope_scaling if scaling else 1.0),
        c.rope_base if base is None else base,
        c.rope if pairs is None else pairs,
        None if whole else c.rope_width,
        divisors,
        c.rope_magnitude if magnitude else 1.0,
    )
    return turned.reshape(x.shape)


def _at(site: Site, positions: Callable[..., NDArray], **options: Any) -> Compute:
    """RoPE by positions(tokens' own positions)."""
    return site.of(lambda x: rotated(site, x, positions(np.arange(len(x))), **options))


def _positions(positions: Callable[..., NDArray]) -> Callable[[Site], Compute]:
    """A mistake in positions."""
    return lambda site: _at(site, positions)


def _without(setting: Callable[[Site], Any], nothing: Any, **options: Any) -> Callable[[Site], Compute | None]:
    """A mistake that leaves out a setting of the model, if that is not `nothing`. options: see rotated."""
    return lambda site: None if setting(site) == nothing else _at(site, lambda t: t, **options)


Turn = Callable[[Array, Array, Array, Array], tuple[Array, Array]]


def _turn(a: Array, b: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    return a * cos - b * sin, a * sin + b * cos


def _turned_in_place(a: Array, b: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    first = a * cos - b * sin
    return first, first * sin + b * cos


def _by_angles(
    site: Site, of_angle: Callable[..., Array] = lambda a: a, of_turn: Callable[[Array], Array] = lambda a: a, turn: Turn = _turn
) -> Compute:
    """RoPE by other angles [T, 1, J] or [T, H, J], other sines and cosines, or another use of these."""

    def compute(x: Array) -> Array:
        c = site.config
        angle = of_angle(roundings.angles(site.turning, site.dialect, len(x))[:, None, :])
        cos, sin = (c.rope_magnitude * of_turn(f(angle)) for f in (np.cos, np.sin))
        out = x.reshape(len(x), -1, c.head_dim).copy()
        first, second = op.pair_slices(c)
        out[..., first], out[..., second] = turn(out[..., first].copy(), out[..., second].copy(), cos, sin)
        return out.reshape(x.shape)

    return site.of(compute)


_PAIRS = {
    "halves": "pairs are interleaved (2i, 2i+1) instead of halves (i, i + K/2)",
    "adjacent": "pairs are halves (i, i + K/2) instead of adjacent (2i, 2i+1)",
}


def _other_pairs(right: str) -> str:
    return "adjacent" if right == "halves" else "halves"


def _wrong_pairs(site: Site) -> Computes:
    right = site.config.rope
    yield {"pairs": _PAIRS[right]}, _at(site, lambda t: t, pairs=_other_pairs(right))


def _other_angles(site: Site) -> Computes:
    for dialect in (BITNET_CPP, EXACT):
        if dialect.stepped_angles != site.dialect.stepped_angles:
            how = "are stepped in float32, as ggml does" if dialect.stepped_angles else "are not stepped in float32"
            yield {"how": how, "name": dialect.name}, site.of(lambda x, d=dialect: op.rope(site.turning, d, x).value)


def _bases(site: Site) -> Computes:
    right = site.turning.config.rope_base
    for value in BASES:
        if value != right:
            yield {"value": value, "right": right}, _at(site, lambda t: t, base=value)


def _other_layers(site: Site) -> Computes:
    local = site.config.local_layers
    if local:
        which, other = ("global", site.model) if site.index in local else ("local", with_rope_of(site.model, local[0]))
        yield {"which": which}, site.of(lambda x: op.rope(other, site.dialect, x).value)


def _scaled_local(site: Site) -> Compute | None:
    scaling = site.config.rope_scaling
    return _at(site, lambda t: 1 / scaling * t) if scaling != 1 and site.index in site.config.local_layers else None


def _exponents(site: Site) -> Computes:
    base = site.turning.config.rope_base
    for how, other in (("is halved: -i / K", base**0.5), ("is doubled: -4i / K", base**2)):
        yield {"how": how}, _at(site, lambda t: t, base=other)


def _narrow(which: str, site: Site) -> Computes:
    for kind in NARROW_FLOATS:
        yield {"kind": kind}, _by_angles(site, **{which: partial(roundings.to_digits, digits=DIGITS[kind])})  # type: ignore[arg-type]


def _restarts(site: Site) -> Computes:
    def compute(period: int, x: Array) -> Array:
        return rotated(site, x, np.arange(len(x)) % period) if period < len(x) else np.full_like(x, np.nan)

    for period in PERIODS:  # of shorter sequences the longer ones change nothing, and so explain nothing
        yield {"period": period}, site.of(partial(compute, period))


def _whole_row(site: Site) -> Compute:
    return site.of(lambda x: spec.rope(x[:, None, :], np.arange(len(x)), site.turning.config.rope_base)[:, 0])


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _turns(base: Variant, factors: NDArray[np.float32] | None, **changes: Any) -> Variant:
    """The engine with other Config numbers that RoPE's frequencies follow from."""
    changed = base.with_config(**changes)
    c = changed.model.config
    frequency = rope_frequencies(c.rope_base, 2 * c.rope_pairs, factors, c.rope_scaling)
    return changed.with_model(rope_frequency=frequency, rope_factors=factors)


def _where(able: Callable[[Model], bool], change: Callable[[Variant], Variant]) -> Callable[[Variant], Engines]:
    """Engines of the models that can make a mistake."""

    def engine(base: Variant) -> Engines:
        if able(base.model):
            yield IN_ROPE, change(base)

    return engine


def _ropes(change: Callable[..., Floats]) -> Callable[[Variant], Engines]:
    """Engines with other RoPE kernels: change(rope, x, cos, sin)."""
    kernels = {name: partial(change, getattr(cpu, name)) for name in ("rope", "rope_adjacent")}
    return _where(lambda model: model.config.rope != "none", lambda base: base.with_operations(**kernels))


def _engine_pairs(base: Variant) -> Engines:
    kind = base.model.config.rope
    if kind != "none":
        yield {**IN_ROPE, "pairs": _PAIRS[kind]}, _turns(base, base.model.rope_factors, rope=_other_pairs(kind))


def _engine_bases(base: Variant) -> Engines:
    c = base.model.config
    for value in BASES if c.rope != "none" else ():
        if value != c.rope_base:
            yield {**IN_ROPE, "value": value, "right": c.rope_base}, _turns(base, base.model.rope_factors, rope_base=value)


def _engine_other_layers(base: Variant) -> Engines:
    local = base.model.config.local_layers
    if local:
        yield {**IN_ROPE, "which": "global"}, base.with_config(local_layers=())
        yield {**IN_ROPE, "which": "local"}, replace(base, model=with_rope_of(base.model, local[0]))


def _engine_scaled_local(base: Variant) -> Engines:
    scaling, frequency = base.model.config.rope_scaling, base.model.local_rope_frequency
    if scaling != 1 and frequency is not None:
        yield IN_ROPE, base.with_model(local_rope_frequency=frequency / scaling)


_engine_unscaled = _where(
    lambda model: model.config.rope != "none" and model.config.rope_scaling != 1,
    lambda base: _turns(base, base.model.rope_factors, rope_scaling=1.0),
)
_engine_whole_head = _where(
    lambda model: model.config.rope != "none" and 2 * model.config.rope_pairs < model.config.head_dim,
    lambda base: _turns(base, None, rope_width=None),
)
_engine_no_factors = _where(lambda model: model.rope_factors is not None, lambda base: _turns(base, None))
_engine_no_magnitude = _where(lambda model: model.config.rope_magnitude != 1, lambda base: base.with_config(rope_magnitude=1.0))

_unscaled = _without(lambda site: site.turning.config.rope_scaling, 1, scaling=False)
_no_magnitude = _without(lambda site: site.config.rope_magnitude, 1, magnitude=False)
_whole_head = _without(lambda site: site.config.rope_width, None, whole=True, factors=False)


def _no_factors(site: Site) -> Compute | None:
    return None if site.turning.rope_factors is None else _at(site, lambda t: t, factors=False)


_OTHER_LAYERS = "queries and keys are rotated as in {which} layers"
MISTAKES = (
    *alike(
        "rope",
        AT,
        ("pairs", "{pairs}", _wrong_pairs, _engine_pairs),
        ("missing", "the rotation is missing", lambda site: site.of(lambda x: x), _ropes(lambda rope, x, cos, sin: x)),
        (
            "backwards",
            "the rotation turns the other way",
            _positions(lambda t: -1 * t),
            _ropes(lambda rope, x, cos, sin: rope(x, cos, -sin)),
        ),
        when=rotates,
    ),
    Mistake("rope.other_layers", _OTHER_LAYERS, AT, _has_local_layers, _other_layers, _engine_other_layers),
    Mistake("rope.scaled_local", "positions are scaled in local layers, too", AT, _has_local_layers, _scaled_local, _engine_scaled_local),
    *alike(
        "rope",
        AT,
        ("base", "the frequency base is {value:g} instead of {right:g}", _bases, _engine_bases),
        ("unscaled", "positions are not scaled", _unscaled, _engine_unscaled),
        ("factors", "the factors of the frequencies are not applied", _no_factors, _engine_no_factors),
        ("magnitude", "cosines and sines are not multiplied by RoPE's magnitude", _no_magnitude, _engine_no_magnitude),
        ("whole_head", "all of each head is rotated, not a part", _whole_head, _engine_whole_head),
        ("position_plus_1", "positions are too large by one", _positions(lambda t: t + 1)),
        ("position_minus_1", "positions are too small by one", _positions(lambda t: t - 1)),
        ("twice", "the rotation is applied twice", _positions(lambda t: 2 * t)),
        ("last_position", "every token is rotated as the last position", _positions(lambda t: np.full(len(t), len(t) - 1.0))),
        when=rotates,
    ),
    Mistake("dialect.angles", "angles {how}: declare the dialect {name} (--as {name})", AT, rotates, _other_angles, fault=False),
    *alike(
        "rope",
        AT,
        ("exponent", "the exponent of the frequencies {how} instead of -2i / K", _exponents),
        ("sin_cos_swapped", "sine and cosine are swapped", lambda site: _by_angles(site, turn=lambda a, b, c, s: _turn(a, b, s, c))),
        (
            "in_place",
            "the second number of a pair is turned with the first one's new value",
            partial(_by_angles, turn=_turned_in_place),
        ),
        when=rotates,
    ),
    Mistake("rope.narrow_angles", "angles are rounded to {kind}", AT, rotates, partial(_narrow, "of_angle"), fault=False),
    Mistake("rope.narrow_turns", "sines and cosines are rounded to {kind}", AT, rotates, partial(_narrow, "of_turn"), fault=False),
    *alike(
        "rope",
        AT,
        ("whole_row", "one head width serves all heads: frequencies run over the whole row", _whole_row),
        (
            "fed_twice",
            "the last token is one position too far: it was fed twice",
            _positions(lambda t: t + (t == len(t) - 1.0)),
        ),
        ("restarts", "positions restart every {period} tokens", _restarts),
        when=rotates,
    ),
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
        "the second half of the heads is": head >= count // 2,
        "even heads are": head % 2 == 0,
        "odd heads are": head % 2 == 1,
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
    Mistake("turns.later", "positions from {b} on are too {which} by {n}", AT, rotates, _later, together=True),
    Mistake("turns.heads", "heads are left out of the rotation: {how}", AT, rotates, _heads),
    Mistake("turns.head_numbers", _BY_HEAD, AT, rotates, _head_numbers, together=True),
    Mistake("turns.pairs", "frequencies are others: {how}", AT, rotates, _frequencies),
)
