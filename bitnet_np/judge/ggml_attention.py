"""ggml's flash attention over a float16 KV cache, read off an output of attention whose numbers are float32.

On a CPU it adds up the values in float16, and divides by the sum of the weights, in float32, at the end: times that sum, the output is of
float16 numbers again.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .. import spec
from ..engine import cache_types
from ..model.records import Model
from .definition import score_scale
from .mistakes.mistake import Cause

Array = NDArray[np.float64]

FLASH_CAUSE = Cause(
    "values are summed in float16, as llama.cpp's flash attention does: declare it (--as llama.cpp-flash)",
    "read.ggml_flash",
    False,
    "float16",
)

_MOST_ROWS = 8  # that are looked at: a row of one head on the grid is no chance already
_OFF_GRID = 0.02  # steps of float16 from the grid, on average; 0.25 by chance


def is_summed_in_float16(model: Model, layer: int, inputs: Sequence[Array], theirs: Array) -> bool:
    """Whether an output [T, HK] of rotated queries and keys and values, times the sum of the weights, lies on float16's grid.

    Only the first rows that see more than one key are looked at. The grid shows how the output was summed, not that it is right: the caller
    checks it against the precision's bounds.
    """
    c, rows = model.config, min(len(theirs), _MOST_ROWS + 1)
    if rows < 2:
        return False
    scale = score_scale(c)
    q, k = (x[:rows].reshape(rows, -1, c.head_dim).astype(np.float32) for x in inputs[:2])
    keys = spec.by_query_head(cache_types.rounded(k, "float16").astype(np.float64), c.heads)
    sums = theirs[:rows].reshape(rows, c.heads, c.head_dim)
    for before, after in ((1.0, scale), (scale, 1.0)):  # some graphs scale queries first, which then are rounded
        scores = np.einsum("thk,shk->hts", cache_types.rounded(q * np.float32(before), "float16").astype(np.float64), keys) * after
        scores = spec.soft_cap(scores, c.score_cap) + spec.causal_mask(rows, rows, window=c.window_of(layer))
        total = np.exp(scores - scores.max(axis=-1, keepdims=True)).sum(axis=-1)  # [H, T]
        if _on_grid(sums[1:] * total.T[1:, :, None]):
            return True
    return False


def _on_grid(x: Array) -> bool:
    """Whether numbers are those of float16, but for a few roundings of float32. Numbers beyond float16 are not."""
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.abs(x) / np.spacing(np.abs(x).astype(np.float16)).astype(np.float64)
    return bool(np.abs(steps - np.rint(steps)).mean() < _OFF_GRID)
