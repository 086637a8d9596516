"""Operations by the names that other projects have for them, for code that is ported from there.

clear_batch, set_batch_size     rustorch's KVCache
"""

from .cache import KVCache


def clear_batch(cache: KVCache, slot: int) -> None:
    """Forget one slot; no other changes. Raises SlotError, an IndexError, for a slot that is not there: rustorch ignores it."""
    cache.clear(slot)


def set_batch_size(cache: KVCache, batch: int, *, force: bool = False) -> None:
    """Change the number of slots; what they hold stays. Raises SlotError if a slot in use would go, unless `force` says that it may."""
    cache.resize(batch, force=force)
