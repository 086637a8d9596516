"""Operations under the names that other projects use, for code that is ported from there.

clear_batch, set_batch_size     rustorch's KVCache
"""

from .cache import KVCache


def clear_batch(cache: KVCache, slot: int) -> None:
    """Forget one slot; no other changes. Raises SlotError, an IndexError, for a slot that does not exist: rustorch ignores it."""
    cache.clear(slot)


def set_batch_size(cache: KVCache, batch: int, *, force: bool = False) -> None:
    """Change the number of slots; they keep what they hold. Raises SlotError if a slot in use would go, unless `force` is set."""
    cache.resize(batch, force=force)
