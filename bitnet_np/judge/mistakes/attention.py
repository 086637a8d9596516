"""Mistakes in attention: masks, heads, scores, the keys and values read."""

from dataclasses import replace
from functools import partial

from .. import operations as op
from ..edits.caches import query_scales
from ..variant import Variant
from .edited import named
from .mistake import Computes, Engines, Mistake, Site
from .switches import other_dialects

AT = ("kqv_out",)


def _float16_scaled(site: Site) -> Computes:
    for scale in () if site.dialect.in_float16 else [*query_scales(site.config)][1:]:
        rounding = replace(site.dialect, in_float16=True)
        unscaled = replace(site.model, config=replace(site.config, attention_scale=1.0))
        attend = partial(op.attend, unscaled, rounding, site.index)
        yield {"kind": "float16"}, site.of(lambda q, k, v, scale=scale, attend=attend: attend(q * scale, k, v).value)


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
        ("groups", "groups: {W}", ""),
        ("transposed", "transposed: heads and their elements are transposed", "heads and head width are transposed in the output"),
        ("unrotated", f"{_RAW_KEYS} + {_RAW_KEYS.replace('K', 'Q')}", "queries and keys are not rotated: Qcur{x} and Kcur{x} are read"),
        ("keys_values_swapped", "exchanged: Vcur and Kcur{x} are exchanged", "keys and values are swapped"),
        ("last_only", "masks: only the last {n} tokens are seen, {X}", ""),
    ),
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
