"""Operations under the names that other projects use, for code that is ported from there.

clear_batch, set_batch_size     rustorch's KVCache
forward_batch                   rustorch's: logits in float64
forward_packed                  FlashAttention's and vLLM's layout: sequences end to end, with cumulative lengths
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base.errors import ShapeError, TokenRangeError
from ..base.validate import integers
from ..engine.cache import KVCache
from ..model.records import Model
from .batch import forward_batch as forward_float32


def clear_batch(cache: KVCache, slot: int) -> None:
    """Forget one slot; no other changes. Raises SlotError, an IndexError, for a slot that does not exist: rustorch ignores it."""
    cache.clear(slot)


def set_batch_size(cache: KVCache, batch: int, *, force: bool = False) -> None:
    """Change the number of slots; they keep what they hold. Raises SlotError if a slot in use would go, unless `force` is set."""
    cache.resize(batch, force=force)


def forward_batch(model: Model, sequences: Sequence[Sequence[int]], cache: KVCache | None = None) -> list[NDArray[np.float64]]:
    """Logits [T, V] of each sequence, as `bitnet_np.forward_batch` computes them in float32, widened. Raises what that raises."""
    return [logits.astype(np.float64) for logits in forward_float32(model, sequences, cache)]


def forward_packed(model: Model, tokens: ArrayLike, cu_seqlens: ArrayLike) -> NDArray[np.float32]:
    """Logits [R, V] of whole sequences end to end: tokens [R], and where each begins, and the end: cu_seqlens [B + 1], from 0 to R.

    The same bits that each sequence gives alone. Raises ShapeError for cumulative lengths that do not rise from 0 to R, and what
    `forward_full` raises.
    """
    ids, cuts = integers("tokens", tokens, 1, TokenRangeError), integers("cu_seqlens", cu_seqlens, 1)
    if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != len(ids) or (np.diff(cuts) < 1).any():
        raise ShapeError(f"cu_seqlens is {cuts[:8].tolist()}, expected numbers that rise from 0 to {len(ids)}, the number of tokens")
    return np.concatenate(forward_float32(model, [part.tolist() for part in np.split(ids, cuts[1:-1])]))
