"""Mistakes in RoPE."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...dialects import BITNET_CPP, EXACT, Dialect
from ...kernels import cpu
from ...model import Model, with_rope_of
from ...rope import rope_frequencies
from .. import operations as op
from .. import roundings
from ..precision import DIGITS, NARROW_FLOATS
from ..variant import Variant
from .mistake import Array, Compute, Mistake, Numbers, Site

Floats = NDArray[np.float32]

AT = ("Qcur_rope", "Kcur_rope")
BASES = (1e4, 5e5, 1e6)
IN_ROPE: Numbers = {"where": "in RoPE: "}


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


def _turned(shift: float = 0, scale: float = 1, **options: Any) -> Callable[[Site], Compute]:
    """A mistake with positions shifted and multiplied."""
    return lambda site: site.of(lambda x: rotated(site, x, scale * (np.arange(len(x)) + shift), **options))


def _by_angles(
    site: Site,
    x: Array,
    *,
    swapped: bool = False,
    in_place: bool = False,
    of_angle: Callable[[Array], Array] = lambda a: a,
    of_turn: Callable[[Array], Array] = lambda a: a,
) -> Array:
    """RoPE by sines and cosines that are wrong, or used wrongly."""
    angle = of_angle(roundings.angles(site.turning, site.dialect, len(x)))[:, None, :]
    cos, sin = (site.config.rope_magnitude * of_turn(f(angle)) for f in (np.cos, np.sin))
    cos, sin = (sin, cos) if swapped else (cos, sin)
    out = x.reshape(len(x), -1, site.config.head_dim).copy()
    first, second = op.pair_slices(site.config)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * cos - b * sin
    out[..., second] = (out[..., first] if in_place else a) * sin + b * cos
    return out.reshape(x.shape)


PERIODS = (1, 2, 4, 8, 16, 32, 64)
"""Lengths of chunks after which positions restart. Any others are read off a dump of queries or keys."""


def _other_pairs(site: Site) -> str:
    return "adjacent" if site.config.rope == "halves" else "halves"


_PAIRS = {
    "halves": "pairs are interleaved (2i, 2i+1) instead of halves (i, i + K/2)",
    "adjacent": "pairs are halves (i, i + K/2) instead of adjacent (2i, 2i+1)",
}


def _wrong_pairs(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    yield {"pairs": _PAIRS[site.config.rope]}, _turned(pairs=_other_pairs(site))(site)


def _unscaled(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if site.turning.config.rope_scaling != 1:
        yield {}, _turned(scaling=False)(site)


def _without_factors(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if site.turning.rope_factors is not None:
        yield {}, _turned(factors=False)(site)


def _without_magnitude(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if site.config.rope_magnitude != 1:
        yield {}, _turned(magnitude=False)(site)


def _whole_head(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    if site.config.rope_width is not None:
        yield {}, _turned(whole=True, factors=False)(site)


def _other_angles(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    for dialect in (BITNET_CPP, EXACT):
        if dialect.stepped_angles != site.dialect.stepped_angles:
            how = "are stepped in float32, as ggml does" if dialect.stepped_angles else "are not stepped in float32"
            yield {"how": how, "name": dialect.name}, site.of(lambda x, d=dialect: op.rope(site.turning, d, x).value)


def _bases(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    right = site.turning.config.rope_base
    for value in BASES:
        if value != right:
            yield {"value": value, "right": right}, _turned(base=value)(site)


def _other_layers(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    local = site.config.local_layers
    if local:
        which, other = ("global", site.model) if site.index in local else ("local", with_rope_of(site.model, local[0]))
        yield {"which": which}, site.of(lambda x: op.rope(other, site.dialect, x).value)


def _scaled_local(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    scaling = site.config.rope_scaling
    if scaling != 1 and site.index in site.config.local_layers:
        yield {}, _turned(scale=1 / scaling)(site)


def _exponents(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    base = site.turning.config.rope_base
    for how, other in (("is halved: -i / K", base**0.5), ("is doubled: -4i / K", base**2)):
        yield {"how": how}, _turned(base=other)(site)


def _narrow(which: str, site: Site) -> Iterator[tuple[Numbers, Compute]]:
    for kind in NARROW_FLOATS:
        rounded = partial(roundings.to_digits, digits=DIGITS[kind])
        yield {"kind": kind}, site.of(lambda x, rounded=rounded: _by_angles(site, x, **{which: rounded}))


def _restarts(site: Site) -> Iterator[tuple[Numbers, Compute]]:
    def compute(period: int, x: Array) -> Array:
        return rotated(site, x, np.arange(len(x)) % period) if period < len(x) else np.full_like(x, np.nan)

    for period in PERIODS:  # of shorter sequences the longer ones change nothing, and so explain nothing
        yield {"period": period}, site.of(partial(compute, period))


def _fed_twice(t: int) -> Array:
    return np.arange(t) + (np.arange(t) == t - 1.0)


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _turns(base: Variant, factors: NDArray[np.float32] | None, **changes: Any) -> Variant:
    """The engine with other Config numbers that RoPE's frequencies follow from."""
    changed = base.with_config(**changes)
    c = changed.model.config
    frequency = rope_frequencies(c.rope_base, 2 * c.rope_pairs, factors, c.rope_scaling)
    return changed.with_model(rope_frequency=frequency, rope_factors=factors)


def _ropes(change: Callable[..., Floats]) -> Callable[[Variant], Iterator[tuple[Numbers, Variant]]]:
    """Engines with other RoPE kernels: change(rope, x, cos, sin)."""

    def engine(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
        if base.model.config.rope != "none":
            kernels = {name: partial(change, getattr(cpu, name)) for name in ("rope", "rope_adjacent")}
            yield IN_ROPE, base.with_operations(**kernels)

    return engine


def _engine_pairs(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    kind = base.model.config.rope
    if kind != "none":
        other = "adjacent" if kind == "halves" else "halves"
        yield {**IN_ROPE, "pairs": _PAIRS[kind]}, _turns(base, base.model.rope_factors, rope=other)


def _engine_bases(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    c = base.model.config
    for value in BASES if c.rope != "none" else ():
        if value != c.rope_base:
            yield {**IN_ROPE, "value": value, "right": c.rope_base}, _turns(base, base.model.rope_factors, rope_base=value)


def _engine_other_layers(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    local = base.model.config.local_layers
    if local:
        yield {**IN_ROPE, "which": "global"}, base.with_config(local_layers=())
        yield {**IN_ROPE, "which": "local"}, replace(base, model=with_rope_of(base.model, local[0]))


def _engine_scaled_local(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    scaling, frequency = base.model.config.rope_scaling, base.model.local_rope_frequency
    if scaling != 1 and frequency is not None:
        yield IN_ROPE, base.with_model(local_rope_frequency=frequency / scaling)


def _engine_unscaled(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    if base.model.config.rope != "none" and base.model.config.rope_scaling != 1:
        yield IN_ROPE, _turns(base, base.model.rope_factors, rope_scaling=1.0)


def _engine_without_factors(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    if base.model.rope_factors is not None:
        yield IN_ROPE, _turns(base, None)


def _engine_without_magnitude(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    if base.model.config.rope_magnitude != 1:
        yield IN_ROPE, base.with_config(rope_magnitude=1.0)


def _engine_whole_head(base: Variant) -> Iterator[tuple[Numbers, Variant]]:
    c = base.model.config
    if c.rope != "none" and 2 * c.rope_pairs < c.head_dim:
        yield IN_ROPE, _turns(base, None, rope_width=None)


MISTAKES = (
    Mistake("rope.pairs", "{pairs}", AT, rotates, _wrong_pairs, _engine_pairs),
    Mistake("rope.missing", "the rotation is missing", AT, rotates, lambda site: site.of(lambda x: x), _ropes(lambda rope, x, cos, sin: x)),
    Mistake(
        "rope.backwards",
        "the rotation turns the other way",
        AT,
        rotates,
        _turned(scale=-1),
        _ropes(lambda rope, x, cos, sin: rope(x, cos, -sin)),
    ),
    Mistake(
        "rope.other_layers", "queries and keys are rotated as in {which} layers", AT, _has_local_layers, _other_layers, _engine_other_layers
    ),
    Mistake("rope.scaled_local", "positions are scaled in local layers, too", AT, _has_local_layers, _scaled_local, _engine_scaled_local),
    Mistake("rope.base", "the frequency base is {value:g} instead of {right:g}", AT, rotates, _bases, _engine_bases),
    Mistake("rope.unscaled", "positions are not scaled", AT, rotates, _unscaled, _engine_unscaled),
    Mistake("rope.factors", "the factors of the frequencies are not applied", AT, rotates, _without_factors, _engine_without_factors),
    Mistake(
        "rope.magnitude",
        "cosines and sines are not multiplied by RoPE's magnitude",
        AT,
        rotates,
        _without_magnitude,
        _engine_without_magnitude,
    ),
    Mistake("rope.whole_head", "all of each head is rotated, not a part", AT, rotates, _whole_head, _engine_whole_head),
    Mistake("rope.position_plus_1", "positions are too large by one", AT, rotates, _turned(1)),
    Mistake("rope.position_minus_1", "positions are too small by one", AT, rotates, _turned(-1)),
    Mistake("rope.twice", "the rotation is applied twice", AT, rotates, _turned(scale=2)),
    Mistake(
        "rope.last_position",
        "every token is rotated as the last position",
        AT,
        rotates,
        lambda site: site.of(lambda x: rotated(site, x, np.full(len(x), len(x) - 1.0))),
    ),
    Mistake("dialect.angles", "angles {how}: declare the dialect {name} (--as {name})", AT, rotates, _other_angles, fault=False),
    Mistake("rope.exponent", "the exponent of the frequencies {how} instead of -2i / K", AT, rotates, _exponents),
    Mistake(
        "rope.sin_cos_swapped",
        "sine and cosine are swapped",
        AT,
        rotates,
        lambda site: site.of(lambda x: _by_angles(site, x, swapped=True)),
    ),
    Mistake(
        "rope.in_place",
        "the second number of a pair is turned with the first one's new value",
        AT,
        rotates,
        lambda site: site.of(lambda x: _by_angles(site, x, in_place=True)),
    ),
    Mistake("rope.narrow_angles", "angles are rounded to {kind}", AT, rotates, partial(_narrow, "of_angle"), fault=False),
    Mistake("rope.narrow_turns", "sines and cosines are rounded to {kind}", AT, rotates, partial(_narrow, "of_turn"), fault=False),
    Mistake(
        "rope.whole_row",
        "one head width serves all heads: frequencies run over the whole row",
        AT,
        rotates,
        lambda site: site.of(lambda x: spec.rope(x[:, None, :], np.arange(len(x)), site.turning.config.rope_base)[:, 0]),
    ),
    Mistake(
        "rope.fed_twice",
        "the last token is one position too far: it was fed twice",
        AT,
        rotates,
        lambda site: site.of(lambda x: rotated(site, x, _fed_twice(len(x)))),
    ),
    Mistake("rope.restarts", "positions restart every {period} tokens", AT, rotates, _restarts),
)
