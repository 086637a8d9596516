"""Files that appear when they are whole: written beside their place, under a name of their own, and renamed in the end."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def name_beside(path: Path) -> Path:
    """A name next to `path`, hidden, that nobody else writes to."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The name to write to. It becomes `path` at the end of the block; a block that fails leaves `path` as it was, and nothing beside it.

    A link stays, and what it names is replaced. What is there and is no file (a pipe, /dev/stdout) is written to as it is.
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
    """An OSError that names no file, as those of a full disk do, names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
