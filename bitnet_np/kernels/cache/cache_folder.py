"""The folder of compiled kernels on disk, and the deletion of old ones.

The folder is in NUMBA_CACHE_DIR if that is set. Otherwise it is beside the kernels, or, where that cannot be written, in the user's folder
for caches. Each installation of this package has a folder of its own, with one folder in it for each state (defined in disk_cache.py).
The STATES_KEPT states used last are kept; older ones are deleted when a new one begins. A process that still uses a deleted state compiles
again.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numba

HERE = Path(__file__).parents[1]  # of the kernels
STATES_KEPT = 16  # at some 10 MB each; the tests alone use five for each edit
PREFIX = "compiled-"  # of the name of a state's folder
SUFFIX = ".kernel"  # of the name of an entry's file


def folder() -> Path:
    """The folder that holds all states: the first place that can be written, or simply the first if none can."""
    return _folder(numba.config.CACHE_DIR)


@lru_cache
def _folder(cache_dir: str) -> Path:
    installation = f"bitnet_np-{hashlib.sha256(str(HERE).encode()).hexdigest()[:16]}"
    places = [Path(os.path.abspath(cache_dir), installation)] if cache_dir else [HERE / "__pycache__", *_user_folders(installation)]
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
            return place
        except OSError:
            continue
    return places[0]


def _user_folders(name: str) -> list[Path]:
    """The folder of this name among the user's caches; none for a user without a home."""
    variable, below_home = {
        "win32": ("LOCALAPPDATA", "AppData/Local"),
        "darwin": ("", "Library/Caches"),
    }.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    try:
        return [Path(os.path.abspath(os.environ.get(variable) or Path.home() / below_home), name)]
    except RuntimeError:
        return []


class UntrustedError(PermissionError):
    """A folder or an entry could be the work of another user. What an entry holds runs as the user who loads it."""


def check_trusted(place: Path | int) -> None:
    """Raise UntrustedError unless a folder or an open file is this user's or root's, and nobody else may write to it.

    Not on Windows: access there is by lists, and the user's own folder for caches is closed to others.
    """
    if hasattr(os, "geteuid"):
        status = os.stat(place)
        if status.st_uid not in (os.geteuid(), 0):
            raise UntrustedError(f"it belongs to user {status.st_uid}, whose code would run as this one")
        if status.st_mode & 0o022:
            raise UntrustedError(f"others may write to it (mode {status.st_mode & 0o777:o}), and their code would run as this user")


def make(state: Path) -> None:
    """Make the folder of a state, for this user alone. What root made is for all to read."""
    state.mkdir(0o755 if getattr(os, "geteuid", lambda: 1)() == 0 else 0o700, parents=True, exist_ok=True)


def states() -> list[Path]:
    """The folders of all states, the one used last first."""
    return sorted(folder().glob(f"{PREFIX}*"), key=lambda path: path.stat().st_mtime, reverse=True)


def entries(name: str = "*") -> list[Path]:
    """The entry files of all states whose names, without the suffix, match the pattern `name`."""
    return sorted(folder().glob(f"{PREFIX}*/{name}{SUFFIX}"))


def delete_old_states() -> None:
    """Delete all states but the STATES_KEPT used last."""
    with suppress(OSError):  # another process may do the same
        for old in states()[STATES_KEPT:]:
            shutil.rmtree(old)


@lru_cache
def set_time_of_use(state: Path) -> None:
    """Note that a state is in use, once for each process."""
    with suppress(OSError):  # the folder may be read-only
        os.utime(state)


def clear() -> tuple[int, int]:
    """Delete the entries of all states. Returns their number and their bytes. Raises OSError."""
    sizes = [path.stat().st_size for path in entries()]
    for state in states():
        shutil.rmtree(state)
    return len(sizes), sum(sizes)
