"""One sweep at a time for each folder of results."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..base.errors import OptionError

if sys.platform == "win32":
    import msvcrt

    def _lock(file: BinaryIO) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other sweeps out of a folder until the block ends, or the process does: the system frees the lock then.

    The file `lock` stays behind, empty. Raises OptionError where another process has it.
    """
    with open(folder / "lock", "ab") as file:
        try:
            _lock(file)
        except OSError:
            raise OptionError(f"{folder}: another sweep writes its results there, expected a folder of this one's own") from None
        yield
