"""Wrong attention: the record of it, and the heads that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ... import spec
from .. import operations as op
from ..roundings import to_float16
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

    @classmethod
    def of(cls, wrong: Wrong, most: int = ROWS) -> Attention:
        """The attention of the first tokens, `most` of them."""
        some = wrong.first(most)
        q, k, v = (x.reshape(len(x), -1, wrong.config.head_dim) for x in read(some))
        return cls(some, q, k, v, int(some.places.any(axis=1).argmax()))

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
