"""Mistakes in masks, caches and softmax that are tried where attention's output or its inputs are not in a dump.

Where a dump has them, readings see the keys that are read and the heads that are moved (readings/attention.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...traces.points import Key
from .. import operations as op
from ..roundings import to_float16
from .attention import AT, causal, right, seeing, weighted, window_of, with_heads, with_mask
from .mistake import Array, Compute, Computes, Mistake, Site, Values, alike


def _at_borders(sees: Callable[[float, int, NDArray, NDArray], NDArray[np.bool_]]) -> Callable[[Site], Computes]:
    """Masks by sees(window, border, query i [T, 1], key j [T])."""

    def compute(site: Site) -> Computes:
        window = window_of(site)
        for border in site.borders:
            yield {"b": border}, seeing(site, partial(sees, window, border))

    return compute


def _hidden_keys(site: Site) -> Computes:
    window = window_of(site)
    for count in (1, 2, 3, 4):
        for first in range(min(16, site.length - count)):
            last = first + count - 1
            keys = f"position {first} is" if count == 1 else f"positions {first} to {last} are"
            yield {"keys": keys}, seeing(site, partial(_all_but, first, last, window))


def _all_but(first: int, last: int, window: float, i: NDArray, j: NDArray) -> NDArray[np.bool_]:
    return causal(window, i, j) & ((j < first) | (j > last) | (j == i))


def _rings(site: Site) -> Computes:
    """The slot of a position holds the newest key that was written to it: newer ones count for themselves and for those they replaced."""
    for size in site.borders[1:]:

        def mask(i: NDArray, j: NDArray, size: int = size) -> Array:
            replaced = j // size  # older keys of the same slot
            return np.where((j <= i) & (j > i - size), np.log(1.0 + replaced), -np.inf)

        yield {"size": size}, with_mask(site, mask)


def _soft_masks(site: Site) -> Computes:
    window = window_of(site)
    for amount in (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 50, 100):
        yield {"amount": amount}, with_mask(site, lambda i, j, c=amount: np.where(causal(window, i, j), 0.0, -c))


def _zero_scores(site: Site) -> Compute:
    """Masks that multiply instead of hiding, or that hide with the number 0."""

    def compute(q: Array, k: Array, v: Array) -> Array:
        i, j = np.arange(len(q))[:, None], np.arange(len(q))
        return weighted(site, v, spec.softmax(np.where(causal(window_of(site), i, j), op.scores(site.model, q, k)[0], 0.0)))

    return site.of(compute)


# --- heads ----------------------------------------------------------------------------------------------------------------------------


def _unmasked_heads(site: Site) -> Computes:
    heads = np.arange(site.config.heads)
    parts = {
        "even heads are masked": heads % 2 == 0,
        "odd heads are masked": heads % 2 == 1,
        "the first half of the heads is masked": heads < heads.size // 2,
        "the second half of the heads is masked": heads >= heads.size // 2,
        "the first head is masked": heads == 0,
        "all heads but the last are masked": heads < heads.size - 1,
        "all heads but the first are masked": heads > 0,
    }
    window = window_of(site)
    for words, masked in parts.items():
        yield {"words": words}, seeing(site, partial(_masked_in, masked[:, None, None], window))


def _masked_in(heads: NDArray[np.bool_], window: float, i: NDArray, j: NDArray) -> NDArray[np.bool_]:
    return ~heads | causal(window, i, j)


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
    yield {"how": "heads are in the opposite order"}, moved(heads[::-1])
    yield {"how": "the output of each head is that of the one before"}, moved((heads - 1) % c.heads)
    yield {"how": "the output of each head is that of the next one"}, moved((heads + 1) % c.heads)


def _read_heads(site: Site) -> Computes:
    """Query heads that read key-value heads by another rule."""
    c = site.config
    own = np.arange(c.heads) // (c.heads // c.kv_heads)
    rules = {"the next key-value head": (own + 1) % c.kv_heads, "the last key-value head": own * 0 + c.kv_heads - 1}
    for words, read in rules.items():
        for what, keys, values in (("keys and values", read, read), ("keys", read, None), ("values", None, read)):
            yield {"what": what, "which": words}, with_heads(site, keys, values)


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


def _moved_rows(site: Site) -> Computes:
    for shift, which in ((1, "before"), (-1, "behind")):
        for what, moves in (("keys and values", (1, 1)), ("keys", (1, 0)), ("values", (0, 1)), ("queries", (0, 0))):
            query = shift * (what == "queries")
            by = (query, shift * moves[0], shift * moves[1])
            yield {"what": what, "which": which}, site.of(partial(_rolled, site, by))


def _rolled(site: Site, by: tuple[int, int, int], *qkv: Array) -> Array:
    return right(site, *(np.roll(x, n, axis=0) for x, n in zip(qkv, by, strict=True)))


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


# --- softmax --------------------------------------------------------------------------------------------------------------------------


def _softmaxed(site: Site, weights: Callable[[Array], Array]) -> Compute:
    """Attention whose weights [H, T, S] are weights(masked scores)."""

    def compute(q: Array, k: Array, v: Array) -> Array:
        if site.dialect.in_float16:
            q, k, v = to_float16(q), to_float16(k), to_float16(v)
        mask = spec.causal_mask(len(q), len(q), window=site.config.window_of(site.index))
        return weighted(site, v, weights(op.scores(site.model, q, k)[0] + mask))

    return site.of(compute)


def _by(weights: Callable[[Array], Array]) -> Callable[[Site], Compute]:
    """A mistake in the softmax."""
    return lambda site: _softmaxed(site, weights)


def _sink(shift: bool, scores: Array) -> Array:
    largest = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - largest)
    return p / (p.sum(axis=-1, keepdims=True) + (1.0 if shift else np.exp(-largest)))


def _tiles(site: Site) -> Computes:
    for size in (2, 4, 8, 16, 32, 64):
        for every, words in ((True, f"between tiles of {size} keys"), (False, f"at key {size}")):
            yield {"words": words}, _softmaxed(site, partial(_uncorrected, size, every))


def _uncorrected(size: int, every: bool, scores: Array) -> Array:
    """Flash attention whose earlier sums are not rescaled when the running maximum grows."""
    if scores.shape[-1] <= size:
        return np.full_like(scores, np.nan)
    running = np.maximum.accumulate(scores, axis=-1)
    tile = np.arange(scores.shape[-1]) // size
    ends = np.minimum((tile + 1) * size, scores.shape[-1]) - 1
    used = running[..., ends] if every else np.where(tile == 0, running[..., [size - 1]], running[..., [-1]])
    p = np.where(np.isfinite(scores), np.exp(scores - np.where(np.isfinite(used), used, 0)), 0)
    return p / p.sum(axis=-1, keepdims=True)


def _by_scores(change: Callable[[Array, float], Array], site: Site) -> Callable[[float], Compute]:
    """Softmax of scores that are changed by a number."""
    return lambda number: _softmaxed(site, lambda scores: spec.softmax(np.where(np.isfinite(scores), change(scores, number), -np.inf)))


def _capped(scores: Array, cap: float) -> Array:
    return cap * np.tanh(np.where(np.isfinite(scores), scores, 0) / cap)


def _cap(site: Site) -> Callable[[float], Compute]:
    """Scores capped by a number instead of the model's own."""
    c = site.config
    plain = replace(site, model=replace(site.model, config=replace(c, score_cap=None)))
    return _by_scores(_capped, plain)


_MASKS: dict[tuple[str, str], Callable[[float, int, NDArray, NDArray], NDArray[np.bool_]]] = {
    ("prefix", "the first {b} tokens are seen by all, as a prefix is"): lambda w, b, i, j: causal(w, i, j) | (j < b),
    ("window", "only the last {b} tokens are seen, as in a window, or in a ring of so many slots"): (
        lambda w, b, i, j: causal(min(w, b), i, j)
    ),
    ("window_and_first", "only the first {b} tokens and as many last ones are seen"): (
        lambda w, b, i, j: causal(w, i, j) & ((j < b) | (j > i - b))
    ),
    ("unmasked_chunk", "tokens from position {b} on see each other's future: a later chunk is not masked inside"): (
        lambda w, b, i, j: causal(w, i, j) | ((i >= b) & (j >= b))
    ),
    ("unmasked_chunks", "tokens see the future within their chunk of {b}"): lambda w, b, i, j: causal(w, i, j) | (i // b == j // b),
    ("chunk_from_0", "the mask of a later chunk, from position {b} on, is that of a chunk that begins at 0"): (
        lambda w, b, i, j: np.where(i >= b, causal(w, i - b, j), causal(w, i, j))
    ),
    ("blind_chunk", "tokens from position {b} on do not see those before: the cache is lost at the border of a chunk"): (
        lambda w, b, i, j: causal(w, i, j) & ((i < b) | (j >= b))
    ),
    ("chunks", "tokens see their own chunk of {b} alone"): lambda w, b, i, j: causal(w, i, j) & (i // b == j // b),
    ("past_alone", "tokens from position {b} on see those before it alone, not their own chunk"): (
        lambda w, b, i, j: causal(w, i, j) & ((i < b) | (j < b))
    ),
    ("late", "keys are seen {b} positions late"): lambda w, b, i, j: causal(w, i, j) & ((j <= i - b) | (j == 0)),
    ("future", "tokens see the next {b} too"): lambda w, b, i, j: (j <= i + b) & (j > i - w),
}
_by_masks = [(*named, _at_borders(sees)) for named, sees in _MASKS.items()]
_HIDDEN = ("hidden", "{keys} not seen by later tokens, as padding is", _hidden_keys)
MISTAKES = (
    *alike(
        "masks",
        AT,
        *_by_masks[:3],
        _HIDDEN,
        *_by_masks[3:],
        ("soft", "{amount} is subtracted from masked scores instead of infinity: a soft mask", _soft_masks),
        ("zero", "masked scores are 0 instead of minus infinity", _zero_scores),
        ("heads", "only {words}", _unmasked_heads),
    ),
    *alike(
        "cache",
        AT,
        ("ring", "a ring of {size} slots wraps: the keys and values of older tokens are overwritten by newer ones", _rings),
        ("other_layer", "{what} of layer {n} are read: the cache of another layer", _other_layers),
        ("moved", "{what} are those of the token {which}", _moved_rows),
        ("lost", "{what} of position {b} are 0: a slot of the cache that was not written", _lost_rows),
        ("raw_keys", "keys before position {b} are not rotated for tokens behind it: they are cached before RoPE", _raw_past),
    ),
    Mistake("heads.moved", "heads are in other places: {how}", AT, compute=_moved_heads),
    Mistake("heads.read", "{what} are those of {which}", AT, compute=_read_heads),
    *alike(
        "softmax",
        AT,
        ("sink", "a score of 0 stands beside the keys: an attention sink", _by(partial(_sink, False))),
        ("plus_one", "1 is added to the denominator of the softmax", _by(partial(_sink, True))),
        ("tiles", "flash attention: the running maximum is not corrected {words}", _tiles),
        ("unnormalised", "the softmax does not divide by its sum", _by(np.exp)),
    ),
    Mistake(
        "scores.factor",
        "scores are {number:.5g} times what they should be",
        AT,
        search=partial(_by_scores, lambda scores, number: scores * number),
        grid=tuple(np.geomspace(0.02, 50, 13)),
    ),
    Mistake("scores.cap", "scores are soft-capped at {number:.4g}", AT, search=_cap, grid=tuple(np.geomspace(0.05, 500, 13))),
)
