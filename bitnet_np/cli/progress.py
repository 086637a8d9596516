"""Progress for people, on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

from ..progress import Progress

_CLEAR = "\r\033[K"
INTERVAL = 10.0
"""Seconds between two lines where standard error is no terminal. Work that takes less prints none."""

_begin = time.monotonic()  # of the process
_last = _begin  # of the last line


def _show(text: str, line: str = "") -> None:
    """Show `text` on a terminal in place of what was shown last, or print `line` where there is none and it is time for one."""
    global _last
    if sys.stderr.isatty():
        print(_CLEAR + text, end="", file=sys.stderr, flush=True)
    elif line and (now := time.monotonic()) - _last >= INTERVAL:
        _last = now
        print(f"bitnet-np: {line}, {now - _begin:.0f} s so far", file=sys.stderr, flush=True)


def bar(label: str) -> Progress:
    """A progress bar with this label; it goes away when all is done."""

    def progress(done: int, total: int) -> None:
        filled = 30 * done // total
        bar = f"{label} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}"
        _show("" if done == total else bar, f"{label}, {done} of {total}")

    return progress


class _Compilations(event.Listener):
    def __init__(self) -> None:
        self.count = 0

    def on_start(self, event: Any) -> None:
        self.count += 1
        text = f"compiling kernels, on the first run only: {self.count}"
        _show(text, text)

    def on_end(self, event: Any) -> None:
        _show("")


@contextmanager
def compiling() -> Iterator[None]:
    """Context that shows when Numba compiles: a first run takes some 15 seconds of it, later ones read the cache."""
    with event.install_listener("numba:compile", _Compilations()):
        yield
