"""Progress for people, on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

from ..base.progress import Progress

_CLEAR = "\r\033[K"
INTERVAL = 10.0
"""Seconds between two lines where standard error is no terminal. Work that takes less prints none."""


class _Clock:
    """When the command began, when its last line was printed, the time that kernels took to be there, and whether anything is shown."""

    def start(self) -> None:
        self.begin = self.last = time.monotonic()
        self.hidden, self.compiling = False, event.TimingListener()


_clock = _Clock()
_clock.start()


def _show(text: str, line: str = "") -> None:
    """Show `text` on a terminal in place of what was shown last, or print `line` where there is none and it is time for one."""
    now = time.monotonic()
    if _clock.hidden:
        return
    if sys.stderr.isatty():
        print(_CLEAR + text, end="", file=sys.stderr, flush=True)
    elif line and now - _clock.last >= INTERVAL:
        _clock.last = now
        print(f"bitnet-np: {line}, {now - _clock.begin:.0f} s so far", file=sys.stderr, flush=True)


def clear() -> None:
    """Take away what is shown, before something is printed."""
    _show("")


def hide() -> None:
    """Show nothing more of this command: it prints a text piece by piece, and what is shown would run into it."""
    clear()
    _clock.hidden = True


def working_time() -> float:
    """Seconds since some time, without those in which this command compiled kernels or loaded them from disk."""
    return time.perf_counter() - (_clock.compiling.duration if _clock.compiling.done else 0.0)


def bar(label: str) -> Progress:
    """A progress bar with this label; it goes away when all is done."""

    def progress(done: int, total: int) -> None:
        filled = 30 * done // max(total, 1)
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
        clear()


@contextmanager
def compiling() -> Iterator[None]:
    """Context of a command: shows when Numba compiles. A first run takes some 10 seconds of it, later ones read the cache."""
    _clock.start()
    with event.install_listener("numba:compile", _Compilations()), event.install_listener("numba:compiler_lock", _clock.compiling):
        yield
