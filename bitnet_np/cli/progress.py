"""Progress for people, on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
import time

from ..base.progress import Progress

_CLEAR = "\r\033[K"
INTERVAL = 10.0
"""Seconds between two lines where standard error is no terminal. Work that takes less prints none."""


class _Clock:
    """When the command began, when its last line was printed, and whether anything is shown."""

    def start(self) -> None:
        self.begin = self.last = time.monotonic()
        self.hidden = False


_clock = _Clock()
_clock.start()


def start() -> None:
    """A command begins."""
    _clock.start()


def show(text: str, line: str = "") -> None:
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
    show("")


def hide() -> None:
    """Show nothing more of this command: it prints a text piece by piece, and what is shown would run into it."""
    clear()
    _clock.hidden = True


def bar(label: str) -> Progress:
    """A progress bar with this label; it goes away when all is done."""

    def progress(done: int, total: int) -> None:
        filled = 30 * done // max(total, 1)
        bar = f"{label} [{'#' * filled}{'.' * (30 - filled)}] {done}/{total}"
        show("" if done == total else bar, f"{label}, {done} of {total}")

    return progress
