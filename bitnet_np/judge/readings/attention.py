"""Wrong attention: the record of it, and the heads and caches that it reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ... import spec
from ...traces.points import Key
from .. import operations as op
from ..roundings import to_float16
from .search import best_number
from .wrong import ROWS, Array, Wrong, explained

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
    q, k, v = (to_float16(x) if wrong.dialect.halves else x for x in wrong.inputs)
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
