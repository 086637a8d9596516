"""The record of wrong attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ... import spec
from .. import operations as op
from ..roundings import to_float16
from .wrong import ROWS, Array, Wrong

Seen = NDArray[np.bool_]


@dataclass(frozen=True)
class Attention:
    """The attention of the first tokens of a sequence in one layer."""

    wrong: Wrong
    q: Array  # [T, H, K]
    k: Array  # [T, G, K]
    v: Array  # [T, G, K]

    @classmethod
    def of(cls, wrong: Wrong, most: int = ROWS) -> Attention:
        """The attention of the first tokens, `most` of them."""
        some = wrong.rows(np.arange(min(most, len(wrong.theirs))))
        q, k, v = (x.reshape(len(x), -1, wrong.config.head_dim) for x in read(some))
        return cls(some, q, k, v)

    @cached_property
    def scores(self) -> Array:
        """[H, T, T], of all keys."""
        c = self.wrong.config
        products = np.einsum("thk,shk->hts", self.q, spec.by_query_head(self.k, self.q.shape[1]))
        return spec.soft_cap(products * op.score_scale(c), c.score_cap)

    @cached_property
    def visible(self) -> Seen:
        """[T, T], True where a token sees a key."""
        return spec.causal_mask(len(self.q), len(self.k), window=self.wrong.config.window_of(self.wrong.key.layer or 0)) == 0

    @cached_property
    def weights(self) -> Array:
        """The right weights, [H, T, T]: those of visible keys, 0 for the others, and in rows that see none."""
        return spec.softmax(np.where(self.visible, self.scores, -np.inf))

    def outputs(self, weights: Array) -> Array:
        """The sums of values by weights [H, T, T]: [T, H * K]."""
        values = spec.by_query_head(self.v, self.q.shape[1])
        return np.einsum("hts,shk->thk", weights, values).reshape(len(self.q), -1)


def read(wrong: Wrong) -> tuple[Array, Array, Array]:
    """The queries, keys and values [T, width] as the dialect reads them."""
    q, k, v = (to_float16(x) if wrong.dialect.in_float16 else x for x in wrong.inputs)
    return q, k, v
