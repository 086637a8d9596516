"""Mistakes in caches, heads and flash attention that are tried beside the edits of attention."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...traces.points import Key
from .. import operations as op
from ..roundings import to_float16
from .attention import AT, right
from .edited import named
from .mistake import Array, Compute, Computes, Mistake, Site, Values, alike


def _moved_heads(site: Site) -> Computes:
    c = site.config
    heads = np.arange(c.heads)
    few = range(min(c.heads, 16))

    def moved(source: NDArray[np.int64]) -> Compute:
        def compute(*qkv: Array) -> Array:
            out = right(site, *qkv)
            return out.reshape(len(out), c.heads, c.head_dim)[:, source].reshape(out.shape)

        return site.of(compute)

    for a in few:
        for b in few:
            if a != b:
                yield {"how": f"the output of head {a} is that of head {b}"}, moved(np.where(heads == a, b, heads))
            if a < b:
                source = np.where(heads == a, b, np.where(heads == b, a, heads))
                yield {"how": f"the outputs of heads {a} and {b} are exchanged"}, moved(source)


# --- keys and values ------------------------------------------------------------------------------------------------------------------


def _other_layers(site: Site) -> Computes:
    query, key, value = site.operation.inputs
    for n in range(len(site.model.layers)):
        if n == site.index:
            continue
        for what, read in (("keys and values", (key.name, value.name)), ("keys", (key.name,)), ("values", (value.name,))):

            def compute(values: Values, n: int = n, read: tuple[str, ...] = read) -> Array:
                return right(site, values[query], *(values[Key(x.name, n) if x.name in read else x] for x in (key, value)))

            yield {"what": what, "n": n}, compute


def _lost_past(site: Site) -> Computes:
    """Keys and values that are 0 for the tokens of a later chunk."""
    for border in site.borders:

        def compute(q: Array, k: Array, v: Array, b: int = border) -> Array:
            k0, v0 = (np.where(np.arange(len(x))[:, None] < b, 0, x) for x in (k, v))
            return np.concatenate([right(site, q, k, v)[:b], right(site, q, k0, v0)[b:]])

        yield {"b": border}, site.of(compute)


def _lost_rows(site: Site) -> Computes:
    """Keys or values of a position that are 0: a slot that was never written."""
    for border in site.borders:
        for what in ("keys", "values", "keys and values"):

            def compute(q: Array, k: Array, v: Array, b: int = border - 1, what: str = what) -> Array:
                k, v = k.copy(), v.copy()
                for name, x in (("keys", k), ("values", v)):
                    if name in what:
                        x[b] = 0
                return right(site, q, k, v)

            yield {"what": what, "b": border - 1}, site.of(compute)


def _raw_past(site: Site) -> Computes:
    """Keys that were cached before they were rotated: right for tokens of their own chunk."""
    query, key, value = site.operation.inputs
    raw = Key(key.name.replace("_rope", "_normed" if site.layer is not None and site.layer.attn_k_norm is not None else ""), site.index)
    if raw == key:
        return
    for border in site.borders:

        def compute(values: Values, b: int = border) -> Array:
            q, k, v = values[query], values[key], values[value]
            past = np.concatenate([values[raw][:b], k[b:]])
            return np.concatenate([right(site, q, k, v)[:b], right(site, q, past, v)[b:]])

        yield {"b": border}, compute


def _turned_past(site: Site) -> Computes:
    """Keys whose positions are others than when they were written, as after a cache was shifted."""
    frequency = site.turning.rope_frequency
    for border in site.borders if site.name == "kqv_out" and site.config.rope != "none" else ():
        for n in (n for n in (1, 2, 3, 4, 8, -1, -2, -3, -4, -8) if abs(n) <= border):
            yield {"b": border, "n": n}, site.of(partial(_with_turned_past, site, border, n * frequency[None].astype(np.float64)))


def _with_turned_past(site: Site, border: int, angle: Array, q: Array, k: Array, v: Array) -> Array:
    heads = k[:border].reshape(border, -1, site.config.head_dim)
    past = np.concatenate([spec.rotate(heads, angle, site.config.rope).reshape(border, -1), k[border:]])
    return np.concatenate([right(site, q, k, v)[:border], right(site, q, past, v)[border:]])


# --- softmax --------------------------------------------------------------------------------------------------------------------------


def _tiles(site: Site) -> Computes:
    for size in (2, 4, 8, 16, 32, 64):
        for every, words in ((True, f"between tiles of {size} keys"), (False, f"at key {size}")):
            yield {"words": words}, site.of(partial(_uncorrected, site, size, every))


def _uncorrected(site: Site, size: int, every: bool, q: Array, k: Array, v: Array) -> Array:
    """Flash attention whose earlier sums are not rescaled when the running maximum grows."""
    if site.dialect.in_float16:
        q, k, v = to_float16(q), to_float16(k), to_float16(v)
    scores = op.scores(site.model, q, k)[0] + spec.causal_mask(len(q), len(q), window=site.config.window_of(site.index))
    if len(q) <= size:
        return np.full_like(q, np.nan)
    running = np.maximum.accumulate(scores, axis=-1)
    tile = np.arange(len(q)) // size
    ends = np.minimum((tile + 1) * size, len(q)) - 1
    used = running[..., ends] if every else np.where(tile == 0, running[..., [size - 1]], running[..., [-1]])
    p = np.where(np.isfinite(scores), np.exp(scores - np.where(np.isfinite(used), used, 0)), 0)
    values = spec.by_query_head(v.reshape(len(v), site.config.kv_heads, -1), site.config.heads)
    return np.einsum("hts,shk->thk", p / p.sum(axis=-1, keepdims=True), values).reshape(len(v), -1)


_BEFORE, _NEXT = "shifted by one, the one before in the place of each", "shifted by one, the next one in the place of each"
MISTAKES = (
    *alike(
        "cache",
        AT,
        ("other_layer", "{what} of layer {n} are read: the cache of another layer", _other_layers),
        ("lost", "{what} of position {b} are 0: a slot of the cache that was not written", _lost_rows),
        ("lost_past", "keys and values before position {b} are 0 for tokens behind it: the cache of a later chunk is empty", _lost_past),
        ("raw_keys", "keys before position {b} are not rotated for tokens behind it: they are cached before RoPE", _raw_past),
        (
            "turned_keys",
            "keys before position {b} are rotated by {n} positions more than they should be, for tokens behind it",
            _turned_past,
        ),
    ),
    *named(
        "cache",
        AT,
        (
            "moved_before",
            f"order: rows of Vcur are {_BEFORE} + order: rows of Kcur{{x}} are {_BEFORE}",
            "keys and values are those of the token before",
        ),
        (
            "moved_behind",
            f"order: rows of Vcur are {_NEXT} + order: rows of Kcur{{x}} are {_NEXT}",
            "keys and values are those of the token behind",
        ),
    ),
    Mistake("heads.moved", "heads are in other places: {how}", AT, compute=_moved_heads),
    Mistake("softmax.tiles", "flash attention: the running maximum is not corrected {words}", AT, compute=_tiles),
    *named(
        "softmax",
        AT,
        (
            "unnormalised",
            "left_out: the softmax's sum is not divided out + left_out: the largest score is left out",
            "the softmax does not divide by its sum",
        ),
    ),
)
