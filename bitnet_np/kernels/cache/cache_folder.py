"""The folder of compiled kernels on disk: whom it is trusted to, and the deletion of old ones.

It is in NUMBA_CACHE_DIR if that is set, and otherwise in the user's cache folder: files next to the sources would outlive `pip uninstall`.
Each installation of this package has a separate folder there, so that checkouts and versions do not delete what others use. It contains
one folder for each state (defined in disk_cache.py). When a new state begins, all but the STATES_KEPT used last are deleted, and so are
installations that were not used for UNUSED days. A process that still uses a deleted state compiles again.
"""

import hashlib
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numba
import platformdirs

HERE = Path(__file__).parents[1]  # of the kernels
STATES_KEPT = 16  # at some 10 MB each; the tests alone use five for each edit
UNUSED = 90
_DIGITS = 16  # of the name of an installation's folder
PREFIX = "compiled-"  # of the name of a state's folder
SUFFIX = ".kernel"  # of the name of an entry's file


def folder() -> Path:
    """The folder that holds all states of this installation. It need not exist."""
    return _folder(numba.config.CACHE_DIR)


@lru_cache
def _folder(cache_dir: str) -> Path:
    try:
        place = Path(os.path.abspath(cache_dir), "bitnet_np") if cache_dir else platformdirs.user_cache_path("bitnet_np", appauthor=False)
    except RuntimeError:  # a user without a home
        place = Path(tempfile.gettempdir(), f"bitnet_np-{getattr(os, 'geteuid', int)()}")
    return place / hashlib.sha256(str(HERE).encode()).hexdigest()[:_DIGITS]


# --- trust ----------------------------------------------------------------------------------------------------------------------------


class UntrustedError(PermissionError):
    """What is at a path could be the work of another user. What an entry holds runs as the user who loads it."""


def check_trusted(folder: Path) -> None:
    """Raise UntrustedError unless this user and root alone decide what is in a folder: as ssh asks for its files, from the root down.

    Each folder and link on the way is this user's or root's, and nobody else may write to it. Others may write to a folder on the way whose
    sticky bit keeps them from replacing what is not theirs, such as /tmp. Not on Windows: access there is by lists, and the user's own
    folder for caches is closed to others. Raises FileNotFoundError at the first folder that is not there.
    """
    if hasattr(os, "geteuid"):
        place, ahead = "", list(reversed(folder.parts))
        while ahead:
            place = os.path.join(place, ahead.pop())
            status = os.lstat(place)
            _check(place, status, bool(ahead and status.st_mode & stat.S_ISVTX))
            if stat.S_ISLNK(status.st_mode):
                os.stat(place)  # raises OSError for links in a circle
                ahead += reversed(Path(os.readlink(place)).parts)
                place = os.path.dirname(place)


def check_trusted_file(path: Path, descriptor: int) -> None:
    """The same for an open file of a folder that is trusted."""
    if hasattr(os, "geteuid"):
        _check(path, os.fstat(descriptor))


def _check(place: str | Path, status: os.stat_result, is_shared: bool = False) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise UntrustedError(f"{place} belongs to user {status.st_uid}, whose code would run as this one")
    write_bits = 0o022 if _has_others(status.st_gid) else 0o002  # of other users
    if status.st_mode & write_bits and not is_shared and not stat.S_ISLNK(status.st_mode):
        raise UntrustedError(f"others may write to {place} (mode {status.st_mode & 0o777:o}), and their code would run as this user")


@lru_cache
def _has_others(group: int) -> bool:
    """Whether a group may have members other than this user. The user's private group, which has the user's name, has none."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return True
    return user.pw_gid != group or user.pw_name != entry.gr_name or not set(entry.gr_mem) <= {user.pw_name}


# --- what is there --------------------------------------------------------------------------------------------------------------------


def make(state: Path) -> None:
    """Make the folder of a state, and those it is in, for this user alone. What root made is for all to read. Raises OSError."""
    with suppress(FileNotFoundError):
        check_trusted(state)  # as far as it exists: files made in another user's folder would be in that user's way
    for place in reversed([state, *state.parents]):
        if not place.exists():
            place.mkdir(0o755 if getattr(os, "geteuid", lambda: 1)() == 0 else 0o700, exist_ok=True)


def states() -> list[Path]:
    """The folders of all states, the one used last first."""
    return sorted(folder().glob(f"{PREFIX}*"), key=lambda path: path.stat().st_mtime, reverse=True)


def entries(name: str = "*") -> list[Path]:
    """The entry files of all states whose names, without the suffix, match the pattern `name`."""
    return sorted(folder().glob(f"{PREFIX}*/{name}{SUFFIX}"))


def delete_old() -> None:
    """Delete all states but the STATES_KEPT used last, and other installations' that were not used for UNUSED days."""
    begin = time.time() - UNUSED * 24 * 3600
    installations = folder().parent.glob("[0-9a-f]" * _DIGITS)
    with suppress(OSError):  # another process may do the same
        for old in [*states()[STATES_KEPT:], *(other for other in installations if other.stat().st_mtime < begin)]:
            shutil.rmtree(old)


@lru_cache
def set_time_of_use(state: Path) -> None:
    """Note that a state and its installation are in use, once for each process."""
    with suppress(OSError):  # the folder may be read-only
        os.utime(state)
        os.utime(state.parent)


def clear() -> tuple[int, int]:
    """Delete the entries of all states. Returns their number and their bytes. Raises OSError."""
    sizes = [path.stat().st_size for path in entries()]
    for state in states():
        shutil.rmtree(state)
    return len(sizes), sum(sizes)
