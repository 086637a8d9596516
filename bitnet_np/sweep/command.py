"""An engine's own command: run without a shell, and ended with all it started when its time is over."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..base.errors import Error

_MOST_LOG = 2000  # bytes at the end of what a failed command printed


class TimeLimitError(Error):
    """A command took longer than it may."""


def run_command(arguments: Sequence[str], folder: Path, seconds: float) -> None:
    """Run a program in a folder, without a shell and without input.

    Raises TimeLimitError, Error for an exit code other than 0 with the end of what was printed, and OSError for a program that cannot be
    started.
    """
    log = folder / "log.txt"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            arguments, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeLimitError(f"{arguments[0]}: still running after {seconds:g} s, the time limit") from None
        finally:
            _end(process)
    if code:
        raise Error(f"{arguments[0]}: exit code {code}, expected 0: {_end_of(log)}")


def _end_of(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _MOST_LOG))
        return file.read(_MOST_LOG).decode("utf-8", "replace").strip()


def _end(process: subprocess.Popen) -> None:
    """End a process; on POSIX also those that it started."""
    if os.name == "posix":
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()
