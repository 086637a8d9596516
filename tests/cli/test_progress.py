"""Progress on standard error: bars on a terminal, gone when the work is done; elsewhere a line every ten seconds."""

import io
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import TINY, TOKENS, with_commas
from numba.core import event

from bitnet_np.cli import progress
from bitnet_np.cli.compiling import compiling, working_time
from bitnet_np.cli.main import main
from bitnet_np.files import embedded

CLEAR = "\r\033[K"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """What progress.py takes for standard error, a terminal."""
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=Terminal()))
    return progress.sys.stderr


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, for progress.py; its lines come every ten seconds."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(progress, "INTERVAL", 10.0)
    return now


def compile_a_kernel():
    """What Numba says when it compiles."""
    with event.trigger_event("numba:compile"):
        pass


def test_compilations_are_counted_while_they_last(terminal):
    with compiling():
        compile_a_kernel()
        compile_a_kernel()
    compile_a_kernel()  # after the command
    text = "compiling kernels, on the first run only: "
    assert terminal.getvalue() == f"{CLEAR}{text}1{CLEAR}{CLEAR}{text}2{CLEAR}"


def test_nothing_is_shown_once_a_command_prints_its_text(terminal):
    with compiling():
        progress.hide()
        compile_a_kernel()
        progress.bar("reading")(1, 2)
    with compiling():
        progress.clear()
    assert terminal.getvalue() == CLEAR + CLEAR


def test_working_time_leaves_out_compiling():
    with compiling():
        before = working_time()
        with event.trigger_event("numba:compiler_lock"):
            time.sleep(0.2)
        assert working_time() - before < 0.2


def test_longer_work_prints_what_it_does_every_ten_seconds(capsys, clock):
    """A line for many steps, and one for each that takes longer than that. The first ten seconds print none."""
    clock.seconds += 3600  # the process is older than the command
    with compiling():
        advance = progress.bar("judging operations")
        for done in range(1, 31):
            clock.seconds += 0.9
            advance(done, 40)
        clock.seconds += 12
        compile_a_kernel()
        clock.seconds += 25
        progress.bar("trying known mistakes")(40, 40)
    assert capsys.readouterr() == (
        "",
        "bitnet-np: judging operations, 12 of 40, 11 s so far\n"
        "bitnet-np: judging operations, 24 of 40, 22 s so far\n"
        "bitnet-np: compiling kernels, on the first run only: 1, 39 s so far\n"
        "bitnet-np: trying known mistakes, 40 of 40, 64 s so far\n",
    )


def test_a_terminal_gets_a_bar_that_fills_and_goes_away_and_no_lines(terminal, clock):
    with compiling():
        advance = progress.bar("reading")
        for done in range(4):
            clock.seconds += 60
            advance(done, 3)
    bars = [f"reading [{'#' * n}{'.' * (30 - n)}] {done}/3" for done, n in ((0, 0), (1, 10), (2, 20))]
    assert terminal.getvalue() == "".join(CLEAR + text for text in [*bars, ""])


def test_a_command_whose_output_is_no_terminal_says_how_far_it_is(capfd, monkeypatch, tmp_path):
    """Each known mistake is a step, and here it is always time for a line."""
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    np.save(tmp_path / "x.npy", embedded.recording()["logits_prefill_T17"])
    main(["check", TINY, "--tokens", with_commas(TOKENS), "--theirs", str(tmp_path / "x.npy")])
    lines = [line for line in capfd.readouterr().err.splitlines() if "known mistakes" in line]
    assert len(lines) > 50
    assert all(re.fullmatch(r"bitnet-np: trying known mistakes, \d+ of \d+, \d+ s so far", line) for line in lines)
