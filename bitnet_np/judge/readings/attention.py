"""Wrong attention: the record of it, the heads and caches that it reads, and other rules, each of which is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...traces.points import Key
from .. import operations as op
from ..narrow import rounded
from ..roundings import to_digits, to_float16
from .search import best_number
from .wrong import ROWS, Array, Wrong, explained, runs

Seen = NDArray[np.bool_]


@dataclass(frozen=True)
class Attention:
    """The attention of the first tokens of a sequence in one layer."""

    wrong: Wrong
    q: Array  # [T, H, K]
    k: Array  # [T, G, K]
    v: Array  # [T, G, K]
    begin: int  # the first token that is wrong
    group: int | None = None  # the one key-value head that it is of; None: all

    @classmethod
    def of(cls, wrong: Wrong, most: int = ROWS) -> Attention:
        """The attention of the first tokens, `most` of them."""
        some = wrong.first(most)
        q, k, v = (x.reshape(len(x), -1, wrong.config.head_dim) for x in read(some))
        return cls(some, q, k, v, int(some.places.any(axis=1).argmax()))

    def worst_group(self) -> Attention:
        """The attention of one key-value head, the one whose query heads are most wrong."""
        groups, width = self.k.shape[1], self.wrong.theirs.shape[1] // self.k.shape[1]
        square = ((self.wrong.theirs - self.wrong.value) ** 2).reshape(len(self.q), groups, width)
        g = int(square.sum(axis=(0, 2)).argmax())
        part = {name: getattr(self.wrong, name)[:, g * width : (g + 1) * width] for name in ("value", "theirs", "places")}
        heads = slice(g * self.q.shape[1] // groups, (g + 1) * self.q.shape[1] // groups)
        return replace(self, wrong=replace(self.wrong, **part), q=self.q[:, heads], k=self.k[:, [g]], v=self.v[:, [g]], group=g)

    @cached_property
    def scores(self) -> Array:
        """[H, T, T], of all keys."""
        c = self.wrong.config
        products = np.einsum("thk,shk->hts", self.q, spec.by_query_head(self.k, self.q.shape[1]))
        return spec.soft_cap(products * op.score_scale(c), c.score_cap)

    @cached_property
    def mask(self) -> Array:
        """[T, T] of 0 and -inf."""
        return spec.causal_mask(len(self.q), len(self.k), window=self.wrong.config.window_of(self.wrong.key.layer or 0))

    @cached_property
    def visible(self) -> Seen:
        """[T, T], True where a token sees a key."""
        return self.mask == 0

    @cached_property
    def weights(self) -> Array:
        """The right weights, [H, T, T]."""
        return softmax(self.scores, self.visible)

    def outputs(self, weights: Array) -> Array:
        """The sums of values by weights [H, T, T]: [T, H * K]."""
        values = spec.by_query_head(self.v, self.q.shape[1])
        return np.einsum("hts,shk->thk", weights, values).reshape(len(self.q), -1)


def read(wrong: Wrong) -> tuple[Array, Array, Array]:
    """The queries, keys and values [T, width] as the dialect reads them."""
    q, k, v = (to_float16(x) if wrong.dialect.in_float16 else x for x in wrong.inputs)
    return q, k, v


def softmax(scores: Array, visible: Seen) -> Array:
    """The weights of visible keys; 0 for the others, and in rows that see none."""
    return spec.softmax(np.where(visible, scores, -np.inf))


def other_heads(wrong: Wrong) -> str | None:
    """The first query head that reads another key-value head than its own, if that explains the numbers."""
    c, own = wrong.config, Attention.of(wrong)
    out, shared = own.wrong.theirs.reshape(own.q.shape), c.heads // c.kv_heads

    def reads(h: int, query: int, g: int) -> bool:
        output = spec.attend(own.q[:, [query]], own.k[:, [g]], own.v[:, [g]], own.mask, c.attention_scale, c.score_cap)[:, 0]
        return explained(output, out[:, h], wrong.noise)

    heads_read = [next((g for g in range(c.kv_heads) if reads(h, h, g)), -1) for h in range(c.heads)]
    lost = [h for h in range(c.heads) if heads_read[h] < 0]
    if lost:
        queries = [next((query for query in range(c.heads) if reads(h, query, h // shared)), -1) for h in lost]
        if min(queries) < 0:
            return None
        more = f", and {len(lost) - 1} more have others'" if len(lost) > 1 else ""
        return f"query head {lost[0]} has the queries of head {queries[0]}{more}"
    off = np.flatnonzero(np.array(heads_read) != np.arange(c.heads) // shared)
    if not off.size:
        return None
    h = int(off[0])
    first = f"query head {h} reads key-value head {heads_read[h]} instead of {h // shared}"
    return first + (f", and {off.size - 1} more read wrong ones" if off.size > 1 else "")


def other_layers(wrong: Wrong) -> str | None:
    """The layer whose keys or values are read, if it is another one's."""
    (q, k, v), n = read(wrong), wrong.key.layer
    names = [key.name for key in wrong.operation.inputs[1:]]
    for other in range(len(wrong.model.layers)):
        its_keys, its_values = (wrong.tensors.get(Key(name, other)) for name in names)
        if other == n or its_keys is None or its_values is None:
            continue
        for what, keys, values in (("keys and values", its_keys, its_values), ("keys", its_keys, v), ("values", k, its_values)):
            if wrong.accounts(op.attend(wrong.model, wrong.dialect, n or 0, q, keys, values).value):
                return f"{what} of layer {other} are read: the cache of another layer"
    return None


def score_cap(wrong: Wrong) -> str | None:
    """The soft cap of scores, if one is applied that the model does not have."""
    c = wrong.config

    def capped(some: Wrong, cap: float) -> Array:
        t = len(some.value)
        q, k, v = (x.reshape(t, -1, c.head_dim) for x in read(some))
        mask = spec.causal_mask(t, t, window=c.window_of(some.key.layer or 0))
        return spec.attend(q, k, v, mask, c.attention_scale, cap).reshape(t, -1)

    number = best_number(wrong, capped)
    if number is None:
        return None
    return f"scores are soft-capped at {number:.4g}" + ("" if c.score_cap is None else f" instead of {c.score_cap:g}")


def moved_heads(wrong: Wrong) -> str | None:
    """The heads whose outputs stand where others' belong."""
    value, theirs = (x.reshape(len(x), -1, wrong.config.head_dim) for x in (wrong.value, wrong.theirs))
    off = np.flatnonzero(wrong.places.reshape(value.shape).any(axis=(0, 2)))
    source = []
    for h in off:
        away = ((theirs[:, [h]] - value) ** 2).sum(axis=(0, 2))
        source.append(int(away.argmin()))
    moved = value.copy()
    moved[:, off] = value[:, source]
    if not off.size or not wrong.accounts(moved.reshape(wrong.value.shape)):
        return None
    first = f"the output of head {off[0]} is that of head {source[0]}"
    return first + (f", and {off.size - 1} more are others'" if off.size > 1 else "")


# --- attention by another rule ------------------------------------------------------------------------------------------------------------


_DROPPED = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)  # probabilities below which engines drop values
_STEPS = (127, 63, 31, 15, 7)  # on either side of 0, of a cache in codes


def other_rule(wrong: Wrong) -> str | None:
    """The rule by which attention was computed instead, if one gives these numbers."""
    own = Attention.of(wrong)
    part = own.worst_group()
    with np.errstate(all="ignore"):
        for text, computed in _of_all_heads(own):
            if own.wrong.accounts(computed):
                return text
        for rules in (_by_weights, _other_rows, _of_a_chunk):
            likely = {text for text, computed in rules(part) if part.wrong.accounts(computed)}
            for text, computed in rules(own) if likely else ():
                if text in likely and own.wrong.accounts(computed):
                    return text
                if text in likely and (heads := _in_wrong_heads(own, computed)):
                    return f"{heads} alone: {text}"
    return None


def _in_wrong_heads(own: Attention, computed: Array) -> str | None:
    """The wrong heads in words, if what is computed gives theirs and the others are right."""
    shape = (len(own.q), -1, own.wrong.config.head_dim)
    off = np.flatnonzero(own.wrong.places.reshape(shape).any(axis=(0, 2)))
    mixed = own.wrong.value.reshape(shape).copy()
    mixed[:, off] = computed.reshape(shape)[:, off]
    if off.size == mixed.shape[1] or not own.wrong.accounts(mixed.reshape(own.wrong.value.shape)):
        return None
    return runs("head", off)


def _of_all_heads(own: Attention) -> Iterator[tuple[str, Array]]:
    """Rules by which heads depend on each other: another axis of the softmax, a cache with one scale for several heads."""
    powers = np.where(own.visible, np.exp(own.scores - own.scores.max()), 0)
    for axis, text in ((0, "over the heads"), (1, "over the queries"), ((0, 1, 2), "over everything at once")):
        total = powers.sum(axis=axis, keepdims=True)
        yield f"the softmax is taken {text}, not over the keys of each query", own.outputs(powers / np.where(total == 0, 1, total))
    yield from _in_codes(own)


def _by_weights(own: Attention) -> Iterator[tuple[str, Array]]:
    """Other weights, and other masks."""
    for text, weights in _softmaxes(own):
        yield text, own.outputs(weights)
    for text, visible in _masks(own):
        yield text, own.outputs(softmax(own.scores, visible))


def _softmaxes(own: Attention) -> Iterator[tuple[str, Array]]:
    """Weights [H, T, T] that are made of scores in another way."""
    masked = np.where(own.visible, own.scores, -np.inf)
    for count in range(1, len(own.k)):
        least_score = np.sort(masked, axis=-1)[..., -count, None]
        yield f"only the {count} largest scores of each query count", softmax(own.scores, own.visible & (own.scores >= least_score))
    most = masked.max(axis=-1, keepdims=True)
    powers = np.exp(masked - most)
    sums = powers.sum(axis=-1, keepdims=True)
    yield "the sigmoid of scores is taken, not their softmax", 1 / (1 + np.exp(-masked))
    yield "relu of scores is taken, not their softmax", np.where(own.visible, np.maximum(own.scores, 0), 0)
    yield "exponentials of scores are not divided by their sum", np.exp(masked)
    yield "exponentials of scores less their largest are not divided by their sum", powers
    yield "a score of 0 is counted in the sum of exponentials: a sink", powers / (sums + np.exp(-most))
    scale = op.score_scale(own.wrong.config)
    yield "the scale of scores is applied to probabilities instead", softmax(own.scores / scale, own.visible) * scale
    for size in (n for n in (4, 8, 16, 32, 64) if n < len(own.k)):
        last = powers * (np.arange(len(own.k)) // size == np.arange(len(own.q))[:, None] // size)
        text = f"outputs are divided by the sum of the last tile of {size} keys, not of all"
        yield text, powers / last.sum(axis=-1, keepdims=True)
    yield "exponentials are powers of 2, not of e", softmax(own.scores * np.log(2), own.visible)
    yield "exponentials are divided by the sum of the position before", powers / np.concatenate([sums[:, :1], sums[:, :-1]], axis=1)
    for digits in range(2, 9):
        yield f"probabilities are rounded to {digits} significant bits", to_digits(own.weights, digits)
    for least in _DROPPED:
        rest = np.where(own.weights < least, 0, own.weights)
        yield f"probabilities below {least:g} are dropped", rest
        total = np.maximum(rest.sum(axis=-1, keepdims=True), 1e-300)
        yield f"probabilities below {least:g} are dropped, and the others add up to 1", rest / total


def _masks(own: Attention) -> Iterator[tuple[str, Seen]]:
    """Other masks [T, T], True where a token sees a key."""
    tokens = len(own.q)
    query, key = np.arange(tokens)[:, None], np.arange(tokens)
    yield "no token sees itself: the mask is off by one", key < query
    yield "each token sees the next one: the mask is off by one", key <= query + 1
    yield "each token sees those behind it, not those before: the mask is transposed", key >= query
    yield "no token sees the one before it", own.visible & (key != query - 1)
    for count in range(2, tokens):
        yield f"the first {count} tokens are seen by all, as in a prefix LM", own.visible | (key <= query) | (key < count)
    for count in range(1, tokens):
        window = own.visible & (key > query - count)
        yield f"only the last {count} keys are seen: a window", window
        for sinks in (1, 2, 4):
            text = f"only the last {count} keys and the first {sinks} are seen: a window with attention sinks"
            yield text, window | (own.visible & (key < sinks))
    for size in (n for n in (2, 4, 8, 16, 32) if n < tokens):
        start = (tokens - 1) // size * size
        yield f"keys from position {start} on, the last tile, are seen by all", own.visible | (key >= start)
        yield f"only keys of the same {size} tokens are seen: attention in chunks", own.visible & (key // size == query // size)
        yield f"keys are seen to the end of their tile of {size}: the mask is applied to whole tiles", key // size <= query // size


def _other_rows(own: Attention) -> Iterator[tuple[str, Array]]:
    """Keys or values that stand in other rows of the cache, or are not finished."""
    for by in (1, -1, 2, -2):
        if len(own.k) <= 2 * abs(by):
            continue
        side = f"{abs(by)} token{'s' * (abs(by) > 1)} {'before' if by > 0 else 'after'}"
        for kind, fill in _moved(own.v, by):
            yield f"values are those of {side}{kind}", replace(own, v=fill).outputs(own.weights)
        for kind, fill in _moved(own.k, by):
            yield f"keys are those of {side}{kind}", _with_keys(own, fill)
    for by in (1, 2, 4, 8, 16, -1, -2, -4, -8, -16):
        text = f"are read at an offset of {by} elements in each head"
        yield f"values {text}", replace(own, v=_shifted(own.v, by)).outputs(own.weights)
        yield f"keys {text}", _with_keys(own, _shifted(own.k, by))
    for text, keys in _unfinished(own):
        yield f"keys are {text}", _with_keys(own, keys)
    yield "the first token is seen twice, once a position earlier: a BOS that is fed twice", _first_twice(own)


def _first_twice(own: Attention) -> Array:
    """The outputs with a further key and value in front: those of the first token, rotated by a position less."""
    c, model = own.wrong.config, own.wrong.model
    key = own.k[:1] if c.rope == "none" else spec.rotate(own.k[:1], -model.rope_frequency[None].astype(np.float64), c.rope)
    longer = replace(own, k=np.concatenate([key, own.k]), v=np.concatenate([own.v[:1], own.v]))
    return longer.outputs(softmax(longer.scores, np.pad(own.visible, ((0, 0), (1, 0)), constant_values=True)))


def _shifted(x: Array, by: int) -> Array:
    """Elements from a wrong offset inside of each head."""
    return np.roll(x, -by, axis=2)


def _moved(rows: Array, by: int) -> Iterator[tuple[str, Array]]:
    """Rows moved by a number of places, and what stands at the end."""
    moved = np.roll(rows, by, axis=0)
    end = slice(0, by) if by > 0 else slice(by, None)
    for kind, numbers in (("", rows[end]), (", the cache's end is empty", 0 * rows[end]), (", in a ring", moved[end])):
        filled = moved.copy()
        filled[end] = numbers
        yield kind, filled


def _with_keys(own: Attention, keys: Array) -> Array:
    return own.outputs(softmax(replace(own, k=keys).scores, own.visible))


def _unfinished(own: Attention) -> Iterator[tuple[str, Array]]:
    """The layer's keys before RoPE, or before their norm, in words."""
    name, layer = own.wrong.operation.inputs[1]
    raw = "not normed" if name == "Kcur_normed" else "neither normed nor rotated"
    has_norm = Key("Kcur_normed", layer) in own.wrong.tensors
    for other, text in (("Kcur_normed", "not rotated"), ("Kcur", raw if has_norm else "not rotated")):
        keys = own.wrong.tensors.get(Key(other, layer))
        if other != name and keys is not None:
            heads = keys[: len(own.k)].reshape(len(own.k), -1, own.k.shape[2])
            yield text, heads if own.group is None else heads[:, [own.group]]


def _of_a_chunk(own: Attention) -> Iterator[tuple[str, Array]]:
    """Another past of a chunk of tokens. Its first token is the first that is wrong."""
    begin = own.begin
    if begin == 0:
        return
    query, key = np.arange(len(own.q))[:, None], np.arange(len(own.q))
    later = query >= begin
    past = later & (key < begin)
    start = f"from position {begin} on "

    def by_scores(scores: Array, visible: Seen) -> Array:
        return own.outputs(softmax(scores, visible))

    yield from _of_a_slot(own)
    yield start + "no token sees those before: a later chunk does not see the cache", by_scores(own.scores, own.visible & ~past)
    yield start + "no token sees the one before it", by_scores(own.scores, own.visible & ~(later & (key == query - 1)))
    yield start + "all tokens see each other: a later chunk has no mask", by_scores(own.scores, own.visible | later)
    yield (
        start + "the mask begins at 0 again: a later chunk sees the first keys",
        by_scores(own.scores, own.visible & (~later | (key <= query - begin))),
    )
    for text, keys in _unfinished(own):
        scores = np.where(past, replace(own, k=keys).scores, own.scores)
        yield start + f"keys of the tokens before are {text}: the cache is written too early", by_scores(scores, own.visible)
    c, frequency = own.wrong.config, own.wrong.model.rope_frequency[None].astype(np.float64)
    for by in (n for n in range(-begin, begin + 1) if n and c.rope != "none"):
        scores = np.where(past, replace(own, k=spec.rotate(own.k, by * frequency, c.rope)).scores, own.scores)
        yield start + f"keys of the tokens before are rotated by {by} positions more than they should be", by_scores(scores, own.visible)
    for count in sorted({*range(1, min(begin, 8) + 1), begin}):
        for which, lost in (("last", (key >= begin - count) & past), ("first", (key < count) & past)):
            tokens = f"the {which} {f'{count} tokens' if count > 1 else 'token'} before"
            yield start + f"{tokens} cannot be seen", by_scores(own.scores, own.visible & ~lost)
            weights = softmax(np.where(lost, 0, own.scores), own.visible)
            yield start + f"the cache has zeros for {tokens}", own.outputs(np.where(lost, 0, weights))
            twice = np.where(lost, own.scores + np.log(2), own.scores)
            yield start + f"{tokens} {'count' if count > 1 else 'counts'} twice: stored twice in the cache", by_scores(twice, own.visible)


def _of_a_slot(own: Attention) -> Iterator[tuple[str, Array]]:
    """Another key or value of one token, the first that is wrong: it reads its own slot first."""
    slot = own.begin
    for factor, text in ((0, "0: a slot of the cache that was not written"), (1, "those of the token before")):
        k, v = own.k.copy(), own.v.copy()
        k[slot], v[slot] = factor * k[slot - 1], factor * v[slot - 1]
        for what, keys, values in (("keys and values", k, v), ("keys", k, own.v), ("values", own.k, v)):
            yield f"{what} of position {slot} are {text}", _with_keys(replace(own, v=values), keys)


def _cached(own: Attention) -> Iterator[tuple[str, Array, Array]]:
    """Yields keys and values of a narrow cache, in words."""
    for kind in ("q8_0", "q4_0"):
        if own.k[0].size % 32 == 0:
            k, v = (rounded(x.reshape(len(x), -1), kind).reshape(x.shape) for x in (own.k, own.v))
            yield f"rounded to {kind}", k, v
    for each, axis in {"head of each token": (2,), "token": (1, 2), "element of a head": (0,), "tensor": (0, 1, 2)}.items():
        for steps in _STEPS:
            k, v = (_rounded(x, steps, axis) for x in (own.k, own.v))
            yield f"rounded to codes of {steps} steps on either side of 0, one scale for each {each}", k, v


def _in_codes(own: Attention) -> Iterator[tuple[str, Array]]:
    """A cache of codes, with one scale for some numbers."""
    first = own.wrong.theirs[0].reshape(own.q.shape[1:])  # the first token's value, as the cache has it
    for how, k, v in _cached(own):
        for what, keys, values in (("keys and values", k, v), ("keys", k, own.v), ("values", own.k, v)):
            if np.allclose(spec.by_query_head(values[:1], len(first))[0], first, rtol=1e-2, atol=1e-2 * np.abs(first).max()):
                yield f"{what} are {how}: a narrow cache", _with_keys(replace(own, v=values), keys)


def _rounded(x: Array, steps: int, axis: tuple[int, ...]) -> Array:
    largest = np.abs(x).max(axis=axis, keepdims=True) / steps
    largest = np.where(largest == 0, 1, largest)
    return np.rint(x / largest) * largest
