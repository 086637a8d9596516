"""Attention with a narrow KV cache, as ggml computes it, read off an output of attention whose numbers are float32.

ggml rounds the queries to the type that it multiplies the cache's keys with: to bfloat16 or float16 as the keys are, to Q8_0 where they are
Q8_0 or Q4_0. That is recomputed to the bit. Flash attention on a CPU adds up the values of a float16 cache in float16, and divides by the
sum of the weights, in float32, at the end: times that sum, the output is of float16 numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import cache_types, spec
from ..model import Model
from . import operations as op
from .bounds import relative_error
from .mistakes.mistake import Cause
from .precision import FLASH, Precision

Array = NDArray[np.float64]

_QUERIES = {"bfloat16": "bfloat16", "q8_0": "q8_0", "q4_0": "q8_0"}
"""The type of a cache -> the type that queries are rounded to."""

_MOST_ROWS = 8  # that are looked at: a row of one head on the grid is no chance already
_OFF_GRID = 0.02  # steps of float16 from the grid, on average; 0.25 by chance


class Recognised(NamedTuple):
    """A KV cache, and the cause to report."""

    precision: Precision
    cause: Cause


def recognise(model: Model, layer: int, attend: Callable[..., op.Expected], inputs: Sequence[Array], theirs: Array) -> Recognised | None:
    """The cache and the attention that make this output [T, HK] of the rotated queries and keys and the values, if ggml's do.

    attend: attention of such inputs with exact numbers. The caller checks a float16 output against the precision's bounds: the grid
    shows how it was summed, not that it is right.
    """
    c = model.config
    heads = [x.reshape(len(x), -1, c.head_dim).astype(np.float32) for x in inputs]
    now = relative_error(attend(*inputs).value, theirs)
    for kind, queries in _QUERIES.items():
        if kind != "bfloat16" and c.head_dim % cache_types.BLOCK:
            continue
        q, k, v = (
            cache_types.rounded(x, to).reshape(len(x), -1).astype(np.float64) for x, to in zip(heads, (queries, kind, kind), strict=True)
        )
        if relative_error(attend(q, k, v).value, theirs) < now / 1000:
            text = f"keys and values are rounded to {kind}, as in a KV cache of ggml: declare it (--precision kv={kind})"
            return Recognised(Precision(kv=kind), Cause(text, "read.ggml_cache", False, kind))
    if _summed_in_float16(model, layer, heads, theirs):
        text = "values are summed in float16, as llama.cpp's flash attention does: declare it (--as llama.cpp-flash)"
        return Recognised(FLASH, Cause(text, "read.ggml_flash", False, "float16"))
    return None


def _summed_in_float16(model: Model, layer: int, heads: Sequence[NDArray[np.float32]], theirs: Array) -> bool:
    """Whether the output times the sum of the weights lies on float16's grid, for the first rows that see more than one key."""
    c, rows = model.config, min(len(theirs), _MOST_ROWS + 1)
    if rows < 2:
        return False
    q, k = (cache_types.rounded(x[:rows], "float16").astype(np.float64) for x in heads[:2])
    scores = np.einsum("thk,shk->hts", q, spec.by_query_head(k, c.heads)) * op.score_scale(c)
    scores = spec.soft_cap(scores, c.score_cap) + spec.causal_mask(rows, rows, window=c.window_of(layer))
    total = np.exp(scores - scores.max(axis=-1, keepdims=True)).sum(axis=-1)  # [H, T]
    sums = theirs[:rows].reshape(rows, c.heads, c.head_dim) * total.T[..., None]
    steps = np.abs(sums[1:]) / np.spacing(np.abs(sums[1:]).astype(np.float16)).astype(np.float64)
    return bool(np.abs(steps - np.rint(steps)).mean() < _OFF_GRID)
