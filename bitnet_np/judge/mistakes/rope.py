"""Mistakes in RoPE."""

from collections.abc import Iterator
from dataclasses import replace

from .. import operations as op
from ..variant import Variant
from .edited import named, numbered
from .mistake import Compute, Engines, Mistake, Numbers, Site
from .switches import other_dialects

AT = ("Qcur_rope", "Kcur_rope")
BASES = (1e4, 5e5, 1e6)


def _bases(site: Site) -> Iterator[tuple[Numbers, float]]:
    right = site.turning.config.rope_base
    for value in BASES:
        if value != right:
            yield {"value": value, "right": right}, value


def _other_layers(base: Variant) -> Engines:
    c = base.model.config
    for which, layers in (("global", ()), ("local", tuple(range(c.n_layers)))) if c.local_layers else ():
        yield {"which": which}, base.with_config(local_layers=layers)


def _scaled_local(site: Site) -> Compute | None:
    scaling = site.config.rope_scaling
    scaled = replace(site.turning, config=replace(site.turning.config, rope_scaling=scaling))
    return site.of(lambda x: op.rope(scaled, site.dialect, x).value) if scaling != 1 and site.index in site.config.local_layers else None


_ANGLES = "angles {how}: declare the dialect {name} (--as {name})"
_STEPPED = {True: "are stepped in float32, as ggml does", False: "are not stepped in float32"}
_BACKWARDS = "the rotation turns the other way"
MISTAKES = (
    *named(
        "rope",
        AT,
        ("pairs", "turns: pairs are {X}", ""),
        ("missing", "left_out: everything is left out", "the rotation is missing"),
        ("backwards", f"turns: the sine has the wrong sign: {_BACKWARDS}", _BACKWARDS),
        ("unscaled", "left_out: the position scale is not divided out", "positions are not scaled"),
        ("magnitude", "left_out: RoPE's magnitude is left out", "cosines and sines are not multiplied by RoPE's magnitude"),
        ("factors", "left_out: the factors of the frequencies are not divided out", "the factors of the frequencies are not applied"),
        likely=True,
    ),
    *named(
        "rope",
        AT,
        ("position_plus_1", "positions: positions are too large by 1", "positions are too large by one"),
        ("position_minus_1", "positions: positions are too small by 1", "positions are too small by one"),
        ("fed_twice", "positions: the last token is one position too far", "the last token is one position too far: it was fed twice"),
        ("before_norm", "swapped: {A}_rope comes before {B}_normed", "the norm of queries and keys comes after RoPE"),
    ),
    *numbered(
        "rope",
        AT,
        ("base", "the frequency base", "the frequency base is {value:g} instead of {right:g}", _bases),
        likely=True,
    ),
    Mistake("rope.other_layers", "queries and keys are rotated as in {which} layers", AT, engine=_other_layers),
    Mistake("rope.scaled_local", "positions are scaled in local layers, too", AT, compute=_scaled_local, likely=True),
    Mistake("dialect.angles", _ANGLES, AT, engine=other_dialects("stepped_angles", _STEPPED), fault=False),
    *named(
        "rope",
        AT,
        ("narrow_angles", "rounded: the angles: rounded to {kind}", "angles are rounded to {kind}"),
        ("narrow_turns", "rounded: sines and cosines: rounded to {kind}", "sines and cosines are rounded to {kind}"),
        fault=False,
    ),
)
