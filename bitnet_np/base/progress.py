"""Progress of long work, reported to functions that the caller passes in. The library itself prints nothing."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with the number of steps done and their total."""

Bars = Callable[[str], Progress]
"""Returns the Progress of a piece of work, given its label."""


def silent(done: int, total: int) -> None:
    """A Progress that does nothing."""


def no_bars(label: str) -> Progress:
    """`silent`, for any label."""
    return silent
