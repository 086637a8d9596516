"""Mistakes in attention: masks, heads, scores, the keys and values read."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from .. import operations as op
from ..edits.caches import query_scales
from ..variant import Variant
from .edited import named, numbered
from .mistake import Array, Compute, Computes, Engines, Mistake, Numbers, Site
from .switches import other_dialects

Round = Callable[[Array], Array]

AT = ("kqv_out",)


# --- one operation --------------------------------------------------------------------------------------------------------------------


def right(site: Site, q: Array, k: Array, v: Array) -> Array:
    """Attention as it should be, of other queries, keys or values."""
    return op.attend(site.model, site.dialect, site.index, q, k, v).value


def _model_width(site: Site) -> Iterator[tuple[Numbers, float]]:
    yield {}, site.config.width**-0.5


def _values_rotated(site: Site) -> Compute | None:
    rotated = site.of(lambda q, k, v: right(site, q, k, op.rope(site.model, site.dialect, v).value))
    return None if site.config.rope == "none" else rotated


def _float16_scaled(site: Site) -> Computes:
    for scale in () if site.dialect.in_float16 else [*query_scales(site.config)][1:]:
        rounding = replace(site.dialect, in_float16=True)
        unscaled = replace(site, dialect=rounding, model=replace(site.model, config=replace(site.config, attention_scale=1.0)))
        yield {"kind": "float16"}, site.of(lambda q, k, v, scale=scale, unscaled=unscaled: right(unscaled, q * scale, k, v))


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _engine_window_layers(base: Variant) -> Engines:
    c = base.model.config
    for how, by in (("later", 1), ("earlier", -1)) if c.window is not None and c.window_layers else ():
        if by == 1 or c.n_layers > 2:
            moved = {name: tuple(sorted((n + by) % c.n_layers for n in getattr(c, name))) for name in ("window_layers", "local_layers")}
            yield {"how": how}, base.with_config(**moved)


_ONE_LAYER = "the layers with the window are one layer {how} than in the model"
_FLOAT16 = {True: ": declare the dialect bitnet.cpp (--as bitnet.cpp)", False: " are not there: declare the dialect exact"}
_OF_GGML = "are rounded to {kind}, as in a KV cache of ggml"
_SCALED_TOO, _DECLARE = ", and queries that are scaled already,", ": declare it (--precision kv={kind})"
_SCALED = "float16 roundings, of queries that are scaled already: declare them (--as llama.cpp-f16kv)"
_RAW_KEYS = "other_tensor: Kcur{x} is read instead of Kcur_rope"
_MOVED = "order: rows of Vcur are {0} + order: rows of Kcur{{x}} are {0}"
_BEFORE, _NEXT = (f"shifted by one, the {which} in the place of each" for which in ("one before", "next one"))
_UNDIVIDED = "left_out: the softmax's sum is not divided out + left_out: the largest score is left out"
MISTAKES = (
    *named(
        "attention",
        AT,
        ("unscaled", "left_out: the score scale is left out", "scores are not scaled by 1/sqrt(K)"),
        ("divided_by_width", "twice: the score scale is applied twice", "scores are divided by K instead of its root"),
        ("no_window", "masks: the window is missing{X}", ""),
        ("heads_in_turn", "groups: key-value heads are dealt out{X}", ""),
        likely=True,
    ),
    Mistake("attention.window_layers", _ONE_LAYER, engine=_engine_window_layers),
    *named(
        "attention",
        AT,
        ("mask", "masks: {W}", ""),
        ("mask_of_ones", "masks: the mask is 1 and 0, and added", ""),
        ("groups", "groups: {W}", ""),
        ("multiplied", "inverted: the score scale is divided by instead of multiplied", "scores are multiplied by sqrt(K)"),
        ("transposed", "transposed: heads and their elements are transposed", "heads and head width are transposed in the output"),
        ("unrotated", f"{_RAW_KEYS} + {_RAW_KEYS.replace('K', 'Q')}", "queries and keys are not rotated: Qcur{x} and Kcur{x} are read"),
        ("keys_unrotated", _RAW_KEYS, "keys are not rotated: Kcur{x} is read"),
        ("values_are_keys", "exchanged: Kcur{x} is read instead of Vcur", "values are the keys"),
        ("keys_values_swapped", "exchanged: Vcur and Kcur{x} are exchanged", "keys and values are swapped"),
        ("last_only", "masks: only the last {n} tokens are seen, {X}", ""),
        ("moved_before", _MOVED.format(_BEFORE), "keys and values are those of the token before"),
        ("moved_behind", _MOVED.format(_NEXT), "keys and values are those of the token behind"),
        ("unnormalised", _UNDIVIDED, "the softmax does not divide by its sum"),
    ),
    *numbered(
        "attention",
        AT,
        ("divided_by_model_width", "the score scale", "scores are divided by the root of the model width", _model_width),
    ),
    Mistake("attention.values_rotated", "values are rotated too, as if they were keys", AT, _values_rotated),
    *named(
        "cache",
        AT,
        ("ggml", f"stored: keys and values {_OF_GGML}", f"keys and values {_OF_GGML}{_DECLARE}"),
        ("ggml_scaled", f"stored: keys and values{_SCALED_TOO} {_OF_GGML}", f"keys and values{_SCALED_TOO} {_OF_GGML}{_DECLARE}"),
        ("narrow", "stored: keys and values are rounded, as a cache of {kind} does", ""),
        fault=False,
    ),
    Mistake("dialect.float16", "float16 roundings{how}", AT, engine=other_dialects("in_float16", _FLOAT16, "float16"), fault=False),
    Mistake("cache.float16_scaled", _SCALED, AT, compute=_float16_scaled, fault=False),
)
CACHE_ROUNDINGS = frozenset(mistake.id for mistake in MISTAKES if not mistake.fault)
"""The ids of those that are the KV cache's type."""
