"""How long work says how far it is: through functions that the caller passes in. The library itself prints nothing."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with what is done and with all there is to do."""

Bars = Callable[[str], Progress]
"""The Progress of a piece of work that has this label."""


def silent(done: int, total: int) -> None:
    """A Progress that says nothing."""


def no_bars(label: str) -> Progress:
    """A Progress that says nothing, for any label."""
    return silent
