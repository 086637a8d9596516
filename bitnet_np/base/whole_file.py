"""Files that appear only when they are complete: written under a temporary name beside the target, and renamed at the end."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def name_beside(path: Path) -> Path:
    """A hidden temporary name next to `path` that no other process uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary name to write to, renamed to `path` at the end of the block. A block that fails leaves `path` as it was.

    A symbolic link stays, and its target is replaced. A path that is no regular file (a pipe, /dev/stdout) is written to directly.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with naming(path):
            yield path
        return
    part = name_beside(path)
    try:
        with naming(path):
            yield part
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError that names no file, as on a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
