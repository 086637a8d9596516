"""Mistakes in attention: masks, heads, scores, the keys and values read."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...engine import cache_types
from ...engine.dialects import EXACT, Dialect
from ...model.records import Model
from .. import operations as op
from ..roundings import NARROW, to_float16
from ..variant import Variant
from .edited import named
from .mistake import Array, Compute, Computes, Engines, Mistake, Site, Values, alike

Round = Callable[[Array], Array]
Sees = Callable[[NDArray, NDArray], NDArray[np.bool_]]
"""The rule of a mask: query i [T, 1], key j [T] -> True where i sees j."""

AT = ("kqv_out",)
_GGML_QUERIES = {"bfloat16": "bfloat16", "q8_0": "q8_0", "q4_0": "q8_0"}
"""The type of a cache in ggml -> the type that it rounds queries to in order to multiply them."""
LAST_SEEN = (2, 4, 8, 16, 32, 64)


# --- one operation --------------------------------------------------------------------------------------------------------------------


def attend(
    site: Site,
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    scale: float | None = None,
    keys: NDArray | None = None,
    values: NDArray | None = None,
) -> Array:
    """Attention with another mask [T, T] or [H, T, T], another scale, or other key-value heads [H] of the queries'."""
    c, t = site.config, len(q)
    if site.dialect.in_float16:
        q, k, v = to_float16(q), to_float16(k), to_float16(v)
    q = q.reshape(t, c.heads, c.head_dim)
    k = k.reshape(t, c.kv_heads, c.head_dim)[:, _grouped(site) if keys is None else keys]
    v = v.reshape(t, c.kv_heads, c.head_dim)[:, _grouped(site) if values is None else values]
    scores = spec.soft_cap(np.einsum("thk,shk->hts", q, k) * (op.score_scale(c) if scale is None else scale), c.score_cap) + mask
    with np.errstate(invalid="ignore"):
        p = np.nan_to_num(np.exp(scores - scores.max(axis=-1, keepdims=True)))
        p = np.nan_to_num(p / p.sum(axis=-1, keepdims=True))
    p = to_float16(p) if site.dialect.in_float16 else p
    return np.einsum("hts,shk->thk", p, v).reshape(t, -1)


def weighted(site: Site, v: Array, p: Array) -> Array:
    """The sums of values [T, GK] by weights [H, T, T]."""
    c = site.config
    return np.einsum("hts,shk->thk", p, spec.by_query_head(v.reshape(len(v), c.kv_heads, c.head_dim), c.heads)).reshape(len(v), -1)


def right(site: Site, q: Array, k: Array, v: Array) -> Array:
    """Attention as it should be, of other queries, keys or values."""
    return op.attend(site.model, site.dialect, site.index, q, k, v).value


def _of_right(change: Callable[[Array, Array, Array], tuple[Array, Array, Array]]) -> Callable[[Site], Compute]:
    """A mistake that takes other queries, keys or values."""
    return lambda site: site.of(lambda *qkv: right(site, *change(*qkv)))


def _grouped(site: Site) -> NDArray:
    """The key-value head of each query head."""
    return np.arange(site.config.heads) // (site.config.heads // site.config.kv_heads)


def _in_turn(site: Site) -> NDArray:
    return np.arange(site.config.heads) % site.config.kv_heads


def _first_head(site: Site) -> NDArray:
    return 0 * _grouped(site)


def _reversed(site: Site) -> NDArray:
    return site.config.kv_heads - 1 - _grouped(site)


def window_of(site: Site) -> float:
    """The window of the layer; infinite where it has none."""
    limit = site.config.window_of(site.index)
    return np.inf if limit is None else limit


def causal(window: float, i: NDArray, j: NDArray) -> NDArray[np.bool_]:
    """Whether query i sees key j."""
    return (j <= i) & (j > i - window)


def with_mask(site: Site, mask: Callable[..., NDArray], **options: object) -> Compute:
    """Attention with mask(query i [T, 1], key j [T]) added to the scores. options: see attend."""

    def compute(q: Array, k: Array, v: Array) -> Array:
        i, j = np.arange(len(q))[:, None], np.arange(len(q))
        with np.errstate(divide="ignore"):
            return attend(site, q, k, v, mask(i, j), **options)  # type: ignore[arg-type]

    return site.of(compute)


def seeing(site: Site, sees: Sees, **options: object) -> Compute:
    """Attention by another rule of who sees whom. options: see attend."""
    return with_mask(site, lambda i, j: np.where(sees(i, j), 0.0, -np.inf), **options)


def _mask(make: Callable[[float], Sees]) -> Callable[[Site], Compute]:
    """A mistake with another mask: make(window) of the layer."""
    return lambda site: seeing(site, make(window_of(site)))


def with_heads(site: Site, keys: NDArray | None, values: NDArray | None) -> Compute:
    """Attention with other key-value heads of keys, of values or both."""
    return seeing(site, partial(causal, window_of(site)), keys=keys, values=values)


def _heads(keys: Callable[[Site], NDArray] | None, values: Callable[[Site], NDArray] | None) -> Callable[[Site], Compute]:
    """A mistake with other key-value heads."""
    return lambda site: with_heads(site, keys and keys(site), values and values(site))


def _scale(scale: Callable[[Site], float]) -> Callable[[Site], Compute]:
    return lambda site: seeing(site, partial(causal, window_of(site)), scale=scale(site))


def _windowed(mask: Callable[[int], Sees]) -> Callable[[Site], Computes]:
    """A mistake that only layers with a window can make."""

    def compute(site: Site) -> Computes:
        limit = site.config.window_of(site.index)
        if limit is not None:
            yield {"window": limit}, seeing(site, mask(limit))

    return compute


def _rotates(model: Model, dialect: Dialect) -> bool:
    return model.config.rope != "none"


def _has_window(model: Model, dialect: Dialect) -> bool:
    return model.config.window is not None


def _masked_after(site: Site) -> Compute:
    """The softmax runs over all keys, and hidden ones are left out of the sums of values."""

    def compute(q: Array, k: Array, v: Array) -> Array:
        p = spec.softmax(op.scores(site.model, q, k)[0])
        return weighted(site, v, np.where(spec.causal_mask(len(q), len(q), window=site.config.window_of(site.index)) == 0, p, 0))

    return site.of(compute)


def _added_ones(site: Site) -> Compute:
    return with_mask(site, lambda i, j: causal(window_of(site), i, j).astype(np.float64))


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


def _last_seen(site: Site) -> Computes:
    for seen in LAST_SEEN:  # where it is longer than the sequence it changes nothing
        yield {"seen": seen}, seeing(site, partial(causal, seen))


def _not_float16(site: Site) -> Compute | None:
    return _of_right(lambda *qkv: qkv)(replace(site, dialect=EXACT)) if site.dialect.in_float16 else None


def _rounding(site: Site) -> Site:
    """The site in a dialect that rounds to float16."""
    return replace(site, dialect=replace(site.dialect, in_float16=True))


def _float16(site: Site) -> Computes:
    if not site.dialect.in_float16:
        yield {"kind": "float16"}, _of_right(lambda *qkv: qkv)(_rounding(site))


def _float16_scaled(site: Site) -> Computes:
    q, k, v = site.operation.inputs
    for scale in () if site.dialect.in_float16 else [*_query_scales(site)][1:]:
        attend_scaled = seeing(_rounding(site), partial(causal, window_of(site)), scale=1.0)

        def compute(values: Values, scale: float = scale, attend_scaled: Compute = attend_scaled) -> Array:
            return attend_scaled({q: values[q] * scale, k: values[k], v: values[v]})

        yield {"kind": "float16"}, compute


# --- whole engines --------------------------------------------------------------------------------------------------------------------


def _engine_window_layers(base: Variant) -> Engines:
    c = base.model.config
    for how, by in (("later", 1), ("earlier", -1)) if c.window is not None and c.window_layers else ():
        if by == 1 or c.n_layers > 2:
            moved = {name: tuple(sorted((n + by) % c.n_layers for n in getattr(c, name))) for name in ("window_layers", "local_layers")}
            yield {"how": how}, base.with_config(**moved)


_by_window = _windowed(lambda limit: lambda i, j: j <= i)
_ONE_LAYER = "the layers with the window are one layer {how} than in the model"
_IN_TURN = "dealt out in turn (h % G) instead of in groups"
WHOLE_ENGINE = (
    *named(
        "attention",
        AT,
        ("unscaled", "left_out: the score scale is left out", "scores are not scaled by 1/sqrt(K)", ""),
        ("divided_by_width", "twice: the score scale is applied twice", "scores are divided by K instead of its root", ""),
    ),
    *alike(
        "attention",
        AT,
        ("no_window", "the window is missing: all tokens before are seen", _by_window),
        ("heads_in_turn", f"key-value heads are {_IN_TURN}", _heads(_in_turn, _in_turn)),
        everywhere="",
    ),
    Mistake("attention.window_layers", _ONE_LAYER, when=_has_window, engine=_engine_window_layers),
)
_FLOAT16 = "float16 roundings"
_OF_GGML = "keys and values{queries} are rounded to {kind}, as in a KV cache of ggml: declare it (--precision kv={kind})"
_AS_BITNET_CPP = f"{_FLOAT16}: declare the dialect bitnet.cpp (--as bitnet.cpp)"
_SCALED = f"{_FLOAT16}, of queries that are scaled already: declare them (--as llama.cpp-f16kv)"
_FIRST_LOST = "keys and values of the first token are lost, or it is not fed, as a BOS that is missing"
_RAW_KEYS = "other_tensor: Kcur is read instead of Kcur_rope"
OTHERS = (
    Mistake("dialect.no_float16", f"{_FLOAT16} are not there: declare the dialect exact", AT, compute=_not_float16, fault=False),
    *alike(
        "attention",
        AT,
        (
            "window_too_long",
            "the window is too long by one: it does not count the token itself",
            _windowed(lambda limit: partial(causal, limit + 1)),
        ),
        ("window_too_short", "the window is too short by one", _windowed(lambda limit: partial(causal, limit - 1))),
        (
            "blocks",
            "blocks of {window} tokens instead of a window",
            _windowed(lambda limit: lambda i, j: (j <= i) & (j // limit == i // limit)),
        ),
        when=_has_window,
    ),
    *alike(
        "attention",
        AT,
        ("no_mask", "the mask is missing: tokens see the future", _mask(lambda w: lambda i, j: j > i - w)),
        (
            "sees_next",
            "the mask is off by one: a token sees the next one",
            _mask(lambda w: lambda i, j: (j <= i + 1) & (j > i - w)),
        ),
        (
            "blind_to_itself",
            "the mask is off by one: a token does not see itself",
            _mask(lambda w: lambda i, j: ((j < i) & (j > i - w)) | ((i == 0) & (j == 0))),
        ),
        ("mask_after", "the mask is applied after the softmax: weights no longer add up to 1", _masked_after),
        ("mask_of_ones", "the mask is 1 and 0, and added", _added_ones),
        ("keys_in_turn", f"keys, but not values, are {_IN_TURN}", _heads(_in_turn, None)),
        ("values_in_turn", f"values, but not keys, are {_IN_TURN}", _heads(None, _in_turn)),
        ("first_head", "every query head reads the first key-value head", _heads(_first_head, _first_head)),
        ("heads_reversed", "key-value heads are in the opposite order", _heads(_reversed, _reversed)),
        ("divided_by_model_width", "scores are divided by the root of the model width", _scale(lambda site: site.config.width**-0.5)),
    ),
    *named(
        "attention",
        AT,
        ("multiplied", "inverted: the score scale is divided by instead of multiplied", "scores are multiplied by sqrt(K)"),
        ("transposed", "transposed: heads and their elements are transposed", "heads and head width are transposed in the output"),
        ("unrotated", f"{_RAW_KEYS} + other_tensor: Qcur is read instead of Qcur_rope", "queries and keys are not rotated"),
        ("keys_unrotated", _RAW_KEYS, "keys are not rotated"),
    ),
    Mistake("attention.values_rotated", "values are rotated too, as if they were keys", AT, _rotates, _values_rotated),
    Mistake("cache.ggml", _OF_GGML, AT, compute=_ggml_cache, fault=False),
    Mistake("cache.narrow", "keys and values are rounded, as a cache of {kind} does", AT, compute=_narrow_cache, fault=False),
    *named(
        "attention",
        AT,
        ("values_are_keys", "exchanged: Kcur{x} is read instead of Vcur", "values are the keys"),
        ("keys_values_swapped", "exchanged: Vcur and Kcur{x} are exchanged", "keys and values are swapped"),
    ),
    Mistake("cache.first_lost", _FIRST_LOST, AT, compute=_mask(lambda w: lambda i, j: causal(w, i, j) & ((j > 0) | (i == 0)))),
    *alike(
        "attention",
        AT,
        ("itself_only", "each token sees itself only", _mask(lambda w: lambda i, j: j == i)),
        ("last_only", "only the last {seen} tokens are seen", _last_seen),
    ),
    Mistake("dialect.float16", _AS_BITNET_CPP, AT, compute=_float16, fault=False),
    Mistake("cache.float16_scaled", _SCALED, AT, compute=_float16_scaled, fault=False),
)
CACHE_ROUNDINGS = frozenset(mistake.id for mistake in OTHERS if not mistake.fault)
"""The ids of those that are the KV cache's type."""
