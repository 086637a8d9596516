"""Mistakes in attention: masks, heads, scores, the keys and values read."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from ...engine import cache_types
from ...engine.dialects import EXACT, Dialect
from ...model.records import Model
from .. import operations as op
from ..roundings import NARROW
from ..variant import Variant
from .edited import named, numbered
from .mistake import Array, Compute, Computes, Engines, Mistake, Numbers, Site

Round = Callable[[Array], Array]

AT = ("kqv_out",)
_GGML_QUERIES = {"bfloat16": "bfloat16", "q8_0": "q8_0", "q4_0": "q8_0"}
"""The type of a cache in ggml -> the type that it rounds queries to in order to multiply them."""


# --- one operation --------------------------------------------------------------------------------------------------------------------


def right(site: Site, q: Array, k: Array, v: Array) -> Array:
    """Attention as it should be, of other queries, keys or values."""
    return op.attend(site.model, site.dialect, site.index, q, k, v).value


def _right_at(site: Site) -> Compute:
    return site.of(partial(right, site))


def _rotates(model: Model, dialect: Dialect) -> bool:
    return model.config.rope != "none"


def _norms_keys(model: Model, dialect: Dialect) -> bool:
    return model.layers[0].attn_k_norm is not None


def _norms_no_keys(model: Model, dialect: Dialect) -> bool:
    return model.layers[0].attn_k_norm is None


def _has_window(model: Model, dialect: Dialect) -> bool:
    return model.config.window is not None


def _model_width(site: Site) -> Iterator[tuple[Numbers, float]]:
    yield {}, site.config.width**-0.5


def _values_rotated(site: Site) -> Compute:
    return site.of(lambda q, k, v: right(site, q, k, op.rope(site.model, site.dialect, v).value))


def _narrow_cache(site: Site) -> Computes:
    for kind, narrow in NARROW.items():
        yield {"kind": kind}, site.of(lambda q, k, v, narrow=narrow: right(site, q, narrow(k), narrow(v)))


def _ggml_cache(site: Site) -> Computes:
    for kind, queries in _GGML_QUERIES.items():
        if kind == "bfloat16" or site.config.head_dim % cache_types.BLOCK == 0:
            narrow_q, narrow = (partial(_cached, site.config.head_dim, name) for name in (queries, kind))
            for scale in _query_scales(site):

                def compute(q: Array, k: Array, v: Array, scale: float = scale, of_q: Round = narrow_q, of_kv: Round = narrow) -> Array:
                    return right(site, of_q(q * scale) / scale, of_kv(k), of_kv(v))

                yield {"kind": kind, "queries": "" if scale == 1 else ", and queries that are scaled already,"}, site.of(compute)


def _query_scales(site: Site) -> Iterator[float]:
    """Yields the factors of queries before they are rounded: 1, and that of scores.

    Some graphs scale queries before attention does, as llama.cpp's for Gemma and Phi. A power of two changes no rounding.
    """
    yield 1.0
    if math.frexp(scale := op.score_scale(site.config))[0] != 0.5:
        yield scale


def _cached(head_dim: int, kind: str, x: Array) -> Array:
    """Rows of heads [T, HK] as a KV cache of this type gives them back."""
    heads = np.ascontiguousarray(x, np.float32).reshape(len(x), -1, head_dim)
    return cache_types.rounded(heads, kind).reshape(x.shape).astype(np.float64)


def _not_float16(site: Site) -> Compute | None:
    return _right_at(replace(site, dialect=EXACT)) if site.dialect.in_float16 else None


def _rounding(site: Site) -> Site:
    """The site in a dialect that rounds to float16."""
    return replace(site, dialect=replace(site.dialect, in_float16=True))


def _float16(site: Site) -> Computes:
    if not site.dialect.in_float16:
        yield {"kind": "float16"}, _right_at(_rounding(site))


def _float16_scaled(site: Site) -> Computes:
    for scale in () if site.dialect.in_float16 else [*_query_scales(site)][1:]:
        rounding = _rounding(site)
        unscaled = replace(rounding, model=replace(site.model, config=replace(site.config, attention_scale=1.0)))
        yield {"kind": "float16"}, site.of(lambda q, k, v, scale=scale, unscaled=unscaled: right(unscaled, q * scale, k, v))


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _engine_window_layers(base: Variant) -> Engines:
    c = base.model.config
    for how, by in (("later", 1), ("earlier", -1)) if c.window is not None and c.window_layers else ():
        if by == 1 or c.n_layers > 2:
            moved = {name: tuple(sorted((n + by) % c.n_layers for n in getattr(c, name))) for name in ("window_layers", "local_layers")}
            yield {"how": how}, base.with_config(**moved)


_ONE_LAYER = "the layers with the window are one layer {how} than in the model"
WHOLE_ENGINE = (
    *named(
        "attention",
        AT,
        ("unscaled", "left_out: the score scale is left out", "scores are not scaled by 1/sqrt(K)", ""),
        ("divided_by_width", "twice: the score scale is applied twice", "scores are divided by K instead of its root", ""),
        ("no_window", "masks: the window is missing{X}", "the window is missing{X}", ""),
        ("heads_in_turn", "groups: key-value heads are dealt out{X}", "key-value heads are dealt out{X}", ""),
    ),
    Mistake("attention.window_layers", _ONE_LAYER, when=_has_window, engine=_engine_window_layers),
)
_FLOAT16 = "float16 roundings"
_OF_GGML = "keys and values{queries} are rounded to {kind}, as in a KV cache of ggml: declare it (--precision kv={kind})"
_AS_BITNET_CPP = f"{_FLOAT16}: declare the dialect bitnet.cpp (--as bitnet.cpp)"
_SCALED = f"{_FLOAT16}, of queries that are scaled already: declare them (--as llama.cpp-f16kv)"
_FIRST_LOST = "keys and values of the first token are lost{X}"
_RAW_KEYS = "other_tensor: Kcur is read instead of Kcur_rope"
_NORMED_KEYS = "other_tensor: Kcur_normed is read instead of Kcur_rope"
_MULTIPLIED = "inverted: the score scale is divided by instead of multiplied"
OTHERS = (
    Mistake("dialect.no_float16", f"{_FLOAT16} are not there: declare the dialect exact", AT, compute=_not_float16, fault=False),
    *named(
        "attention",
        AT,
        ("window_too_long", "masks: the window is too long by one{X}", "the window is too long by one{X}"),
        ("window_too_short", "masks: the window is too short by one", "the window is too short by one"),
        ("blocks", "masks: blocks as long as the window {X}", "blocks as long as the window {X}"),
        ("no_mask", "masks: the mask is missing{X}", "the mask is missing{X}"),
        ("sees_next", "masks: the mask is off by one: a token sees the next one", "the mask is off by one: a token sees the next one"),
        ("blind_to_itself", "masks: the mask is off by one: a token does not {X}", "the mask is off by one: a token does not {X}"),
        ("mask_after", "masks: the mask is applied after the softmax{X}", "the mask is applied after the softmax{X}"),
        ("mask_of_ones", "masks: the mask is 1 and 0, and added", "the mask is 1 and 0, and added"),
        ("keys_in_turn", "groups: keys, but not values, are dealt out{X}", "keys, but not values, are dealt out{X}"),
        ("values_in_turn", "groups: values, but not keys, are dealt out{X}", "values, but not keys, are dealt out{X}"),
        ("first_head", "groups: every query head reads the first key-value head", "every query head reads the first key-value head"),
        ("heads_reversed", "groups: key-value heads are in the opposite order", "key-value heads are in the opposite order"),
    ),
    *numbered(
        "attention",
        AT,
        ("divided_by_model_width", "the score scale", "scores are divided by the root of the model width", _model_width),
    ),
    *named(
        "attention",
        AT,
        ("multiplied", _MULTIPLIED, "scores are multiplied by sqrt(K)"),
        ("transposed", "transposed: heads and their elements are transposed", "heads and head width are transposed in the output"),
    ),
    *named(
        "attention",
        AT,
        ("unrotated", f"{_RAW_KEYS} + {_RAW_KEYS.replace('K', 'Q')}", "queries and keys are not rotated"),
        ("keys_unrotated", _RAW_KEYS, "keys are not rotated"),
        when=_norms_no_keys,
    ),
    *named(
        "attention",
        AT,
        ("keys_raw", _RAW_KEYS, "keys are neither normed nor rotated"),
        ("normed_unrotated", f"{_NORMED_KEYS} + {_NORMED_KEYS.replace('K', 'Q')}", "queries and keys are not rotated"),
        ("normed_keys_unrotated", _NORMED_KEYS, "keys are not rotated"),
        when=_norms_keys,
    ),
    Mistake("attention.values_rotated", "values are rotated too, as if they were keys", AT, _rotates, _values_rotated),
    Mistake("cache.ggml", _OF_GGML, AT, compute=_ggml_cache, fault=False),
    Mistake("cache.narrow", "keys and values are rounded, as a cache of {kind} does", AT, compute=_narrow_cache, fault=False),
    *named(
        "attention",
        AT,
        ("values_are_keys", "exchanged: Kcur{x} is read instead of Vcur", "values are the keys"),
        ("keys_values_swapped", "exchanged: Vcur and Kcur{x} are exchanged", "keys and values are swapped"),
        ("itself_only", "masks: each token sees itself only", "each token sees itself only"),
        ("last_only", "masks: only the last {n} tokens are seen, {X}", "only the last {n} tokens are seen, {X}"),
    ),
    *named("cache", AT, ("first_lost", f"masks: {_FIRST_LOST}", _FIRST_LOST)),
    Mistake("dialect.float16", _AS_BITNET_CPP, AT, compute=_float16, fault=False),
    Mistake("cache.float16_scaled", _SCALED, AT, compute=_float16_scaled, fault=False),
)
CACHE_ROUNDINGS = frozenset(mistake.id for mistake in OTHERS if not mistake.fault)
"""The ids of those that are the KV cache's type."""
