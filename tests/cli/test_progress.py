"""Progress bars: on standard error, if that is a terminal, and gone when the work is done."""

import io
from types import SimpleNamespace

import pytest
from numba.core import event

from bitnet_np.cli import progress

CLEAR = "\r\033[K"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """What progress.py takes for standard error, a terminal."""
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=Terminal()))
    return progress.sys.stderr


def compile_a_kernel():
    """What Numba says when it compiles."""
    with event.trigger_event("numba:compile"):
        pass


def test_a_bar_fills_and_goes_away(terminal):
    advance = progress.bar("reading")
    for done in range(4):
        advance(done, 3)
    bars = [f"reading [{'#' * n}{'.' * (30 - n)}] {done}/3" for done, n in ((0, 0), (1, 10), (2, 20))]
    assert terminal.getvalue() == "".join(CLEAR + text for text in [*bars, ""])


def test_compilations_are_counted_while_they_last(terminal):
    with progress.compiling():
        compile_a_kernel()
        compile_a_kernel()
    compile_a_kernel()  # after the command
    text = "compiling kernels, on the first run only: "
    assert terminal.getvalue() == f"{CLEAR}{text}1{CLEAR}{CLEAR}{text}2{CLEAR}"


def test_nothing_is_shown_where_there_is_no_terminal(capsys):
    progress.bar("reading")(1, 2)
    with progress.compiling():
        compile_a_kernel()
    assert capsys.readouterr() == ("", "")
