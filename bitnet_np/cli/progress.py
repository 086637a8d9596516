"""Progress bars for people: on standard error, and only if that is a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

from ..progress import Progress

_CLEAR = "\r\033[K"


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(_CLEAR + text, end="", file=sys.stderr, flush=True)


def bar(label: str) -> Progress:
    """A progress bar with this label; it goes away when all is done."""

    def progress(done: int, total: int) -> None:
        filled = 30 * done // total
        _show("" if done == total else f"{label} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}")

    return progress


class _Compilations(event.Listener):
    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: Any) -> None:
        self.count += 1
        _show(f"compiling kernels, on the first run only: {self.count}")

    def on_end(self, event: Any) -> None:
        _show("")


@contextmanager
def compiling() -> Iterator[None]:
    """Context that shows when Numba compiles: a first run takes some 15 seconds of it, later ones read the cache."""
    with event.install_listener("numba:compile", _Compilations()):
        yield
