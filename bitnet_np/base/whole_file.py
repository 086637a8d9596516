"""Files that appear only when they are complete: written under a temporary name next to the target, and renamed at the end."""

import hashlib
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path


def name_beside(path: Path) -> Path:
    """A hidden temporary name next to `path` that no other process uses. Files that ended processes left are deleted."""
    start = f".{path.name}.{_where()}-"
    with suppress(OSError):  # there is no such folder, or another process deletes the same
        for left in os.scandir(path.parent):
            writer = re.fullmatch(rf"{re.escape(start)}(\d+)-.*\.part.*", left.name)
            if writer and not _lives(int(writer[1])):
                shutil.rmtree(left.path) if left.is_dir() else os.unlink(left.path)
    return path.with_name(f"{start}{os.getpid()}-{secrets.token_hex(2)}.part")


@lru_cache
def _where() -> str:
    """A digest of the machine and the container within which process numbers are valid."""
    container = os.path.basename(os.path.realpath("/proc/self/ns/pid"))
    return hashlib.sha256(f"{platform.node()} {container}".encode()).hexdigest()[:8]


def _lives(process: int) -> bool:
    """Whether there is such a process. On Windows, where asking would end it, every one counts as alive."""
    try:
        if os.name != "nt":
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def whole_file(path: str | os.PathLike[str], folder: bool = False) -> Iterator[Path]:
    """Yields a temporary name to write to, renamed to `path` at the end of the block. A block that fails leaves `path` as it was.

    folder: it is that of a new folder, and `path` may only be an empty one.
    A symbolic link stays, and its target is replaced. A path that is no regular file (a pipe, /dev/stdout) is written to directly.
    """
    path = Path(os.path.realpath(path))
    direct = path.exists() and not path.is_file() and not folder
    part = path if direct else name_beside(path)
    try:
        if folder:
            part.mkdir()
        yield part
        if not direct:
            os.replace(part, path)
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error  # a full disk's names no file
    finally:
        if folder:
            shutil.rmtree(part, ignore_errors=True)
        elif not direct:
            part.unlink(missing_ok=True)
